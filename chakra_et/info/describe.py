"""Describe an .et file as one dict; ``info.command`` documents its fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import communicates, texts
from chakra_et.report.timeline import EDGE_KINDS, lanes_of


def describe(trace: ExecutionTrace, comm_groups: dict[str, list[int]] | None = None) -> dict[str, Any]:
    """The fields that ``info.command`` documents, except for ``file`` and ``bytes``.

    ``comm_groups``: group id → ranks, to list the members of each group.
    """
    from chakra_et.simulate.measured_steps import about_steps
    from chakra_et.simulate.replays import longest_path

    notes: list[str] = []
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
        "lanes": _lanes(trace),
        "communication": _communication(trace, comm_groups or {}),
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
    """Nodes and durations per lane."""
    if not len(trace):
        return []
    lane, labels = lanes_of(trace)
    values, index = np.unique(lane, return_inverse=True)
    duration = trace.duration_micros.astype(np.float64)
    columns = (None, duration * ~communicates(trace), duration * communicates(trace))
    names = ("nodes", "compute_micros", "communication_micros")
    sums = [np.bincount(index.reshape(-1), column).astype(np.int64).tolist() for column in columns]
    return [
        {"lane": value, "kind": labels[value][0], "label": labels[value][1]}
        | dict(zip(names, figures, strict=True))
        for value, *figures in zip(values.tolist(), *sums, strict=True)
    ]


def _communication(trace: ExecutionTrace, comm_groups: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Collectives by group and type, then messages by direction and peer."""
    node = np.flatnonzero(communicates(trace))
    texts_of = {name: texts(trace, name) for name in ("pg_name", "pg_original_name", "pg_description")}
    columns = [trace.column(name, -1)[node] for name in ("comm_type", "comm_src", "comm_dst", "wait_micros")]
    found: dict[tuple[str, str, int | None], dict[str, Any]] = {}
    size, duration = trace.column("comm_size")[node].tolist(), trace.duration_micros[node].tolist()
    for at, row in enumerate(node.tolist()):
        kind, source, target, wait = (int(column[at]) for column in columns)
        group, *names = (table[index[row]] if index[row] >= 0 else "" for table, index in texts_of.values())
        peer = None
        if trace.types[row] == NodeType.COMM_COLL:
            known = kind in list(CollectiveType)
            name = CollectiveType(kind).name if known else f"comm_type {kind}"
        else:
            sends = trace.types[row] == NodeType.COMM_SEND
            name, group, peer = ("send", "", target) if sends else ("receive", "", source)
        entry = found.setdefault(
            (group, name, peer),
            {
                "group": group,
                "name": " ".join(filter(None, names)),
                "ranks": comm_groups.get(group),
                "type": name,
                "peer": peer,
                "count": 0,
                "bytes": 0,
                "micros": 0,
                "wait_micros": 0 if "wait_micros" in trace.attributes else None,
            },
        )
        entry["count"] += 1
        entry["bytes"] += size[at]
        entry["micros"] += duration[at]
        if entry["wait_micros"] is not None:
            entry["wait_micros"] += max(wait, 0)
    return [found[key] for key in sorted(found, key=lambda key: (key[2] is not None, *key[:2], key[2] or 0))]
