"""What each communication event is: operation, bytes, group, peer.

NCCL says it on the kernel (recent PyTorch), on ``record_param_comms`` (PyTorch 2.2 on) or only through
the operators that enclose the launch; gloo only through the tensors of its operator.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.graph.groups import (
    LAUNCHERS,
    Group,
    global_rank,
    group_of_thread,
    groups_of,
    mentioned_groups,
    named_groups,
)
from chakra_et.graph.link import Link
from chakra_et.traces.device import KERNEL, MAX_RANKS, Args, DeviceTrace
from chakra_et.traces.fields import as_number
from chakra_et.traces.host import HostTrace, tensors

# Collectives that ASTRA-sim does not know, as the nearest that it does.
NEAREST_IN_ASTRA_SIM = {
    CollectiveType.BARRIER: CollectiveType.ALL_REDUCE,
    CollectiveType.REDUCE: CollectiveType.ALL_REDUCE,
    CollectiveType.GATHER: CollectiveType.ALL_GATHER,
    CollectiveType.SCATTER: CollectiveType.BROADCAST,
    CollectiveType.REDUCE_SCATTER_BLOCK: CollectiveType.REDUCE_SCATTER,
}
# Part of a name, letters only, → what it is. The first that fits counts.
OPERATIONS: tuple[tuple[str, CollectiveType | NodeType], ...] = (
    ("barrier", CollectiveType.BARRIER),
    ("allreduce", CollectiveType.ALL_REDUCE),
    ("allgather", CollectiveType.ALL_GATHER),
    ("reducescatter", CollectiveType.REDUCE_SCATTER),
    ("alltoall", CollectiveType.ALL_TO_ALL),
    ("broadcast", CollectiveType.BROADCAST),
    ("scatter", CollectiveType.SCATTER),
    ("gather", CollectiveType.GATHER),
    ("sendrecv", NodeType.COMM_COLL),
    ("send", NodeType.COMM_SEND),
    ("recv", NodeType.COMM_RECV),
    ("reduce", CollectiveType.REDUCE),
)
ITEM_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1, "float8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "half": 2, "bfloat16": 2, "float16": 2, "short": 2, "int16": 2,
    "float": 4, "float32": 4, "int": 4, "int32": 4,
    "double": 8, "float64": 8, "long": 8, "int64": 8, "long int": 8,
    "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip
KERNEL_NAMES = ("ncclkernel", "nccldevkernel", "rcclkernel", "onerankreduce")
MAX_BYTES = 1 << 50
BACKEND_NAMES = ("gloo:", "mpi:", "ucc:")
PEERS = re.compile(r"\d+(?:->|<-)(\d+)")
"""ProcessGroupNCCL's ``nccl:send ME->PEER`` and ``nccl:recv ME<-PEER``."""


@dataclass
class Communication:
    """One communication event. ``event``: its row; ``launch``: row of the operator that started it, or -1.

    ``size``: bytes that this rank puts in (for an all-gather the shard), at least 1; ``sized`` is False where
    no trace tells them. ``peer``: global rank
    of the other side of a send or receive. ``sequence``: its number in the group, from 0.
    """

    event: int
    launch: int
    type: NodeType
    collective: CollectiveType | None
    size: int
    group: Group
    dtype: str = ""
    peer: int = -1
    tag: int = 0
    asynchronous: bool | None = None
    sequence: int = -1
    on_gpu: bool = False
    sized: bool = True
    storages: frozenset[int] = frozenset()
    api: str = ""

    @property
    def is_local(self) -> bool:
        """A collective of one rank moves nothing, and a simulator never finishes it: it counts as compute."""
        return self.collective is not None and len(self.group.ranks) == 1


@dataclass
class Communications:
    """All communication events of a rank, in launch order, and what could not be told of them."""

    items: list[Communication] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)


def is_communication(device: DeviceTrace) -> np.ndarray:
    """bool[rows]: events that are the communication itself, on a CPU backend's thread or on the GPU."""
    cpu = np.array([name.startswith(BACKEND_NAMES) for name in device.names], dtype=bool)[device.name]
    gpu = np.array([name.lower().startswith(KERNEL_NAMES) for name in device.names], dtype=bool)[device.name]
    return (cpu & (device.category < KERNEL)) | (gpu & (device.category == KERNEL))


def describe(
    host: HostTrace, device: DeviceTrace, linked: Link, parent: np.ndarray, calls: np.ndarray,
    manifest: Sequence[dict[str, Any]] = (),
) -> Communications:  # fmt: skip
    """Say what each communication event is.

    ``parent``: the nesting of the timeline; ``calls[i]``: row of the call that
    launched device row i, or -1.
    """
    result = Communications()
    declared = groups_of(host, device, manifest)
    groups = declared | mentioned_groups(host, device, declared)
    groups.setdefault("0", Group("0"))
    rows = np.flatnonzero(is_communication(device)).tolist()
    launchers = _Launchers(device)
    named = named_groups(device, parent, launchers.rows.tolist(), groups)
    told = launchers.before([row for row in rows if device.category[row] < KERNEL], device)
    threads = group_of_thread(
        device, [row for row, launch in told.items() if launch not in named], declared, result.notes
    )
    for row in rows:
        if device.category[row] == KERNEL:
            item = _kernel(row, host, device, linked, parent, calls, groups)
        else:
            default = declared.get("0") or next(iter(declared.values()), groups["0"])
            group = named.get(told[row]) or threads.get(int(device.thread[row])) or default
            item = _backend(row, host, device, linked, told[row], group)
        if item is None:
            name = device.names[device.name[row]]
            result.notes[f"communication kernel of unknown kind kept as compute: {name[:60]}"] = 1
        else:
            result.items.append(_within_bounds(item))
    result.items.sort(
        key=lambda item: (device.start[item.launch if item.launch >= 0 else item.event], item.event)
    )
    count: dict[str, int] = {}
    for item in result.items:
        if item.type is NodeType.COMM_COLL:
            item.sequence = count.get(item.group.name, 0)
            count[item.group.name] = item.sequence + 1
    return result


def _within_bounds(item: Communication) -> Communication:
    """A size, peer or tag that no run has, from a damaged or hostile trace, counts as not told."""
    if not 0 <= item.size <= MAX_BYTES:
        item.size, item.sized = 1, False
    if not -1 <= item.peer < MAX_RANKS:
        item.peer = -1
    if not abs(item.tag) < 2**31:
        item.tag = 0
    return item


def operation(name: str) -> CollectiveType | NodeType | None:
    """What a name such as ``c10d::_allgather_base_`` or ``ncclDevKernel_AllReduce_Sum_f32`` stands for."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    return next((what for part, what in OPERATIONS if part in letters), None)


class _Launchers:
    """The operators that start communication: rows in order of time, and in order of their numbers."""

    def __init__(self, device: DeviceTrace) -> None:
        named = np.array([name.startswith(LAUNCHERS) for name in device.names], dtype=bool)
        self.rows = np.flatnonzero(named[device.name] & (device.category < KERNEL))
        self.starts = device.start[self.rows]
        self.by_id = self.rows[np.argsort(device.rf_id[self.rows], kind="stable")]
        self.ids = device.rf_id[self.by_id]

    def before(self, rows: list[int], device: DeviceTrace) -> dict[int, int]:
        """Row → the launcher that was recorded last before it, -1 for none."""
        return {row: self.last_before(row, device) for row in rows}

    def last_before(self, row: int, device: DeviceTrace) -> int:
        """The one that was recorded last before event ``row``, -1 for none."""
        if device.rf_id[row] > 0:
            at = int(np.searchsorted(self.ids, device.rf_id[row], side="left")) - 1
            return int(self.by_id[at]) if at >= 0 else -1
        at = int(np.searchsorted(self.starts, device.start[row], side="right")) - 1
        return int(self.rows[at]) if at >= 0 else -1


def _backend(
    row: int, host: HostTrace, device: DeviceTrace, linked: Link, launch: int, group: Group
) -> Communication | None:
    """A CPU backend's operator, such as ``gloo:all_reduce``, that row ``launch`` (-1: none) started."""
    name = device.names[device.name[row]]
    api = device.names[device.name[launch]] if launch >= 0 else name
    what = operation(name)
    # Gloo runs a reduce-scatter as an all-reduce and so on: the program asked for what the launcher says.
    asked = operation(api)
    if what is None or (
        asked is not None and isinstance(asked, CollectiveType) == isinstance(what, CollectiveType)
    ):
        what = asked
    if what is None:
        return None
    host_row, host_launch = int(linked.host_row[row]), int(linked.host_row[launch]) if launch >= 0 else -1
    inputs = tensors(host.inputs[0][host_row]) if host_row >= 0 else []
    size = sum(count * item for _, count, item in inputs)
    launch_values = host.inputs[0][host_launch] if host_launch >= 0 else b"[]"
    storages = frozenset(t[0] for t in inputs) | frozenset(t[0] for t in tensors(launch_values))
    item = Communication(
        event=row, launch=launch, type=NodeType.COMM_COLL, collective=None, size=max(size, 1), group=group,
        sized=bool(inputs), dtype=_dtype(host.inputs[2][host_row]) if host_row >= 0 else "", api=api,
        storages=storages,
    )  # fmt: skip
    if isinstance(what, CollectiveType):
        item.collective = what
        item.asynchronous = _async_flag(launch_values)
    else:
        item.type = what
        item.peer, item.tag = _peer_and_tag(launch_values, group)
    return item


def _kernel(
    row: int, host: HostTrace, device: DeviceTrace, linked: Link, parent: np.ndarray,
    calls: np.ndarray, groups: dict[str, Group],
) -> Communication | None:  # fmt: skip
    """An NCCL or RCCL kernel: its own arguments first, then the operators around its launch."""
    name = device.names[device.name[row]]
    args = device.communication.get(row, Args())
    around = []
    at = int(calls[row])
    while at >= 0:
        around.append(at)
        at = int(parent[at])
    names = [device.names[device.name[at]] for at in around]
    host_rows = [int(linked.host_row[at]) for at in around]
    attributes: dict[str, Any] = {}
    for host_row in host_rows:
        attributes |= {k: v for k, v in host.communication.get(host_row, {}).items() if k not in attributes}
    named = [args.collective, attributes.get("collective_name"), *names[:6], name]
    what = next((found for text in named if text and (found := operation(str(text))) is not None), None)
    if what is None:
        return None
    if what is NodeType.COMM_COLL:  # a send/recv kernel with nothing around it is how NCCL does all-to-all
        what = CollectiveType.ALL_TO_ALL
    size, storages, dtype = 0, frozenset(), str(args.dtype or attributes.get("dtype") or "")
    elements = args.in_elements if args.in_elements is not None else attributes.get("in_msg_nelems")
    if elements is not None and dtype.lower() in ITEM_BYTES:
        size = int(as_number(elements, 0)) * ITEM_BYTES[dtype.lower()]
    for host_row, around_name in zip(host_rows, names, strict=True):
        found = tensors(host.inputs[0][host_row]) if host_row >= 0 else []
        if found and ("nccl:" in around_name or around_name == "record_param_comms"):
            storages |= frozenset(t[0] for t in found)
            size = size or sum(count * item for _, count, item in found)
            dtype = dtype or _dtype(host.inputs[2][host_row])
    group_name = str(args.group_name if args.group_name is not None else attributes.get("pg_name") or "0")
    group = groups[group_name]
    launch = next((at for at, n in zip(around, names, strict=True) if n.startswith(LAUNCHERS)), -1)
    item = Communication(
        event=row, launch=launch, type=NodeType.COMM_COLL, collective=None, size=max(size, 1), group=group,
        sized=size > 0 or elements is not None, dtype=dtype, on_gpu=True, storages=storages,
        api=next((n for n in names if n.startswith(LAUNCHERS)), name),
    )  # fmt: skip
    asked = host_rows[around.index(launch)] if launch >= 0 else -1
    launch_values = host.inputs[0][asked] if asked >= 0 else b"[]"
    if isinstance(what, CollectiveType):
        item.collective = what
        item.asynchronous = _async_flag(launch_values)
        return item
    item.type = what
    told, item.tag = _peer_and_tag(launch_values, group)
    peer = args.target_rank if what is NodeType.COMM_SEND else args.source_rank
    item.peer = int(as_number(peer if peer is not None else told, -1))
    for text in names:
        match = PEERS.search(text)
        if item.peer < 0 and match:
            item.peer = global_rank(int(match.group(1)), group)
    return item


def _peer_and_tag(values: bytes, group: Group) -> tuple[int, int]:
    """Peer (as a global rank) and tag of ``c10d::send`` and ``recv_``: their last two inputs."""
    try:
        *_, peer, tag = msgspec.json.decode(values)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return -1, 0
    return (global_rank(peer, group), tag) if isinstance(peer, int) and isinstance(tag, int) else (-1, 0)


def _async_flag(values: bytes) -> bool | None:
    """``async_op`` of a c10d operator: its only boolean input, where the version has it."""
    flags = re.findall(rb"(?<![\w\"])(true|false)(?![\w\"])", values)
    return flags[-1] == b"true" if flags else None


def _dtype(types: bytes) -> str:
    match = re.search(rb"Tensor\(([^)]*)\)", types)
    return match.group(1).decode("utf-8", "replace") if match else ""
