"""``fasop evaluate``: given plans, without a search."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fasop.commands import evaluate
from fasop.commands.plan import Config
from fasop.errors import PlanError
from fasop.exact.estimate import estimate
from fasop.inputs.clusters import Cluster, Gpu, load_clusters
from fasop.inputs.costs import read_costs
from fasop.inputs.models import find_model
from fasop.plans.layout import Described, Layout, LayoutStage, Replica, of_plan, read_layouts
from fasop.plans.options import Options
from fasop.plans.plan import Goal, plans_json
from fasop.plans.shapes import Part, Shape
from fasop.schedule import deepspeed
from fasop.search.planner import Planner
from fasop.search.search import search
from tests.shared import shared_path

ROOT = Path(__file__).resolve().parents[2]
EVEN = """
layouts:
  even: {model: gpt2-xl, cluster: paper-gpt2xl, tp: 1, dp: 4, mbs: 1,
         layers: 0-11-8-8-8-8-5-0, measured: 1.4022}
  listed:
    model: gpt2-xl
    cluster: paper-gpt2xl
    stages:
"""
STAGE = "      - {{layers: {}, replicas: [{}]}}\n"


def listed(layers: list[int]) -> str:
    text = EVEN
    for stage, count in enumerate(layers):
        replica = f"{{gpu: A10, gpus: 1, mbs: 1, node: n{stage}}}"
        text += STAGE.format(count, ", ".join([replica] * 4))
    return text


def written(folder: Path, text: str) -> str:
    path = folder / "layouts.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def right_layouts(path: str) -> list[Described]:
    """Those of a file that must all be right."""
    found: list[Described] = []
    for each in read_layouts(path, [read_costs()]):
        if isinstance(each, PlanError):
            raise each
        found.append(each)
    return found


def test_a_layout_that_sets_nothing_runs_as_plans_do(tmp_path: Path) -> None:
    """A model without measured costs was evaluated without FlashAttention, and planned with it."""
    text = "layouts: {it: {model: llama3-8b, cluster: 8xH100, tp: 1, dp: 8, mbs: 1, layers: 32}}"
    (given,) = right_layouts(written(tmp_path, text))
    (options,) = Config(model="llama3-8b", cluster="8xH100").options(measured=False)
    assert given.options == options
    (given,) = right_layouts(written(tmp_path, text.replace("32}", "32, attention: unfused}")))
    assert given.options.attention == "unfused" and given.options.sequence_parallel


def test_listed_stages_take_what_even_ones_take(tmp_path: Path) -> None:
    path = written(tmp_path, listed([0, 11, 8, 8, 8, 8, 5, 0]))
    even, each = (estimate(one.layout, [read_costs()], one.options) for one in right_layouts(path))
    assert even == each
    assert even.step > 1.4 and len(even.stages) == 8


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(overlap=True, zero=1),
        Options(recompute="selective", sequence_parallel=True),
        Options(scatter_gather=True, gradient_bytes=2),
        Options(zero=3),
    ],
    ids=["plain", "overlap", "sequence-parallel", "scatter-gather", "zero-3"],
)
def test_a_plan_of_the_search_is_evaluated_as_it_was_planned(options: Options) -> None:
    model = find_model("gpt2-xl")
    clusters = load_clusters("paper-gpt2xl-het")
    for tp in (1, 2):
        goal = Goal(top=3, tp=tp, pp=8)
        for plan in search(model, clusters, [read_costs()], [options], goal):
            assert estimate(of_plan(plan), [read_costs()], options).step == pytest.approx(plan.step_time)


def test_each_of_several_layouts_says_whether_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a layout alone said so: the first of these needs 16 times the memory there is."""
    ways = {"big": "llama3-70b, tp: 1, dp: 8, mbs: 4", "small": "llama3-8b, tp: 8, dp: 1, mbs: 1"}
    lines = [f"  {name}: {{cluster: 8xH100, pp: 1, model: {way}}}" for name, way in ways.items()]
    assert evaluate.main([written(tmp_path, "\n".join(["layouts:", *lines]))]) == 0
    big, small = capsys.readouterr().out.splitlines()[1:3]
    assert big.startswith("big") and big.endswith(" OOM") and "OOM" not in small


def test_stages_that_are_only_counted_hold_equally_many_layers(tmp_path: Path) -> None:
    """``pp`` was answered with "did you mean 'tp'?"."""
    text = "layouts: {it: {model: gpt2-xl, cluster: paper-gpt2xl, tp: 1, dp: 4, mbs: 1, pp: 5}}"
    (one,) = right_layouts(written(tmp_path, text))
    (same,) = right_layouts(written(tmp_path, text.replace("pp: 5", "layers: 10-10-10-9-9")))
    assert one == same and one.layout.partition == (11, 10, 10, 9, 10)
    (chunks,) = right_layouts(written(tmp_path, text.replace("pp: 5", "pp: 4, virtual_stages: 2")))
    assert chunks.layout.virtual_stages == 2


def test_an_uneven_stage_goes_at_the_pace_of_its_slowest_replica(tmp_path: Path) -> None:
    text = """
layouts:
  mixed:
    model: gpt2-xl
    cluster: paper-gpt2xl-het
    global_batch: 64
    stages:
      - {layers: 24, replicas: [{gpu: A100, gpus: 4, mbs: 3}, {gpu: A10, gpus: 4, mbs: 1}]}
      - {layers: 24, replicas: [{gpu: A10, gpus: 4, mbs: 2}, {gpu: A10, gpus: 4, mbs: 2}]}
"""
    (one,) = right_layouts(written(tmp_path, text))
    found = estimate(one.layout, [read_costs()], one.options)
    slow, fast = (
        estimate(each.layout, [read_costs()], each.options)
        for each in (
            right_layouts(written(tmp_path, text.replace(old, new)))[0]
            for old, new in (("gpu: A100, gpus: 4, mbs: 3", "gpu: A10, gpus: 4, mbs: 3"), ("mixed:", "same:"))
        )
    )
    assert slow.stages[0].forward > found.stages[0].forward
    assert fast == found and one.layout.micro_batches == 16


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("dp: 4", "dp: 0", "dp: 0: give a whole number"),
        ("dp: 4", "dp: 5", "no multiple of dp 5"),
        ("tp: 1", "tp: 3", "tp is 3: give a divisor of the 16 heads"),
        ("tp: 1", "tp: 32", "tp is 32: give a divisor of the 16 heads"),
        ("tp: 1", "tp: 4", "stages is 128, its nodes have 32 GPUs"),
        ("-5-0", "-5-1", "49 layers"),
        ("-5-0", "-5-x", "give as 0-11-8"),
        ("mbs: 1", "mbs: 1, recompute: ful", "did you mean 'full'"),
        ("mbs: 1", "mbs: 1, zero: 4", "zero: 4: give a whole number from 0 to 3"),
        ("mbs: 1", "mbs: 1, nodes: [A10, B]", "no GPU 'B'"),
        ("mbs: 1", "mbs: 1, nodes: [A10]", "stages is 32, its nodes have 4 GPUs"),
        ("measured: 1.4022", "measured: -1", "seconds per step"),
        ("mbs: 1", "mbs: 1, mps: 1", "unknown setting 'mps'"),
        ("tp: 1, ", "", "lacks tp"),
        ("mbs: 1", "mbs: 1, pp: 8", "either layers of each stage, as 8-8-8-8, or pp"),
        ("mbs: 1", "mbs: 1, ep: 2", "ep is 2: give 1, as gpt2-xl has no experts"),
        ("mbs: 1", "mbs: 1, cp: 32, cp_comm: all-to-all", "layout even: model gpt2-xl: cp_comm"),
        ("mbs: 1", "mbs: 1, virtual_stages: 2", "virtual_stages is 2: give at most 1"),
        ("model: gpt2-xl, ", "", "lacks model"),
        ("gpt2xl,", "pareto,", "grid of clusters"),
    ],
)
def test_a_layout_that_is_wrong_is_one_sentence(old: str, new: str, message: str, tmp_path: Path) -> None:
    even = EVEN[: EVEN.index("  listed:")]
    with pytest.raises(PlanError, match=message):
        right_layouts(written(tmp_path, even.replace(old, new)))


def test_replicas_share_the_gpus_of_a_node(tmp_path: Path) -> None:
    def stages(first: str, second: str) -> str:
        replicas = ", ".join(f"{{gpu: A10, gpus: 4, mbs: 1, {node}}}" for node in (first, second))
        head = EVEN[EVEN.index("  listed:") :]
        return "layouts:\n" + head + STAGE.format(48, replicas)

    with pytest.raises(PlanError, match="stage 0, replica 1: 8 GPUs on a node that has 4: name another"):
        right_layouts(written(tmp_path, stages("node: n", "node: n")))
    # The second's own node is not the first's, though it would be numbered so.
    (one,) = right_layouts(written(tmp_path, stages("node: node1", "")))
    assert [replica.group[0].node for replica in one.layout.stages[0].replicas] == [0, 1]


def test_one_bad_layout_does_not_block_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    even = EVEN[: EVEN.index("  listed:")]
    bad = [even.split("layouts:")[1].replace("even", name).replace("tp: 1", tp) for name, tp in
           (("b", "tp: 3"), ("c", "tp: x"))]  # fmt: skip
    path = written(tmp_path, even + "".join(bad))
    assert evaluate.main([path]) == 2
    output = capsys.readouterr()
    assert "1.4022" in output.out
    assert [line.split(": ")[2] for line in output.err.splitlines()] == ["layout b", "layout c"]
    assert evaluate.main([path, "--json"]) == 2
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["even"]


def test_the_command_shows_the_error_of_a_measured_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, EVEN[: EVEN.index("  listed:")])
    assert evaluate.main([path]) == 0
    text = capsys.readouterr().out
    assert "1.4022" in text and "%" in text and "11" in text
    assert evaluate.main([path, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["measured"] == 1.4022 and len(found["stages"]) == 8


def test_the_command_takes_plans_of_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, (cluster,) = find_model("gpt2-xl"), load_clusters("paper-gpt2xl")
    (plan,) = search(model, [cluster], [read_costs()], [Options()], Goal(top=1, pp=8))
    path = tmp_path / "plans.json"
    path.write_text(plans_json([plan]))
    assert evaluate.main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["step"] == pytest.approx(plan.step_time)


def test_a_message_above_the_buffer_waits_for_its_receiver() -> None:
    passes, messages = ([4.0, 1.0], [0.0, 0.0]), [1.0]
    # The first gradient is ready at 6 and received at 8, when stage 0 has ended its second forward.
    assert deepspeed.stage_ends(*passes, messages, [0.0], 2) == [11.0, 10.0]
    # Half of each message holds its sender: the gradient starts at 8.5.
    assert deepspeed.stage_ends(*passes, messages, [0.5], 2) == [12.5, 12.0]


@pytest.mark.slow
def test_the_published_measurements_are_predicted_as_the_readme_has_it(tmp_path: Path) -> None:
    shared_path("data/planner", "sailor/measured_plans.json", "vtrain/ground_truth_multi.csv")
    (tmp_path / "mpt_fsdp.csv").symlink_to(shared_path("data/truth", "mpt_fsdp.csv") / "mpt_fsdp.csv")
    command = [sys.executable, "benchmarks/planner_accuracy.py", "--truth", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    readme = (ROOT / "fasop" / "README.md").read_text(encoding="utf-8")
    planned, _, runs = done.stdout.partition("\n\n")
    assert planned in readme and "MPT, H100" in runs


def _a10s(nodes: int) -> Cluster:
    gpu = Gpu("A10", 22, 5, 40e9, 128e9, shared_bus=True)
    return Cluster("a10s", 8, (gpu,), (nodes,))


def test_the_embedding_of_a_plan_on_one_node_is_summed_within_it() -> None:
    model = find_model("gpt2-xl")
    shape, partition = Shape(4, 1, 2, 1), (25, 25)
    steps = []
    for nodes in (1, 2):  # with a second node that the plan leaves idle
        plan = Planner(model, _a10s(nodes), [], Options()).estimate(shape, ("A10",), partition)
        assert estimate(of_plan(plan), [], plan.options).step == pytest.approx(plan.step_time)
        steps.append(plan.step_time)
    assert steps[0] == pytest.approx(steps[1])


def test_the_embedding_of_every_replica_is_summed() -> None:
    # Stage 0's first replica shares a node with stage 1's, the second does not.
    model = find_model("gpt2-xl")

    def replica(node: int) -> Replica:
        return Replica((Part(node, "A10", 4),), 1)

    def step(second: int) -> float:
        stages = (
            LayoutStage(25, (replica(0), replica(1))),
            LayoutStage(25, (replica(0), replica(second))),
        )
        return estimate(Layout(model, _a10s(3), stages, 32), [], Options()).embedding

    assert step(2) > 1.5 * step(1)


def test_shares_by_gpu_type_are_evaluated_as_planned() -> None:
    model = replace(find_model("gpt2-xl"), global_batch=48)
    gpus = tuple(Gpu(name, 76, 10, 200e9, 1840e9) for name in ("A100", "H100"))
    cluster = Cluster("two", 4, gpus, (1, 1))
    options = Options(per_stage=True, attention="flash", recompute="full")
    plans = search(model, [cluster], [], [options], Goal(top=40, workers=1))
    uneven = [plan for plan in plans if any(len({b for _, b in c.shares}) > 1 for c in plan.choices)]
    assert uneven
    for plan in uneven:
        # Each column of replicas has its own messages there; the search takes the slowest for all.
        step = estimate(of_plan(plan), [], plan.options).step
        assert 0.98 * plan.step_time < step <= plan.step_time * (1 + 1e-9)
