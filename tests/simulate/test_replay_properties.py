"""Property tests: the replays against slow, literal simulators of the same rules, on random graphs."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.simulate import longest_path as schedules
from chakra_et.simulate.replays import longest_path
from tests.simulate.replay_traces import (
    collective,
    cpu,
    kernel,
    make_trace,
    makespan_ns,
    recv,
    replay_astra,
    replay_device,
    send,
)

Times = dict[tuple[int, int], tuple[int, int]]


class Naive:
    """The common part of both slow simulators: nodes as dicts by (rank, id), and matching."""

    def __init__(self, ranks: list[list[dict]]):
        self.nodes = {(rank, node["id"]): node for rank, nodes in enumerate(ranks) for node in nodes}
        self.together = len(ranks) > 1
        self.world = set(range(len(ranks)))
        self.times: Times = {}

    def parents(self, key: tuple[int, int]) -> set[tuple[int, int]]:
        return {(key[0], dep) for dep in self.nodes[key]["deps"]}

    def channel(self, key: tuple[int, int]):
        """(channel, this node's side, all sides), or None for a node that runs unmatched."""
        node, rank = self.nodes[key], key[0]
        kind = node.get("type")
        if not self.together or kind is None:
            return None
        if kind == NodeType.COMM_COLL:
            users = {r for (r, _), n in self.nodes.items() if n.get("pg_name") == node["pg_name"]}
            return (node["pg_name"], rank, users) if len(users) > 1 else None
        ends = (rank, node["comm_dst"]) if kind == NodeType.COMM_SEND else (node["comm_src"], rank)
        return (*ends, node["comm_tag"]), kind, {NodeType.COMM_SEND, NodeType.COMM_RECV}

    def answer(self) -> Times | None:
        return self.times if len(self.times) == len(self.nodes) else None


def naive_device(ranks: list[list[dict]]) -> Times | None:
    """(start, end) of each node in ns, or None for a deadlock. Rescans until no node can run."""
    sim = Naive(ranks)

    def lane(key):
        node = sim.nodes[key]
        if node.get("is_cpu_op"):
            return key[0], "thread", node["tid"]
        if node.get("type") == NodeType.COMM_COLL:
            return key[0], "group", node["pg_name"]
        return (key[0], "stream", node["stream"]) if "stream" in node else (key, "own")

    keys = sorted(sim.nodes)
    before = {key: {other for other in keys if lane(other) == lane(key) and other < key} for key in keys}

    def place(key):
        found = sim.channel(key)
        if found is None:
            return key
        same = [k for k in keys if (c := sim.channel(k)) and c[:2] == found[:2] and k[0] == key[0]]
        return found[0], same.index(key)

    progress = True
    while progress:
        progress = False
        for key in keys:
            if key in sim.times:
                continue
            found = sim.channel(key)
            members = (
                [key] if found is None else [k for k in keys if sim.channel(k) and place(k) == place(key)]
            )
            if found and len(members) < len(found[2]):
                continue
            needed = {member: sim.parents(member) | before[member] for member in members}
            if not all(need in sim.times for needs in needed.values() for need in needs):
                continue
            start = {m: max((sim.times[need][1] for need in needed[m]), default=0) for m in members}
            end = max(start.values()) + 1000 * min(sim.nodes[m]["duration"] for m in members)
            sim.times.update({member: (start[member], end) for member in members})
            progress = True
    return sim.answer()


def naive_astra(ranks: list[list[dict]]) -> Times | None:
    """The same by ASTRA-sim's rules: after each completion, go through the rank's ready nodes by id."""
    sim = Naive(ranks)
    running: list[tuple[int, int, tuple[int, int]]] = []  # (end, order of scheduling, node)
    started: dict[tuple[int, int], int] = {}
    posted: dict = {}
    scheduled = 0

    def slot(key):
        node = sim.nodes[key]
        if node.get("is_cpu_op"):
            return "cpu"
        return {None: "gpu", NodeType.COMM_RECV: None}.get(node.get("type"), "comm")

    def issue(rank, now):
        nonlocal scheduled
        for key in sorted(k for k in sim.nodes if k[0] == rank and k not in started):
            held = {slot(k) for k in started if k[0] == rank and k not in sim.times} - {None}
            if slot(key) in held or not all(parent in sim.times for parent in sim.parents(key)):
                continue
            started[key] = now
            found = sim.channel(key)
            members = [key]
            if found and sim.nodes[key].get("comm_type") != CollectiveType.BROADCAST:
                queues = posted.setdefault(found[0], {side: [] for side in found[2]})
                queues[found[1]].append(key)
                if not all(queues.values()):
                    continue
                members = [queue.pop(0) for queue in queues.values()]
                members.sort(key=list(started).index)
            end = now + max(1, 1000 * min(sim.nodes[member]["duration"] for member in members))
            for member in members:
                running.append((end, scheduled, member))
                scheduled += 1

    for rank in range(len(ranks)):
        issue(rank, 0)
    while running:
        event = min(running)
        running.remove(event)
        now, _, key = event
        sim.times[key] = (started[key], now)
        issue(key[0], now)
    return sim.answer()


@st.composite
def rank_sets(draw: st.DrawFn) -> list[list[dict]]:
    """One to three ranks of up to 14 nodes, whose communication may match or not."""
    ranks = []
    count = draw(st.integers(1, 3))
    for rank in range(count):
        nodes: list[dict] = []
        for place in range(draw(st.integers(1, 14))):
            deps = tuple(draw(st.sets(st.integers(1, place), max_size=3))) if place else ()
            duration = draw(st.integers(0, 6))
            peer = draw(st.sampled_from([r for r in range(count) if r != rank] or [rank]))
            make = draw(st.sampled_from([cpu, cpu, kernel, kernel, collective, "send", "recv"]))
            if make is cpu:
                node = cpu(place + 1, duration, deps, tid=draw(st.integers(1, 2)))
            elif make is kernel:
                node = kernel(place + 1, duration, deps, stream=draw(st.integers(7, 8)))
            elif make is collective:
                kind = draw(st.sampled_from([CollectiveType.ALL_GATHER, CollectiveType.BROADCAST]))
                group = "1" if kind == CollectiveType.ALL_GATHER else "2"
                node = collective(place + 1, duration, deps, group=group, comm_type=int(kind))
            elif count == 1:
                node = kernel(place + 1, duration, deps)
            elif make == "send":
                node = send(place + 1, duration, dst=peer, deps=deps)
            else:
                node = recv(place + 1, duration, src=peer, deps=deps)
            nodes.append(node)
        ranks.append(nodes)
    if draw(st.booleans()):
        _make_fit(ranks)
    return ranks


def _make_fit(ranks: list[list[dict]]) -> None:
    """Give all ranks rank 0's collectives and no messages, so that most draws run to the end."""
    wanted = [(n["comm_type"], n["pg_name"]) for n in ranks[0] if n.get("type") == NodeType.COMM_COLL]
    for nodes in ranks:
        nodes[:] = [n if "type" not in n else kernel(n["id"], n["duration"], n["deps"]) for n in nodes]
        last = len(nodes)
        for offset, (kind, group) in enumerate(wanted, start=1):
            deps = (last + offset - 1,)
            nodes.append(collective(last + offset, 1 + offset % 3, deps, group=group, comm_type=kind))


def _both(replay, naive, ranks: list[list[dict]]) -> None:
    expected = naive(ranks)
    traces = [make_trace(*nodes) for nodes in ranks]
    try:
        result = replay(traces)
    except TraceError:
        assert expected is None
        return
    got = {
        (rank, node["id"]): (int(result.start_ns[rank][row]), int(result.end_ns[rank][row]))
        for rank, nodes in enumerate(ranks)
        for row, node in enumerate(nodes)
    }
    assert got == expected


@settings(max_examples=100, deadline=None)
@given(rank_sets())
def test_device_replay_equals_the_naive_simulator(ranks):
    _both(replay_device, naive_device, ranks)


@settings(max_examples=100, deadline=None)
@given(rank_sets())
def test_device_replay_node_by_node_equals_the_naive_simulator(ranks):
    with mock.patch.multiple(schedules, PATIENCE=0, FEW=100, SEQUENCE=3):
        _both(replay_device, naive_device, ranks)


@settings(max_examples=100, deadline=None)
@given(rank_sets())
def test_astra_replay_equals_the_naive_simulator(ranks):
    _both(replay_astra, naive_astra, ranks)


@settings(max_examples=100, deadline=None)
@given(rank_sets(), st.randoms())
def test_row_order_and_id_values_change_nothing(ranks, random):
    """Only the order of ids matters: gaps between ids and shuffled rows do not change the times."""
    nodes = ranks[0]
    shuffled = [{**n, "id": n["id"] * 1000, "deps": tuple(d * 1000 for d in n["deps"])} for n in nodes]
    random.shuffle(shuffled)
    for replay in (replay_device, replay_astra):
        plain, other = replay(make_trace(*nodes)), replay(make_trace(*shuffled))
        ends = dict(zip([n["id"] * 1000 for n in nodes], plain.end_ns[0].tolist(), strict=True))
        assert dict(zip([n["id"] for n in shuffled], other.end_ns[0].tolist(), strict=True)) == ends


@settings(max_examples=100, deadline=None)
@given(rank_sets())
def test_no_replay_is_shorter_than_the_longest_path_or_longer_than_the_sum(ranks):
    trace: ExecutionTrace = make_trace(*ranks[0])
    total = int(np.sum(trace.duration_micros)) * 1000
    assert longest_path(trace) <= makespan_ns(replay_device(trace)) <= total
    assert longest_path(trace) <= makespan_ns(replay_astra(trace)) <= total + len(trace)


@settings(max_examples=100, deadline=None)
@given(rank_sets(), st.randoms())
def test_device_replay_with_ids_against_the_dependencies(ranks, random):
    """Foreign ids may contradict the dependencies: the result still obeys every dependency and every lane."""
    nodes = ranks[0]
    ids = [node["id"] for node in nodes]
    random.shuffle(ids)
    renamed = dict(zip([node["id"] for node in nodes], ids, strict=True))
    trace = make_trace(
        *({**n, "id": renamed[n["id"]], "deps": tuple(renamed[d] for d in n["deps"])} for n in nodes)
    )
    result = replay_device(trace)
    start, end = result.start_ns[0].tolist(), result.end_ns[0].tolist()
    row = {node_id: index for index, node_id in enumerate(ids)}
    for index, node in enumerate(nodes):
        assert end[index] == start[index] + 1000 * node["duration"]
        assert all(end[row[renamed[dep]]] <= start[index] for dep in node["deps"])
    for stream in {n["stream"] for n in nodes if "stream" in n}:
        spans = sorted((start[i], end[i]) for i, n in enumerate(nodes) if n.get("stream") == stream)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
