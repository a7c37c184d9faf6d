"""Where the time goes: the parts of a step, the critical path, and who waited for whom, added up by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import chakra_et as ce
from chakra_et.errors import TraceError
from chakra_et.report.collectives import (
    collectives,
    nccl_size,
    traffic,
)
from chakra_et.report.content import headline, lacks, path_by_kind, rank_rows
from chakra_et.report.run import ReportRun, assemble
from chakra_et.report.times import by_module, by_name, call_tree, find_steps, idle_time
from chakra_et.simulate.breakdown import ACTIVITIES, activity
from chakra_et.simulate.critical_path import waited_for
from chakra_et.text import duration
from tests.diagnose.machines import Rank, machine
from tests.report.made_run import made_run, write_run
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace


@pytest.fixture
def run(tmp_path: Path) -> ReportRun:
    return made_run(tmp_path)


def test_the_parts_of_a_step_add_up(run: ReportRun) -> None:
    steps = find_steps(run)
    assert [(step.rank, step.name, step.lasts_ns) for step in steps] == [(0, "5", 160_000), (1, "5", 160_000)]
    parts = [dict(zip(ACTIVITIES, step.parts_ns, strict=True)) for step in steps]
    assert parts[0] == {
        "compute": 50_000, "memory": 10_000, "communication": 20_000, "wait": 40_000, "host": 40_000,
        "idle": 0,
    }  # fmt: skip
    assert parts[1] == {
        "compute": 90_000, "memory": 10_000, "communication": 20_000, "wait": 0, "host": 40_000,
        "idle": 0,
    }  # fmt: skip
    assert [step.phases_ns for step in steps] == [(50_000, 0, 0), (90_000, 0, 0)]
    assert [step.replayed_ns for step in steps] == [160_000, 160_000]


def test_ranks_that_cant_be_replayed_together_are_shown_apart(tmp_path: Path) -> None:
    write_run(tmp_path).groups_file.write_text('{"1": [0]}')
    job = ce.load(tmp_path / "made")
    shown, steps = job.measured, find_steps(job.measured)
    assert shown.diagnosis is None and "can't be replayed together" in " ".join(lacks(shown, steps))
    assert [(step.lasts_ns, step.replayed_ns) for step in steps] == [(160_000, 160_000)] * 2
    assert "per step" in headline(shown, steps)[0]
    # Each replays exactly by itself, which proves nothing.
    assert all("can't be replayed together" in each["reasons"][0] for each in rank_rows(shown))
    with pytest.raises(TraceError, match="made: the ranks can't be replayed together: rank 1"):
        ce.predict(job, scale=("gemm=0.5",))


def test_communication_of_the_cpu_is_no_idle_device(run: ReportRun) -> None:
    gloo = cpu(1, 10, start=0, kind="operator"), collective(2, 20, (1,), start=10, kind="collective")
    traces = [make_trace(*gloo, rank=rank, world_size=2) for rank in range(2)]
    assert idle_time(assemble("made", traces, [0, 1], {}, {}, {})) is None
    assert [sum(each) for each in idle_time(run) or []] == [0, 0]


def test_communication_behind_a_kernel_is_hidden() -> None:
    trace = make_trace(
        kernel(1, 30, start=0, kind="kernel"), kernel(2, 40, start=10, stream=9, kind="collective", type=7)
    )
    start, end, wait = np.array([0, 10]), np.array([30, 50]), np.array([0, 5])
    found = activity(trace, start, end, wait)
    assert found.parts(np.array([0]), np.array([60])).tolist() == [[30, 0, 20, 0, 0, 10]]
    assert found.hidden_ns(np.array([0]), np.array([60])).tolist() == [15]


def test_a_rank_without_device_work_computes_on_its_threads() -> None:
    trace = make_trace(
        cpu(1, 10, start=0, kind="operator"),
        cpu(2, 5, start=10, kind="host-overhead"),
        cpu(3, 5, start=20, tid=2),
    )
    start, us = 1000 * np.array([0, 10, 20]), 1000
    found = activity(trace, start, start + us * np.array([10, 5, 5]), np.zeros(3, np.int64))
    parts = found.parts(us * np.array([0, 12]), us * np.array([25, 22]))
    assert (parts // us).tolist() == [[15, 0, 0, 0, 5, 5], [2, 0, 0, 0, 3, 5]]


def test_nodes_of_no_length_at_one_moment_leave_the_step_idle() -> None:
    trace, moment, none = make_trace(kernel(1, 0), kernel(2, 0)), np.array([5, 5]), np.zeros(2, np.int64)
    found = activity(trace, moment, moment, none)
    assert found.parts(np.array([0]), np.array([10])).tolist() == [[0, 0, 0, 0, 0, 10]]
    assert found.hidden_ns(np.array([0]), np.array([10])).tolist() == [0]


def test_a_microsecond_between_works_of_the_host_is_rounding() -> None:
    """Small models on MI300X were idle for 5% of a step, in gaps of 1 µs alone."""
    trace = make_trace(
        cpu(1, 9, start=0, kind="host-overhead"),
        cpu(2, 5, start=10, kind="host-overhead"),
        cpu(3, 5, start=17, kind="host-overhead"),
    )
    start = 1000 * np.array([0, 10, 17])
    found = activity(trace, start, start + 1000 * np.array([9, 5, 5]), np.zeros(3, np.int64))
    parts = dict(zip(ACTIVITIES, found.parts(np.array([0]), np.array([22_000]))[0].tolist(), strict=True))
    assert (parts["host"], parts["idle"]) == (20_000, 2000)


def test_the_critical_path_goes_through_the_rank_that_came_last(run: ReportRun) -> None:
    assert run.path is not None
    names = [run.graph.describe(node) for node in run.path.node.tolist()]
    ranks = [run.graph.rank(node) for node in run.path.node.tolist()]
    assert [name.split("'")[1] for name in names] == [
        "ProfilerStep#5", "aten::mm", "gemm", "ncclAllReduce", "ncclAllReduce", "Optimizer.step",
    ]  # fmt: skip
    assert ranks == [1, 1, 1, 1, 0, 0]
    assert int(run.path.lasts_ns.sum()) == 160_000
    kinds = {kind: ns for kind, ns in path_by_kind(run).items() if ns}
    assert kinds == {"operator": 50_000, "kernel": 90_000, "transfer": 20_000}


def test_waits_go_to_the_rank_that_came_last(run: ReportRun) -> None:
    assert waited_for(run.graph, *run.arrivals).tolist() == [[0, 40_000], [0, 0]]
    assert "Rank 1 is slow" in "".join(headline(run, find_steps(run)))


def test_a_run_without_communication_has_no_collectives() -> None:
    trace = make_trace(cpu(1, 10, start=0, kind="operator"))
    assert collectives(assemble("made", [trace], [0], {}, {}, {})) == []


def test_bandwidth_of_a_collective(run: ReportRun) -> None:
    (found,) = collectives(run)
    assert found == {
        "type": "all-reduce", "bytes": 1000, "group": "1", "ranks": 2, "count": 1, "transfer_ns": 20_000,
        "algorithm": pytest.approx(0.05), "bus": pytest.approx(0.05), "skew_ns": (40_000.0, 40_000),
        "last": {1: 1}, "usual_bus": None,
    }  # fmt: skip
    assert traffic(run)["collectives"].tolist() == [[0, 1000], [1000, 0]]
    assert traffic(run)["collective_ns"].tolist() == [[0, 20_000], [20_000, 0]]
    assert not traffic(run)["messages"].any()


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all-reduce", 1.75),
        ("all-gather", 0.875),
        ("reduce-scatter", 0.875),
        ("broadcast", 1.0),
        ("barrier", None),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(kind: str, factor: float | None) -> None:
    assert nccl_size(kind, 10, 8) == (80 if kind == "all-gather" else 10, factor)


def test_time_by_name_and_module(run: ReportRun) -> None:
    entries = {(entry.kind, entry.name): entry for entry in by_name(run)}
    gemm = entries["kernel", "gemm"]
    assert (gemm.count, gemm.self_ns, gemm.longest_ns, gemm.rank_ns) == (2, 140_000, 90_000, (50_000, 90_000))
    assert gemm.per_second == pytest.approx(1e7 / 140e-6)
    assert gemm.bytes_per_second == pytest.approx(2e5 / 140e-6)
    assert entries["operator", "aten::mm"].device_ns == 140_000
    assert ("annotation", "ProfilerStep#5") not in entries
    (module,) = by_module(run)
    assert (module.path, module.count, module.host_ns, module.device_ns) == (
        "Net_0/Linear_0",
        2,
        40_000,
        140_000,
    )
    assert module.phases_ns == (140_000, 0, 0)


def test_a_verdict_for_each_rank(run: ReportRun) -> None:
    rows = rank_rows(run)
    assert [(row["rank"], row["measured_ns"], row["replayed_ns"]) for row in rows] == [
        (0, 160_000, 160_000),
        (1, 160_000, 160_000),
    ]
    assert all(row["reasons"] == [] for row in rows)


def test_what_a_run_lacks_is_named(run: ReportRun) -> None:
    found = " ".join(lacks(run, find_steps(run)))
    assert "one step only" in found
    assert "no manifest" in found
    assert "no conversion report" in found
    assert "ranks are missing" not in found
    assert "no modules" not in found


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0"),
        (999, "999 ns"),
        (1000, "1.00 µs"),
        (999_950, "1.00 ms"),
        (45_600_000, "45.6 ms"),
        (7.89e9, "7.89 s"),
    ],
)
def test_durations_have_three_digits(ns: float, text: str) -> None:
    assert duration(ns) == text


@pytest.mark.parametrize(
    ("device", "above"), [("Tesla V100-SXM2-16GB", True), ("NVIDIA B200", False), ("X", False)]
)
def test_a_rate_above_the_peak_of_the_gpu_is_marked(tmp_path: Path, device: str, above: bool) -> None:
    """6.43 TB/s of an embedding on a V100, which has 0.9: the table was in the cache."""
    run = made_run(tmp_path)
    for trace in run.traces:
        trace.metadata["device_name"] = device
        values = trace.attributes["tensor_size"].values
        values[values == 100_000] = 6_430_000 * 70
    (gemm,) = [entry for entry in by_name(run) if entry.name == "gemm"]
    assert gemm.bytes_per_second is not None and gemm.bytes_per_second > 6e12
    assert (gemm.of_peak is not None and gemm.of_peak > 1) is above


def test_calls_are_folded_by_module_and_name(run: ReportRun, tmp_path: Path) -> None:
    found = call_tree(run)
    names = {each.name: (found[each.above].name if each.above >= 0 else "", each) for each in found}
    assert [names[name][0] for name in ("Net_0", "Linear_0", "aten::mm", "gemm")] == [
        "", "Net_0", "Linear_0", "aten::mm",
    ]  # fmt: skip
    product = names["aten::mm"][1]
    assert (product.count, product.host_ns, product.device_ns) == (2, 40_000, 140_000)
    total = [sum(getattr(each, of) for each in found if each.above < 0) for of in ("host_ns", "device_ns")]
    assert sum(total) == int((run.end_ns - run.start_ns).sum()), "every moment is in one call"


def test_python_of_an_annotation_is_inside_it() -> None:
    def step(rank: Rank, number: int, step: int) -> None:
        rank.annotation("enumerate(DataLoader)#__next__", 500)
        rank.kernel("gemm", 100)

    job = machine(1, 2, step)
    found = call_tree(assemble("made", job.graph.traces, [0], {}, {}, {}))
    (python,) = [each for each in found if each.name == "host-overhead"]
    assert found[python.above].name.startswith("enumerate(DataLoader)") and python.host_ns == 1_000_000
