"""Hand-written traces for cases that the simulated machine does not have. Times in µs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from chakra_et.convert.graph.build import build
from chakra_et.convert.graph.dependencies import find_dependencies
from chakra_et.convert.graph.linked import link_rank
from chakra_et.traces import device as device_trace
from chakra_et.traces import host as host_trace

PID, TID = 10, 10


def op(
    name: str, ts: float, dur: float, rf: int | None = None, tid: Any = TID, **args: Any
) -> dict[str, Any]:
    """An operator; ``rf`` is its record-function id and external id."""
    numbers = {} if rf is None else {"Record function id": rf, "External id": rf}
    return event("cpu_op", name, ts, dur, tid, **numbers, **args)


def annotation(name: str, ts: float, dur: float, rf: int | None = None, tid: Any = TID) -> dict[str, Any]:
    return op(name, ts, dur, rf, tid) | {"cat": "user_annotation"}


def call(name: str, ts: float, dur: float, correlation: int, tid: Any = TID, **args: Any) -> dict[str, Any]:
    category = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else "cuda_runtime"
    return event(category, name, ts, dur, tid, correlation=correlation, **args)


def kernel(
    name: str, ts: float, dur: float, correlation: int = 0, stream: int = 7, device: int = 0, **args: Any
) -> dict:
    category = (
        "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
    )
    numbers = {"correlation": correlation} if correlation else {}
    made = event(category, name, ts, dur, stream, device=device, stream=stream, **numbers, **args)
    return made | {"pid": device}


def sync(
    kind: str, ts: float, dur: float, correlation: int, stream: int, device: int = 0, **args: Any
) -> dict[str, Any]:
    fields = {"cuda_sync_kind": kind, "stream": stream, "device": device, "correlation": correlation}
    return event("cuda_sync", kind, ts, dur, stream, **fields, **args)


def event(category: str, name: str, ts: float, dur: float, tid: Any = TID, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": PID,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def node(
    name: str, rf: int, values: list | None = None, types: list | None = None, parent: int = 2, **attrs: Any
) -> dict:
    """A host node of schema 1.1.1 with one string per input type."""
    numbers = {
        "rf_id": rf,
        "fw_parent": 0,
        "seq_id": -1,
        "scope": 0,
        "tid": 1,
        "fw_tid": 0,
        "op_schema": "",
    } | attrs
    inputs = {
        "values": values or [],
        "shapes": [[] for _ in values or []],
        "types": types or [],
        "strides": [],
    }
    listed = [{"name": key, "type": "uint64", "value": value} for key, value in numbers.items()]
    empty = {"values": [], "shapes": [], "types": [], "strides": []}
    return {
        "id": rf + 2,
        "name": name,
        "ctrl_deps": parent,
        "inputs": inputs,
        "outputs": empty,
        "attrs": listed,
    }


def tensor(storage: int, elements: int, item_bytes: int = 4, device: str = "cpu") -> list:
    return [storage + 1000, storage, 0, elements, item_bytes, device]


def write_device(folder: Path, events: list[dict[str, Any]], **header: Any) -> Path:
    path = folder / "hand_device.json"
    path.write_text(json.dumps({"schemaVersion": 1, **header, "traceEvents": events}))
    return path


def write_host(folder: Path, nodes: list[dict[str, Any]], **header: Any) -> Path:
    path = folder / "hand_host.json"
    roots = [
        node("[pytorch|profiler|execution_trace|thread]", 0, parent=1),
        node("[pytorch|profiler|execution_trace|process]", 0, parent=1),
    ]
    roots[0]["id"], roots[1]["id"] = 2, 1
    document = {"schema": "1.1.1-chakra.0.0.4", "pid": PID, "time": "", "start_ts": 0, **header}
    path.write_text(json.dumps({**document, "nodes": [roots[0], *nodes, roots[1]], "finish_ts": 1}))
    return path


class Stages:
    """All stages for one pair; events without a host node get one, but for the ``lost`` ids."""

    def __init__(
        self,
        folder: Path,
        events: list[dict[str, Any]],
        nodes: list[dict] | None = None,
        lost: Collection[int] = (),
        **header: Any,
    ) -> None:
        nodes = list(nodes or [])
        known = set(lost) | {
            entry["value"] for one in nodes for entry in one["attrs"] if entry["name"] == "rf_id"
        }
        for one in events:
            rf = one.get("args", {}).get("Record function id")
            if rf is not None and rf not in known:
                nodes.append(node(one["name"], rf))
        self.host = host_trace.load(write_host(folder, nodes))
        self.device = device_trace.load(write_device(folder, events, **header))
        self.rank = link_rank(self.host, self.device, allow_unlinked=True)
        self.device = self.rank.device  # by the host's clock
        self.linked, self.time, self.communication = (
            self.rank.host_row,
            self.rank.timeline,
            self.rank.communication,
        )
        self.causes = find_dependencies(self.rank)
        self.graph = build(self.rank, self.causes)

    def name(self, node: int) -> str:
        event = self.graph.event[node]
        return "overhead" if event < 0 else self.device.names[self.device.name[event]]

    def nodes(self) -> list[tuple[str, float, float]]:
        """(name, start, end) in µs, in the order of the file."""
        graph = self.graph
        return [(self.name(n), graph.start[n] / 1000, graph.end[n] / 1000) for n in range(len(graph))]

    def edges(self, kind: int | None = None) -> set[tuple[str, str]]:
        """(name, name) of the edges, or of those of one kind."""
        graph = self.graph
        pairs = zip(graph.source.tolist(), graph.target.tolist(), graph.edge_kind.tolist(), strict=True)
        return {(self.name(a), self.name(b)) for a, b, k in pairs if kind is None or k == kind}

    def replayed(self) -> bool:
        """Whether edges and durations alone reproduce the start times."""
        graph = self.graph
        start = [self.time.begin] * len(graph)
        length = (graph.end - graph.start).tolist()
        for a, b in zip(graph.source.tolist(), graph.target.tolist(), strict=True):
            start[b] = max(start[b], start[a] + length[a])
        return start == graph.start.tolist()


def frame(name: str, ts: float, dur: float, tid: Any = TID) -> dict[str, Any]:
    """A Python frame, as ``with_stack`` records it."""
    return event("python_function", name, ts, dur, tid)


def write_kineto(
    path: Path, events: list[dict[str, Any]], rank: int | None = None, world: int = 1, **header: Any
) -> Path:
    """A Kineto trace of one rank as frameworks write it: with any name, without a host trace."""
    if rank is not None:
        header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schemaVersion": 1, **header, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
