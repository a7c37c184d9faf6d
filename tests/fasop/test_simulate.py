"""``simulate`` and ``export``: events, pictures, .et files and settings of a plan."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from chakra_et.et import file as et_file
from chakra_et.et.columns import NodeType
from fasop.__main__ import main
from fasop.errors import PlanError
from fasop.output import export, picture
from fasop.plans.plan import Plan, read_plans, write_plans
from fasop.schedule import events as events_

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans of GPT-2 XL on one A100 and seven A10 nodes, as ``plan --json`` prints them."""
    command = [sys.executable, "-m", "fasop", "plan", "--model", "gpt2-xl", "--cluster", "paper-gpt2xl-het"]
    done = subprocess.run([*command, "--json", "--top", "6"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    path = tmp_path_factory.mktemp("plans") / "plans.json"
    path.write_text(done.stdout)
    return path


def of_stage(found: list[events_.Event], stage: int, *kinds: str) -> list[events_.Event]:
    return [event for event in found if event.stage == stage and event.kind in kinds]


def test_the_events_end_at_the_plans_step_time(plans: Path) -> None:
    for plan in read_plans(plans):
        found = events_.one_forward_one_backward(plan)
        assert events_.step_time(found) == pytest.approx(plan.step_time, rel=1e-9)
        for stage in range(plan.pp):
            work = of_stage(found, stage, "forward", "backward")
            assert len(work) == 2 * plan.micro_batches
            assert all(a.end <= b.start + 1e-12 for a, b in zip(work, work[1:], strict=False)), (
                "one at a time"
            )
            seconds = plan.micro_batches * (plan.stage_forward[stage] + plan.stage_backward[stage])
            assert sum(event.end - event.start for event in work) == pytest.approx(seconds)


def test_no_micro_batch_is_ahead_of_its_data(plans: Path) -> None:
    plan = read_plans(plans)[0]
    for found in (events_.one_forward_one_backward(plan), events_.interleaved(plan, 2)):
        ends = {
            (e.kind, e.stage, e.micro_batch, e.chunk): e.end
            for e in found
            if e.kind in ("forward", "backward")
        }
        for event in found:
            if event.kind == "forward" and event.stage:
                assert event.start >= ends["forward", event.stage - 1, event.micro_batch, event.chunk] - 1e-9
            if event.kind == "backward":
                assert event.start >= ends["forward", event.stage, event.micro_batch, event.chunk] - 1e-9
                if event.stage < plan.pp - 1:
                    later = ends["backward", event.stage + 1, event.micro_batch, event.chunk]
                    assert event.start >= later - 1e-9


def test_interleaving_computes_as_much_with_smaller_bubbles(plans: Path) -> None:
    plan = next(plan for plan in read_plans(plans) if plan.pp == 8)
    even = dataclasses.replace(
        plan, stage_forward=(0.01,) * 8, stage_backward=(0.02,) * 8, p2p=(0.0,) * 7, dp_allreduce=(0.0,) * 8,
        embedding_allreduce=0.0,
    )  # fmt: skip
    m = even.micro_batches
    plain, mixed = events_.one_forward_one_backward(even), events_.interleaved(even, 2)
    # Narayanan et al. 2021: the bubble is (p − 1)/m of the ideal time, and 1/v of that interleaved.
    assert events_.step_time(plain) == pytest.approx(0.03 * (m + 7))
    assert events_.step_time(mixed) == pytest.approx(0.03 * (m + 7 / 2))
    for found in (plain, mixed):
        assert sum(e.end - e.start for e in found if e.kind == "forward") == pytest.approx(8 * m * 0.01)
    assert events_.bubbles(even, plain)[0] == pytest.approx(7 / (m + 7))


def test_the_picture_holds_every_event_and_no_markup_of_names(plans: Path, tmp_path: Path) -> None:
    plan = read_plans(plans)[0]
    plan = dataclasses.replace(
        plan, cluster=dataclasses.replace(plan.cluster, name="<script>alert(1)</script>")
    )
    found = events_.one_forward_one_backward(plan)
    drawn = picture.svg(plan, found, "1f1b")
    root = ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    bars = [rect for rect in root.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    assert len(bars) == sum(event.kind in picture.COLOURS for event in found)
    by_colour = {
        colour: [bar for bar in bars if bar.get("fill") == colour] for colour in picture.COLOURS.values()
    }
    assert len(by_colour[picture.COLOURS["forward"]]) == plan.pp * plan.micro_batches
    assert len(by_colour[picture.COLOURS["backward"]]) == plan.pp * plan.micro_batches
    assert all(0 <= float(bar.get("x", -1)) <= picture.WIDTH for bar in bars)
    page = picture.page(plan, found, "1f1b")
    assert (
        "<script>" not in page
        and "&lt;script&gt;" in page
        and "http" not in page.replace("http://www.w3.org", "")
    )


def test_every_rank_gets_a_trace_and_the_set_replays_the_plan(plans: Path, tmp_path: Path) -> None:
    assert (
        main(["simulate", str(plans), "--rank", "2", "--et", "--output", str(tmp_path), "--name", "planned"])
        == 0
    )
    plan = read_plans(plans)[1]
    ranks = plan.tp * plan.dp * plan.pp
    assert len(list(tmp_path.glob("planned.*.et"))) == ranks
    for command in (["validate"], ["replay", "--semantics", "device", "--max-error", "0.1"]):
        line = [sys.executable, "-m", "chakra_et", *command, str(tmp_path / "planned")]
        done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
    ends = [int(et_file.read(path).metadata["measured_end_micros"]) for path in tmp_path.glob("planned.*.et")]
    assert max(ends) / 1e6 == pytest.approx(plan.step_time, rel=1e-5)
    first = et_file.read(tmp_path / "planned.0.et")
    sends = first.types == NodeType.COMM_SEND
    size = plan.mbs * plan.model.seq * plan.model.hidden * 2
    assert int(sends.sum()) == plan.micro_batches and set(first.column("comm_size")[sends]) == {size}
    groups = json.loads((tmp_path / "planned_comm_groups.json").read_text())
    assert groups["1"] == list(range(ranks)) and groups["2"] == [plan.tp * d for d in range(plan.dp)]


def test_the_export_launches_the_plan(plans: Path, tmp_path: Path) -> None:
    plan = read_plans(plans)[0]
    assert main(["export", str(plans), "--output", str(tmp_path / "_00_conf.sh")]) == 0
    text = (tmp_path / "_00_conf.sh").read_text()
    (tmp_path / "settings.py").write_text((ROOT / "megatron_lm" / "settings.py").read_text())
    script = f'. "{tmp_path}/_00_conf.sh" && for name in "${{SETTINGS[@]}}"; do echo "$name=${{!name}}"; done'
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0, done.stderr
    values = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert {name: values[name] for name in export.settings(plan)} == export.settings(plan)
    assert (
        values["WORLD_SIZE"] == str(plan.tp * plan.dp * plan.pp) and values["HOMOGENEOUS_CLUSTER"] == "false"
    )
    original = (ROOT / "megatron_lm" / "_00_conf.sh").read_text()
    assert len(text.splitlines()) == len(original.splitlines()), "every other setting is still there"


def test_the_published_partition_in_megatrons_count(plans: Path) -> None:
    plan = next(plan for plan in read_plans(plans) if plan.pp == 8)
    plan = dataclasses.replace(plan, partition=(1, 11, 8, 8, 8, 8, 5, 1))
    assert export.settings(plan)["PARTITION"] == "0-11-8-8-8-8-5-0"


def one(plans: Path, folder: Path, **changes) -> str:
    path = folder / "one.json"
    write_plans(path, [dataclasses.replace(read_plans(plans)[0], **changes)])
    return str(path)


def test_bad_input_is_one_sentence(plans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan: Plan = read_plans(plans)[0]
    not_a_plan = tmp_path / "x.json"
    not_a_plan.write_text("{}")
    bert = dataclasses.replace(plan.model, name="bert-large")
    cases = [
        (["simulate", "nowhere.json"], "nowhere.json: can't be read"),
        (["simulate", str(not_a_plan)], "plans of format None"),
        (["simulate", str(plans), "--rank", "7"], "holds 6 plans: --rank 7 is none of them"),
        (["export", str(plans), "--rank", "0"], "--rank 0"),
        (["export", str(plans), "--template", str(not_a_plan)], "has no line"),
        (["export", str(plans), "--output", str(tmp_path / "no" / "x.sh")], "No such file"),
        (["export", one(plans, tmp_path, model=bert)], "megatron_lm trains GPT-2 only"),
        (
            ["simulate", str(plans), "--schedule", "interleaved", "--virtual-stages", "9"],
            "--virtual-stages 9",
        ),
        (
            ["simulate", str(plans), "--schedule", "interleaved", "--virtual-stages", "1"],
            "at least 2 of both",
        ),
    ]
    for arguments, words in cases:
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert words in error and len(error.splitlines()) == 1, (arguments, error)
    for arguments in (
        ["simulate", str(plans), "--picture", "x.pdf"],
        ["simulate", str(plans), "--name", "../x"],
    ):
        with pytest.raises(SystemExit):
            main(arguments)


def test_more_micro_batches_than_stages_are_needed_to_interleave(plans: Path) -> None:
    plan = dataclasses.replace(read_plans(plans)[0], micro_batches=5)
    with pytest.raises(PlanError, match="needs a multiple of"):
        events_.interleaved(plan, 2)
