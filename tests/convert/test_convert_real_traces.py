"""Traces of real machines: eight V100s training DLRM over NCCL, and GPT-2 over gloo on CPUs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from chakra_et.convert.pair import Converted, convert_pair
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.simulate.replays import longest_path
from chakra_et.traces.sets import Pair
from chakra_et.validate import check as validate
from tests.convert.good_traces import NAMES, check_run
from tests.shared import shared_path
from tests.simulate.replay_traces import makespan_ns, replay_device

ROOT = Path(__file__).resolve().parents[2]
CAPTURES = ROOT / "tests" / "fixtures" / "captures"
RANKS = range(4)


@cache
def dlrm(rank: int) -> Converted:
    host, device = names = [f"dlrm_8gpu_rank{rank}_{kind}.json.gz" for kind in ("host", "device")]
    folder = shared_path("data/traces/dlrm_8gpu", *names)
    return convert_pair(Pair(rank, folder / host, folder / device))


@cache
def flat() -> Converted:
    host, device = names = ["rank0_host.json.gz", "rank0_device.json.gz"]
    folder = shared_path("data/traces/dlrm_8gpu_schema_1.0.1", *names)
    return convert_pair(Pair(0, folder / host, folder / device))


def captures() -> list[str]:
    return sorted(str(path.relative_to(CAPTURES)) for path in CAPTURES.glob("*/*_host.json.gz"))


@cache
def capture(name: str) -> Converted:
    host = CAPTURES / name
    return convert_pair(Pair(-1, host, Path(str(host).replace("_host.json", "_device.json"))))


def check_replay(trace: ExecutionTrace, percent: float) -> None:
    """In device semantics; no dependency chain is longer than the measured time."""
    measured = int(trace.metadata["measured_end_micros"]) * 1000
    simulated = makespan_ns(replay_device(trace))
    assert abs(simulated / measured - 1) * 100 <= percent
    assert longest_path(trace) <= measured + 1_000 * len(np.unique(trace.column("lane")))


@pytest.mark.parametrize("rank", RANKS)
def test_dlrm_is_linked_and_conserved(rank: int) -> None:
    report = dlrm(rank).report
    assert report.conserved() and report.link_rate == 1.0
    assert report.losses == {"profiler-span": 1}
    # Ranks 1 and 3 hold 64 kernels whose launching calls were before the trace began.
    unseen = report.notes.get("no-launch", 0)
    assert unseen == {0: 0, 1: 64, 2: 0, 3: 64}[rank]


@pytest.mark.parametrize("rank", RANKS)
def test_dlrm_replays_in_its_measured_time(rank: int) -> None:
    check_replay(dlrm(rank).trace, percent=5.0)


@pytest.mark.parametrize("rank", RANKS)
def test_dlrm_has_every_kind_of_edge(rank: int) -> None:
    edges = dlrm(rank).report.edges_by_kind
    assert set(edges) == {"program order", "launch", "stream order", "synchronisation", "inter thread"}
    assert dlrm(rank).report.notes["backward-waited"] == 1


@pytest.mark.parametrize("rank", RANKS)
def test_dlrm_communicates_eight_times(rank: int) -> None:
    """Five all-to-all and three all-reduce; what rank 0 sends was read off its host trace by hand."""
    trace = dlrm(rank).trace
    rows = np.flatnonzero(trace.types == NodeType.COMM_COLL)
    kinds = [CollectiveType(kind).name for kind in trace.column("comm_type")[rows]]
    assert sorted(kinds) == ["ALL_REDUCE"] * 3 + ["ALL_TO_ALL"] * 5
    sizes = trace.column("comm_size")[rows].tolist()
    assert all(size > 1 for size in sizes)
    if rank == 0:
        all_to_all = [size for size, kind in zip(sizes, kinds, strict=True) if kind == "ALL_TO_ALL"]
        assert sorted(all_to_all) == sorted([6144 * 4, 24 * 8, 384 * 4, 3392 * 4, 6144 * 4])
        assert 394_241 * 4 in sizes
    assert [trace.attributes["pg_name"].values[n] for n in range(8)] == ["1"] * 8


def test_dlrm_ranks_agree_with_each_other() -> None:
    """Same collectives in the same order with the same sizes of all-reduces, on the four ranks at hand."""
    seen = []
    for rank in RANKS:
        trace = dlrm(rank).trace
        rows = np.flatnonzero(trace.types == NodeType.COMM_COLL)
        kinds, sizes = trace.column("comm_type")[rows], trace.column("comm_size")[rows]
        # Each rank gives other amounts into its all-to-alls.
        seen.append(
            [(k, s if k == CollectiveType.ALL_REDUCE else None) for k, s in zip(kinds, sizes, strict=True)]
        )
    assert seen[1:] == seen[:-1]


@pytest.mark.parametrize("rank", RANKS)
def test_dlrm_is_valid(rank: int) -> None:
    problems = validate.check(dlrm(rank).trace, {"1": list(range(8))})
    assert [str(problem) for problem in problems if problem.severity == "error"] == []


def test_schema_1_0_1_gives_the_same_graph() -> None:
    """The same run recorded without record-function ids: linked by thread, order and name."""
    one, other = dlrm(0), flat()
    assert other.report.link_rate > 0.995
    assert (one.trace.types == other.trace.types).all()
    for column in ("start_micros", "duration_micros"):
        assert (getattr(one.trace, column) == getattr(other.trace, column)).all()
    assert (one.trace.data_deps.values == other.trace.data_deps.values).all()
    assert (one.trace.column("comm_size") == other.trace.column("comm_size")).all()
    assert one.report.edges_by_kind == other.report.edges_by_kind


@pytest.mark.parametrize("name", captures())
def test_a_gloo_capture(name: str) -> None:
    report, trace = capture(name).report, capture(name).trace
    assert report.conserved() and report.link_rate == 1.0
    assert len(report.steps_us) == 2
    check_replay(trace, percent=2.0)
    communication = int(
        np.isin(trace.types, (NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV)).sum()
    )
    if "2gpu" not in name:
        assert communication == 0
        return
    # Several all-reduces a step, each waited for by the thread that started it.
    waited = sum(report.notes.get(key, 0) for key in ("wait-blocked", "wait-done"))
    assert (
        communication >= 4
        and report.edges_by_kind["launch"] == communication
        and waited >= 0.8 * communication
    )
    assert (trace.column("comm_size")[trace.types == NodeType.COMM_COLL] > 1).all()


def test_both_ranks_of_a_capture_agree() -> None:
    for version in sorted({name.split("/")[0] for name in captures()}):
        ranks = {n: capture(f"{version}/tiny_2gpu{f'_rank{n}' * (n > 0)}_host.json.gz").trace for n in (0, 1)}
        problems = check_run(ranks, {"1": [0, 1]}, NAMES)
        assert [str(problem) for problem in problems if problem.severity == "error"] == []
