"""Other sizes of tensors, and the operations, times and bytes that follow: another batch or other sequences
(``with_tokens``), more tensor-parallel ranks (``with_shards``), dimensions by value (``with_dimensions``).

Batch and sequence are read from the look-up of tokens (``aten::embedding`` with indices of two dimensions).
Which sizes of which tensors they are is told by value: tensors with a parameter's shape stay, of all others
the sizes batch × sequence, batch × heads, batch (the leftmost one) and sequence change.

Of a captured rank's shards, which are cut further, the collectives of the tensor-parallel group tell, whose
tensors (tokens × batch × hidden) are whole on every rank: of a weight of two dimensions with the hidden size,
the other one is sharded; so are the vocabulary of the logits, and the heads whose number times width is a
sharded size. With sequence parallelism, the tokens that an all-gather takes are sharded too.

Assumed, and said in the notes: an operator's time follows its operations (see ``operator_work``), but for
what one without work takes; control flow and replicated work (norms, residuals) stay.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import texts
from chakra_et.job.gradients import grown_reductions, sweeps_of
from chakra_et.job.operators import GRADIENT, Operators, Shape, shapes_in, with_shapes
from chakra_et.transform.changes import RankTraces, with_sizes
from chakra_et.transform.operator_times import elements_in, resized

_LARGEST = 1 << 24
"""Batch or sequence."""


def wanted(text: str, have: int, most: int, refusal: str) -> int:
    """The number that ``8`` or ``2x`` asks for, of ``have``: 1 to ``most``. Raises ``TraceError``."""
    try:
        number = float(text[:-1]) * have if text.endswith("x") else float(int(text))
    except ValueError:
        number = 0.0
    if not 1 <= number <= most or number != int(number):
        raise TraceError(f"{refusal}, or a factor that makes a whole one, as 2x")
    return int(number)


def with_tokens(ranks: RankTraces, batch: str, sequence: str) -> RankTraces:
    """The ranks with another batch or other sequences, as ``8`` or ``2x``; "" for what was captured. Raises
    ``TraceError``, naming what was looked for, where these aren't recognised."""
    sizes = find_sizes(ranks.operators(), ranks.where)
    new = []
    for flag, text, have in (("batch", batch, sizes.batch), ("seq", sequence, sizes.sequence)):
        refusal = f"--{flag} {text}: the captured one is {have}: give a number from 1 on"
        new.append(wanted(text, have, _LARGEST, refusal) if text else have)
    return _reshaped(
        ranks,
        resizing(sizes, new[0], new[1], ranks.where),
        f"batch × sequence of a pass was {sizes.batch} × {sizes.sequence} (look-up of tokens) and is "
        f"{new[0]} × {new[1]}",
        f"no operator's work depends on batch {sizes.batch} or sequence {sizes.sequence}",
    )


def with_dimensions(ranks: RankTraces, sizes: Mapping[int, int]) -> RankTraces:
    """The ranks whose tensors have other dimensions, old size → new size: ``{10: 20, 720: 1440}`` for twice a
    batch of 10, where 720 is 10 sequences of 72. Raises ``TraceError`` where no work depends on them, or one
    is also another size of the model."""
    try:
        found = find_sizes(ranks.operators(), ranks.where)
    except TraceError:  # what the sizes are is the user's to know
        pass
    else:
        found.refuse_alike(sizes, ranks.where)
    texts = [text for trace in ranks.traces.values() if trace.inputs for text in trace.inputs.shapes]
    common = Counter(size for text in texts for shape in shapes_in(text) for size in shape)
    return _reshaped(
        ranks,
        lambda shape: tuple(sizes.get(size, size) for size in shape),
        f"sizes {', '.join(f'{old} → {new}' for old, new in sizes.items())}",
        f"--resize: no operator's work depends on a dimension of {', '.join(map(str, sizes))}: the sizes are "
        f"{', '.join(str(size) for size, _ in common.most_common(8)) or 'none recorded'}",
    )


def _reshaped(
    ranks: RankTraces, shape: Callable[[Shape], Shape], what: str, nothing: str, shards: bool = False
) -> RankTraces:
    """The ranks whose tensors have the shapes that ``shape`` makes of theirs: operators and kernels change
    with their operations, collectives of gradients with the parameters, and others with the tensors that they
    carry, but where ``shards`` are changed. ``what`` changes, for the note; ``nothing`` is the refusal."""

    @functools.lru_cache(maxsize=65536)
    def text(shapes: bytes) -> bytes:
        return with_shapes(shapes, shape)

    traces: dict[int, ExecutionTrace] = {}
    counts, moved, reduced = [], 0, 0
    for rank, operators in ranks.operators().items():
        made, count = resized(operators.trace, text)
        of_gradients = grown_reductions(
            operators,
            sweeps_of(operators, None),
            lambda each: math.prod(shape(each.shape)) / max(math.prod(each.shape), 1),
        )
        carried = {} if shards else _communicated(operators.trace, text)
        traces[rank] = with_sizes(made, carried | of_gradients, ranks.retime)
        counts.append(count)
        moved, reduced = moved + len(carried.keys() - of_gradients), reduced + len(of_gradients)
    nodes, before, after = np.sum(counts, axis=0).tolist()
    if not nodes and not reduced:
        raise TraceError(f"{ranks.where}: {nothing}")
    return ranks.with_traces(
        traces,
        f"{what}: {nodes:,} nodes that took {before / 1000:,.1f} ms take {after / 1000:,.1f} ms, assuming "
        "that an operator's time follows its operations, but for what one without work takes, and a kernel's "
        "the model of its GPU where that is known",
        f"{reduced:,} collectives of gradients changed with the parameters, and {moved:,} other collectives "
        "and messages with the tensors that they carry; what has no recorded shape stays",
    )


@dataclass(frozen=True)
class Sizes:
    """What is known of the sizes in a set: the sequences of a rank in one pass (``batch``) and the tokens of
    a ``sequence``. ``parameters``: their shapes; ``tables``: those that tokens or places are looked up in;
    ``heads``: of attention, and the ``width`` of one, 0 where not seen."""

    batch: int
    sequence: int
    parameters: frozenset[Shape]
    tables: frozenset[Shape]
    heads: int
    width: int

    @property
    def widths(self) -> set[int]:
        """Sizes of layers and heads. The leftmost size that equals the batch is the batch, and a table's
        length is no size of a layer."""
        found = {size for shape in self.parameters - self.tables for size in shape}
        found |= {size for shape in self.tables for size in shape[1:]}
        return (found | {self.heads, self.width}) - {self.batch, 0}

    def refuse_alike(self, changed: Iterable[int], where: str) -> None:
        """Raises ``TraceError`` where one of these sizes is that of the batch or tokens, and another one."""
        tokens = self.batch * self.sequence
        what = {self.sequence: f"a sequence of {self.sequence}", self.batch: f"a batch of {self.batch}"}
        what[tokens] = f"{self.batch} × {self.sequence} tokens"
        others = self.widths | {1} | {shape[0] for shape in self.tables if shape[0] == tokens}
        for size in changed:
            if size in what and size in others:
                raise TraceError(
                    f"{where}: {what[size]} can't be told from another size {size} of the model: capture "
                    "with sizes that differ from all of the model's"
                )


def find_sizes(of_rank: Mapping[int, Operators], where: str) -> Sizes:
    """Raises ``TraceError``, naming what was looked for, where batch and sequence aren't recognised."""
    look_ups, parameters, shapes = _shapes_of(of_rank)
    tables = {found[0] for found in look_ups}
    looked: Counter[Shape] = Counter()
    for found, count in look_ups.items():
        if len(found) > 1 and len(found[1]) == 2:
            looked[found[1]] += count * found[0][0]  # the largest table is that of tokens
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
        if len(shape) == 4
        for at in (1, 2)
        if (shape[0], shape[3 - at]) == (batch, sequence) or (at == 2 and shape[:2] == (sequence, batch))
    )
    several, width = next((pair for pair, _ in heads.most_common() if pair[0] != sequence), (0, 0))
    return Sizes(batch, sequence, frozenset(parameters | tables), frozenset(tables), several, width)


def _shapes_of(
    of_rank: Mapping[int, Operators],
) -> tuple[Counter[tuple[Shape, ...]], set[Shape], Counter[Shape]]:
    """How often which inputs are looked up, the table first; the shapes of parameters; and how often all
    others have which shape."""
    look_ups: Counter[tuple[Shape, ...]] = Counter()
    parameters: set[Shape] = set()
    others: Counter[Shape] = Counter()
    for operators in of_rank.values():
        for row, name in enumerate(operators.name):
            if not (found := operators.shapes(row)):
                continue
            if name == "aten::embedding":
                look_ups[found] += 1
            elif name == GRADIENT:
                parameters.add(found[0])
            else:
                others.update(found)
    return look_ups, parameters, others


def resizing(sizes: Sizes, batch: int, sequence: int, where: str) -> Callable[[Shape], Shape]:
    """What makes a tensor's shape that of another batch and sequence. Raises ``TraceError`` where their sizes
    can't be told from others."""
    changes = (
        (sizes.batch, batch),
        (sizes.sequence, sequence),
        (sizes.batch * sizes.sequence, batch * sequence),
    )
    if sizes.batch == sizes.sequence:
        raise TraceError(f"{where}: batch and sequence are both {sizes.batch}: capture different ones")
    sizes.refuse_alike([have for have, new in changes if new != have], where)
    kept = sizes.parameters | {shape[::-1] for shape in sizes.parameters}
    by_length = {sizes.sequence + off: sequence + off for off in (0, 1, -1)}
    joined = {sizes.batch * length: batch * other for length, other in by_length.items()}
    if sizes.heads:
        joined[sizes.batch * sizes.heads] = batch * sizes.heads
        joined[sizes.batch * sizes.heads * sizes.sequence] = batch * sizes.heads * sequence
    joined.pop(sizes.sequence, None)
    # Products and neighbours of sizes that are also a size of the model are that.
    for others in (joined, by_length):
        for size in sizes.widths & others.keys():
            del others[size]

    def resized_shape(shape: Shape) -> Shape:
        if shape in kept:
            return shape
        found: list[int] = []
        has_batch = any(size in joined for size in shape)
        for size in shape:
            if size == sizes.batch and not has_batch:
                found.append(batch)
                has_batch = True
            elif size in joined and size != sizes.batch:
                found.append(joined[size])
            else:
                found.append(by_length.get(size, size) if size > 1 and size != sizes.heads else size)
        return tuple(found)

    return resized_shape


def _communicated(trace: ExecutionTrace, text: Callable[[bytes], bytes]) -> dict[int, int]:
    """The new bytes of communication whose tensors have other elements, by row."""
    found: dict[int, int] = {}
    sizes, inputs = trace.column("comm_size"), trace.inputs
    for at, row in enumerate(inputs.rows.tolist() if inputs else ()):
        if inputs and trace.types[row] >= NodeType.COMM_SEND and sizes[row]:
            before, after = elements_in(inputs.shapes[at]), elements_in(text(inputs.shapes[at]))
            if before and after != before:
                found[row] = max(round(int(sizes[row]) * after / before), 1)
    return found


def with_shards(ranks: RankTraces, degree: int) -> RankTraces:
    """The ranks with the shards of ``degree`` tensor-parallel ranks. Collectives of gradients follow the
    parameters that a rank has; those of the tensor-parallel group keep their tensors.

    Raises ``TraceError``, naming what was looked for, where shards aren't recognised.
    """
    of_rank, mesh = ranks.operators(), ranks.mesh
    tensor_groups = {
        name
        for name, members in ranks.groups.items()
        if len(members) == mesh.tp and len({mesh.place(rank)[1:] for rank in members}) == 1
    }
    sharded, ratio = find_sharding(of_rank, tensor_groups, mesh.tp, degree, ranks.where)
    return _reshaped(
        ranks,
        lambda shape: tuple(size // ratio if size in sharded else size for size in shape),
        f"each shard of a tensor-parallel operator becomes {ratio}: sizes "
        f"{', '.join(map(str, sorted(sharded)))} were recognised as sharded",
        "no operator's work depends on the sizes that are sharded",
        shards=True,
    )


def find_sharding(
    of_rank: Mapping[int, Operators], tensor_groups: set[str], old: int, new: int, where: str
) -> tuple[set[int], int]:
    """The sizes of which every rank has a part, and how many new shards an old one makes. Raises
    ``TraceError``, naming what was looked for, where shards can't be told from whole sizes."""
    hidden, tokens, whole, sharded = _of_collectives(of_rank, tensor_groups)
    if not hidden:
        raise TraceError(
            f"{where}: tensor-parallel operators weren't recognised: no all-reduce or all-gather of a "
            "tensor-parallel group has a recorded shape of three dimensions"
        )
    look_ups, parameters, shapes = _shapes_of(of_rank)
    tables = {found[0] for found in look_ups}
    logits = {shape[-1] for shape in shapes if len(shape) == 3} - {hidden}
    for shape in parameters | tables:
        if len(shape) == 2 and shape.count(hidden) == 1:
            other = shape[0] if shape[1] == hidden else shape[1]
            if shape not in tables or other in logits:
                sharded.add(other)
    heads = {shape[-2:] for shape in shapes if len(shape) == 4 and shape[-2] * shape[-1] in sharded}
    whole |= {width for _, width in heads}
    for count, _ in heads:
        sharded |= {count, *(count * batch for _, batch in tokens)}
        sharded |= {count * batch * length * length for length, batch in tokens}
    ratio = new // old
    both = sorted(sharded & whole)
    uneven = sorted(size for size in sharded if size % ratio)
    if both or uneven or 1 in sharded:
        reason = (
            f"the size {both[0]} is that of a shard and of a whole tensor"
            if both
            else f"a shard of {(uneven or [1])[0]} can't be cut into {ratio}"
        )
        raise TraceError(f"{where}: --tp {new}: {reason}: capture with other sizes, or with --tp {new}")
    return sharded, ratio


def _of_collectives(
    of_rank: Mapping[int, Operators], tensor_groups: set[str]
) -> tuple[int, set[Shape], set[int], set[int]]:
    """The hidden size, (tokens, batch), whole sizes, and shards (of tokens) that the tensors of collectives
    show."""
    hidden: Counter[int] = Counter()
    whole: set[int] = set()
    sharded: set[int] = set()
    tokens: set[Shape] = set()
    for operators in of_rank.values():
        trace = operators.trace
        table, index = texts(trace, "pg_name")
        kinds = trace.column("comm_type", -1)
        for row in np.flatnonzero(trace.types == NodeType.COMM_COLL).tolist():
            if index[row] < 0 or table[index[row]] not in tensor_groups:
                continue
            for shape in operators.shapes(row):
                if len(shape) != 3:
                    continue
                hidden[shape[-1]] += 1
                if kinds[row] == CollectiveType.ALL_GATHER:
                    sharded.add(shape[0])
                    whole |= set(shape[1:])
                else:
                    whole |= set(shape)
                    tokens.add(shape[:2])
    return (hidden.most_common(1)[0][0] if hidden else 0), tokens, whole, sharded
