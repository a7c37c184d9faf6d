"""What the time of each node is spent on: arithmetic, memory, the host, communication, input data, …"""

from __future__ import annotations

import re

import numpy as np

from chakra_et.arrays import nearest
from chakra_et.et.node_attributes import parents
from chakra_et.simulate.run import Run
from chakra_et.simulate.time_by_kind import KINDS
from chakra_et.transform.gpu import BY_LIBRARIES, kernel_class

COMPUTE, MEMORY, HOST, COMMUNICATION, LOADING, COMPILING, ALLOCATING, COPYING, STARTING = range(9)
CLASSES = (
    *("compute", "memory", "host", "communication"),
    *("data loading", "compilation", "memory allocation", "host copies", "start-up"),
)
"""``compute`` and ``memory`` are work of a device that its arithmetic or its memory bounds; on ranks without
a device, operators are ``compute``, and ``host`` is what threads do between operators. ``host copies``: of a
device, from or to the host. ``start-up``: calls that create the context of a device, or load code to it."""
ON_DEVICE = COMPUTE, MEMORY, COPYING

RIDGE = 40.0
"""Operations per byte from which a kernel counts as bound by arithmetic. Between the ridges of 32-bit and
16-bit arithmetic on A100 to H200 (10 to 300, by their data sheets): products and convolutions of training
sizes have hundreds, elementwise kernels less than one."""
_STREAMING = re.compile(r"splitK_?reduce|paged_attention|attention_3d|splitkv|dot_do_o|convert_dq", re.I)
"""Kernels of products and attention that memory bounds: sums of parts, decoding with few queries, and what
FlashAttention's backward pass does before and after its products."""
_TILE = re.compile(r"(?<![\dx])(\d+)x(\d+)")
"""Rows and columns of the result that a block of a product makes: with 16 bits, it does at most as many
operations per byte as the smaller one."""
_PLANNED = re.compile(r"^(forward|backward) \d")  # passes of a plan
_LOADS = (
    r"data_?(load|pipe|iter)|dali(?![a-z])|(load|next|get|fetch|wait_for|copy)_?batch"
    r"|batch[-_ ]?(generator|fetch)"
)
_WITHIN = (
    (LOADING, re.compile(_LOADS, re.I)),
    (COMPILING, re.compile(r"\(dynamo_timed\)|_compile\.compile_inner|compile_fx|async_compile|PyCodeCache")),
)
"""Operators and annotations of PyTorch, TorchRec, Lightning and Megatron, by their names."""
_CALLS = (
    (ALLOCATING, re.compile(r"(cuda|hip)(Malloc|Free|HostAlloc|HostFree|HostRegister)\w*")),
    (ALLOCATING, re.compile(r"(cu|hip)Mem(Alloc|Free|Create|Release|Map|Unmap|SetAccess|Address)\w*")),
    (
        COMPILING,
        re.compile(r"(cu|hip|cuda)(Module|Library|Link)\w*(Load|Complete|AddData)\w*|(nv|hip)rtc\w+"),
    ),
)
_HOST_COPY = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost|Host -> Device|Device -> Host")
_WAITING = re.compile(r"Sync|Wait|Query|Memcpy|Memset", re.I)
BEFORE = "work before the recording"
"""Nodes of the device that stand for work of unknown kinds, see ``convert``."""
STARTS_NS, STARTS_TIMES = 10e6, 100
"""A call that waits for nothing, takes at least so long, and so many times the median one, starts a device up
or loads code: others take microseconds."""


def node_classes(run: Run) -> np.ndarray:
    """Index into ``CLASSES`` of each node, int64[N]."""
    kind, on_device = {name: run.kind == at for at, name in enumerate(KINDS)}, run.on_devices
    found = np.full(len(run.graph), HOST, np.int64)
    if on_device.any():
        operations, moved = (
            run.graph.attribute(name, 0).astype(float) for name in ("num_ops", "tensor_size")
        )
        tiles = map(_TILE.search, run.names)
        narrow = np.array([tile is not None and min(map(int, tile.groups())) < RIDGE for tile in tiles])
        named = run.named(_by_library) & ~run.named(_STREAMING.search) & ~narrow[run.name_of]
        arithmetic = np.where((operations > 0) & (moved > 0), operations > RIDGE * moved, named)
        found[on_device] = np.where(arithmetic & kind["kernel"], COMPUTE, MEMORY)[on_device]
        found[on_device & kind["copy"] & run.named(_HOST_COPY.search)] = COPYING
        unknown = on_device & run.named(BEFORE.__eq__)
        known = np.bincount(found, run.measured.own_ns * (on_device & ~unknown), len(CLASSES))
        found[unknown] = COMPUTE if known[COMPUTE] >= known[MEMORY] else MEMORY  # as most of the rest
    else:
        found[kind["operator"]] = COMPUTE
    for number, pattern in _CALLS:
        found[kind["runtime"] & run.named(pattern.fullmatch)] = number
    found[_starting(run, on_device)] = STARTING
    for number, pattern in _WITHIN:
        found[_within(run, pattern) & ~on_device] = number
    found[run.is_communication] = COMMUNICATION
    return found


def _by_library(name: str) -> bool:
    """Whether a kernel is a product, a convolution or attention by its name, or a pass of a plan."""
    return kernel_class(name) in BY_LIBRARIES or _PLANNED.match(name) is not None


def _starting(run: Run, on_device: np.ndarray) -> np.ndarray:
    """Runtime calls of ``start-up``, in which the rank's devices are idle, bool[N]."""
    calls: np.ndarray = (run.kind == KINDS.index("runtime")) & ~run.named(_WAITING.search)
    own = run.measured.own_ns
    found: np.ndarray = calls & (own >= STARTS_NS)
    if found.any():
        found &= own >= STARTS_TIMES * np.median(own[calls])
    for at in np.flatnonzero(found).tolist():
        busy = on_device & (run.graph.trace_of == run.graph.trace_of[at])
        start, end = run.start_ns[at], run.end_ns[at]
        inside = np.minimum(run.end_ns[busy], end) - np.maximum(run.start_ns[busy], start)
        found[at] = np.clip(inside, 0, None).sum() < 0.1 * (end - start)
    return found


def _within(run: Run, pattern: re.Pattern[str]) -> np.ndarray:
    """Nodes of operators and annotations whose name matches, and what these call, bool[N].

    The Python of an annotation is in nodes of their own, which share its ``rf_id``.
    """
    named = run.named(pattern.search)
    if not named.any():
        return named
    parts = []
    for trace, names in zip(run.graph.traces, run.graph.scatter(named), strict=True):
        own, event = names > 0, trace.column("rf_id", -1)
        inside = own | (np.isin(event, event[own]) & (event > 0))
        parts.append(nearest(inside, parents(trace)) >= 0)
    return run.graph.gather(parts)
