"""The recorded facts of a communication: the kernel's arguments, and the operators around its launch."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from chakra_et.arrays import rows_by_value
from chakra_et.convert.graph.communication import Operation, operation_named
from chakra_et.convert.graph.timeline import named
from chakra_et.cost.operator_work import shaped_tensors
from chakra_et.et.columns import CollectiveType, item_bytes
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import KERNEL
from chakra_et.traces.fields import as_number
from chakra_et.traces.host import HostTrace, tensors

LAUNCHERS = ("c10d::", "_c10d_functional")
"""Prefixes of operators that start communication."""
GROUP_MARK = re.compile(r"process_group:(.*?)(?: \((\d+) bytes\))?")
"""Our tracer's annotation around a call of a process group: its name, and what the rank sends."""
SOURCE_MARK = re.compile(r"process_group:source (\d+)")
# By gloo.
_RUN_AS: dict[Any, Operation] = {CollectiveType.REDUCE_SCATTER: CollectiveType.ALL_REDUCE}
RECENT = 64  # more operations don't wait for a thread of their backend
# Functional operators that only pass on or wait for a result.
_NOT_LAUNCHERS = ("wait_tensor", "_wrap_tensor_autograd")
SENDS = ("c10d::send",)
RECEIVES = ("c10d::recv_", "c10d::recv_any_source_")


@dataclass(frozen=True)
class Facts:
    """Fields of NCCL's metadata; None or empty if not recorded. ``in_split`` and ``out_split``: rows (of the
    first dimension) that an all-to-all sends to and gets from each member, as a JSON list; "" for equal ones.
    """

    collective: str = ""
    dtype: str = ""
    in_elements: int | None = None
    out_elements: int | None = None
    group: str = ""
    in_split: str = ""
    out_split: str = ""
    source: int | None = None
    target: int | None = None

    def over(self, other: Facts) -> Facts:
        """These facts; missing ones are taken from ``other``."""
        mine = {name: value for name, value in vars(self).items() if value not in (None, "")}
        return replace(other, **mine)

    def bytes(self, received: bool) -> int | None:
        """Bytes that this rank contributes, or receives with ``received``; None if not recorded."""
        elements = self.out_elements if received else self.in_elements
        each = item_bytes(self.dtype)
        return elements * each if elements is not None and each else None


# Their names in Kineto's arguments and in the host trace's attributes, which lack the last two.
_IN_DEVICE = (
    *("collective", "dtype", "in_elements", "out_elements", "group_name", "in_split", "out_split"),
    *("source_rank", "target_rank"),
)
_IN_HOST = (
    *("collective_name", "dtype", "in_msg_nelems", "out_msg_nelems", "pg_name"),
    *("in_split_size", "out_split_size"),
)


def split_text(value: Any) -> str:
    """A recorded list of rows per member, as JSON text; "" for none."""
    numbers = _scalar(value)
    if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
        return ""
    return str(numbers).replace(" ", "") if numbers else ""


def _whole(value: Any) -> int | None:
    number = as_number(value, -1)
    return int(number) if number >= 0 else None


def _text(value: Any) -> str:
    return "" if value is None else str(value)


_AS_FACTS = (_text, _text, _whole, _whole, _text, split_text, split_text, _whole, _whole)
"""What makes a recorded value a fact, in the order of ``Facts``."""


def _facts(values: Iterable[Any]) -> Facts:
    facts: Iterable[Any] = (of(value) for of, value in zip(_AS_FACTS, values, strict=False))
    return Facts(*facts)


class Around:
    """Access to the operators around an event, and to their arguments. ``launchers``: the rows of the
    operators that start communication, by time; ``marks``, ``sources``: see the functions."""

    def __init__(self, host: HostTrace, device: DeviceTrace, linked: np.ndarray, parent: np.ndarray) -> None:
        self.host, self.device, self.linked, self._parent = host, device, np.append(linked, -1), parent
        self.launchers, self.marks, self.sources = launchers(device), marks(device), sources(device)

    def chain(self, row: int) -> list[int]:
        """``row`` and the events around it, innermost first."""
        found = []
        while row >= 0:
            found.append(row)
            row = int(self._parent[row])
        return found

    def name(self, row: int) -> str:
        """The name of an event."""
        return self.device.names[int(self.device.name[row])]

    def facts(self, rows: Iterable[int]) -> Facts:
        """Facts of ``rows``, merged: Kineto's arguments before host attributes, earlier rows first."""
        found = Facts()
        for row in rows:
            if (args := self.device.communication.get(row)) is not None:
                found = found.over(_facts(getattr(args, name) for name in _IN_DEVICE))
            if attributes := self.host.communication.get(int(self.linked[row])):
                found = found.over(_facts(map(attributes.get, _IN_HOST)))
        return found

    def _text(self, row: int, which: int) -> bytes:
        """The operator's values (0), shapes (1) or types (2), as JSON."""
        host_row = int(self.linked[row])
        return self.host.inputs[which][host_row] if host_row >= 0 else b"[]"

    def values(self, row: int) -> list[Any]:
        """The operator's arguments. Kineto writes scalars as JSON in strings, which are decoded."""
        try:
            values = msgspec.json.decode(self._text(row, 0), type=list[Any])
        except (ValueError, RecursionError):
            return []
        return values if self.host.recorded else [_scalar(value) for value in values]

    def tensors(self, row: int) -> list[tuple[int, int]]:
        """(bytes, storage or -1) of each tensor among the operator's arguments."""
        if self.host.recorded:
            return _sizes(self._text(row, 0))
        return [(size, -1) for size in shape_bytes(self._text(row, 1), self._text(row, 2))]

    def given(self, row: int) -> list[tuple[int, int]]:
        """As ``tensors``, for what a ``c10d`` operator sends: the last of its lists of tensors, as a list of
        outputs comes before that of inputs."""
        if not self.host.recorded:
            return self.tensors(row)
        found: list[tuple[int, int]] = []
        with contextlib.suppress(msgspec.DecodeError):
            for argument in msgspec.json.decode(self._text(row, 0), type=list[msgspec.Raw]):
                if not bytes(argument).lstrip().startswith(b"["):
                    break  # the process group, and options that may have tensors
                found = _sizes(bytes(argument)) or found
        return found

    def is_sparse(self, launch: int, row: int) -> bool:
        """Whether a collective is of sparse tensors, of which no storage is recorded; without a record of
        its launcher by the backend's name for it."""
        found = tensors(self._text(launch, 0))
        return not any(each for _, _, each in found) if found else "sparse" in self.name(row)

    def splits(self, row: int, facts: Facts) -> tuple[str, str]:
        """``Facts.in_split`` and ``out_split``, or the operator's arguments, which have the output first."""
        if facts.in_split or facts.out_split or row < 0:
            return facts.in_split, facts.out_split
        given = [
            text for value in self.values(row) if isinstance(value, list) and (text := split_text(value))
        ]
        single = re.search(r"alltoall_base|all_to_all_single", self.name(row))
        return (given[1], given[0]) if single and len(given) == 2 else ("", "")

    def dtype(self, row: int) -> str:
        """The element type of the operator's first tensor, "" if it has none."""
        match = re.search(rb"Tensor\(([^)\[,]*)", self._text(row, 2))
        return match.group(1).decode("utf-8", "replace") if match else ""


def _sizes(values: bytes) -> list[tuple[int, int]]:
    # Of a sparse tensor no storage is recorded, and elements of 0 bytes.
    return [(count * each, storage) for storage, count, each in tensors(values) if each]


def _scalar(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


@functools.lru_cache(maxsize=65536)
def shape_bytes(shapes: bytes, types: bytes) -> tuple[int, ...]:
    """Bytes of each tensor, from the JSON texts of an operator's shapes and types."""
    try:
        dims, kinds = (msgspec.json.decode(text, type=list[Any]) for text in (shapes, types))
    except (msgspec.DecodeError, RecursionError):
        return ()
    return tuple(math.prod(shape) * each for shape, each in shaped_tensors(dims, kinds))


def message_ends(values: list[Any]) -> tuple[int, int]:
    """Peer (rank in the group) and tag of ``c10d::send`` and ``recv_``, their last two arguments; -1 and 0 if
    not recorded, as the peer of a receive from any rank."""
    peer, tag = values[-2:] if len(values) > 1 else (None, None)
    return peer if type(peer) is int else -1, tag if type(tag) is int else 0


def launchers(device: DeviceTrace) -> np.ndarray:
    """The rows of the operators that start communication, by time."""
    starts = named(device, lambda name: name.startswith(LAUNCHERS) and not name.endswith(_NOT_LAUNCHERS))
    return np.flatnonzero(starts & (device.category < KERNEL))


def marks(device: DeviceTrace) -> dict[int, tuple[str, int]]:
    """Launcher → its group and the bytes it sends (0: not recorded), by our tracer's annotation around it.

    It may call itself once more, after a wait for a tensor that another collective is still making.
    """
    on_thread = np.argsort(device.thread, kind="stable")
    at = np.flatnonzero(named(device, GROUP_MARK.fullmatch)[on_thread])
    starts = np.flatnonzero(np.isin(on_thread, launchers(device)))
    before = np.append(on_thread[at], -1)[np.searchsorted(at, starts) - 1]
    found = {}
    for row, mark in zip(on_thread[starts].tolist(), before.tolist(), strict=True):
        is_inside = device.thread[mark] == device.thread[row] and device.start[row] <= device.end[mark]
        if mark >= 0 and is_inside and (of := GROUP_MARK.fullmatch(device.names[device.name[mark]])):
            found[row] = of[1], int(of[2] or 0)
    return found


def sources(device: DeviceTrace) -> dict[int, int]:
    """Receive from any rank → the rank in its group that it was of, by our tracer's annotation behind it."""
    receives = np.flatnonzero(named(device, lambda name: name == RECEIVES[1]))
    found: dict[int, int] = {}
    for at in np.flatnonzero(named(device, SOURCE_MARK.fullmatch)).tolist():
        own = receives[(device.thread[receives] == device.thread[at]) & (receives < at)]
        rank = SOURCE_MARK.fullmatch(device.names[device.name[at]])
        found |= {row: int(rank[1]) for row in own[-1:].tolist() if rank}
    return found


def started_by(
    device: DeviceTrace, rows: np.ndarray, group_of: Mapping[int, str], marked: Mapping[int, tuple[str, int]]
) -> np.ndarray:
    """int64[rows of the trace]: for ``rows``, operations on the threads of a CPU backend, the row of the
    launcher; -1 for none and for all others.

    That is the last one before it by record-function ids. Without these ids it is the last ``c10d`` operator
    of the group that its thread has in ``group_of``: if possible one that has no operation yet, of its kind.
    """
    starts, known = launchers(device), device.rf_id[rows] > 0
    by_id = starts[np.argsort(device.rf_id[starts], kind="stable")]
    at = np.searchsorted(device.rf_id[by_id], device.rf_id[rows[known]]) - 1
    found = np.full(len(device.name), -1)
    found[rows[known]] = np.append(by_id, -1)[at]
    is_c10d = named(device, lambda name: name.startswith(LAUNCHERS[0]))
    calls = np.setdiff1d(starts[is_c10d[starts]], found).tolist()
    kinds = {at: operation_named(device.names[device.name[at]]) for at in (*calls, *rows.tolist())}
    kinds = {at: _RUN_AS.get(kind, kind) for at, kind in kinds.items()}
    free, queues = set(calls), dict[tuple[str, Operation | None], list[int]]()
    for row in rows[~known].tolist():
        own, until = group_of.get(int(device.thread[row]), ""), bisect(calls, row)
        recent = calls[max(until - RECENT, 0) : until]
        fits = [at for at in recent if not own or marked.get(at, ("", 0))[0] in ("", own)]
        if fits:
            found[row] = max(fits, key=lambda at: (at in free and kinds[at] is kinds[row], at in free, at))
            free.discard(int(found[row]))
            queues.setdefault((own, kinds[row]), []).append(row)
    for queue in queues.values():  # first in, first out
        found[queue] = np.sort(found[queue])
    return found


class Pending:
    """The communication operators of each thread that no kernel has executed yet.

    NCCL runs a batch of sends and receives (``batch_isend_irecv``, pipelines) as one kernel, which is
    launched at the end of the batch and has no metadata (mlcommons/chakra#178). Its messages are the
    operators that the same thread has called since the previous such kernel.
    """

    def __init__(self, around: Around) -> None:
        self._around, device = around, around.device
        self._recorded: dict[int, int] = {}
        of_c10d = named(device, lambda name: name.startswith("c10d::"))[around.launchers]
        self._waiting = rows_by_value(device.thread, around.launchers[of_c10d])
        records = named(device, lambda name: name == "record_param_comms")
        for row in np.flatnonzero(records).tolist() if self._waiting else ():
            for outer in around.chain(row):
                self._recorded.setdefault(outer, row)

    def take(self, call: int, chain: list[int]) -> list[int]:
        """The operators of the kernel that ``call`` launches, in time order; they are no longer pending.

        A kernel launched inside an operator (in ``chain``, the events around ``call``) executes only that.
        """
        if call < 0:
            return []
        device = self._around.device
        thread = int(device.thread[call])
        waiting = self._waiting.get(thread, self._around.launchers[:0])
        until = np.searchsorted(device.start[waiting], device.start[call], side="right")
        before, self._waiting[thread] = waiting[:until].tolist(), waiting[until:]
        return [row for row in before if row in chain][-1:] or before

    def facts(self, row: int) -> Facts:
        """The facts of a pending operator."""
        return self._around.facts([row, self._recorded.get(row, row)])

    def bytes(self, rows: list[int], what: Operation | None) -> int:
        """Total bytes that the operators of type ``what`` among ``rows`` contribute."""
        around = self._around
        return sum(
            self.facts(row).bytes(received=False) or sum(each for each, _ in around.tensors(row))
            for row in rows
            if operation_named(around.name(row)) is what
        )
