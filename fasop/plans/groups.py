"""Groups of GPUs and the nodes that they sit in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """The GPUs of a group that sit in one node: the node's number in the placement, its type, how many."""

    node: int
    gpu: str
    gpus: int


Group = tuple[Part, ...]


def group_size(group: Group) -> int:
    return sum(part.gpus for part in group)


def merged(groups: Sequence[Group]) -> Group:
    """All GPUs of some groups as one."""
    counts: Counter[tuple[int, str]] = Counter()
    for group in groups:
        for part in group:
            counts[part.node, part.gpu] += part.gpus
    return tuple(Part(node, gpu, count) for (node, gpu), count in sorted(counts.items()))


def first(group: Group, ranks: int) -> Group:
    """The group of its first ranks."""
    found, left = [], ranks
    for part in group:
        if left > 0:
            found.append(part._replace(gpus=min(part.gpus, left)))
        left -= part.gpus
    return tuple(found)


def every(group: Group, step: int) -> tuple[Group, int]:
    """The group of each ``step``-th rank of a group; and how many such groups have a GPU in a node."""
    found, first = [], 0
    for part in group:
        end = first + part.gpus
        count = (end - 1) // step - (first - 1) // step
        if count:
            found.append(part._replace(gpus=count))
        first = end
    return tuple(found), min(step, max(part.gpus for part in group))
