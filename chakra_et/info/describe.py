"""Describe an .et file as one dict; ``info.command`` documents its fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import communicates, texts

# The letters in the attribute ``dep_kinds``, one per data dependency.
EDGE_KINDS = {
    "P": "program order",
    "L": "launch",
    "S": "stream order",
    "Y": "synchronisation",
    "T": "inter thread",
    "C": "collective",
}


def describe(trace: ExecutionTrace, comm_groups: dict[str, list[int]] | None = None) -> dict[str, Any]:
    """The fields that ``info.command`` documents, except for ``file`` and ``bytes``.

    ``comm_groups``: group id → ranks, to list the members of each group.
    """
    from chakra_et.simulate.measured_steps import about_steps
    from chakra_et.simulate.replays import longest_path
    from chakra_et.simulate.time_by_kind import shares

    notes: list[str] = []
    time_shares = shares(trace)
    # In float64: the times of a damaged file may overflow 64 bits.
    end = (trace.start_micros.astype(float) + trace.duration_micros).max() if len(trace) else 0
    start = trace.start_micros.min() if len(trace) else 0
    timed = bool(trace.start_micros.any())
    if not timed:
        notes.append("the file has no start times: convert with --timestamps to get a time span")
    notes += about_steps([trace])
    try:
        longest = longest_path(trace) // 1000
    except TraceError as error:
        notes.append(f"no longest path: {error}")
        longest = None
    types = [NodeType(value).name if value in list(NodeType) else f"type {value}" for value in range(256)]
    edge_kinds = dict.fromkeys(EDGE_KINDS.values(), 0)
    for letters, count in _count(*texts(trace, "dep_kinds")).items():
        for letter in letters:
            kind = EDGE_KINDS.get(letter, letter)
            edge_kinds[kind] = edge_kinds.get(kind, 0) + count
    return {
        "nodes": len(trace),
        "nodes_by_type": _count(types, trace.types),
        "nodes_by_kind": _count(*texts(trace, "kind")),
        "edges": {
            "data": len(trace.data_deps.values),
            "ctrl": len(trace.ctrl_deps.values),
            "by_kind": {kind: count for kind, count in edge_kinds.items() if count},
        },
        "time": {
            "start_micros": int(start),
            "end_micros": int(end),
            "span_micros": int(end) - int(start) if timed else None,
            "longest_path_micros": longest,
        },
        "critical_path_micros": time_shares.path if time_shares else {},
        "busy_micros": time_shares.busy if time_shares else {},
        "lanes": _lanes(trace),
        "collectives": _collectives(trace, comm_groups or {}),
        "messages": _messages(trace),
        "notes": notes,
        "metadata": {name: _unpacked(value) for name, value in trace.metadata.items()},
    }


def _count(names: Sequence[str], values: np.ndarray) -> dict[str, int]:
    """How often each name occurs; ``values``: indices into ``names``, negative for none."""
    return {names[at]: int(count) for at, count in enumerate(np.bincount(values[values >= 0])) if count}


def _unpacked(value: Any) -> Any:
    """The value of a JSON list or object in a string, such as our converter's metadata has."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _lanes(trace: ExecutionTrace) -> list[dict[str, Any]]:
    """Nodes and durations per lane: by the attribute ``lane``, or else per thread and stream."""
    if not len(trace):
        return []
    on_cpu = trace.column("is_cpu_op") != 0
    names = _unpacked(trace.metadata.get("lanes", ""))
    if "lane" in trace.attributes:
        key = trace.column("lane", -1)
    else:
        # Even keys are threads, odd keys streams.
        names = None
        key = np.where(on_cpu, 2 * trace.column("tid", -1), 2 * trace.column("stream", -1) + 1)
    values, index = np.unique(key, return_inverse=True)
    index = index.reshape(-1)
    duration = trace.duration_micros.astype(np.float64)
    columns = (None, duration * ~communicates(trace), duration * communicates(trace))
    nodes, compute, communication = (np.bincount(index, column) for column in columns)
    lanes = []
    for at, value in enumerate(values.tolist()):
        if names is None:
            kind, what = ("gpu", "stream") if value & 1 else ("cpu", "thread")
            label = f"{what} {value >> 1}" if value >= 0 else f"{what} not recorded"
        else:
            known = names[value] if isinstance(names, list) and 0 <= value < len(names) else {}
            known = known if isinstance(known, dict) else {}
            kind, label = str(known.get("kind", "")), str(known.get("label", ""))
        lanes.append(
            {
                "lane": value if names is not None else at,
                "kind": kind,
                "label": label,
                "nodes": int(nodes[at]),
                "compute_micros": int(compute[at]),
                "communication_micros": int(communication[at]),
            }
        )
    return lanes


def _collectives(trace: ExecutionTrace, comm_groups: dict[str, list[int]]) -> list[dict[str, Any]]:
    groups, names, descriptions = (
        _of_rows(trace, name) for name in ("pg_name", "pg_original_name", "pg_description")
    )
    kinds, sizes = trace.column("comm_type", -1), trace.column("comm_size")
    duration, wait = trace.duration_micros.astype(np.int64), trace.column("wait_micros", -1)
    table: dict[tuple[str, int], dict[str, Any]] = {}
    for row in np.flatnonzero(trace.types == NodeType.COMM_COLL).tolist():
        group, kind = groups.get(row, ""), int(kinds[row])
        known = kind in list(CollectiveType)
        entry = table.setdefault(
            (group, kind),
            {
                "group": group,
                "name": " ".join(filter(None, (names.get(row, ""), descriptions.get(row, "")))),
                "ranks": comm_groups.get(group),
                "type": CollectiveType(kind).name if known else f"comm_type {kind}",
                "count": 0,
                "bytes": 0,
                "micros": 0,
                "wait_micros": 0 if "wait_micros" in trace.attributes else None,
            },
        )
        entry["count"] += 1
        entry["bytes"] += int(sizes[row])
        entry["micros"] += int(duration[row])
        if entry["wait_micros"] is not None:
            entry["wait_micros"] += max(int(wait[row]), 0)
    return [entry for _, entry in sorted(table.items())]


def _messages(trace: ExecutionTrace) -> list[dict[str, Any]]:
    sizes, found = trace.column("comm_size"), []
    # By name: receives first.
    for kind, direction, peer in (
        (NodeType.COMM_RECV, "receive", "comm_src"),
        (NodeType.COMM_SEND, "send", "comm_dst"),
    ):
        rows = np.flatnonzero(trace.types == kind)
        peers = trace.column(peer, -1)[rows]
        for each in np.unique(peers).tolist():
            own = sizes[rows[peers == each]]
            found.append({"direction": direction, "peer": each, "count": len(own), "bytes": int(own.sum())})
    return found


def _of_rows(trace: ExecutionTrace, name: str) -> dict[int, str]:
    """A string attribute of communication nodes: row → value."""
    table, index = texts(trace, name)
    rows = np.flatnonzero(communicates(trace) & (index >= 0)).tolist()
    return {row: table[index[row]] for row in rows}
