"""A host and device trace pair of any size, written record by record as the real writers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

HOST_ATTRS = (("rf_id", "uint64"), ("fw_parent", "uint64"), ("seq_id", "int64"), ("scope", "uint64"),
              ("tid", "uint64"), ("fw_tid", "uint64"), ("op_schema", "string"))  # fmt: skip
SHAPE, STRIDE = [1, 128, 768], [98304, 768, 1]
KERNELS = 100


def write_pair(folder: Path, events: int) -> None:
    """Write ``pair_host.json`` and ``pair_device.json``: a GPU training step of about ``events`` events.

    For every four events an operator inside an operator, the call that launches a kernel, and the kernel,
    on one thread and one stream.
    """
    with open(folder / "pair_host.json", "w") as host, open(folder / "pair_device.json", "w") as device:
        head = {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "time": "2026-01-01 00:00:00", "start_ts": 0}
        host.write(json.dumps(head)[:-1] + ', "nodes": [\n')
        distributed = {"backend": "nccl", "rank": 0, "world_size": 1}
        head = {"schemaVersion": 1, "distributedInfo": distributed, "baseTimeNanoseconds": 0}
        device.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        groups = max(1, events // 4)
        _event(device, "user_annotation", "ProfilerStep#1", 0, groups * 20 + 10, first=True, **_ids(1))
        _node(host, 2, "ProfilerStep#1", 1, 1, first=True)
        for group in range(groups):
            _group(host, device, group)
        host.write('\n], "finish_ts": 1}\n')
        device.write('\n], "traceName": "synthetic"}\n')


def _group(host: IO[str], device: IO[str], group: int) -> None:
    start, ids, kind = 5 + group * 20, 2 + group * 2, group % KERNELS
    for depth in range(2):
        name = f"aten::op{kind + depth * KERNELS}"
        parent = 2 if depth == 0 else 3 + group * 2
        _node(host, 3 + group * 2 + depth, name, parent, ids + depth)
        dims = {"Input Dims": [SHAPE, SHAPE], "Input type": ["float", "float"], "Ev Idx": ids + depth}
        _event(device, "cpu_op", name, start + depth, 15 - 2 * depth, **_ids(ids + depth), **dims)
    link = {"External id": ids + 1, "correlation": 10_000_000 + group}
    _event(device, "cuda_runtime", "cudaLaunchKernel", start + 3, 5, cbid=211, **link)
    place = {"device": 0, "context": 1, "stream": 7, "grid": [96, 1, 1], "block": [256, 1, 1]}
    _event(device, "kernel", f"kernel_{kind}", start + 9, 10, pid=0, tid=7, **link, **place)


def _ids(record: int) -> dict[str, int]:
    return {
        "External id": record,
        "Record function id": record,
        "Sequence number": record,
        "Fwd thread id": 0,
    }


def _event(
    file: IO[str], category: str, name: str, start: int, length: int, pid: int = 1, tid: int = 1,
    first: bool = False, **args: Any,
) -> None:  # fmt: skip
    event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start + 0.125}
    file.write(("" if first else ",\n") + json.dumps(event | {"dur": length, "args": args}))


def _node(file: IO[str], number: int, name: str, parent: int, rf_id: int, first: bool = False) -> None:
    tensor = [number, number, 0, 98304, 4, "cuda:0"]
    values = {"values": [tensor, tensor], "shapes": [SHAPE, SHAPE], "types": ["Tensor(float)"] * 2}
    values["strides"] = [STRIDE, STRIDE]
    content = (rf_id, 0, rf_id, 0, 1, 0, f"{name}(Tensor self, Tensor other) -> Tensor")
    attrs = [{"name": n, "type": t, "value": v} for (n, t), v in zip(HOST_ATTRS, content, strict=True)]
    node = {
        "id": number,
        "name": name,
        "ctrl_deps": parent,
        "inputs": values,
        "outputs": values,
        "attrs": attrs,
    }
    file.write(("" if first else ",\n") + json.dumps(node))
