"""More tensor-parallel ranks: the shards of a captured rank, cut further.

Which sizes are shards is told by the collectives of the tensor-parallel group, whose tensors (tokens × batch
× hidden) are whole on every rank: of a weight of two dimensions with the hidden size, the other one is
sharded; so are the vocabulary of the logits, and the heads whose number times width is a sharded size. With
sequence parallelism, the tokens that an all-gather takes are sharded too.

Assumed, and said in the notes: an operator's time follows its operations, but for what one without work
takes; the replicated work (norms, residuals) stays.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import texts
from chakra_et.job.gradients import sweeps_of, whole_collectives
from chakra_et.job.operators import GRADIENT, Operators, Shape, with_shapes
from chakra_et.transform.changes import RankTraces, with_sizes
from chakra_et.transform.operator_times import resized


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
    sharding = find_sharding(of_rank, tensor_groups, mesh.tp, degree, ranks.where)
    traces: dict[int, ExecutionTrace] = {}
    counts = []
    for rank, operators in of_rank.items():
        made, count = resized(operators.trace, sharding.text)
        sizes = _gradient_sizes(operators, sharding)
        traces[rank] = with_sizes(made, sizes, ranks.retime)
        counts.append(count)
    nodes, before, after = np.sum(counts, axis=0).tolist()
    return ranks.with_traces(
        traces,
        {},
        f"each shard of a tensor-parallel operator becomes {sharding.ratio}: sizes "
        f"{', '.join(map(str, sorted(sharding.sharded)))} were recognised as sharded, and {nodes:,} nodes "
        f"that took {before / 1000:,.1f} ms take {after / 1000:,.1f} ms, assuming that an operator's time "
        "follows its operations",
    )


def _gradient_sizes(operators: Operators, sharding: Sharding) -> dict[int, int]:
    """The new bytes of the collectives of gradients, by row."""
    sweeps = sweeps_of(operators, None)
    if not sweeps:
        return {}
    gradients = max((sweep.gradients for sweep in sweeps), key=len)
    before = sum(math.prod(each.shape) for each in gradients)
    after = sum(math.prod(sharding.shape(each.shape)) for each in gradients)
    rows = {collective for sweep in sweeps for collective, _ in sweep.launches}
    rows |= set(whole_collectives(operators, rows, before))
    sizes = operators.trace.column("comm_size")
    return {row: max(round(int(sizes[row]) * after / before), 1) for row in rows}


@dataclass(frozen=True)
class Sharding:
    """``sharded``: sizes of which every rank has a part; ``ratio``: how many new shards an old one makes."""

    sharded: frozenset[int]
    ratio: int

    def shape(self, shape: Shape) -> Shape:
        return tuple(size // self.ratio if size in self.sharded else size for size in shape)

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - lives as long as one command
    def text(self, shapes: bytes) -> bytes:
        """The JSON text of an operator's shapes with those of the new shards."""
        return with_shapes(shapes, self.shape)


def find_sharding(
    of_rank: Mapping[int, Operators], tensor_groups: set[str], old: int, new: int, where: str
) -> Sharding:
    """Raises ``TraceError``, naming what was looked for, where shards can't be told from whole sizes."""
    hidden, tokens, whole, sharded = _of_collectives(of_rank, tensor_groups)
    if not hidden:
        raise TraceError(
            f"{where}: tensor-parallel operators weren't recognised: no all-reduce or all-gather of a "
            "tensor-parallel group has a recorded shape of three dimensions"
        )
    shapes: set[Shape] = set()
    parameters: set[Shape] = set()
    tables: set[Shape] = set()
    for operators in of_rank.values():
        for row, name in enumerate(operators.name):
            found = operators.shapes(row)
            if name == GRADIENT:
                parameters |= set(found[:1])
            elif name == "aten::embedding":
                tables |= set(found[:1])
            else:
                shapes.update(found)
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
    return Sharding(frozenset(sharded), ratio)


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
