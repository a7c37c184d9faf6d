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

from chakra_et.arrays import coded_pairs
from chakra_et.convert.graph.communication import (
    Communication,
    Communications,
    Group,
    Operation,
    Pattern,
    communication_names,
    operation_named,
)
from chakra_et.convert.graph.communication_arguments import (
    LAUNCHERS,
    RECEIVES,
    SENDS,
    Around,
    Facts,
    Pending,
    message_ends,
)
from chakra_et.convert.graph.groups import Groups
from chakra_et.convert.graph.timeline import named
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
    on_gpu = device.category == KERNEL
    used = set(np.unique(device.name[on_gpu]).tolist())
    names = [name if code in used else "" for code, name in enumerate(device.names)]
    patterns = communication_names(names, added_kernels)
    gpu = np.isin(device.name, list(patterns))
    gpu[list(device.communication)] = True
    cpu = named(device, lambda name: name.startswith(BACKEND_NAMES)) & (device.category < KERNEL)
    return CommunicationRows(cpu, gpu & on_gpu, patterns)


def describe(
    host: HostTrace, device: DeviceTrace, linked: np.ndarray, parent: np.ndarray, calls: np.ndarray,
    rows: CommunicationRows, manifest: Sequence[dict[str, Any]] = (),
) -> Communications:  # fmt: skip
    """Identify each communication event.

    ``parent``: nesting of the timeline; ``calls[i]``: row of the call that launched row i, or -1;
    ``manifest``: the process groups in the run's manifest.
    """
    findings = Findings()
    around = Around(host, device, linked, parent)
    groups = Groups(around, np.flatnonzero(rows.gpu), manifest)
    items = _on_gpu(around, calls, rows, groups, findings)
    for row, launch, group in groups.of_backend(np.flatnonzero(rows.cpu), findings):
        item = _on_cpu(around, row, launch, group)
        if item is not None:
            items.append(item)
    # An absurd size, peer or tag (from a damaged or hostile trace) is not recorded.
    items = [
        replace(
            item,
            size=item.size if 0 <= item.size <= MAX_BYTES else 0,
            peer=item.peer if -1 <= item.peer < MAX_RANKS else -1,
            tag=item.tag if abs(item.tag) < 2**31 else 0,
        )
        for item in items
    ]
    start = device.start
    items.sort(key=lambda i: (int(start[i.launch if i.launch >= 0 else i.event]), i.event, i.part))
    for name, sizes in groups.buckets.items():
        _fill_from_buckets(items, around, name, sizes)
    _fill_from_period(items, device, findings)
    _warn_of_unknown_kernels(device, rows, findings)
    count: dict[str, int] = {}
    for at, item in enumerate(items):
        if item.is_message:
            findings.add("communication-peer", item.peer < 0)
        else:
            number = count[item.group.name] = count.get(item.group.name, -1) + 1
            items[at] = replace(item, sequence=number)
            if item.collective is None:
                findings.add("communication-kind", detail=device.names[device.name[item.event]][:60])
        findings.add("communication-size", not item.size and not item.is_local)
    return Communications(items, groups.by_name, findings)


def _warn_of_unknown_kernels(device: DeviceTrace, rows: CommunicationRows, findings: Findings) -> None:
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
    for code in np.unique(device.name[kernels]).tolist():
        name = device.names[code].removeprefix("void ").partition("<")[0].partition("(")[0]
        if MAY_COMMUNICATE.search(name) and not KNOWN_NAMESPACES.match(name):
            of_name.setdefault(name, []).append(code)
    for name, codes in of_name.items():
        own = kernels[np.isin(device.name[kernels], codes)]
        share = int(lasts[own].sum()) / max(total, 1)
        if share > LEAST_SHARE:
            findings.add("unknown-communication", len(own), f"{name[:60]} ({share:.0%} of the device's time)")


def _on_gpu(
    around: Around, calls: np.ndarray, found: CommunicationRows, groups: Groups, findings: Findings
) -> list[Communication]:
    device, rows = around.device, np.flatnonzero(found.gpu)
    pending = Pending(around)
    # In launch order, as a batch of messages belongs to the kernel that is launched next.
    launched = np.where(calls[rows] >= 0, device.start[calls[rows]], -1)
    items: list[Communication] = []
    for row in rows[np.lexsort((device.start[rows], launched))].tolist():
        call = int(calls[row])
        chain = around.chain(call)
        facts = around.facts([row, *chain])
        pattern = found.patterns.get(int(device.name[row]))
        if pattern is not None and pattern.operation is not None:
            what: Operation | None = pattern.operation
        else:
            above = (around.name(at) for at in chain[:6])
            texts = [facts.collective, *(name for name in above if name.startswith(OPERATOR_NAMES))]
            if pattern is None or not pattern.ambiguous:
                texts.append(around.name(row)[:200])
            what = next((each for text in texts if (each := operation_named(text)) is not None), None)
        launch = next((at for at in chain if around.name(at).startswith(LAUNCHERS)), -1)
        is_nccl = pattern is None or pattern.library.startswith("NCCL")
        batch = pending.take(call, chain) if is_nccl else []
        messages = [at for at in batch if around.name(at) in (*SENDS, *RECEIVES)]
        if messages and not isinstance(what, CollectiveType):
            items += [_message(around, pending, groups, row, at, part) for part, at in enumerate(messages)]
            continue
        group = groups.of_kernel(row, facts, chain, findings)
        storages, size, dtype = _tensors(around, facts, chain, what)
        if not size and launch < 0:
            size = pending.bytes(batch, what)
        item = Communication(
            event=row, launch=launch, type=NodeType.COMM_COLL, collective=None, size=size, group=group,
            dtype=dtype, on_gpu=True, storages=storages, api=around.name(launch if launch >= 0 else row),
        )  # fmt: skip
        if isinstance(what, CollectiveType):
            if what is CollectiveType.BARRIER:
                size = max(size, 1) if is_nccl else 1
            item = _collective(around, replace(item, size=size), what, facts)
        elif what is not None:
            peer = facts.target if what is NodeType.COMM_SEND else facts.source
            if peer is None:
                matches = (PEERS.search(around.name(at)) for at in chain)
                peer = next((group.global_rank(int(match[2])) for match in matches if match), -1)
            item = replace(item, type=what, peer=peer)
        items.append(item)
    return items


def _message(
    around: Around, pending: Pending, groups: Groups, event: int, launch: int, part: int
) -> Communication:
    """One send or receive of a kernel. ``launch``: row of its operator."""
    is_send = around.name(launch) in SENDS
    facts, tensors = pending.facts(launch), around.tensors(launch)
    peer, tag = message_ends(around.values(launch))
    group = groups.by_name.get(facts.group) or groups.of_launcher.get(launch) or groups.default
    return Communication(
        event=event,
        launch=launch,
        type=NodeType.COMM_SEND if is_send else NodeType.COMM_RECV,
        collective=None,
        size=facts.bytes(received=not is_send) or sum(each for each, _ in tensors),
        group=group,
        dtype=facts.dtype or around.dtype(launch),
        peer=group.global_rank(peer),
        tag=tag,
        on_gpu=True,
        storages=frozenset(storage for _, storage in tensors if storage >= 0),
        api=around.name(launch),
        part=part,
    )


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


def _collective(around: Around, item: Communication, what: CollectiveType, facts: Facts) -> Communication:
    """``item`` as this collective, with what its launcher tells: ``async_op`` is a c10d operator's only
    boolean argument, which some versions lack."""
    flags = [value for value in around.values(item.launch) if isinstance(value, bool)]
    sent, got = around.splits(item.launch, facts) if what is CollectiveType.ALL_TO_ALL else ("", "")
    flag = flags[-1] if flags else None
    return replace(item, collective=what, asynchronous=flag, in_split=sent, out_split=got)


def _fill_from_buckets(items: list[Communication], around: Around, group: str, sizes: list[int]) -> None:
    """Give the all-reduces that DDP's C++ calls the ``sizes`` of its buckets, one after the other, in place
    of what those of the structure step had, when there were other buckets; none where the numbers don't
    fit."""
    own = []
    for at, item in enumerate(items):
        callers = [around.name(row) for row in around.chain(item.launch)]
        by_name = item.launch in around.marks or any(name.startswith(LAUNCHERS[1]) for name in callers)
        if (item.group.name, item.api) == (group, "c10d::allreduce_") and not by_name:
            own.append(at)
    fits = sizes and not len(own) % len(sizes) and all(type(n) is int and 0 < n <= MAX_BYTES for n in sizes)
    sizes = sizes if fits else [0]
    for number, at in enumerate(own):
        if items[at].collective is CollectiveType.ALL_REDUCE:  # not of sparse gradients
            items[at] = replace(items[at], size=sizes[number % len(sizes)])


def _fill_from_period(items: list[Communication], device: DeviceTrace, findings: Findings) -> None:
    """Infer type and size of kernels that were launched before the recording began, with a warning each.

    Training repeats the same communication in every step: if the recorded sequence on a communicator's stream
    is periodic, so were the kernels before it.
    """
    streams: dict[tuple[int, int], list[int]] = {}
    for index, item in enumerate(items):
        if item.on_gpu:
            key = int(device.device[item.event]), int(device.stream[item.event])
            streams.setdefault(key, []).append(index)
    for indices in streams.values():
        indices.sort(key=lambda index: (int(device.start[items[index].event]), items[index].part))
        known = [_is_named(items[index]) and items[index].size > 0 for index in indices]
        first = known.index(True) if True in known else 0
        if not first or not all(known[first:]):
            continue
        following = [items[index] for index in indices[first:]]
        kinds = [_kind(item) for item in following]
        # The shortest one that occurs at least twice.
        halves = range(1, len(kinds) // 2 + 1)
        period = next((period for period in halves if kinds[period:] == kinds[:-period]), 0)
        for back, index in enumerate(reversed(indices[:first]), 1):
            item = items[index]
            if period:
                like = following[-back % period]
            elif len({kind[:2] for kind in kinds}) == 1:
                like = replace(following[0], size=0)
            else:
                break
            if _is_named(item) and _kind(item)[:2] != _kind(like)[:2]:
                break
            findings.add("communication-inferred")
            items[index] = replace(
                item, type=like.type, collective=like.collective, size=like.size, group=like.group,
                dtype=like.dtype, peer=like.peer, tag=like.tag,
            )  # fmt: skip


def _is_named(item: Communication) -> bool:
    return item.is_message or item.collective is not None


def _kind(item: Communication) -> tuple[object, ...]:
    return item.type, item.collective, item.size, item.group.name, item.dtype, item.peer


def _on_cpu(around: Around, row: int, launch: int, group: Group) -> Communication | None:
    """A CPU backend's operator, such as ``gloo:all_reduce``. ``launch``: row that started it, -1 for none."""
    api = around.name(launch if launch >= 0 else row)
    # The launcher has the requested operation: gloo runs a reduce-scatter as an all-reduce, for example.
    what, requested = operation_named(around.name(row)), operation_named(api)
    if what is None or type(requested) is type(what):
        what = requested
    if what is CollectiveType.ALL_REDUCE and around.is_sparse(launch, row):
        what = CollectiveType.ALL_GATHER  # of indices and values, as many as each rank has
    if what is None:
        return None
    own, arguments = around.tensors(row), around.tensors(launch)
    # The host trace lacks what had not ended when its recording stopped, and what other steps do.
    given, (_, marked) = own or around.given(launch), around.marks.get(launch, ("", 0))
    size = (marked if not own else 0) or sum(each for each, _ in given)
    item = Communication(
        event=row,
        launch=launch,
        type=NodeType.COMM_COLL,
        collective=None,
        size=1 if what is CollectiveType.BARRIER or (given and not size) else size,
        group=group,
        dtype=around.dtype(row) or around.dtype(launch),
        api=api,
        storages=frozenset(storage for _, storage in (*own, *arguments) if storage >= 0),
    )
    if isinstance(what, CollectiveType):
        return _collective(around, item, what, Facts())
    peer, tag = message_ends(around.values(launch))
    peer = around.sources.get(launch, peer)
    return replace(item, type=what, peer=group.global_rank(peer), tag=tag)
