"""The recorded facts of a communication: the kernel's arguments, and the operators around its launch."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from chakra_et.convert.graph.link import Link
from chakra_et.et.element_types import item_bytes
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import Args
from chakra_et.traces.fields import as_number
from chakra_et.traces.host import HostTrace, tensors


@dataclass(frozen=True)
class Facts:
    """Fields of NCCL's metadata; None or empty if not recorded. ``ranks``: the members of the group."""

    collective: str = ""
    dtype: str = ""
    in_elements: int | None = None
    out_elements: int | None = None
    group: str | None = None
    description: str = ""
    ranks: Any = None
    source: int | None = None
    target: int | None = None

    def over(self, other: Facts) -> Facts:
        """These facts; missing ones are taken from ``other``."""
        empty = (None, "")
        mine = {name: value for name, value in vars(self).items() if value not in empty}
        return replace(other, **mine)

    def bytes(self, received: bool) -> int | None:
        """Bytes that this rank contributes, or receives with ``received``; None if not recorded."""
        elements = self.out_elements if received else self.in_elements
        each = item_bytes(self.dtype)
        return elements * each if elements is not None and each else None


def facts_of(args: Args | None, attributes: dict[str, Any]) -> Facts:
    """The facts in Kineto's arguments and the host trace's attributes of an event; the former win."""
    recorded = Facts(
        collective=str(attributes.get("collective_name") or ""),
        dtype=str(attributes.get("dtype") or ""),
        in_elements=_count(attributes.get("in_msg_nelems")),
        out_elements=_count(attributes.get("out_msg_nelems")),
        group=str(attributes["pg_name"]) if attributes.get("pg_name") not in (None, "") else None,
        description=str(attributes.get("pg_desc") or ""),
    )
    if args is None:
        return recorded
    return Facts(
        collective=str(args.collective or ""),
        dtype=str(args.dtype or ""),
        in_elements=_count(args.in_elements),
        out_elements=_count(args.out_elements),
        group=str(args.group_name) if args.group_name not in (None, "") else None,
        description=str(args.group_description or ""),
        ranks=args.group_ranks,
        source=_rank(args.source_rank),
        target=_rank(args.target_rank),
    ).over(recorded)


def _count(value: Any) -> int | None:
    number = as_number(value, -1)
    return int(number) if number >= 0 else None


def _rank(value: Any) -> int | None:
    number = as_number(value, -1)
    return int(number) if number >= 0 else None


class Around:
    """Access to the operators around an event, and to their arguments."""

    def __init__(self, host: HostTrace, device: DeviceTrace, linked: Link, parent: np.ndarray) -> None:
        self.host, self.device, self.linked, self._parent = host, device, linked, parent

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
        """The merged facts of ``rows``; earlier rows win."""
        found = Facts()
        for row in rows:
            host_row = int(self.linked.host_row[row])
            attributes = self.host.communication.get(host_row, {}) if host_row >= 0 else {}
            args = self.device.communication.get(row)
            if args is not None or attributes:
                found = found.over(facts_of(args, attributes))
        return found

    def values(self, row: int) -> list[Any]:
        """The operator's arguments. Kineto writes scalars as JSON in strings, which are decoded."""
        host_row = int(self.linked.host_row[row]) if row >= 0 else -1
        try:
            values = msgspec.json.decode(self.host.inputs[0][host_row]) if host_row >= 0 else []
        except (msgspec.DecodeError, ValueError, RecursionError):
            return []
        if not isinstance(values, list):
            return []
        if self.host.recorded:
            return values
        return [_scalar(value) for value in values]

    def tensors(self, row: int) -> list[tuple[int, int]]:
        """(bytes, storage or -1) of each tensor among the operator's arguments."""
        host_row = int(self.linked.host_row[row]) if row >= 0 else -1
        if host_row < 0:
            return []
        if self.host.recorded:
            found = tensors(self.host.inputs[0][host_row])
            return [(count * each, storage) for storage, count, each in found]
        shapes, types = self.host.inputs[1][host_row], self.host.inputs[2][host_row]
        return [(size, -1) for size in shape_bytes(shapes, types)]

    def given(self, row: int) -> list[tuple[int, int]]:
        """As ``tensors``, for what a ``c10d`` operator sends: the last of its lists of tensors, as a list of
        outputs comes before that of inputs."""
        host_row = int(self.linked.host_row[row]) if row >= 0 else -1
        if host_row < 0 or not self.host.recorded:
            return self.tensors(row)
        found: list[tuple[int, int]] = []
        with contextlib.suppress(msgspec.DecodeError):
            for argument in msgspec.json.decode(self.host.inputs[0][host_row], type=list[msgspec.Raw]):
                if not bytes(argument).lstrip().startswith(b"["):
                    break  # the process group, and options that may have tensors
                listed = [(count * each, storage) for storage, count, each in tensors(bytes(argument))]
                found = listed or found
        return found

    def members(self, row: int) -> int:
        """The size of the group of a ``c10d`` all-gather or reduce-scatter, by how much larger one side is
        than the other; 0 for other operators and if the shapes are not recorded."""
        host_row = int(self.linked.host_row[row]) if row >= 0 else -1
        letters = self.name(row).replace("_", "") if host_row >= 0 else ""
        if not letters.startswith(("c10d::allgather", "c10d::reducescatter")):
            return 0
        try:
            output, given = map(_elements, msgspec.json.decode(self.host.inputs[1][host_row])[:2])
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError):
            return 0
        whole, part = (given, output) if "reduce" in letters else (output, given)
        return whole // part if part and whole % part == 0 else 0

    def dtype(self, row: int) -> str:
        """The element type of the operator's first tensor, "" if it has none."""
        host_row = int(self.linked.host_row[row]) if row >= 0 else -1
        match = re.search(rb"Tensor\(([^)\[,]*)", self.host.inputs[2][host_row]) if host_row >= 0 else None
        return match.group(1).decode("utf-8", "replace") if match else ""


def _elements(dims: list[Any]) -> int:
    """The elements of a tensor or of all tensors of a list, from shapes."""
    if all(type(n) is int and 0 <= n < 1 << 40 for n in dims):
        return math.prod(dims)
    return sum(map(_elements, dims))


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
        dims, kinds = msgspec.json.decode(shapes), msgspec.json.decode(types)
    except (msgspec.DecodeError, RecursionError):
        return ()
    if not isinstance(dims, list) or not isinstance(kinds, list):
        return ()
    found = []
    for shape, kind in zip(dims, kinds, strict=False):
        match = re.fullmatch(r"Tensor\((.*)\)", str(kind))
        each = item_bytes(match[1]) if match else 0
        if each and isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
            found.append(math.prod(shape) * each)
    return tuple(found)


def message_ends(values: list[Any]) -> tuple[int, int]:
    """Peer (rank in the group) and tag of ``c10d::send`` and ``recv_``, their last two arguments; -1 and 0 if
    not recorded."""
    peer, tag = values[-2:] if len(values) > 1 else (None, None)
    return (peer, tag) if type(peer) is int and type(tag) is int else (-1, 0)
