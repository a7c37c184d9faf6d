"""What the time of each node is spent on: arithmetic, memory, the host, communication, input data, …"""

from __future__ import annotations

import re

import numpy as np

from chakra_et.et.node_attributes import parents
from chakra_et.simulate.run import Run
from chakra_et.simulate.time_by_kind import KINDS

COMPUTE, MEMORY, HOST, COMMUNICATION, LOADING, COMPILING, ALLOCATING = range(7)
CLASSES = (
    *("compute", "memory", "host", "communication"),
    *("data loading", "compilation", "memory allocation"),
)
"""``compute`` and ``memory`` are work of a device that its arithmetic or its memory bounds; on ranks without
a device, operators are ``compute``, and ``host`` is what threads do between operators."""

RIDGE = 40.0
"""Operations per byte from which a kernel counts as bound by arithmetic. Between the ridges of 32-bit and
16-bit arithmetic on A100 to H200 (10 to 300, by their data sheets): products and convolutions of training
sizes have hundreds, elementwise kernels less than one."""
_ARITHMETIC = re.compile(
    r"gemm|matmul|cutlass|nvjet|xmma|wgrad|dgrad|fprop|cijk|conv|winograd|flash|fmha|attention|attn|wgmma|s\d+816",
    re.I,
)
_WITHIN = (
    (LOADING, re.compile(r"DataLoader")),
    (COMPILING, re.compile(r"\(dynamo_timed\)|_compile\.compile_inner|compile_fx|async_compile|PyCodeCache")),
)
_ALLOCATION = re.compile(r"(cuda|hip)(Malloc|Free|HostAlloc|HostFree|HostRegister|MallocAsync|FreeAsync)\w*")
_DEPTH = 256


def node_classes(run: Run) -> np.ndarray:
    """Index into ``CLASSES`` of each node, int64[N]."""
    kind = np.array(KINDS)[run.kind]
    on_device = on_devices(run)
    found = np.full(len(run.graph), HOST, np.int64)
    if on_device.any():
        operations, moved = (
            run.graph.attribute(name, 0).astype(float) for name in ("num_ops", "tensor_size")
        )
        named = np.array([bool(_ARITHMETIC.search(name)) for name in run.names])[run.name_of]
        arithmetic = np.where((operations > 0) & (moved > 0), operations > RIDGE * moved, named)
        found[on_device] = np.where(arithmetic & (kind == "kernel"), COMPUTE, MEMORY)[on_device]
    else:
        found[kind == "operator"] = COMPUTE
    calls = np.array([bool(_ALLOCATION.fullmatch(name)) for name in run.names])[run.name_of]
    found[calls] = ALLOCATING
    for number, pattern in _WITHIN:
        found[_within(run, pattern) & (found != MEMORY)] = number
    found[run.is_communication] = COMMUNICATION
    return found


def on_devices(run: Run) -> np.ndarray:
    """Kernels, copies and memsets of devices, communication left out, bool[N]."""
    kind = np.array(KINDS)[run.kind]
    found: np.ndarray = np.isin(kind, ("kernel", "copy")) & ~run.graph.is_cpu & ~run.is_communication
    return found


def _within(run: Run, pattern: re.Pattern[str]) -> np.ndarray:
    """Nodes of operators whose name matches, and what these operators call, bool[N]."""
    named = np.array([bool(pattern.search(name)) for name in run.names])
    if not named.any():
        return np.zeros(len(run.graph), bool)
    parts = []
    for trace in run.graph.traces:
        own = np.array([bool(pattern.search(text.decode("utf-8", "replace"))) for text in trace.names.table])
        inside = own[trace.names.index]
        above = parents(trace)
        for _ in range(_DEPTH):
            more = (above >= 0) & inside[above] & ~inside
            if not more.any():
                break
            inside |= more
        parts.append(inside)
    return run.graph.gather(parts)
