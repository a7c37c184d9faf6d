"""Hand-written execution traces for tests of the replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from chakra_et.et.columns import Attribute, ExecutionTrace, NodeType, Ragged, Strings
from chakra_et.simulate.joint import ReplayGraph, build_graph
from chakra_et.simulate.matching import match
from chakra_et.simulate.replays import astra_replay
from chakra_et.simulate.run import make_run
from chakra_et.simulate.timing import Timing, timing

KINDS = {"is_cpu_op": "bool", "comm_src": "int32", "comm_dst": "int32", "comm_tag": "int32"}


Traces = ExecutionTrace | Sequence[ExecutionTrace]
Groups = Mapping[str, Sequence[int]]


class ReplayResult(NamedTuple):
    """Times in ns by trace, in its row order, and the start of each rank."""

    start_ns: list[np.ndarray]
    end_ns: list[np.ndarray]
    release_ns: list[int]
    notes: list[str]


def _by_trace(
    graph: ReplayGraph, start: np.ndarray, end: np.ndarray, times: Timing, notes: list[str]
) -> ReplayResult:
    return ReplayResult(graph.scatter(start), graph.scatter(end), times.release_ns, notes + times.notes)


def replay_device(
    traces: Traces, ranks: Sequence[int] | None = None, comm_groups: Groups | None = None
) -> ReplayResult:
    """The replay of traces as the devices ran."""
    given = _given(traces)
    run = make_run("", given, range(len(given)) if ranks is None else ranks, comm_groups)
    return _by_trace(run.graph, run.start_ns, run.end_ns, run.timing, run.matching.notes)


def replay_astra(
    traces: Traces, ranks: Sequence[int] | None = None, comm_groups: Groups | None = None
) -> ReplayResult:
    """``astra_replay`` of traces, also of those that the devices couldn't run."""
    given = _given(traces)
    graph = build_graph(given, range(len(given)) if ranks is None else ranks)
    matching = match(graph, comm_groups)
    known = timing(graph, matching)
    return _by_trace(graph, *astra_replay(graph, matching, known), known, matching.notes)


def makespan_ns(result: ReplayResult) -> int:
    """The end of the last node."""
    return max(int(end.max()) for end in result.end_ns)


def _given(traces: Traces) -> list[ExecutionTrace]:
    return [traces] if isinstance(traces, ExecutionTrace) else list(traces)


def cpu(node_id: int, duration: int, deps: tuple[int, ...] = (), tid: int = 1, **more: Any) -> dict:
    return {"id": node_id, "duration": duration, "deps": deps, "is_cpu_op": 1, "tid": tid, **more}


def kernel(node_id: int, duration: int, deps: tuple[int, ...] = (), stream: int = 7, **more: Any) -> dict:
    return {"id": node_id, "duration": duration, "deps": deps, "stream": stream, **more}


def collective(
    node_id: int, duration: int, deps: tuple[int, ...] = (), group: str = "1", **more: Any
) -> dict:
    node = {"id": node_id, "duration": duration, "deps": deps, "type": NodeType.COMM_COLL, "pg_name": group}
    return {**node, "comm_type": 0, "comm_size": 8, **more}


def send(node_id: int, duration: int, dst: int, deps: tuple[int, ...] = (), **more: Any) -> dict:
    node = {"id": node_id, "duration": duration, "deps": deps, "type": NodeType.COMM_SEND, "comm_dst": dst}
    return {**node, "comm_tag": 0, "comm_size": 8, **more}


def recv(node_id: int, duration: int, src: int, deps: tuple[int, ...] = (), **more: Any) -> dict:
    node = {"id": node_id, "duration": duration, "deps": deps, "type": NodeType.COMM_RECV, "comm_src": src}
    return {**node, "comm_tag": 0, "comm_size": 8, **more}


def make_trace(*nodes: dict, **metadata: Any) -> ExecutionTrace:
    """A trace of the given nodes, in their order. Keys beside the node's own fields become attributes."""
    own = {"id", "duration", "deps", "ctrl", "type", "start", "name"}
    names = [node.get("name", f"n{node['id']}").encode() for node in nodes]
    table = list(dict.fromkeys(names))
    return ExecutionTrace(
        ids=np.array([node["id"] for node in nodes], np.uint64),
        names=Strings(table, np.array([table.index(name) for name in names], np.int32)),
        types=np.array([node.get("type", NodeType.COMP) for node in nodes], np.uint8),
        start_micros=np.array([node.get("start", 0) for node in nodes], np.uint64),
        duration_micros=np.array([node["duration"] for node in nodes], np.uint64),
        data_deps=_ragged([node.get("deps", ()) for node in nodes]),
        ctrl_deps=_ragged([node.get("ctrl", ()) for node in nodes]),
        attributes={
            name: _attribute(name, nodes)
            for name in dict.fromkeys(k for n in nodes for k in n)
            if name not in own
        },
        metadata=metadata,
    )


def times(result: ReplayResult, rank: int = 0) -> list[tuple[float, float]]:
    """(start, end) in µs for each row."""
    return [(a / 1000, b / 1000) for a, b in zip(result.start_ns[rank], result.end_ns[rank], strict=True)]


def _ragged(lists: list[tuple[int, ...]]) -> Ragged:
    offsets = np.concatenate(([0], np.cumsum([len(values) for values in lists], dtype=np.int64)))
    return Ragged(offsets, np.array([value for values in lists for value in values], np.uint64))


def _attribute(name: str, nodes: tuple[dict, ...]) -> Attribute:
    rows = [row for row, node in enumerate(nodes) if name in node]
    values = [nodes[row][name] for row in rows]
    if isinstance(values[0], str):
        values = [str(value) for value in values]
        table = list(dict.fromkeys(values))
        index = np.array([table.index(value) for value in values], np.int32)
        return Attribute("string", np.array(rows, np.int64), Strings([t.encode() for t in table], index))
    return Attribute(KINDS.get(name, "int64"), np.array(rows, np.int64), np.array(values))
