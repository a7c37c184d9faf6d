"""Both traces of a rank as one JSON file, in the layout of MLCommons' chakra_trace_link.

Host nodes with the times of their device records (``ts``, ``inclusive_dur``, ``exclusive_dur`` in µs) and
with the parents that these times show; after them a node for each kernel, copy and memset below the
operator that launched it. chakra_converter reads it, and so can people.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et import causes, collectives, device_trace, et_file, host_trace, link, timeline
from chakra_et.convert import Pair
from chakra_et.device_trace import CATEGORIES, KERNEL, SYNC
from chakra_et.records import open_trace

# The schema versions that chakra_converter 1.0.0 knows; they differ in nothing that it reads.
READABLE_SCHEMA = "1.1.1-chakra.0.0.4"


def write(path: Path, pair: Pair) -> None:
    """Write the merged trace of ``pair`` to ``path``. Raises ``TraceError`` for traces that can't be read."""
    host, device = host_trace.load(pair.host), device_trace.load(pair.device)
    linked = link.link(host, device)
    on_cpu = collectives.is_communication(device) & (device.category < KERNEL)
    time = timeline.build(device, on_cpu)
    calls = causes.launch_calls(device)
    with open_trace(pair.host) as file:
        document = json.load(file)
    nodes = [_with_attrs(node) for node in document["nodes"]]
    exclusive = _exclusive(device, time)
    for row in np.flatnonzero(linked.host_row >= 0).tolist():
        node = nodes[linked.host_row[row]]
        node["ts"] = int(device.start[row]) / 1000
        node["inclusive_dur"] = int(time.end[row] - time.start[row]) / 1000
        node["exclusive_dur"] = int(exclusive[row]) / 1000
        parent = _operator(int(time.parent[row]), time.parent, linked.host_row)
        if parent >= 0:
            node["ctrl_deps"] = nodes[linked.host_row[parent]]["id"]
    nodes.sort(key=lambda node: node["id"])
    by_row = {int(row): position for position, row in enumerate(np.argsort(host.id, kind="stable"))}
    free_id = max(node["id"] for node in nodes) + 1
    for row in np.flatnonzero((device.category >= KERNEL) & (device.category != SYNC)).tolist():
        launcher = _operator(int(calls[row]), time.parent, linked.host_row)
        base = (
            nodes[by_row[int(linked.host_row[launcher])]]
            if launcher >= 0
            else {"inputs": _EMPTY, "outputs": _EMPTY}
        )
        length = int(device.end[row] - device.start[row]) / 1000
        nodes.append(
            base
            | {
                "id": free_id,
                "name": device.names[device.name[row]],
                "ctrl_deps": base.get("id", 1),
                "cat": CATEGORIES[device.category[row]],
                "ph": "X",
                "ts": int(device.start[row]) / 1000,
                "inclusive_dur": length,
                "exclusive_dur": length,
                "stream": int(device.stream[row]),
            }
        )
        free_id += 1
    document["schema"] = READABLE_SCHEMA
    document["nodes"] = nodes
    with et_file.atomic_file(path) as out:
        out.write(json.dumps(document, indent=1).encode())


_EMPTY: dict[str, Any] = {"values": [], "shapes": [], "types": []}


def _exclusive(device: device_trace.DeviceTrace, time: timeline.Timeline) -> np.ndarray:
    """ns that each event spends outside of its children."""
    exclusive = device.end - device.start
    pieces = time.pieces
    owned = pieces.owner >= 0
    exclusive[np.unique(pieces.owner[owned])] = 0
    np.add.at(exclusive, pieces.owner[owned], (pieces.end - pieces.start)[owned])
    return exclusive


def _operator(row: int, parent: np.ndarray, host_row: np.ndarray) -> int:
    """``row`` or the nearest event around it that has a host node."""
    while row >= 0 and host_row[row] < 0:
        row = int(parent[row])
    return row


def _with_attrs(node: dict[str, Any]) -> dict[str, Any]:
    """A node of the flat layout (schema 1.0.x) in the layout with attrs; any other as it is."""
    if "attrs" in node or "input_shapes" not in node:
        return node
    attrs = [
        {"name": name, "type": "int64", "value": node[name]} for name in host_trace.NUMERIC if name in node
    ]
    attrs.append({"name": "op_schema", "type": "string", "value": node.get("op_schema", "")})
    sides = {
        side: {
            "values": node[side],
            "shapes": node[f"{side[:-1]}_shapes"],
            "types": node[f"{side[:-1]}_types"],
        }
        for side in ("inputs", "outputs")
    }
    return {"id": node["id"], "name": node["name"], "ctrl_deps": node["parent"], **sides, "attrs": attrs}
