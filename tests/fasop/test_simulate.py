"""``simulate`` and ``export``: events, pictures, .et files and settings of a plan."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chakra_et.et import file as et_file
from chakra_et.et.columns import NodeType
from chakra_et.report.schedule import schedule_page
from fasop.__main__ import main
from fasop.commands.simulate import KINDS, picture
from fasop.errors import PlanError
from fasop.plans.plan import Plan, StageChoice, StageParts, plans_json, read_plans
from fasop.schedule import events as events_
from megatron_lm import plan_settings
from tests.fasop import fasop_cases as cases
from tests.report.test_page import page_data

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
        found = events_.of_plan(plan)
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
    plan = next(plan for plan in read_plans(plans) if plan.pp == 8)
    for found in (events_.of_plan(plan), events_.of_plan(events_.rescheduled(plan, 2))):
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


def test_interleaving_computes_as_much_with_smaller_bubbles() -> None:
    plan = even(8, layers=4)
    m = plan.micro_batches
    plain, mixed = events_.of_plan(plan), events_.of_plan(events_.rescheduled(plan, 2))
    # Narayanan et al. 2021: the bubble is (p − 1)/m of the ideal time, and 1/v of that interleaved.
    assert events_.step_time(plain) == pytest.approx(0.12 * (m + 7))
    assert events_.step_time(mixed) == pytest.approx(0.12 * (m + 7 / 2))
    for found in (plain, mixed):
        assert sum(e.end - e.start for e in found if e.kind == "forward") == pytest.approx(8 * m * 0.04)
    assert events_.bubbles(plan, plain)[0] == pytest.approx(7 / (m + 7))


def even(stages: int, layers: int, **changes: object) -> Plan:
    """A plan of ``layers`` layers per stage that take 10 ms forward and 20 ms backward, and nothing else."""
    model = cases.model(layers=stages * layers, batch=16)
    cluster = cases.cluster({"X": stages}, 1)
    values = {
        "partition": (layers + 1, *[layers] * (stages - 2), layers + 1),
        "stage_gpu": ("X",) * stages,
        "stage_forward": (0.01 * layers,) * stages,
        "stage_backward": (0.02 * layers,) * stages,
        "p2p": (0.0,) * (stages - 1),
        "dp_allreduce": (0.0,) * stages,
        "stage_memory": (1.0,) * stages,
        "stage_cap": (10.0,) * stages,
        "parts": (StageParts(0.01, 0.02),) * stages,
    }
    fixed = {"tp": 1, "dp": 1, "pp": stages, "mbs": 1, "micro_batches": 16}
    nothing = ("embedding_allreduce", "pipeline_time", "step_time", "price_per_step", "train_cost")
    plan = Plan(
        model=model, cluster=cluster, cost_model="exact", placement=("X",) * stages, is_oom=False,
        **fixed, **{**dict.fromkeys(nothing, 0.0), **values, **changes},
    )  # fmt: skip
    return events_.rescheduled(plan, 1)


def test_three_layers_are_chunks_of_two_and_one() -> None:
    plan = events_.rescheduled(even(2, layers=3), 2)
    found = [e for e in events_.of_plan(plan) if e.kind == "forward" and e.stage == 1 and e.micro_batch == 0]
    assert [round(e.end - e.start, 9) for e in found] == [0.02, 0.01]
    assert plan_settings.settings(dataclasses.replace(plan, hosts=("a", "b")))["PARTITION"] == "2-2-1-1"


def test_messages_of_two_chunks_follow_each_other_over_a_link() -> None:
    plan = events_.rescheduled(even(2, layers=2, p2p=(0.5,), wrap=0.5), 2)
    sends = [e for e in events_.of_plan(plan) if e.kind == "send"]
    for stage in range(2):
        times = sorted((e.start, e.end) for e in sends if e.stage == stage)
        assert len(times) > 16
        assert all(one[1] <= two[0] + 1e-9 for one, two in zip(times, times[1:], strict=False))


def test_the_picture_holds_every_event_and_no_markup_of_names(plans: Path, tmp_path: Path) -> None:
    plan = read_plans(plans)[0]
    plan = dataclasses.replace(
        plan, cluster=dataclasses.replace(plan.cluster, name="<script>alert(1)</script>")
    )
    found = events_.of_plan(plan)
    drawn = picture(plan, found)
    assert len(drawn.spans) == sum(event.kind in KINDS for event in found)
    for kind in ("forward", "backward"):
        assert sum(span.kind == kind for span in drawn.spans) == plan.pp * plan.micro_batches
    page = schedule_page(plan.cluster.name, [drawn])
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    path = tmp_path / "plan.html"
    assert main(["simulate", str(plans), "--picture", str(path)]) == 0
    content, columns = page_data(path)
    assert len(columns["row"]) == len(drawn.spans)
    assert [row[2] for row in content["timeline"]["rows"][:2]] == ["compute", "communication"]


def test_every_rank_gets_a_trace_and_the_set_replays_the_plan(plans: Path, tmp_path: Path) -> None:
    index = next(at for at, plan in enumerate(read_plans(plans)) if plan.dp == 4 and plan.tp == 1)
    plan = read_plans(plans)[index]
    words = ["--rank", str(index + 1), "--et", "--output", str(tmp_path), "--name", "planned"]
    assert main(["simulate", str(plans), *words]) == 0
    ranks = plan.tp * plan.dp * plan.pp
    assert len(list(tmp_path.glob("planned.*.et"))) == ranks
    for command in (["validate"], ["replay", "--semantics", "device", "--max-error", "0.1"], ["stragglers"]):
        line = [sys.executable, "-m", "chakra_et", *command, str(tmp_path / "planned")]
        done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ranks} ranks, dp {plan.dp} × pp {plan.pp}, " in done.stdout  # the plan's own mesh
    ends = [int(et_file.read(path).metadata["measured_end_micros"]) for path in tmp_path.glob("planned.*.et")]
    assert max(ends) / 1e6 == pytest.approx(plan.step_time, rel=1e-5)
    first = et_file.read(tmp_path / "planned.0.et")
    sends = first.types == NodeType.COMM_SEND
    size = plan.mbs * plan.model.seq * plan.model.hidden * 2
    assert int(sends.sum()) == plan.micro_batches and set(first.column("comm_size")[sends]) == {size}
    # Numbers of micro-batches don't make other operators in what people read.
    line = [
        sys.executable,
        "-m",
        "chakra_et",
        "report",
        str(tmp_path / "planned"),
        "-o",
        str(tmp_path / "p.html"),
    ]
    told = subprocess.run([*line, "--json"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    entries = {entry["name"]: entry["count"] for entry in json.loads(told)["entries"]}
    assert entries["forward"] == entries["backward"] == ranks * plan.micro_batches, entries
    groups = json.loads((tmp_path / "planned_comm_groups.json").read_text())
    assert groups["1"] == list(range(ranks)) and list(range(plan.dp)) in groups.values()


def shell_values(text: str) -> dict[str, str]:
    """NAME=VALUE lines as a shell reads them."""
    names = [line.partition("=")[0] for line in text.splitlines() if not line.startswith("#")]
    script = f'{text}\nfor name in {" ".join(names)}; do echo "$name=${{!name}}"; done'
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=True
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_the_export_is_the_whole_plan(plans: Path, tmp_path: Path) -> None:
    plan = read_plans(plans)[0]
    assert main(["export", str(plans), "--output", str(tmp_path / "plan.conf")]) == 0
    values = shell_values((tmp_path / "plan.conf").read_text())
    assert values == plan_settings.settings(plan)
    world = int(values["NPROC_PER_NODE"]) * int(values["NNODES"])
    assert world == plan.tp * plan.dp * plan.pp and values["HOMOGENEOUS_CLUSTER"] == "false"
    assert (values["MASTER_NNODES"], values["MASTER_GRES"], values["SLAVE_GRES"]) == (
        "1",
        "gpu:a100:4",
        "gpu:a10:4",
    )
    changes = {
        "recompute": ("RECOMPUTE", "full"),
        "zero": ("SHARDED_OPTIMIZER", 1),
        "precision": ("PRECISION", "fp32"),
        "attention": ("ATTENTION", "flash"),
    }
    for option, (name, value) in changes.items():
        other = dataclasses.replace(plan, options=dataclasses.replace(plan.options, **{option: value}))
        assert plan_settings.settings(other)[name] == ("true" if value == 1 else value), option
    interleaved = events_.rescheduled(next(plan for plan in read_plans(plans) if plan.pp == 8), 2)
    settings = plan_settings.settings(interleaved)
    assert settings["VIRTUAL_STAGES"] == "2" and len(settings["PARTITION"].split("-")) == 16
    assert sum(map(int, settings["PARTITION"].split("-"))) == plan.model.layers


def test_names_that_a_shell_would_take_apart_are_quoted(plans: Path) -> None:
    plan = read_plans(plans)[0]
    for queue in ("fast queue", "a$b"):
        gpus = tuple(dataclasses.replace(gpu, queue=queue) for gpu in plan.cluster.gpus)
        named = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, gpus=gpus))
        assert shell_values(plan_settings.lines(named))["MASTER_QUEUE"] == queue


def test_the_export_names_nodes_in_the_order_of_their_stages(plans: Path) -> None:
    plan = read_plans(plans)[0]
    first, second = (
        dataclasses.replace(gpu, hosts=tuple(f"{gpu.name.lower()}-{i}" for i in range(count)), queue="all")
        for gpu, count in zip(plan.cluster.gpus, plan.cluster.nodes, strict=True)
    )
    cluster = dataclasses.replace(plan.cluster, gpus=(first, second))
    named = dataclasses.replace(plan, cluster=cluster, hosts=tuple(cluster.assigned(plan.placement)))
    assert plan_settings.settings(named)["NODELIST"].split(",")[:2] == ["a100-0", "a10-0"]
    assert plan_settings.settings(named)["SLAVE_QUEUE"] == "all"
    around = (*plan.placement[1:4], plan.placement[0], *plan.placement[4:])
    mixed = dataclasses.replace(named, placement=around, hosts=tuple(cluster.assigned(around)))
    settings = plan_settings.settings(mixed)
    assert settings["HOMOGENEOUS_CLUSTER"] == "true" and settings["GRES"] == "gpu:4"
    assert settings["NODELIST"].split(",")[3] == "a100-0" and settings["SLURM_QUEUE"] == "all"
    with pytest.raises(PlanError, match="in the order 3 of A10, 1 of A100, 4 of A10"):
        plan_settings.settings(dataclasses.replace(plan, placement=around))


def test_the_export_says_why_a_plan_can_not_be_run(plans: Path) -> None:
    plan = read_plans(plans)[0]
    with_options = {
        "zero": (3, "the plan needs --zero 3"),
        "overlap": (True, "reduces gradients at the end"),
        "engine": ("deepspeed", "it is for deepspeed"),
        "gradient_bytes": (2, "of 4 bytes"),
    }
    both = dataclasses.replace(plan.options, attention="flash", precision="fp32")
    wide, halved = dataclasses.replace(plan.model, d_kv=128), {"tp": 2, "dp": plan.dp // 2}
    cases_ = [
        ({"options": dataclasses.replace(plan.options, **{name: value})}, words)
        for name, (value, words) in with_options.items()
    ]
    cases_ += [
        (
            {"options": both},
            "megatron_lm refuses ATTENTION=flash: GPUs have no such kernel for PRECISION=fp32",
        ),
        ({"model": wide}, "its heads are 128 wide (d_kv), not hidden / heads"),
        *(
            (
                halved | {"options": dataclasses.replace(plan.options, **{name: True})},
                "send a share of a stage",
            )
            for name in ("scatter_gather", "per_stage")
        ),
    ]
    uneven = tuple(StageChoice(1, "none", (("A10", 1 + stage % 2),)) for stage in range(plan.pp))
    cases_.append(({"choices": uneven}, "stages differ"))
    cases_.append(({"is_oom": True}, "runs out of memory"))
    cases_.append(
        (
            {"options": dataclasses.replace(plan.options, offload=True)},
            "has no --cp, --cuda-graphs, --offload",
        )
    )
    qwen = dataclasses.replace(plan.model, gated=True, tied=False, parameters=2_000_000_000)
    cases_.append(({"model": qwen}, "has 2,000,000,000 parameters, megatron_lm's Llama of these sizes"))
    gpus = (dataclasses.replace(plan.cluster.gpus[0], gpus_per_node=8), *plan.cluster.gpus[1:])
    cases_.append(({"cluster": dataclasses.replace(plan.cluster, gpus=gpus)}, "nodes have 4 and 8 GPUs"))
    cases_.append(({"dp": 1}, "uses 16 of 32 GPUs"))
    experts = dataclasses.replace(plan.model, experts=8)
    cases_.append(({"model": experts}, "megatron_lm trains GPT-2 and Llama-like models only"))
    for changes, words in cases_:
        with pytest.raises(PlanError, match=re.escape(words)):
            plan_settings.settings(dataclasses.replace(plan, **changes))


def test_what_a_launch_would_refuse_is_not_exported(plans: Path) -> None:
    # It was exported, and refused by _03_submit.sh.
    plan = read_plans(plans)[0]
    plan = dataclasses.replace(plan, tp=2, dp=plan.dp // 2)
    plan_settings.settings(plan)
    odd = dataclasses.replace(plan, model=dataclasses.replace(plan.model, ffn=6401))
    with pytest.raises(PlanError, match=re.escape("TENSOR_MP_SIZE=2: can't share 6401 columns of the MLP")):
        plan_settings.settings(odd)
    options = dataclasses.replace(plan.options, sequence_parallel=True)
    short = dataclasses.replace(plan, model=dataclasses.replace(plan.model, seq=1023), options=options)
    with pytest.raises(PlanError, match=re.escape("TENSOR_MP_SIZE=2 does not divide SEQ_LENGTH=1023")):
        plan_settings.settings(short)


def test_the_published_partition_in_megatrons_count(plans: Path) -> None:
    plan = next(plan for plan in read_plans(plans) if plan.pp == 8)
    plan = dataclasses.replace(plan, partition=(1, 11, 8, 8, 8, 8, 5, 1))
    assert plan_settings.settings(plan)["PARTITION"] == "0-11-8-8-8-8-5-0"


def one(plans: Path, folder: Path, **changes) -> str:
    path = folder / "one.json"
    path.write_text(plans_json([dataclasses.replace(read_plans(plans)[0], **changes)]))
    return str(path)


def test_bad_input_is_one_sentence(plans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan: Plan = read_plans(plans)[0]
    not_a_plan = tmp_path / "x.json"
    not_a_plan.write_text("{}")
    bert = dataclasses.replace(plan.model, causal=False)
    cases = [
        (["simulate", "nowhere.json"], "nowhere.json: can't be read"),
        (["simulate", str(not_a_plan)], "plans of format None"),
        (["simulate", str(plans), "--rank", "7"], "holds 6 plans: --rank 7 is none of them"),
        (["export", str(plans), "--rank", "0"], "--rank 0"),
        (["export", str(plans), "--output", str(tmp_path / "no" / "x.sh")], "No such file"),
        (["export", one(plans, tmp_path, model=bert)], "megatron_lm trains GPT-2 and Llama-like models only"),
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


def test_whole_rounds_of_micro_batches_are_needed_to_interleave(plans: Path, tmp_path: Path) -> None:
    plan = next(plan for plan in read_plans(plans) if plan.pp == 8)
    fewer = dataclasses.replace(plan.model, global_batch=5 * plan.dp * plan.mbs)
    path = tmp_path / "plans.json"
    path.write_text(plans_json([dataclasses.replace(plan, model=fewer, micro_batches=5, virtual_stages=2)]))
    with pytest.raises(PlanError, match="micro-batches are no multiple of pp"):
        read_plans(path)
