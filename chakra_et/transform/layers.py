"""More or fewer repeated blocks: their passes, the collectives of their gradients, and what is done for every
parameter (the optimizer, the norm of the gradients, copies of buckets).

Assumed, and said in the notes: every new block does what the captured one beside it does; the work for
parameters follows their number of elements, or their number where it is one call for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import NodeType
from chakra_et.job.blocks import Blocks
from chakra_et.job.gradients import (
    NEAR,
    Parameters,
    Retime,
    Sweep,
    elements,
    launch_tree,
    parameters_of,
    sweeps_of,
    whole_collectives,
)
from chakra_et.job.operators import Operators, Shape
from chakra_et.transform.block_reductions import BlockReductions
from chakra_et.transform.unroll import Unrolled, drafted, finished


@dataclass(frozen=True)
class Layered:
    """A rank with other blocks. ``buckets``: (by DDP's rule, by bytes) how many backward passes' collectives
    were made; ``scaled``: collectives after the backward pass, of all gradients, that changed;
    ``parameters``: elements before and after."""

    unrolled: Unrolled
    buckets: tuple[int, int]
    scaled: int
    parameters: tuple[int, int]


def copies_of(wanted: int, held: Sequence[int]) -> list[list[int]]:
    """How often each captured block runs, by stage: new block j is a copy of block ⌊j · captured /
    wanted⌋."""
    total = sum(held)
    counted = Counter(new * total // wanted for new in range(wanted))
    begins = np.concatenate(([0], np.cumsum(held)))
    return [
        [counted[int(begin) + at] for at in range(count)] for begin, count in zip(begins, held, strict=False)
    ]


def with_layers(
    operators: Operators, blocks: Blocks, copies: Sequence[int], retime: Retime, where: str
) -> Layered:
    """A rank whose block b runs ``copies[b]`` times. Raises ``TraceError``."""
    sweeps = sweeps_of(operators, blocks)
    trace = operators.trace
    if not sweeps:
        return Layered(finished(drafted(trace, blocks, copies), trace, blocks, where), (0, 0), 0, (0, 0))
    parameters = parameters_of(sweeps, blocks.held)
    _check(parameters, where)
    before, after = parameters.count([1] * blocks.held), parameters.count(copies)
    blocks = _without_launches(operators, blocks, sweeps)
    factors = parameter_factors(operators, blocks, before, after)
    trace = replace(trace, duration_micros=np.rint(trace.duration_micros * factors).astype(np.uint64))
    draft = drafted(trace, blocks, copies)
    buckets = BlockReductions(replace(operators, trace=trace), draft, retime)
    for sweep in sweeps:
        if set(launch for _, launch in sweep.launches) and not _own(operators, blocks, sweep):
            buckets.reduce(sweep)
    known = {collective for sweep in sweeps for collective, _ in sweep.launches}
    whole = [row for row in whole_collectives(operators, known, elements(before)) if blocks.block[row] < 0]
    ratio = elements(after) / elements(before)
    nodes = {draft.old[node]: node for lane in draft.lanes.values() for node in lane}
    for row in whole:
        buckets.set_size(nodes[row], max(round(int(trace.column("comm_size")[row]) * ratio), 1))
    made = buckets.as_ddp, buckets.as_bytes
    return Layered(
        finished(draft, trace, blocks, where), made, len(whole), (elements(before), elements(after))
    )


def _check(parameters: Parameters, where: str) -> None:
    first = parameters.of_block[0]
    other = next((at for at, each in enumerate(parameters.of_block) if each != first), None)
    if other is not None:
        raise TraceError(
            f"{where}: blocks 0 and {other} repeat their operators, and have gradients of other shapes: "
            "--layers needs blocks that are alike"
        )


def _without_launches(operators: Operators, blocks: Blocks, sweeps: Sequence[Sweep]) -> Blocks:
    """The launches of gradients' collectives belong to no block: buckets hold the gradients of several. Those
    that reduce just the gradients of their block stay with it."""
    group, block = blocks.group.copy(), blocks.block.copy()
    for sweep in sweeps:
        sizes: Counter[int] = Counter()
        for gradient in sweep.gradients:
            sizes[gradient.block] += gradient.bytes
        for rows, (collective, launch) in zip(launch_tree(operators, sweep), sweep.launches, strict=True):
            own = sizes.get(int(blocks.block[launch]), 0)
            size = int(operators.trace.column("comm_size")[collective])
            if blocks.block[launch] < 0 or abs(size - own) > NEAR * own:
                at = np.array(sorted(rows))
                group[at], block[at] = -1, -1
    return replace(blocks, group=group, block=block)


def _own(operators: Operators, blocks: Blocks, sweep: Sweep) -> bool:
    """Whether all collectives of a sweep stay with their blocks."""
    return all(blocks.block[launch] >= 0 for _, launch in sweep.launches)


def parameter_factors(
    operators: Operators, blocks: Blocks, before: Counter[Shape], after: Counter[Shape]
) -> np.ndarray:
    """By how much the time of each node outside of blocks changes with the parameters; float64[N].

    Operators on lists of as many tensors as half of the parameters follow the tensors' elements; so does a
    run of one operator for each parameter whose first tensor has a parameter's shape. Other such runs follow
    the number of parameters.
    """
    factors = np.ones(len(operators.trace))
    number = sum(before.values())
    by_count = sum(after.values()) / number
    of_shape = {shape: after[shape] / before[shape] for shape in before if len(shape)}
    least = max(number // 2, 4)
    rows_of_lane = {lane: np.flatnonzero(operators.lane == lane) for lane in operators.tops}
    for lane, tops in operators.tops.items():
        rows = rows_of_lane[lane]
        outside = [row for row in tops if blocks.block[row] < 0]
        updates = sum(operators.phase[row] == "optimizer" for row in outside)
        for run in _runs(operators, outside):
            many = len(run) >= least
            for row in run:
                after_it = tops[tops.index(row) + 1] if row != tops[-1] else len(factors)
                tree = rows[np.searchsorted(rows, row) : np.searchsorted(rows, after_it)]
                shapes = operators.shapes(row)
                if len(shapes) >= least or (not shapes and _listed(operators, row) >= least):
                    _list_factors(operators, tree, shapes, of_shape, by_count, least, factors)
                elif many or (operators.phase[row] == "optimizer" and updates >= number):
                    shape = shapes[0] if shapes else ()
                    factors[tree] = of_shape.get(shape, by_count)
    device = np.flatnonzero(~np.isin(operators.lane, list(operators.tops)) & (operators.parent >= 0))
    device = device[operators.trace.types[device] < NodeType.COMM_SEND]
    factors[device] = factors[operators.parent[device]]
    return factors


def _runs(operators: Operators, rows: Sequence[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for row in rows:
        if run and operators.name[row] != operators.name[run[-1]]:
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _listed(operators: Operators, row: int) -> int:
    """Tensors of no dimensions in the lists of an operator's inputs."""
    inputs = operators.trace.inputs
    if inputs is None:
        return 0
    at = int(np.searchsorted(inputs.rows, row))
    if at >= len(inputs.rows) or inputs.rows[at] != row:
        return 0
    return inputs.shapes[at].count(b"[],") if b"foreach" in operators.name[row].encode() else 0


def _list_factors(
    operators: Operators,
    tree: np.ndarray,
    shapes: Sequence[Shape],
    of_shape: Mapping[Shape, float],
    by_count: float,
    least: int,
    factors: np.ndarray,
) -> None:
    """An operator on a list: as one call it follows elements, with a call for each tensor those of each."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    whole = sum(size * of_shape.get(shape, by_count) for size, shape in zip(sizes, shapes, strict=True))
    by_elements = whole / sum(sizes) if sum(sizes) else by_count
    one_call = len(tree) < least
    for row in tree.tolist():
        inner = operators.shapes(row)
        if row != tree[0] and inner and inner[0] in of_shape:
            factors[row] = of_shape[inner[0]]
        else:
            factors[row] = by_elements if one_call else by_count
