"""Identify the communication of a rank: operation, bytes, group, peer.

NCCL's metadata is on the kernel (recent PyTorch), on ``record_param_comms`` (from PyTorch 2.2), or has to be
derived from the operators around the launch. Gloo's operators only record tensors. Missing values stay
unknown and are counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chakra_et.arrays import coded_pairs, unique
from chakra_et.convert.graph.batches import Pending
from chakra_et.convert.graph.communication import Communication, Communications
from chakra_et.convert.graph.communication_arguments import Around, Facts, message_ends
from chakra_et.convert.graph.groups import Group, Groups, collect_groups, global_rank
from chakra_et.convert.graph.kernel_table import Operation, Pattern, communication_names, operation_named
from chakra_et.convert.graph.launchers import Launchers
from chakra_et.convert.graph.link import Link
from chakra_et.convert.graph.unlaunched_kernels import fill_from_period
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.findings import Findings
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import KERNEL
from chakra_et.traces.fields import MAX_RANKS, as_number
from chakra_et.traces.host import HostTrace

MAX_BYTES = 1 << 50
BACKEND_NAMES = ("gloo:", "mpi:", "ucc:")
# Prefixes of operators whose names contain the operation.
OPERATOR_NAMES = ("nccl:", "c10d::", "_c10d_functional", "record_param_comms", "symm_mem::", "xccl:", "hccl:")
PEERS = re.compile(r"\d+(->|<-)(\d+)")
"""ProcessGroupNCCL's ``nccl:send ME->PEER`` and ``nccl:recv ME<-PEER``."""

# Words for communication in names of kernels, and namespaces of libraries that don't communicate.
MAY_COMMUNICATE = re.compile(
    r"(?<![a-z])(dispatch|combine|all_?(2_?all|to_?all|reduce|gather)|reduce_?scatter|a2a|put|signal|barrier)"
    r"(?![a-z])|(nv|roc)shmem",
    re.IGNORECASE,
)
KNOWN_NAMESPACES = re.compile(r"(at|c10|cub|cutlass|cute|thrust|rocprim|ck|ck_tile|cudnn|flash\w*)::")
# Of the device's time; kernels that take less are not worth a warning.
LEAST_SHARE = 0.05


@dataclass(eq=False, repr=False)
class CommunicationRows:
    """The communication rows of a device trace.

    ``cpu``, ``gpu``: bool[rows]; ``patterns``: index of a kernel name → its row in the kernel table.
    """

    cpu: np.ndarray
    gpu: np.ndarray
    patterns: dict[int, Pattern]


def communication_rows(device: DeviceTrace, added_kernels: str = "") -> CommunicationRows:
    """Find the communication events, on threads of a CPU backend and on the GPU.

    ``added_kernels``: path of a user's kernel table. Raises ``TraceError`` for an invalid table.
    """
    backend = np.array([name.startswith(BACKEND_NAMES) for name in device.names], dtype=bool)
    on_gpu = device.category == KERNEL
    used = np.zeros(len(device.names), dtype=bool)
    used[device.name[on_gpu]] = True
    names = [name if is_used else "" for name, is_used in zip(device.names, used, strict=True)]
    patterns = communication_names(names, added_kernels)
    named = np.zeros(len(device.names), dtype=bool)
    named[list(patterns)] = True
    described = np.zeros(len(device), dtype=bool)
    described[list(device.communication)] = True
    return CommunicationRows(
        backend[device.name] & (device.category < KERNEL), (named[device.name] | described) & on_gpu, patterns
    )


def describe(
    host: HostTrace, device: DeviceTrace, linked: Link, parent: np.ndarray, calls: np.ndarray,
    rows: CommunicationRows, manifest: Sequence[dict[str, Any]] = (),
) -> Communications:  # fmt: skip
    """Identify each communication event.

    ``parent``: nesting of the timeline; ``calls[i]``: row of the call that launched row i, or -1;
    ``manifest``: the process groups in the run's manifest.
    """
    findings = Findings()
    around = Around(host, device, linked, parent)
    launchers = Launchers(device, around)
    groups = collect_groups(host, device, around, launchers.rows, np.flatnonzero(rows.gpu), manifest)
    items = [
        *_on_gpu(around, calls, np.flatnonzero(rows.gpu), rows.patterns, launchers, groups, findings),
        *_on_cpu(around, np.flatnonzero(rows.cpu), launchers, groups, findings),
    ]
    items = [_within_bounds(item) for item in items]
    items.sort(key=lambda item: (int(device.start[item.start_row]), item.event, item.part))
    items = _numbered(fill_from_period(items, device, findings))
    _unknown_kernels(device, rows, findings)
    for item in items:
        if item.is_message:
            findings.add("communication-peer", item.peer < 0)
        elif item.collective is None:
            findings.add("communication-kind", detail=device.names[device.name[item.event]][:60])
        findings.add("communication-size", not item.size and not item.is_local)
    return Communications(items, groups.by_name, findings)


def _unknown_kernels(device: DeviceTrace, rows: CommunicationRows, findings: Findings) -> None:
    """Warn of kernels of a run of several ranks that may communicate by their names, take much of the
    device's time and run beside the streams of known communication."""
    if not as_number(device.distributed.get("world_size"), 2) > 1:
        return
    kernels = np.flatnonzero(device.category == KERNEL)
    _, stream = coded_pairs(device.device[kernels], device.stream[kernels])
    kernels = kernels[~np.isin(stream, stream[rows.gpu[kernels]])]
    lasts = device.end - device.start
    total = int(lasts[device.category >= KERNEL].sum())
    of_name: dict[str, list[int]] = {}
    for code in unique(device.name[kernels]).tolist():
        name = device.names[code].removeprefix("void ").partition("<")[0].partition("(")[0]
        if MAY_COMMUNICATE.search(name) and not KNOWN_NAMESPACES.match(name):
            of_name.setdefault(name, []).append(code)
    for name, codes in of_name.items():
        own = kernels[np.isin(device.name[kernels], codes)]
        share = int(lasts[own].sum()) / max(total, 1)
        if share > LEAST_SHARE:
            findings.add("unknown-communication", len(own), f"{name[:60]} ({share:.0%} of the device's time)")


def _numbered(items: list[Communication]) -> list[Communication]:
    count: dict[str, int] = {}
    numbered = []
    for item in items:
        if not item.is_message:
            number = count[item.group.name] = count.get(item.group.name, -1) + 1
            item = replace(item, sequence=number)
        numbered.append(item)
    return numbered


def _within_bounds(item: Communication) -> Communication:
    """``item`` with an absurd size, peer or tag (from a damaged or hostile trace) set to not recorded."""
    return replace(
        item,
        size=item.size if 0 <= item.size <= MAX_BYTES else 0,
        peer=item.peer if -1 <= item.peer < MAX_RANKS else -1,
        tag=item.tag if abs(item.tag) < 2**31 else 0,
    )


# ---- device kernels ----


def _on_gpu(
    around: Around, calls: np.ndarray, rows: np.ndarray, patterns: dict[int, Pattern], launchers: Launchers,
    groups: Groups, findings: Findings,
) -> list[Communication]:  # fmt: skip
    device = around.device
    pending = Pending(around, launchers)
    # In launch order, as a batch of messages belongs to the kernel that is launched next.
    launched = np.where(calls[rows] >= 0, device.start[calls[rows]], -1)
    items: list[Communication] = []
    for row in rows[np.lexsort((device.start[rows], launched))].tolist():
        call = int(calls[row])
        chain = around.chain(call)
        own = around.facts([row])
        facts = own.over(around.facts(chain))
        pattern = patterns.get(int(device.name[row]))
        what = _operation(around, facts, chain, row, pattern)
        launch = next((at for at in chain if around.name(at).startswith(launchers.PREFIXES)), -1)
        api = around.name(launch) if launch >= 0 else around.name(row)
        is_nccl = pattern is None or pattern.library.startswith("NCCL")
        batch = pending.take(call, chain) if is_nccl else []
        messages = pending.messages(batch) if not isinstance(what, CollectiveType) else []
        if messages:
            items += [
                Communication(
                    event=row, launch=message.launch, type=message.type, collective=None, size=message.size,
                    group=(group := groups.of_message(message)), dtype=message.dtype,
                    peer=global_rank(message.peer, group), tag=message.tag, on_gpu=True,
                    storages=message.storages, api=around.name(message.launch), part=part,
                )
                for part, message in enumerate(messages)
            ]  # fmt: skip
            continue
        group = groups.of_kernel(row, facts, chain, findings)
        storages, size, dtype = _tensors(around, facts, chain, what)
        if not size and launch < 0:
            size = pending.bytes(batch, what)
        item = Communication(
            event=row, launch=launch, type=NodeType.COMM_COLL, collective=None, size=size, group=group,
            dtype=dtype, on_gpu=True, storages=storages, api=api,
        )  # fmt: skip
        if isinstance(what, CollectiveType):
            flag = _async_flag(around.values(launch))
            item = replace(item, collective=what, asynchronous=flag)
            if what is CollectiveType.BARRIER:
                item = replace(item, size=max(size, 1) if is_nccl else 1)
            elif what is CollectiveType.SCATTER:
                item = replace(item, is_root=bool(facts.in_elements))
        elif what is not None:
            item = replace(item, type=what, peer=_peer(around, facts, chain, what, group))
        items.append(item)
    return items


def _operation(
    around: Around, facts: Facts, chain: list[int], row: int, pattern: Pattern | None
) -> Operation | None:
    if pattern is not None and pattern.operation is not None:
        return pattern.operation
    named = [facts.collective, *(n for at in chain[:6] if (n := around.name(at)).startswith(OPERATOR_NAMES))]
    found = next((what for name in named if (what := operation_named(name)) is not None), None)
    if found is None and not (pattern is not None and pattern.ambiguous):
        found = operation_named(around.name(row)[:200])
    return found


def _tensors(
    around: Around, facts: Facts, chain: list[int], what: Operation | None
) -> tuple[frozenset[int], int, str]:
    """Storages, bytes and element type: as recorded, or else from the operators around the launch."""
    received = what is NodeType.COMM_RECV or (what is CollectiveType.SCATTER and not facts.in_elements)
    size, dtype = facts.bytes(received) or 0, facts.dtype
    storages: frozenset[int] = frozenset()
    for at in chain:
        found = around.tensors(at)
        name = around.name(at)
        if found and (name.startswith("nccl:") or name == "record_param_comms"):
            storages |= frozenset(storage for _, storage in found if storage >= 0)
            size = size or sum(each for each, _ in found)
            dtype = dtype or around.dtype(at)
    if not size:
        # An operator of another library, such as a custom all-reduce: use its first tensor.
        first = next((found for at in chain[:4] if (found := around.tensors(at))), [])
        size = first[0][0] if first else 0
    return storages, size, dtype


def _peer(around: Around, facts: Facts, chain: list[int], what: Operation, group: Group) -> int:
    peer = facts.target if what is NodeType.COMM_SEND else facts.source
    if peer is not None:
        return peer
    for at in chain:
        match = PEERS.search(around.name(at))
        if match:
            return global_rank(int(match[2]), group)
    return -1


# ---- CPU backends ----


def _on_cpu(
    around: Around, rows: np.ndarray, launchers: Launchers, groups: Groups, findings: Findings
) -> list[Communication]:
    launch_of = {row: launchers.last_before(row) for row in rows.tolist()}
    group_of = groups.of_backend(launch_of, findings)
    found = (_backend(around, row, launch, group_of[row]) for row, launch in launch_of.items())
    items = [item for item in found if item is not None]
    findings.add("communication-unfinished", sum(not item.ended for item in items))
    return items


def _backend(around: Around, row: int, launch: int, group: Group) -> Communication | None:
    """A CPU backend's operator, such as ``gloo:all_reduce``. ``launch``: row that started it, -1 for none."""
    api = around.name(launch) if launch >= 0 else around.name(row)
    what = operation_named(around.name(row))
    # The launcher has the requested operation: gloo runs a reduce-scatter as an all-reduce, for example.
    requested = operation_named(api)
    same_side = isinstance(requested, CollectiveType) == isinstance(what, CollectiveType)
    if what is None or (requested is not None and same_side):
        what = requested
    if what is None:
        return None
    own, arguments = around.tensors(row), around.tensors(launch)
    ended = _has_ended(around, row, launch)
    given = own if ended else around.given(launch)
    size = sum(each for each, _ in given)
    if not size and what is CollectiveType.SCATTER:
        size = arguments[0][0] if arguments else 0  # not the root: its output is the shard
    is_root = what is CollectiveType.SCATTER and (bool(own) if ended else len(arguments) > len(given))
    values = around.values(launch)
    item = Communication(
        event=row,
        launch=launch,
        type=NodeType.COMM_COLL,
        collective=None,
        size=1 if what is CollectiveType.BARRIER else size,
        group=group,
        dtype=around.dtype(row) or around.dtype(launch),
        api=api,
        storages=frozenset(storage for _, storage in (*own, *arguments) if storage >= 0),
        is_root=is_root,
        ended=ended,
    )
    if isinstance(what, CollectiveType):
        return replace(item, collective=what, asynchronous=_async_flag(values))
    peer, tag = message_ends(values)
    return replace(item, type=what, peer=global_rank(peer, group), tag=tag)


def _has_ended(around: Around, row: int, launch: int) -> bool:
    """Whether a CPU backend's operator ended before the recording stopped.

    PyTorch's observer writes an operator when it ends. gloo's worker frees those who wait for an operation
    before it ends its record, so on a busy machine the recording of the last step may stop in between.
    """
    rows = around.linked.host_row
    known = around.linked.how == "record-function id" and launch >= 0 and rows[launch] >= 0
    return not (known and rows[row] < 0)


def _async_flag(values: list[Any]) -> bool | None:
    """``async_op`` of a c10d operator, its only boolean argument; None if this version has none."""
    flags = [value for value in values if isinstance(value, bool)]
    return flags[-1] if flags else None
