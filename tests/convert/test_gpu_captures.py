"""Captures of a real GPU: all of their kernels, with the work that they do, and what bounds their steps."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import statistics
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chakra_et as ce
from chakra_et.__main__ import main
from chakra_et.convert.inputs import find_run, load_run
from chakra_et.cost.operator_times import CLASSES, gpu_model
from chakra_et.diagnose.verdict import diagnose
from chakra_et.et.edges import edges_of
from chakra_et.ranks.table import step_table
from chakra_et.report.collectives import collectives
from chakra_et.report.run import load
from chakra_et.simulate.run import Run
from chakra_et.simulate.time_by_kind import KINDS, node_kinds
from chakra_et.transform.gpu import kernel_kinds, launched_operators
from chakra_et.transform.rank_copies import step_of
from tests.shared import shared_path

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "gpu"
NAMES = ("host-bound", "compiled", "gloo", "graphs", "device-bound")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("gpu")
    assert main(["convert", "--dir", str(FIXTURES), "-o", str(found)]) == 0
    return found


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    return {name: load_run(str(folder / name)) for name in NAMES}


@cache
def recorded(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((FIXTURES / f"{name}_device.json.gz").read_bytes()))


def by_step(recording: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The device's events by the step in which their launch lies; first those without a recorded launch."""
    events = [event for event in recording["traceEvents"] if event.get("ph") == "X"]
    steps = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["cat"] == "user_annotation" and event["name"].startswith("ProfilerStep#")
    )
    calls = {event["args"]["correlation"]: event["ts"] for event in events if event["cat"] in CALLS}
    found: list[list[dict[str, Any]]] = [[] for _ in range(len(steps) + 1)]
    for event in events:
        if event["cat"] in DEVICE:
            at = calls.get(event["args"]["correlation"], -math.inf)
            inside = [number for number, (begin, end) in enumerate(steps, 1) if begin <= at < end]
            if inside or at < 0:
                found[inside[0] if inside else 0].append(event)
    return found


def launched(name: str) -> list[dict[str, Any]]:
    """The device's events of the timed steps, the last ones."""
    return sum(by_step(recorded(name))[-STEPS:], [])


def between_ends_ms(recording: dict[str, Any]) -> list[float]:
    """From the end of the device's work of each step to that of the next."""
    ends = [max((each["ts"] + each["dur"] for each in step), default=0.0) for step in by_step(recording)]
    return [(after - before) / 1e3 for before, after in pairwise(ends)]


def device_rows(run: Run) -> np.ndarray:
    trace = run.graph.traces[0]
    on_device = trace.column("stream", -1) >= 0
    return np.flatnonzero(on_device & (node_kinds(trace) != KINDS.index("device-overhead")))


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_of_the_timed_steps_is_a_node_of_its_name_and_time(
    name: str, runs: dict[str, Run]
) -> None:
    trace, rows, events = runs[name].graph.traces[0], device_rows(runs[name]), launched(name)
    assert Counter(trace.names[row] for row in rows) == Counter(event["name"] for event in events)
    total = sum(event["dur"] for event in events)
    assert int(trace.duration_micros[rows].sum()) == pytest.approx(total, rel=0.02, abs=2)
    assert trace.metadata_str("device_name") == "NVIDIA H200"


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_linked_valid_and_explained(name: str, folder: Path) -> None:
    for report in json.loads((folder / f"{name}_conversion.json").read_text())["ranks"].values():
        assert report["link_rate"] == 1 and not report["problems"]
        assert report["unexplained_us"] <= 0.1 * sum(report["critical_path_us"].values())
    assert main(["validate", str(folder / name)]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_replay_takes_the_measured_time_in_either_order(name: str, folder: Path) -> None:
    """ASTRA-sim's order of two ranks was 51% late: gloo's threads were busy while their collectives ran."""
    assert main(["replay", str(folder / name), "--semantics", "device", "--max-error", "3"]) == 0
    assert main(["replay", str(folder / name), "--semantics", "astra", "--max-error", "8"]) == 0


@pytest.mark.parametrize(
    "name, bound",
    [("host-bound", "host"), ("compiled", "host"), ("gloo", "communication"), ("graphs", "memory"),
     ("device-bound", "compute")],
)  # fmt: skip
def test_what_bounds_the_step(name: str, bound: str, runs: dict[str, Run]) -> None:
    found = diagnose(runs[name])
    assert found.bound == bound and not found.contradictions
    assert "kernels" in found.evidence and "compute" not in found.evidence


@pytest.mark.parametrize(
    "name, layers, width, batch, tokens", [("gloo", 2, 768, 8, 512), ("device-bound", 4, 2048, 16, 400)]
)
def test_the_work_of_the_model_is_counted(
    name: str, layers: int, width: int, batch: int, tokens: int, runs: dict[str, Run]
) -> None:
    """12 width² parameters of a layer in products, forward and twice backward; attention 4 and 10 times."""
    run = runs[name]
    trace, kinds = run.graph.traces[0], kernel_kinds(run)[run.graph.trace_of == 0]
    operations = trace.column("num_ops")

    def counted(kind: str) -> float:
        return float(operations[kinds == CLASSES.index(kind)].sum()) / STEPS

    products = 6.0 * batch * tokens * 12 * width**2 * layers
    assert counted("matrix product") == pytest.approx(products, rel=1e-6)
    assert counted("attention") == pytest.approx(14.0 * batch * tokens**2 * width * layers, rel=1e-6)
    optimizer = np.array(["multi_tensor_apply" in trace.names[row] for row in range(len(trace))])
    rates = trace.column("tensor_size")[optimizer] / trace.duration_micros[optimizer] / 1e6
    assert 0.5 < np.median(rates) < 4.8, "TB/s"


def test_kernels_of_a_compiled_model_have_no_work_of_others(runs: dict[str, Run]) -> None:
    trace = runs["compiled"].graph.traces[0]
    made = np.array([trace.names[row].startswith("triton_") for row in range(len(trace))])
    made &= trace.column("stream", -1) >= 0
    assert made.sum() == sum(event["name"].startswith("triton_") for event in launched("compiled")) > 0
    assert not trace.column("num_ops")[made].any()


def test_kernels_of_a_cuda_graph_follow_its_launch_and_have_a_class(runs: dict[str, Run]) -> None:
    run = runs["graphs"]
    trace, rows, edges = run.graph.traces[0], device_rows(run), edges_of(run.graph.traces[0])
    launches = [row for row in range(len(trace)) if trace.names[row] == "cudaGraphLaunch"]
    after = {*edges.child[np.isin(edges.parent, launches)].tolist()}
    behind = {*edges.child[np.isin(edges.parent, [row for row in after if row not in rows])].tolist()}
    assert {*rows.tolist()} <= after | behind
    classes = Counter(CLASSES[kind] for kind in kernel_kinds(run)[rows].tolist())
    of_layers = STEPS * 12
    assert classes["matrix product"] == 12 * of_layers and classes["attention"] == 4 * of_layers
    assert classes["normalization"] == 6 * of_layers and classes["reduction"] == 4 * of_layers + STEPS


def test_the_host_ahead_of_the_device_takes_as_long_as_in_untraced_steps(runs: dict[str, Run]) -> None:
    """Recording made it 1.8 times slower, which the step of the device's pace doesn't show."""
    trace, of = runs["device-bound"].graph.traces[0], recorded("device-bound")["chakra_et"]
    untraced, wall = of["step_us"][4:8], of["untraced_total_us"]
    on_host = trace.column("stream", -1) < 0
    host = int(trace.duration_micros[on_host].sum()) / STEPS
    assert host == pytest.approx(statistics.median(step for step, _ in untraced), rel=0.05)
    assert runs["device-bound"].end_ns.max() / 1e3 / STEPS == pytest.approx(wall[1] / wall[0], rel=0.03)


def test_three_equal_steps_took_13_and_12_and_38_ms(runs: dict[str, Run]) -> None:
    """The host was done with the second one before the device was with the first."""
    steps = runs["device-bound"].steps[0].measured_ns
    facts = json.loads(runs["device-bound"].graph.traces[0].metadata_str("steps_micros") or "")
    assert (steps / 1e3).tolist() == pytest.approx([facts["untraced"]] * STEPS, rel=0.03)
    steps = runs["graphs"].steps[0].measured_ns
    assert (steps[1:] / 1e6).tolist() == pytest.approx(between_ends_ms(recorded("graphs"))[-2:], rel=0.01)


def test_a_step_begins_when_the_work_of_those_before_the_recording_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps of 19 ms took 28.9 on average: the device was 30 ms behind when the recording began."""
    path = shared_path("data/traces/public/mi300_resnet_rank0.json.gz")
    wanted = between_ends_ms(json.loads(gzip.decompress(path.read_bytes())))
    assert main(["convert", str(path), "-o", str(tmp_path), "--allow-missing-ranks"]) == 0
    name = str(tmp_path / "mi300_resnet")
    steps = load_run(name, allow_missing=True).steps[0].measured_ns
    assert (steps / 1e6).tolist() == pytest.approx(wanted, abs=0.02)
    capsys.readouterr()
    assert main(["predict", name, "--allow-missing-ranks", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_us"]["before"] / 1e3 == pytest.approx(18.84, rel=0.02)


def test_the_last_step_alone_took_32_ms_instead_of_13(runs: dict[str, Run], tmp_path: Path) -> None:
    """What the device still had to do for the steps before was left out, and the time for it wasn't."""
    for file in FIXTURES.glob("graphs_*"):
        shutil.copy(file, tmp_path)
    assert main(["convert", "--dir", str(tmp_path), "--step", "5"]) == 0
    alone, among = load_run(str(tmp_path / "graphs")), runs["graphs"]
    assert among.steps[0].names[-1:] == alone.steps[0].names == ["ProfilerStep#5"]
    assert alone.steps[0].measured_ns == pytest.approx(among.steps[0].measured_ns[-1:], rel=0.02)
    of_step = step_of(alone.graph.traces[0])[device_rows(alone)]
    assert (of_step == 0).sum() == len(by_step(recorded("graphs"))[-1]) and (of_step == -1).any()


@pytest.mark.parametrize("name", NAMES)
def test_every_command_says_the_same_of_a_step(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(*command: str) -> Any:
        capsys.readouterr()
        assert main([*command, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    run = str(folder / name)
    converted = json.loads((folder / f"{name}_conversion.json").read_text())["ranks"]
    us = [of["steps_us"][step] for of in converted.values() for step in sorted(of["steps_us"], key=int)]
    ranks = range(len(us) // STEPS)
    of_page = answer("report", run, "-o", str(tmp_path / "page.html"))["steps"]
    assert [(each["end_ns"] - each["start_ns"]) / 1e3 for each in of_page] == pytest.approx(us, abs=2)
    assert all(sum(each["parts_ns"]) == each["end_ns"] - each["start_ns"] for each in of_page)
    rows = ce.load(run).steps.rows()
    assert [(row["end_ns"] - row["start_ns"]) / 1e3 for row in rows] == pytest.approx(us, abs=2)
    assert (step_table(run)["total_ns"] / 1e3).tolist() == pytest.approx(us)
    replayed = answer("replay", run, "--semantics", "device")["jobs"][0]["replays"]["device"]
    assert [step["measured_us"] for rank in replayed for step in rank["steps"]] == pytest.approx(us)
    simulated = [step["simulated_us"] for rank in replayed for step in rank["steps"]]
    assert simulated == pytest.approx(us, rel=0.03)
    of_predict = answer("predict", run)["ranks"]
    assert [step["measured_us"] for rank in of_predict for step in rank["steps"]] == pytest.approx(us)
    slowest = max(sum(us[STEPS * rank : STEPS * (rank + 1)]) for rank in ranks) / STEPS
    assert answer("diagnose", run)["step_ms"] * 1e3 == pytest.approx(slowest, rel=0.01)
    if len(ranks) > 1:
        assert sum(answer("stragglers", run)["step_t_base"].values()) * 1e6 == pytest.approx(
            slowest * STEPS, rel=0.01
        )


def test_gloo_is_not_held_against_nccl(folder: Path) -> None:
    found = collectives(load(find_run([str(folder / "gloo")])))
    assert {each["type"] for each in found} == {"all-reduce"} and all(each["bus"] for each in found)
    assert [each["usual_bus"] for each in found] == [None, None], "of H200 beside H200: 200 times as fast"


def test_the_traced_step_has_the_work_of_the_device_as_the_untraced_one(runs: dict[str, Run]) -> None:
    """With a CUDA graph the host launches a step of 12 ms in 2: recording seemed to make steps shorter."""
    trace, of = runs["device-bound"].graph.traces[0], recorded("device-bound")["chakra_et"]
    facts = json.loads(trace.metadata_str("steps_micros") or "")
    host = statistics.mean(step for step, _ in of["step_us"][9:])
    last = max(event["ts"] + event["dur"] for event in launched("device-bound"))
    steps = [each for each in recorded("device-bound")["traceEvents"] if each.get("name") == "ProfilerStep#9"]
    first = min(each["ts"] for each in steps if each["cat"] == "user_annotation")
    assert facts["traced"] == pytest.approx((last - first) / STEPS, rel=0.01)
    assert facts["traced"] > host


def test_predictions_know_who_sets_the_pace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(name: str, *flags: str) -> float:
        capsys.readouterr()
        assert main(["predict", str(folder / name), *flags, "--json"]) == 0
        [found] = [each for each in json.loads(capsys.readouterr().out)["ranks"] if each["rank"] == 0]
        return float(found["after_us"] / found["before_us"])

    assert change("host-bound", "--gpu-kernels", "0.5") > 0.99
    assert change("graphs", "--gpu-kernels", "0.5") < 0.65
    assert 0.5 < change("device-bound", "--gpu-kernels", "0.5") < 0.7, "12.5 ms of the host for 21 ms"


def test_rows_of_an_embedding_move_by_16_bytes(runs: dict[str, Run]) -> None:
    """They were taken to move one element at a time, which made them 5 and 8 times too slow on this GPU."""
    model = gpu_model("H200")
    for name in ("gloo", "device-bound"):
        run = runs[name]
        found = launched_operators(run)
        took = np.bincount(found.of, run.graph.own_ns[found.nodes] / 1e3)
        rows = [at for at, work in enumerate(found.work) if work.kind == "gather" and work.known]
        assert rows and all(model.micros(found.work[at]) == pytest.approx(took[at], rel=0.3) for at in rows)
