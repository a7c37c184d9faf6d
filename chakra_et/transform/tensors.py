"""Another batch or other sequences: the shapes of tensors, operations, times and bytes that follow from them.

Batch and sequence are read from the look-up of tokens (``aten::embedding`` with indices of two dimensions).
Which sizes of which tensors they are is told by value: tensors with a parameter's shape stay, of all others
the sizes batch × sequence, batch × heads, batch (the leftmost one) and sequence change.

Assumed, and said in the notes: an operator's time follows its operations (see ``operator_work``), but for
what one without work takes; control flow stays.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import has, set_integers, texts
from chakra_et.job.gradients import Retime
from chakra_et.job.operators import GRADIENT, Operators, Shape, shapes_in, with_shapes
from chakra_et.transform.operator_times import idle_ns, resized_times, work_ratios

_LISTED = re.compile(r"aten::_(foreach|fused)_")


@dataclass(frozen=True)
class Tokens:
    """Sequences of a rank in one pass, and tokens of a sequence."""

    batch: int
    sequence: int


@dataclass(frozen=True)
class Sizes:
    """What is known of the sizes in a set. ``parameters``: their shapes; ``tables``: those that tokens or
    places are looked up in; ``heads``: of attention, and the ``width`` of one, 0 where not seen."""

    tokens: Tokens
    parameters: frozenset[Shape]
    tables: frozenset[Shape]
    heads: int
    width: int


def find_sizes(of_rank: Mapping[int, Operators], where: str) -> Sizes:
    """Raises ``TraceError``, naming what was looked for, where batch and sequence aren't recognised."""
    looked: Counter[Shape] = Counter()
    parameters: set[Shape] = set()
    tables: set[Shape] = set()
    shapes: Counter[Shape] = Counter()
    for operators in of_rank.values():
        for row in range(len(operators.name)):
            name = operators.name[row]
            if name == "aten::embedding":
                found = operators.shapes(row)
                if len(found) > 1 and len(found[1]) == 2:
                    looked[found[1]] += found[0][0]  # the largest table is that of tokens
                tables |= set(found[:1])
            elif name == GRADIENT:
                parameters |= set(operators.shapes(row)[:1])
            elif name.startswith("aten::"):
                shapes.update(shape for shape in operators.shapes(row) if len(shape) == 4)
    if not looked:
        raise TraceError(
            f"{where}: batch and sequence weren't recognised: no aten::embedding looks up indices of two "
            "dimensions (batch × sequence)"
        )
    if not any(len(shape) > 1 for shape in parameters):
        raise TraceError(
            f"{where}: the model's parameters weren't recognised: no {GRADIENT} has a recorded shape"
        )
    batch, sequence = looked.most_common(1)[0][0]
    # (batch, heads, tokens, width), (batch, tokens, heads, width) or (tokens, batch, heads, width)
    heads = Counter(
        (shape[at], shape[3])
        for shape in shapes.elements()
        for at in (1, 2)
        if (shape[0], shape[3 - at]) == (batch, sequence) or (at == 2 and shape[:2] == (sequence, batch))
    )
    several, width = next((pair for pair, _ in heads.most_common() if pair[0] != sequence), (0, 0))
    return Sizes(Tokens(batch, sequence), frozenset(parameters | tables), frozenset(tables), several, width)


class Resizing:
    """From one batch and sequence to another. Raises ``TraceError`` where their sizes can't be told from
    others."""

    def __init__(self, sizes: Sizes, new: Tokens, where: str):
        self.sizes, self.new = sizes, new
        old = sizes.tokens
        changes: dict[int, str] = {}
        if new.batch != old.batch:
            changes |= {old.batch: f"a batch of {old.batch}"}
        if new.sequence != old.sequence:
            changes |= {old.sequence: f"a sequence of {old.sequence}"}
        if changes:
            changes |= {old.batch * old.sequence: f"{old.batch} × {old.sequence} tokens"}
        if old.batch == old.sequence:
            raise TraceError(f"{where}: batch and sequence are both {old.batch}: capture different ones")
        # The leftmost size that equals the batch is the batch; a table's length is no size of a layer.
        widths = {size for shape in sizes.parameters - sizes.tables for size in shape}
        widths |= {size for shape in sizes.tables for size in shape[1:]}
        widths = (widths | {sizes.heads, sizes.width}) - {old.batch, 0}
        for size, what in changes.items():
            if size in widths or size == 1:
                raise TraceError(
                    f"{where}: {what} can't be told from another size {size} of the model: capture with "
                    "sizes that differ from all of the model's"
                )
        self.kept = sizes.parameters | {shape[::-1] for shape in sizes.parameters}
        joined = {old.batch * (old.sequence + off): new.batch * (new.sequence + off) for off in (0, 1, -1)}
        if sizes.heads:
            joined[old.batch * sizes.heads] = new.batch * sizes.heads
            joined[old.batch * sizes.heads * old.sequence] = new.batch * sizes.heads * new.sequence
        joined.pop(old.sequence, None)
        by_length = {old.sequence + off: new.sequence + off for off in (0, 1, -1)}
        # Products and neighbours of sizes that are also a size of the model are that.
        self.joined = {size: other for size, other in joined.items() if size not in widths}
        self.by_length = {size: other for size, other in by_length.items() if size not in widths}

    def shape(self, shape: Shape) -> Shape:
        """The new shape of a tensor."""
        if shape in self.kept:
            return shape
        old, new, heads = self.sizes.tokens, self.new, self.sizes.heads
        joined, by_length = self.joined, self.by_length
        found: list[int] = []
        has_batch = any(size in joined for size in shape)
        for size in shape:
            if size == old.batch and not has_batch:
                found.append(new.batch)
                has_batch = True
            elif size in joined and size != old.batch:
                found.append(joined[size])
            else:
                found.append(by_length.get(size, size) if size > 1 and size != heads else size)
        return tuple(found)

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - lives as long as one command
    def text(self, shapes: bytes) -> bytes:
        """The JSON text of an operator's shapes with the new ones."""
        return with_shapes(shapes, self.shape)


@dataclass(frozen=True)
class Resized:
    """``nodes``: how many take another time; ``before``, ``after``: theirs, µs; ``moved``: communication with
    other bytes."""

    trace: ExecutionTrace
    nodes: int
    before: int
    after: int
    moved: int


def resized(
    trace: ExecutionTrace, text: Callable[[bytes], bytes], retime: Retime, collectives: bool = True
) -> Resized:
    """The trace with the shapes that ``text`` makes of its own, and what follows from them. ``collectives``:
    whether their bytes do."""
    operations, ratio, leaf, moved = work_ratios(trace, text)
    list_ratios(trace, text, ratio, leaf)
    talks = trace.types >= NodeType.COMM_SEND
    on_cpu = (trace.column("is_cpu_op") != 0) & (leaf > 0) & ~talks
    on_device = (trace.column("is_cpu_op") == 0) & ~talks
    changes = (on_cpu | on_device) & (ratio != 1)
    taken = trace.duration_micros.astype(float) * 1000
    changed = resized_times(taken, idle_ns(taken, on_cpu, operations), on_cpu, ratio)
    duration = np.where(changes, np.rint(changed / 1000), trace.duration_micros).astype(np.uint64)
    trace, communications = _communication(trace, text, retime, duration, collectives)
    for name, factor in (("num_ops", ratio), ("tensor_size", moved)):
        attribute = trace.attributes.get(name)
        if attribute is not None:
            values = np.rint(trace.column(name) * factor).astype(np.int64)
            trace = set_integers(trace, name, attribute.kind, values, has(trace, name))
    inputs, outputs = (
        None if info is None else replace(info, shapes=[text(shapes) for shapes in info.shapes])
        for info in (trace.inputs, trace.outputs)
    )
    before, after = int(taken[changes].sum() / 1000), int(duration[changes].sum())
    return Resized(
        replace(trace, inputs=inputs, outputs=outputs), int(changes.sum()), before, after, communications
    )


def list_ratios(
    trace: ExecutionTrace, text: Callable[[bytes], bytes], ratio: np.ndarray, leaf: np.ndarray
) -> None:
    """Operators on lists of tensors, as an optimizer's, follow the elements of all; ``ratio`` and ``leaf``
    are written."""
    inputs = trace.inputs
    for at, row in enumerate(inputs.rows.tolist() if inputs is not None else ()):
        if inputs is not None and _LISTED.search(trace.names[row]):
            before, after = _elements(inputs.shapes[at]), _elements(text(inputs.shapes[at]))
            if before and after != before:
                ratio[row], leaf[row] = after / before, 1.0


def _communication(
    trace: ExecutionTrace,
    text: Callable[[bytes], bytes],
    retime: Retime,
    duration: np.ndarray,
    collectives: bool,
) -> tuple[ExecutionTrace, int]:
    """The bytes and times of communication, by the elements of its tensors; ``duration`` is written."""
    sizes, kinds = trace.column("comm_size"), trace.column("comm_type", -1)
    table, group = texts(trace, "pg_name")
    changed = 0
    inputs = trace.inputs
    for at, row in enumerate(inputs.rows.tolist() if inputs is not None else ()):
        if inputs is None or trace.types[row] < NodeType.COMM_SEND or not sizes[row]:
            continue
        if trace.types[row] == NodeType.COMM_COLL and not collectives:
            continue
        before, after = _elements(inputs.shapes[at]), _elements(text(inputs.shapes[at]))
        if before and after != before:
            size = max(round(int(sizes[row]) * after / before), 1)
            name = table[group[row]] if group[row] >= 0 else ""
            kind = CollectiveType(int(kinds[row])) if int(kinds[row]) in set(CollectiveType) else None
            micros = float(duration[row])
            if kind is not None:
                micros = retime(kind, int(sizes[row]), size, name, micros)
            else:
                micros *= size / int(sizes[row])
            sizes[row], duration[row] = size, max(round(micros), 1)
            changed += 1
    trace = replace(trace, duration_micros=duration)
    if changed:
        trace = set_integers(
            trace, "comm_size", trace.attributes["comm_size"].kind, sizes, has(trace, "comm_size")
        )
    return trace, changed


def _elements(shapes: bytes) -> int:
    return sum(int(np.prod(shape)) for shape in shapes_in(shapes))
