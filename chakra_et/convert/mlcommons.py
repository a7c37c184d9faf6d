"""MLCommons' tools for comparison, and both traces of a rank in one JSON file as they need it.

chakra_trace_link and chakra_converter run as processes in a scratch folder, with absolute paths and with a
recursion limit and stack size for deep graphs, as the converter's search for cycles is recursive.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chakra_et import files
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.timeline import nearest, on_device
from chakra_et.errors import TraceError
from chakra_et.redact import redacted_json
from chakra_et.traces.device_format import CATEGORIES
from chakra_et.traces.host import NUMERIC
from chakra_et.traces.records import open_trace
from chakra_et.traces.sets import Pair

PACKAGE = "chakra.src"
RECURSION = """
import sys, threading
sys.setrecursionlimit(10_000_000)
threading.stack_size(1 << 30)
from {module} import main
outcome = []
def run():
    try:
        main()
        outcome.append(0)
    except SystemExit as stop:
        outcome.append(stop.code)
thread = threading.Thread(target=run)
thread.start()
thread.join()
sys.exit(outcome[0] if outcome else 1)
"""
# A schema version that chakra_converter 1.0.0 accepts. Versions differ in nothing that it reads.
READABLE_SCHEMA = "1.1.1-chakra.0.0.4"


def convert(pair: Pair, output: Path, merged: Path | None = None) -> None:
    """Convert one rank with MLCommons' tools. ``merged``: where to keep the linked JSON.

    Raises ``TraceError`` if a tool is not installed or fails; ``output`` is then unchanged.
    """
    if pair.host is None:
        raise TraceError(f"{pair.device}: --engine mlcommons needs a host trace too; use --engine native.")
    with files.scratch_folder(output.resolve()) as folder:
        linked, result = folder / "linked.json", folder / "result.et"
        _run(
            pair, linked, f"{PACKAGE}.trace_link.trace_link",
            "--rank", str(max(pair.rank, 0)), "--chakra-host-trace", str(_plain(pair.host, folder)),
            "--chakra-device-trace", str(_plain(pair.device, folder)), "--output-file", str(linked),
        )  # fmt: skip
        _run(
            pair, result, f"{PACKAGE}.converter.converter",
            "--log-filename", os.devnull, "PyTorch", "--input", str(linked), "--output", str(result),
        )  # fmt: skip
        for source, target in ((linked, merged), (result, output)):
            if target is not None:
                files.copy(source, target)


def _run(pair: Pair, output: Path, module: str, *arguments: str) -> None:
    tool = module.rsplit(".", 1)[1]
    done = subprocess.run(
        [sys.executable, "-c", RECURSION.format(module=module), *arguments],
        cwd=output.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
    )  # fmt: skip
    if done.returncode == 0 and output.is_file():
        return
    if "No module named" in done.stderr or "et_replay" in done.stderr:
        raise TraceError(
            "--engine mlcommons: chakra_trace_link or one of its requirements (et_replay, "
            "HolisticTraceAnalysis) is not installed; run ./install_chakra_tools.sh."
        )
    lines = [line for line in done.stderr.splitlines() if "Error" in line]
    reason = lines[-1] if lines else f"status {done.returncode}" if done.returncode else "it wrote no file"
    raise TraceError(f"{pair.device}: {tool} failed ({reason}); try --engine native.")


def _plain(path: Path, folder: Path) -> Path:
    """The absolute path of ``path``, decompressed into ``folder`` if it is a gzip file."""
    with open(path, "rb") as file:
        if file.read(2) != b"\x1f\x8b":
            return path.resolve()
    plain = folder / path.name.removesuffix(".gz")
    with open_trace(path) as source, open(plain, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return plain


# ---- both traces in one file, in the layout of chakra_trace_link ----


def write_merged(path: Path, rank: LinkedRank) -> None:
    """Write the linked traces of a rank to ``path``, as chakra_converter can read them.

    Host nodes with the times of their device records (``ts``, ``inclusive_dur``, ``exclusive_dur`` in µs) and
    with parents by these times; then one node per kernel, copy and memset, below the operator that launched
    it and with its attributes. Of one whose operator the host trace lacks they are 0 and empty:
    chakra_converter needs them.
    """
    host, device, time, host_row = rank.host, rank.device, rank.timeline, rank.link.host_row

    # The host row of each event or of the nearest one around it that has one, -1 for none.
    operator = np.append(host_row, -1)[nearest(host_row >= 0, time.parent)]
    # One node per host row. Its id is that of the trace, or a new one if another row has the same.
    nodes: list[dict[str, Any]] = []
    taken: set[int] = set()
    free_id = max(int(host.id.max()), 0)
    for row, number in enumerate(host.id.tolist()):
        if number < 0 or number in taken:
            number = free_id = free_id + 1
        taken.add(number)
        attrs = {name: int(getattr(host, name)[row]) for name in NUMERIC}
        attrs["op_schema"] = host.schemas[host.op_schema[row]]
        attrs |= host.texts.get(row, {}) | host.communication.get(row, {})
        values = {
            side: {
                name: msgspec.Raw(column[row])
                for name, column in zip(("values", "shapes", "types"), columns, strict=True)
            }
            for side, columns in (("inputs", host.inputs), ("outputs", host.outputs))
        }
        named = [
            {"name": name, "type": "string" if isinstance(value, str) else "int64", "value": value}
            for name, value in attrs.items()
        ]
        name = host.names[host.name[row]]
        nodes.append(
            {"id": number, "name": name, "ctrl_deps": int(host.parent[row]), **values, "attrs": named}
        )
    exclusive = device.end - device.start  # self time of each event, ns
    owned = time.self_time.owner >= 0
    owner = time.self_time.owner[owned]
    exclusive[owner] = 0
    np.add.at(exclusive, owner, (time.self_time.end - time.self_time.start)[owned])
    for row in np.flatnonzero(host_row >= 0).tolist():
        node = nodes[host_row[row]]
        node["ts"] = int(device.start[row]) / 1000
        node["inclusive_dur"] = int(time.end[row] - time.start[row]) / 1000
        node["exclusive_dur"] = int(exclusive[row]) / 1000
        parent = operator[time.parent[row]] if time.parent[row] >= 0 else -1
        if parent >= 0:
            node["ctrl_deps"] = nodes[parent]["id"]
    last_id = max(node["id"] for node in nodes)
    unknown: list[dict[str, Any]] = [{"name": name, "type": "int64", "value": 0} for name in NUMERIC]
    unknown.append({"name": "op_schema", "type": "string", "value": ""})
    empty: dict[str, Any] = {"values": [], "shapes": [], "types": []}
    alone = {"inputs": empty, "outputs": empty, "attrs": unknown}
    for number, row in enumerate(on_device(device).tolist(), 1):
        launcher = operator[rank.calls[row]] if rank.calls[row] >= 0 else -1
        base = nodes[launcher] if launcher >= 0 else alone
        length = int(device.end[row] - device.start[row]) / 1000
        own = {
            "id": last_id + number,
            "name": device.names[device.name[row]],
            "ctrl_deps": base.get("id", 1),
            "cat": CATEGORIES[device.category[row]],
            "ph": "X",
            "ts": int(device.start[row]) / 1000,
            "inclusive_dur": length,
            "exclusive_dur": length,
            "stream": int(device.stream[row]),
        }
        nodes.append(base | own)
    nodes.sort(key=lambda node: node["id"])
    header = {name: _whole(host.header[name]) for name in ("pid", "start_ts", "finish_ts")}
    document = {"schema": READABLE_SCHEMA, "time": str(host.header["time"]), **header, "nodes": nodes}
    text = msgspec.json.format(msgspec.json.encode(document), indent=1)
    with files.atomic_file(path) as out:
        out.write(redacted_json(text))


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else 0
