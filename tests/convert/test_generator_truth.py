"""The converter against a simulated machine with known dependencies.

The machine's times are explained by its dependencies alone (no latencies), so everything must agree to the
nanosecond: the edges, the time that threads worked, the replay, and the times after a duration is changed.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from chakra_et.convert.graph.nodes import NodeKind
from tests.generator import Features, Layout, generate
from tests.generator.machine import Edge
from tests.generator.truth import (
    Converted,
    busy_of_lane,
    convert,
    missing_edges,
    replay,
    unexplained_edges,
    what_if,
)

WAITS = ("item", "copy", "device", "event", "stream")
EVERYTHING = {
    "side_streams": True,
    "waits": WAITS,
    "nccl": ("allreduce", "broadcast"),
    "graphs": True,
    "steps": 2,
    "autograd_thread": True,
    "devices": 2,
}
CASES: dict[str, dict] = {
    "one CPU thread": {"devices": 0, "steps": 2},
    "kernels": {"steps": 2},
    "side streams": {"side_streams": True},
    "waits for the device": {"waits": WAITS},
    "collectives": {"nccl": ("allreduce", "_allgather_base", "reduce_scatter", "barrier")},
    "send and receive": {"nccl": ("send", "recv")},
    "graphs": {"graphs": True},
    "autograd thread": {"autograd_thread": True, "steps": 2},
    "gradient accumulated on the main thread": {"autograd_thread": True, "accumulate_on_main": True},
    "two devices": {"devices": 2},
    "gloo": {
        "devices": 0, "gloo": ("allreduce", "_allgather_base", "reduce_scatter", "barrier", "all_to_allv")
    },
    "gloo, waited for late": {"devices": 0, "late": True, "gloo": ("allreduce", "allreduce", "broadcast")},
    "gloo send and receive": {"devices": 0, "gloo": ("send", "recv", "allreduce", "send")},
    "gloo beside a GPU": {"late": True, "gloo": ("allreduce", "broadcast")},
    "everything": EVERYTHING,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
def test_graph_is_the_true_graph(case: str, seed: int, tmp_path: Path) -> None:
    c = convert(generate(Features(seed=seed, **CASES[case])), tmp_path)
    assert missing_edges(c) == []
    assert unexplained_edges(c) == []
    assert (replay(c) == c.graph.start).all()


@pytest.mark.parametrize("case", CASES)
def test_no_wait_counts_as_work(case: str, tmp_path: Path) -> None:
    c = convert(generate(Features(seed=5, **CASES[case])), tmp_path)
    for thread, worked in c.generated.run.busy.items():
        assert busy_of_lane(c, thread) == worked
    for event in c.generated.run.events:
        # Python's time in an annotation becomes overhead around its mark.
        if event.lane[0] == "cpu" and event.category != "user_annotation":
            spent = sum(int(c.graph.end[node] - c.graph.start[node]) for node in c.nodes[event.number])
            assert spent == event.busy, event


@pytest.mark.parametrize("case", CASES)
def test_a_changed_duration_moves_the_rest_as_on_the_machine(case: str, tmp_path: Path) -> None:
    c = convert(generate(Features(seed=7, **CASES[case])), tmp_path)
    events = c.generated.run.by_key()
    moved = 0
    for key in random.Random(1).sample(sorted(events), min(8, len(events))):
        slower, faster = events[key].busy * 9 + 50_000, -events[key].busy * 9 // 10
        for change in (slower, faster):
            worst, furthest = what_if(c, {key: change})
            assert worst == 0, (key, change)
            moved = max(moved, furthest)
    assert moved > 0


def test_all_durations_changed_at_once(tmp_path: Path) -> None:
    c = convert(generate(Features(seed=3, **EVERYTHING)), tmp_path)
    draw = random.Random(3)
    for _ in range(5):
        changes = {
            key: int(event.busy * draw.uniform(-0.9, 4.0)) for key, event in c.generated.run.by_key().items()
        }
        worst, moved = what_if(c, changes)
        assert worst == 0 and moved > 0


@pytest.mark.parametrize("seed", range(6))
def test_without_sync_records_waits_are_found_by_time(seed: int, tmp_path: Path) -> None:
    features = Features(
        seed=seed, side_streams=True, nccl=("allreduce", "broadcast"), autograd_thread=True, waits=WAITS
    )
    c = convert(generate(features, Layout(sync_events=False)), tmp_path)
    assert unexplained_edges(c) == []
    # A wait that blocked nobody can't be seen in the times.
    assert [edge for edge in missing_edges(c) if _blocked(c, edge)] == []
    assert (replay(c) == c.graph.start).all()
    assert c.causes.findings["stream-wait-inferred"] > 0


def _blocked(c: Converted, edge: Edge) -> bool:
    """Whether an edge ended the wait of a call with a duration above 0."""
    calls = [event for event in c.generated.run.events if event.sync and event.lane == edge.target[0]]
    waiting = any(call.start < edge.target[1] <= call.end for call in calls)
    return edge.source[1] == edge.target[1] and (edge.kind != "synchronisation" or waiting)


TOLERANCE_NS = {"latency": 0, "tail": 4_000, "wake_up": 1, "pick_up": 1}
"""A launch counts from the end of its call where the stream was busy: it is off by up to that once. Waking up
is
the waiting call's own time."""


@pytest.mark.parametrize("what", TOLERANCE_NS)
def test_latencies_blur_changed_durations_by_no_more_than_themselves(what: str, tmp_path: Path) -> None:
    features = {**EVERYTHING, "devices": 1, "gloo": ("allreduce", "broadcast"), "steps": 1}
    for seed in range(3):
        c = convert(generate(Features(seed=seed, **features, **{what: 4_000})), tmp_path)
        # Overhead starts earlier than recorded: a launch's latency passes while earlier kernels run.
        events = c.graph.event >= 0
        assert (replay(c)[events] == c.graph.start[events]).all()
        events = c.generated.run.by_key()
        for key in random.Random(seed).sample(sorted(events), 8):
            for change in (events[key].busy * 4, -events[key].busy // 2):
                worst, _ = what_if(c, {key: change})
                assert worst <= TOLERANCE_NS[what], (seed, key, change)


@pytest.mark.parametrize("kinds", ["launch", "stream order", "synchronisation", "inter thread", "collective"])
def test_checks_detect_a_removed_edge(kinds: str, tmp_path: Path) -> None:
    """The checks above detect a missing edge."""
    c = convert(generate(Features(seed=1, **EVERYTHING, gloo=("allreduce",))), tmp_path)
    number = ["", "launch", "stream order", "synchronisation", "inter thread", "collective"].index(kinds)
    keep = c.graph.edge_kind != number
    assert not keep.all()
    c.graph.source, c.graph.target = c.graph.source[keep], c.graph.target[keep]
    assert {edge.kind for edge in missing_edges(c)} >= {kinds}


def test_overhead_only_where_no_dependency_explains_a_start(tmp_path: Path) -> None:
    c = convert(generate(Features(seed=2, **EVERYTHING)), tmp_path)
    assert not (c.graph.kind == NodeKind.DEVICE_OVERHEAD).any()
    late = convert(generate(Features(seed=2, **EVERYTHING, latency=3_000)), tmp_path)
    device = late.graph.kind == NodeKind.DEVICE_OVERHEAD
    assert device.any() and ((late.graph.end - late.graph.start)[device] <= 3_000).all()
