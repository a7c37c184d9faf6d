"""Both traces of a rank in one JSON file, in the layout of MLCommons' chakra_trace_link.

Host nodes with the times of their device records (``ts``, ``inclusive_dur``, ``exclusive_dur`` in µs) and
with parents by these times; then one node per kernel, copy and memset, below the operator that launched it.
chakra_converter can read the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chakra_et import files
from chakra_et.convert.graph import link, timeline
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.redact import redacted
from chakra_et.traces import device as device_trace
from chakra_et.traces import host as host_trace
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import CATEGORIES, KERNEL, SYNC
from chakra_et.traces.host import HostTrace

# A schema version that chakra_converter 1.0.0 accepts. Versions differ in nothing that it reads.
READABLE_SCHEMA = "1.1.1-chakra.0.0.4"
_EMPTY: dict[str, Any] = {"values": [], "shapes": [], "types": []}


def write(path: Path, rank: LinkedRank) -> None:
    """Write the linked traces of a rank to ``path``."""
    host, device, linked, time, calls = rank.host, rank.device, rank.link, rank.timeline, rank.calls
    nodes = _host_nodes(host)
    exclusive = _exclusive(device, time)
    for row in np.flatnonzero(linked.host_row >= 0).tolist():
        node = nodes[linked.host_row[row]]
        node["ts"] = int(device.start[row]) / 1000
        node["inclusive_dur"] = int(time.end[row] - time.start[row]) / 1000
        node["exclusive_dur"] = int(exclusive[row]) / 1000
        parent = _operator(int(time.parent[row]), time.parent, linked.host_row)
        if parent >= 0:
            node["ctrl_deps"] = nodes[linked.host_row[parent]]["id"]
    nodes += _device_nodes(nodes, device, time, calls, linked)
    nodes.sort(key=lambda node: node["id"])
    header = {name: _whole(host.header[name]) for name in ("pid", "start_ts", "finish_ts")}
    document = {"schema": READABLE_SCHEMA, "time": str(host.header["time"]), **header, "nodes": nodes}
    text = msgspec.json.format(msgspec.json.encode(document), indent=1)
    with files.atomic_file(path) as out:
        out.write(redacted(text.decode("utf-8", "replace")).encode())


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else 0


def _host_nodes(host: HostTrace) -> list[dict[str, Any]]:
    """One node per row. Its id is that of the trace, or a new one if another row has the same."""
    nodes: list[dict[str, Any]] = []
    taken: set[int] = set()
    free_id = max(int(host.id.max()), 0)
    for row, number in enumerate(host.id.tolist()):
        if number < 0 or number in taken:
            number = free_id = free_id + 1
        taken.add(number)
        attrs = {name: int(getattr(host, name)[row]) for name in host_trace.NUMERIC}
        attrs["op_schema"] = host.schemas[host.op_schema[row]]
        attrs |= host.texts.get(row, {}) | host.communication.get(row, {})
        nodes.append(
            {
                "id": number,
                "name": host.names[host.name[row]],
                "ctrl_deps": int(host.parent[row]),
                "inputs": _values(host.inputs, row),
                "outputs": _values(host.outputs, row),
                "attrs": [
                    {"name": name, "type": "string" if isinstance(value, str) else "int64", "value": value}
                    for name, value in attrs.items()
                ],
            }
        )
    return nodes


def _values(columns: tuple[Sequence[bytes], ...], row: int) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(column[row]) for name, column in zip(_EMPTY, columns, strict=True)}


def _device_nodes(
    nodes: list[dict[str, Any]],
    device: DeviceTrace,
    time: timeline.Timeline,
    calls: np.ndarray,
    linked: link.Link,
) -> list[dict[str, Any]]:
    """One node per kernel, copy and memset, with the attributes of the operator that launched it.

    Of one whose operator the host trace lacks they are 0 and empty: chakra_converter needs them.
    """
    last_id = max(node["id"] for node in nodes)
    unknown: list[dict[str, Any]] = [
        {"name": name, "type": "int64", "value": 0} for name in host_trace.NUMERIC
    ]
    unknown.append({"name": "op_schema", "type": "string", "value": ""})
    alone = {"inputs": _EMPTY, "outputs": _EMPTY, "attrs": unknown}
    added: list[dict[str, Any]] = []
    for row in np.flatnonzero((device.category >= KERNEL) & (device.category != SYNC)).tolist():
        launcher = _operator(int(calls[row]), time.parent, linked.host_row)
        base = nodes[linked.host_row[launcher]] if launcher >= 0 else alone
        length = int(device.end[row] - device.start[row]) / 1000
        added.append(
            base
            | {
                "id": last_id + len(added) + 1,
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
    return added


def _exclusive(device: device_trace.DeviceTrace, time: timeline.Timeline) -> np.ndarray:
    """int64[events]: self time of each event, ns."""
    exclusive: np.ndarray = device.end - device.start
    segments = time.self_time
    owned = segments.owner >= 0
    exclusive[np.unique(segments.owner[owned])] = 0
    np.add.at(exclusive, segments.owner[owned], (segments.end - segments.start)[owned])
    return exclusive


def _operator(row: int, parent: np.ndarray, host_row: np.ndarray) -> int:
    """``row`` or the nearest event around it that has a host node."""
    while row >= 0 and host_row[row] < 0:
        row = int(parent[row])
    return row
