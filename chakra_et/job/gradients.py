"""The gradients of captured backward passes, and the collectives that reduce them: DDP's buckets by PyTorch's
own rule.

>>> buckets_of([30, 30, 30], ["float"] * 3, limit=50, first=20)
[[0], [1, 2]]
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.job.operators import ENGINE, GRADIENT, Operators, Shape, inside

if TYPE_CHECKING:
    from chakra_et.job.blocks import Blocks

NEAR = 0.02
"""Bytes that differ by less than this part are the same gradients."""
Retime = Callable[[CollectiveType, int, int, str, float], float]
"""(kind, bytes before, bytes after, group, µs before) → µs after."""
FIRST_MIB, OTHERS_MIB = 1, 25
"""DDP's limits where bucket_cap_mb isn't given (torch.nn.parallel.distributed)."""
_MOST_MIB = 1024


@dataclass(frozen=True)
class Gradient:
    """``row``: where it is accumulated; ``type``: of elements; ``block``: of its parameter, -1 for none."""

    row: int
    shape: Shape
    bytes: int
    type: str
    block: int


@dataclass(frozen=True)
class Sweep:
    """One backward pass on a lane: gradients in order, and ``launches``: rows of (collective, its launch)."""

    lane: int
    gradients: list[Gradient]
    launches: list[tuple[int, int]]


def elements(counted: Counter[Shape]) -> int:
    return sum(number * math.prod(shape) for shape, number in counted.items())


def sweeps_of(operators: Operators, blocks: Blocks | None) -> list[Sweep]:
    """The backward passes of a rank: from each jump of the autograd numbers upwards to the next."""
    collectives = np.flatnonzero((operators.trace.types == NodeType.COMM_COLL) & (operators.parent >= 0))
    launches = {int(operators.parent[row]): int(row) for row in collectives}
    # What a stage received is a leaf too, and its gradient is sent back.
    receives = np.flatnonzero(operators.trace.types == NodeType.COMM_RECV).tolist()
    received = {shape for row in receives for shape in operators.shapes(row) if len(shape) > 2}
    named = (row for row, name in enumerate(operators.name) if name == GRADIENT)
    gradients = {row for row in named if not received.intersection(operators.shapes(row)[:1])}
    segment, found = operators.trace.column("segment"), list[Sweep]()
    inside: dict[int, list[int]] = {}
    for row in sorted(gradients | set(launches)):
        inside.setdefault(int(operators.top[row]), []).append(row)
    for lane, tops in operators.tops.items():
        last = -1
        for top in tops:
            if not operators.name[top].startswith(ENGINE):
                continue
            number = operators.sequence.get(top, -1)
            if number >= 0:
                if number > last or last < 0:
                    found.append(Sweep(lane, [], []))
                last = number
            for row in inside.get(top, ()) if found else ():
                if operators.lane[row] != lane:
                    continue
                if row in gradients and segment[row] == 0:
                    found[-1].gradients.append(_gradient(operators, blocks, row))
                elif row in launches and operators.name[top].endswith(GRADIENT):
                    found[-1].launches.append((launches[row], row))
    return [sweep for sweep in found if sweep.gradients]


def _gradient(operators: Operators, blocks: Blocks | None, row: int) -> Gradient:
    shape = next(iter(operators.shapes(row)), ())
    size = int(np.prod(shape)) * operators.item(row)
    return Gradient(row, shape, size, operators.type(row), -1 if blocks is None else int(blocks.block[row]))


def whole_collectives(operators: Operators, known: Collection[int], held: int) -> Iterator[int]:
    """Rows of collectives, but for those in ``known``, that have the bytes of all ``held`` elements."""
    trace = operators.trace
    sizes = trace.column("comm_size")
    for row in np.flatnonzero(trace.types == NodeType.COMM_COLL).tolist():
        each = int(sizes[row]) / max(held, 1)
        if row not in known and any(abs(each - item) <= NEAR * item for item in (2, 4)):
            yield row


def grown_reductions(
    operators: Operators,
    sweeps: Sequence[Sweep],
    grown: Callable[[Gradient], float],
    among: np.ndarray | None = None,
) -> dict[int, int]:
    """The new bytes of collectives of gradients, by row (``among`` these, bool[N]), where a gradient has
    ``grown`` times its elements: a bucket has the gradients since the launch before its own, other
    collectives have all of them."""
    if not sweeps:
        return {}
    sizes, ratios = operators.trace.column("comm_size"), {}
    for sweep in sweeps:
        begin = -1
        for collective, launch in sweep.launches:
            own = [each for each in sweep.gradients if begin < each.row <= launch]
            ratios[collective] = _growth(own or sweep.gradients, grown)
            begin = launch
    every = max((sweep.gradients for sweep in sweeps), key=len)
    held = sum(math.prod(each.shape) for each in every)
    ratios |= dict.fromkeys(whole_collectives(operators, ratios, held), _growth(every, grown))
    changed = {row: ratio for row, ratio in ratios.items() if ratio != 1 and (among is None or among[row])}
    return {row: max(round(int(sizes[row]) * ratio), 1) for row, ratio in changed.items()}


def _growth(gradients: Sequence[Gradient], grown: Callable[[Gradient], float]) -> float:
    before = sum(each.bytes for each in gradients)
    return sum(each.bytes * grown(each) for each in gradients) / before if before else 1.0


def parameters_of(sweeps: Sequence[Sweep]) -> dict[int, Counter[Shape]]:
    """Block (-1: none) → how many parameters of each shape it has; from the backward pass with the most."""
    found: dict[int, Counter[Shape]] = {}
    for gradient in max(sweeps, key=lambda sweep: len(sweep.gradients)).gradients:
        found.setdefault(gradient.block, Counter())[gradient.shape] += 1
    return found


def launch_tree(operators: Operators, sweep: Sweep) -> list[set[int]]:
    """For each launch its rows: the operator with all in it, and the collective."""
    part = inside(operators.trace, [launch for _, launch in sweep.launches])
    part[operators.lane != sweep.lane] = -1
    of_launch = enumerate(collective for collective, _ in sweep.launches)
    return [{collective, *np.flatnonzero(part == at).tolist()} for at, collective in of_launch]


def buckets_of(sizes: Sequence[int], types: Sequence[str], limit: float, first: float) -> list[list[int]]:
    """The gradients of each bucket, by their places in the order in which they become ready.

    A bucket takes gradients of one type until it holds as many bytes as its limit. Source: torch,
    reducer.cpp, compute_bucket_assignment_by_size.

    ``sizes``: bytes; ``types``: of their elements; ``limit``: bytes at which a bucket is closed; ``first``:
    those of the first bucket of a type.
    """
    open_of: dict[str, list[int]] = {}
    filled: set[str] = set()
    done: list[list[int]] = []
    for at, of in enumerate(types):
        bucket = open_of.setdefault(of, [])
        bucket.append(at)
        if sum(sizes[each] for each in bucket) >= (limit if of in filled else first):
            done.append(open_of.pop(of))
            filled.add(of)
    return sorted([*done, *open_of.values()])


def limits_of(sizes: Sequence[int], types: Sequence[str], buckets: Sequence[int]) -> tuple[int, int] | None:
    """DDP's limits in bytes, of the first bucket and of all others, that make buckets of these bytes of these
    gradients; None where none do.

    1 and 25 MiB where that fits, else the smallest whole MiB: for all buckets, as with ``bucket_cap_mb``, or
    behind a first one of 1 MiB.
    """
    mib = 1 << 20
    whole = range(1, min(-(-sum(sizes) // mib), _MOST_MIB) + 1)
    tried = [(FIRST_MIB, OTHERS_MIB), *((n, n) for n in whole), *((FIRST_MIB, n) for n in whole)]
    for first, limit in tried:
        made = buckets_of(sizes, types, limit * mib, first * mib)
        if [sum(sizes[at] for at in bucket) for bucket in made] == list(buckets):
            return first * mib, limit * mib
    return None
