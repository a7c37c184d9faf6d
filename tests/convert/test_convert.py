"""One pair through all stages: no event is lost uncounted, steps can be selected, time is preserved."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import pytest

from chakra_et.convert.command import ConvertConfig
from chakra_et.convert.pair import Converted, PairOptions, convert_pair
from chakra_et.convert.report import RankReport
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import NodeType
from chakra_et.traces.sets import Manifest, Pair
from tests.convert.good_traces import NAMES, check_run
from tests.generator import Features, Layout, generate
from tests.generator.hand_made import annotation, call, event, kernel, node, op, write_device, write_host
from tests.simulate.replay_traces import makespan_ns, replay_device

RICH = Features(
    seed=11,
    steps=3,
    side_streams=True,
    waits=("item", "copy", "event"),
    nccl=("allreduce", "send"),
    autograd_thread=True,
    graphs=True,
    gloo=("allreduce",),
    worker_thread=True,
)


def convert(folder: Path, features: Features = RICH, layout: Layout | None = None, **options) -> Converted:
    host, device = generate(features, layout).write(folder)
    return convert_pair(Pair(-1, host, device), PairOptions(**options))


def by_hand(folder: Path, events: list[dict], nodes: list[dict] | None = None, **header) -> Converted:
    """Convert these events; each with a record-function id but without a node gets a host node."""
    nodes = list(nodes or [])
    known = {entry["value"] for one in nodes for entry in one["attrs"] if entry["name"] == "rf_id"}
    wanted = {e["args"]["Record function id"]: e["name"] for e in events if "Record function id" in e["args"]}
    nodes += [node(name, rf) for rf, name in wanted.items() if rf not in known]
    paths = write_host(folder, nodes), write_device(folder, events, **header)
    return convert_pair(Pair(-1, *paths))


def measured(converted: Converted) -> float:
    """µs from the first node's start to the end of the last."""
    trace = converted.trace
    return int(trace.metadata["measured_end_micros"]) - int(trace.start_micros.min())


def names(converted: Converted) -> list[str]:
    return [converted.trace.names[row] for row in range(len(converted.trace))]


def test_events_become_nodes_or_counted_losses(tmp_path: Path) -> None:
    report = convert(tmp_path).report
    assert report.conserved()
    assert report.events_in == report.events_kept + sum(report.losses.values())
    assert report.nodes == report.events_kept + report.segments + report.overhead
    losses = report.losses
    assert losses.pop("sync-record") > 0
    assert sum(losses.values()) == 5, "the profiler's own records"
    assert report.nodes == sum(report.nodes_by_kind.values())
    assert report.edges == sum(report.edges_by_kind.values())
    assert set(report.edges_by_kind) == {
        "program order",
        "launch",
        "stream order",
        "synchronisation",
        "inter thread",
        "collective",
    }


def test_report_in_the_metadata(tmp_path: Path) -> None:
    converted = convert(tmp_path)
    et_file.write(tmp_path / "x.et", converted.trace)
    metadata = et_file.read(tmp_path / "x.et").metadata
    assert json.loads(str(metadata["conversion_report"])) == json.loads(
        json.dumps(converted.report.as_dict())
    )
    assert metadata["schema"] == "1.1.1-chakra.0.0.4" and metadata["world_size"] == 2
    assert converted.report.clocks["0"]["contradicting"] == 0 and converted.report.clocks["0"]["pairs"] > 0


@pytest.mark.parametrize("step", ("2", "3", "4"))
def test_one_step_of_three(step: str, tmp_path: Path) -> None:
    everything, one = convert(tmp_path), convert(tmp_path, step=step)
    assert list(everything.report.steps_us) == ["2", "3", "4"]
    assert one.report.steps_us == {step: pytest.approx(everything.report.steps_us[step], abs=2)}
    assert [name for name in names(one) if name.startswith("ProfilerStep#")][0] == f"ProfilerStep#{step}"
    assert 0.2 < len(one.trace) / len(everything.trace) < 0.5
    off = abs(makespan_ns(replay_device(one.trace)) / 1000 / measured(one) - 1)
    assert off < 0.01


@pytest.mark.parametrize("step", ("9", "x", "-1", ""))
def test_missing_step_is_an_error(step: str, tmp_path: Path) -> None:
    with pytest.raises(
        TraceError, match=rf"has no ProfilerStep#{step} \(its steps: 2, 3, 4\); choose one, or --step all"
    ):
        convert(tmp_path, step=step)


@pytest.mark.parametrize("step", ["last", "²", "1.0", ""])
def test_a_step_that_is_no_number_is_refused(step: str) -> None:
    with pytest.raises(ValueError, match="--step must be the number of a ProfilerStep or all"):
        ConvertConfig(step=step)
    assert ConvertConfig(step="12").step == "12"


def test_the_part_of_overhead_in_the_critical_path() -> None:
    path = {"operator": 50, "host-overhead": 30, "device-overhead": 20}
    assert RankReport(0, critical_path_us=path, busy_us=path).overhead_share == 0.5
    assert RankReport(0).overhead_share is None


def test_a_trace_without_steps(tmp_path: Path) -> None:
    features = Features(**{**vars(RICH), "step_annotations": False})
    converted = convert(tmp_path, features)
    assert converted.report.conserved() and converted.report.steps_us == {}
    assert abs(makespan_ns(replay_device(converted.trace)) / 1000 / measured(converted) - 1) < 0.001
    with pytest.raises(TraceError, match="its steps: none"):
        convert(tmp_path, features, step="2")


def test_the_same_traces_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        et_file.write(tmp_path / name, convert(tmp_path).trace)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_no_timestamps(tmp_path: Path) -> None:
    with_times, without = convert(tmp_path), convert(tmp_path, timestamps=False)
    assert with_times.trace.start_micros.any() and not without.trace.start_micros.any()
    assert (with_times.trace.duration_micros == without.trace.duration_micros).all()


def test_memsets_broadcasts_orphans_and_unlinked_events_are_kept(tmp_path: Path) -> None:
    events = [
        op("aten::zero_", 0, 9, 3),
        call("cudaMemsetAsync", 1, 2, 50),
        kernel("Memset (Device)", 4, 1, 50),
        kernel("void orphan()", 6, 2, 99),
        op("aten::never_in_the_host_trace", 10, 2),
        kernel("ncclDevKernel_Broadcast_RING_LL()", 12, 3, 98),
    ]
    converted = by_hand(tmp_path, events)
    assert {event["name"] for event in events} <= set(names(converted))
    assert converted.report.losses == {}
    kinds = converted.report.nodes_by_kind
    assert (kinds["memset"], kinds["collective"], kinds["kernel"]) == (1, 1, 1)


def test_children_of_absent_parents_are_kept(tmp_path: Path) -> None:
    """An operator still open when the recording stopped is not in the host trace, its children are."""
    events = [op("aten::add", 1, 2, 9)]
    converted = by_hand(tmp_path, events, [node("aten::add", 9, parent=12345)])
    assert "aten::add" in names(converted) and converted.report.link_rate == 1.0


def test_host_operators_without_an_event_lower_the_link_rate(tmp_path: Path) -> None:
    converted = by_hand(tmp_path, [op("aten::add", 1, 2, 9)], [node("aten::item", 30)])
    assert converted.report.link_rate == 0.5


def test_many_oddities_at_once_are_all_counted(tmp_path: Path) -> None:
    events = [
        annotation("ProfilerStep#1", 0, 100, 2),
        op("a", 1, -5, 3),
        op("b", 2, 1e15, 4),
        op("c", 90, 30, 5),
        event("mystery", "m", 5, 1),
        kernel("k", 50, 5, 77),
        call("cudaLaunchKernel", 40, 2, 78),
        op("zero", 60, 0, 6),
        op("zero", 60, 0, 7),
    ]
    report = by_hand(tmp_path, events).report
    assert report.events_in == 9 and report.events_kept == 7 and report.conserved()
    assert report.losses == {"bad-time": 1, "unknown-category:mystery": 1}
    assert report.repairs == {
        "negative-duration": 1,
        "clipped-event": 1,
        "clipped-ns": 20_000,
    }


def test_a_device_trace_with_nothing_but_kernels(tmp_path: Path) -> None:
    events = [kernel("k", 1, 3), kernel("l", 5, 3, stream=9)]
    paths = write_host(tmp_path, [node("a", 3)]), write_device(tmp_path, events)
    with pytest.raises(TraceError, match="not from the same run"):
        convert_pair(Pair(-1, *paths))
    converted = convert_pair(Pair(-1, *paths), PairOptions(allow_unlinked=True))
    assert {"k", "l"} <= set(names(converted)) and converted.report.conserved()


def test_file_name_that_contradicts_the_trace_is_an_error(tmp_path: Path) -> None:
    host, device = generate(Features(rank=1, world_size=4, gloo=("allreduce",), devices=0)).write(tmp_path)
    assert convert_pair(Pair(1, host, device)).trace.metadata["rank"] == 1
    with pytest.raises(TraceError, match="is rank 3 by its name and rank 1 by its distributedInfo"):
        convert_pair(Pair(3, host, device))
    with pytest.raises(TraceError, match="world size is 4 in its distributedInfo and 8 in the manifest"):
        convert_pair(Pair(1, host, device), PairOptions(manifest=Manifest({"world_size": 8})))


@pytest.mark.parametrize("kinds", [{"nccl": ("allreduce", "_allgather_base")}, {"gloo": ("allreduce",) * 3}])
def test_two_ranks_match(kinds: dict, tmp_path: Path) -> None:
    """With the same collectives in the same order, the set is valid and its replay ends on all ranks."""
    traces = {}
    for rank in (0, 1):
        features = Features(seed=2, rank=rank, autograd_thread=True, **kinds)
        traces[rank] = convert_pair(Pair(rank, *generate(features).write(tmp_path))).trace
    problems = check_run(traces, {"1": [0, 1]}, NAMES)
    assert [str(problem) for problem in problems if problem.severity == "error"] == []
    together = replay_device(list(traces.values()))
    assert (together.end_ns[0] >= together.start_ns[0]).all()
    alone = makespan_ns(replay_device(traces[0]))
    assert abs(makespan_ns(together) / alone - 1) < 0.01, "both ranks do the same"


def test_a_collective_of_one_rank_is_compute(tmp_path: Path) -> None:
    """NCCL with a world size of 1: a simulator never finishes such a collective."""
    converted = convert(tmp_path, Features(nccl=("allreduce",), world_size=1))
    assert not (converted.trace.types == NodeType.COMM_COLL).any()
    assert any("ncclDevKernel" in name for name in names(converted))


def test_garbage_collector_state_is_restored(tmp_path: Path) -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            convert(tmp_path, Features())
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def test_attributes_of_the_host_trace_stay_with_their_operators(tmp_path: Path) -> None:
    made = generate(RICH)
    converted = convert(tmp_path)
    trace = converted.trace
    first = np.flatnonzero(trace.column("segment", 0) == 0)
    rows = [row for row in first if names(converted)[row] == "aten::_local_scalar_dense"]
    expected = [e for e in made.run.events if e.name == "aten::_local_scalar_dense"]
    assert sorted(trace.column("rf_id")[rows].tolist()) == sorted(e.rf_id for e in expected)
    schema = trace.attributes["op_schema"].values
    assert {schema[row] for row in rows} == {"aten::_local_scalar_dense(Tensor self) -> Tensor"}
    inputs = dict(zip(trace.inputs.rows.tolist(), trace.inputs.values, strict=True))
    assert json.loads(inputs[rows[0]])[0][3] == min(expected, key=lambda e: e.start).tensors[0].elements


def test_device_work_has_the_attributes_of_its_operator(tmp_path: Path) -> None:
    events = [op("aten::mm", 0, 9, 31), call("cudaLaunchKernel", 1, 2, 50), kernel("k", 4, 1, 50)]
    converted = by_hand(tmp_path, events, [node("aten::mm", 31, seq_id=7, tid=1)])
    rf_id, stream = converted.trace.column("rf_id"), converted.trace.column("stream", -1)
    row = names(converted).index("k")
    assert (rf_id[row], converted.trace.column("seq_id")[row], stream[row]) == (31, 7, 7)
    assert converted.trace.column("is_cpu_op")[row] == 0
