"""The shapes of plans on a cluster: degrees, the nodes that stages fall on, and groups of GPUs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fasop.errors import PlanError
from fasop.inputs.clusters import Cluster
from fasop.inputs.models import Model

# The GPUs of one stage: (type, how many of them) for each of its nodes, sorted.
Seats = tuple[tuple[str, int], ...]
BETWEEN, INSIDE, CROWDED = range(3)  # what messages cross
MOST_BLOCKS = 60  # kinds of block of a shape that a search can take


@dataclass(frozen=True)
class Shape:
    """Degrees of a plan: tensor, data, pipeline, sequences per micro-batch, and expert-parallel ranks among
    the data-parallel ones.
    """

    tp: int
    dp: int
    pp: int
    mbs: int
    ep: int = 1

    @property
    def group(self) -> int:
        """GPUs of a stage."""
        return self.tp * self.dp

    @property
    def batch(self) -> int:
        """Sequences that pass through a stage at once, in all its replicas."""
        return self.dp * self.mbs


@dataclass(frozen=True)
class Block:
    """The smallest run of whole nodes that holds whole stages.

    nodes: GPU types in rank order; stages: the seats of each stage (a stage on nodes of two types goes at
    the pace of the slower); inside: whether the boundary after each stage but the last stays within one node;
    is_full: whether the stages take all GPUs, as they do but in a block that can only be the last.
    """

    nodes: tuple[str, ...]
    stages: tuple[Seats, ...]
    inside: tuple[bool, ...]
    is_full: bool = True


def divisors(value: int) -> list[int]:
    """In ascending order."""
    return [d for d in range(1, value + 1) if value % d == 0]


def shapes(model: Model, cluster: Cluster, max_tp: int, idle: bool = False) -> list[Shape]:
    """All degrees that use every GPU, or with ``idle`` that leave some out. Raises ``PlanError`` for none."""
    found = []
    experts = divisors(model.experts) if model.experts else [1]
    sizes = sorted({cluster.size(gpu) for gpu in cluster.gpus})
    degrees = sorted({tp for size in sizes for tp in divisors(math.gcd(size, model.most_tp)) if tp <= max_tp})
    for tp, dp in itertools.product(degrees, divisors(model.global_batch)):
        most, rest = divmod(cluster.gpu_count, tp * dp)
        if dp % model.cp or not most >= 1 or (rest and not idle):
            continue
        deepest = min(most, model.layers) if idle else most
        for pp in range(deepest, 0, -1) if idle else [most]:
            # With fewer stages than there are GPUs for, whole nodes are idle.
            frees = pp == deepest or -(-pp * tp * dp // sizes[0]) < -(-(pp + 1) * tp * dp // sizes[0])
            if pp <= model.layers and frees:
                each = itertools.product(divisors(model.global_batch // dp), experts)
                found += [Shape(tp, dp, pp, mbs, ep) for mbs, ep in each if dp % ep == 0]
    if not found:
        raise PlanError(
            f"no tp × dp × pp makes {cluster.gpu_count} GPUs ({cluster.node_count} nodes of "
            f"{' or '.join(map(str, sizes))}) with tp at most {max_tp} and a divisor of a node's GPUs and of "
            f"{model.heads} heads, dp a divisor of the global batch {model.global_batch}, and pp at most "
            f"{model.layers} layers: give another number of nodes, or another --global-batch."
        )
    return found


def blocks(cluster: Cluster, gpus_per_stage: int) -> tuple[list[Block], bool]:
    """The kinds of block that placements of a shape are made of, one for each that can matter; and whether
    there are more than ``MOST_BLOCKS``.

    Where a stage fills several nodes, mixed stages are kept only as far as they can be needed: swapping
    nodes between two mixed stages that share two types, or around a ring of them, leaves every stage with
    a subset of its types, which is never worse. What remains of that is a forest of stages and types, at
    most (types − 1) mixed stages, and with up to three types each is determined by the node counts.
    Where stages and nodes end together only now and then, all orders of nodes up to there are blocks;
    of more than ``MOST_BLOCKS``, those of the fewest types.
    """
    g, counts = gpus_per_stage, _counts(cluster)
    is_whole = all(g % cluster.size(gpu) == 0 for gpu in cluster.gpus)
    each = _mixes(cluster, g) if is_whole else _orders(cluster, counts, g)
    orders = list(each if is_whole else itertools.islice(each, MOST_BLOCKS + 1))
    is_cut = not is_whole and len(orders) > MOST_BLOCKS
    if is_cut:
        some = (
            order
            for number in range(1, len(counts) + 1)
            for names in itertools.combinations(sorted(counts), number)
            for order in _orders(cluster, {name: counts[name] for name in names}, g)
            if len(set(order)) == number
        )
        orders = list(itertools.islice(some, MOST_BLOCKS))
    found = []
    for nodes in orders:
        of = node_of_each_gpu(cluster, nodes)
        seats = _seats(nodes, of, g)
        inside = [of[k * g] == of[(k + 2) * g - 1] for k in range(len(seats) - 1)]
        found.append(Block(nodes, seats, tuple(inside), len(of) % g == 0))
    return found, is_cut


def _counts(cluster: Cluster) -> dict[str, int]:
    return {gpu.name: count for gpu, count in zip(cluster.gpus, cluster.nodes, strict=True)}


def _orders(cluster: Cluster, counts: dict[str, int], g: int) -> Iterator[tuple[str, ...]]:
    """Orders of the fewest nodes that hold whole stages of g GPUs, and none but whole ones, up to the GPUs at
    which stages and nodes of each type alone end together; and those that nothing is left to make whole.

    Nodes that lie in one stage are in the order of ``counts``: another makes no difference.
    """
    names = list(counts)
    sizes = {name: cluster.size(cluster.gpu(name)) for name in names}
    most = math.lcm(g, *sizes.values())

    def extend(prefix: tuple[str, ...], gpus: int) -> Iterator[tuple[str, ...]]:
        if gpus and gpus % g == 0:
            yield prefix
            return
        is_last = True
        for name in names:
            if prefix.count(name) == counts[name] or gpus + sizes[name] > most:
                continue
            is_last = False
            if prefix:
                alone = (gpus - sizes[prefix[-1]]) // g == (gpus + sizes[name] - 1) // g
                if alone and names.index(name) < names.index(prefix[-1]):
                    continue
            yield from extend((*prefix, name), gpus + sizes[name])
        if is_last and gpus > g:
            yield prefix

    return extend((), 0)


def _mixes(cluster: Cluster, g: int) -> list[tuple[str, ...]]:
    """Node types of one stage on whole nodes, pure ones first."""
    counts = _counts(cluster)
    names, sizes = list(counts), {gpu.name: cluster.size(gpu) for gpu in cluster.gpus}
    rest = {name: counts[name] % (g // sizes[name]) for name in names}
    mixes = [{name: g // sizes[name]} for name in names if counts[name] * sizes[name] >= g]
    is_even = len(set(sizes.values())) == 1
    if is_even and len(names) > 3:
        # The left-over nodes are packed in the cluster's order of types.
        left, each = [name for name in names for _ in range(rest[name])], g // sizes[names[0]]
        mixes += [Counter(left[k : k + each]) for k in range(0, len(left) - each + 1, each)]
    elif sum(rest[name] * sizes[name] for name in names) == g:
        mixes.append(rest)
    # What stages of one type leave over, made up with another.
    for one, two in itertools.permutations(names, 2) if not is_even or len(names) == 3 else ():
        for number in range(rest[one], 0, -1):
            others, over = divmod(g - number * sizes[one], sizes[two])
            if not over and others <= counts[two]:
                mixes.append({one: number, two: others})
                break
    found = {tuple(name for name in names for _ in range(mix.get(name, 0))) for mix in mixes}
    return sorted(found, key=lambda nodes: (len(set(nodes)), [names.index(name) for name in nodes]))


def node_of_each_gpu(cluster: Cluster, nodes: Sequence[str]) -> list[int]:
    """The place in ``nodes`` of each rank's, where ranks are numbered through the nodes in order."""
    return [at for at, name in enumerate(nodes) for _ in range(cluster.size(cluster.gpu(name)))]


def _seats(nodes: Sequence[str], of: list[int], g: int) -> tuple[Seats, ...]:
    """The seats of each whole stage of g ranks."""
    stages = [Counter(of[first : first + g]) for first in range(0, len(of) - g + 1, g)]
    return tuple(tuple(sorted((nodes[node], count) for node, count in stage.items())) for stage in stages)


def stage_seats(cluster: Cluster, placement: Sequence[str], shape: Shape) -> tuple[Seats, ...]:
    """The seats of each stage of a placement."""
    return _seats(placement, node_of_each_gpu(cluster, placement), shape.group)[: shape.pp]


def crowded(stage_nodes: Sequence[set[int]]) -> tuple[bool, ...]:
    """Of each boundary between stages, whether messages of another use a link of the same node.

    stage_nodes: the nodes of each stage. Two boundaries of one stage have messages at different times.
    """
    nodes = [left | right for left, right in itertools.pairwise(stage_nodes)]
    across: dict[int, list[int]] = {}  # boundaries whose messages leave or enter each node
    for boundary, of in enumerate(nodes):
        for node in of if len(of) > 1 else ():
            across.setdefault(node, []).append(boundary)
    return tuple(
        len(of) > 1 and any(boundary - across[n][0] > 1 or across[n][-1] - boundary > 1 for n in of)
        for boundary, of in enumerate(nodes)
    )


def boundary_kinds(cluster: Cluster, placement: Sequence[str], shape: Shape) -> tuple[int, ...]:
    """Of each boundary between stages: ``INSIDE`` one node, ``BETWEEN`` nodes, or ``CROWDED``."""
    of, g = node_of_each_gpu(cluster, placement), shape.group
    stages = [set(of[k * g : (k + 1) * g]) for k in range(shape.pp)]
    pairs = zip(itertools.pairwise(stages), crowded(stages), strict=True)
    return tuple(
        INSIDE if len(one | two) == 1 else CROWDED if is_crowded else BETWEEN
        for (one, two), is_crowded in pairs
    )


def gpu_types(seats: Seats) -> tuple[str, ...]:
    """The types of GPU of a stage, each once."""
    return tuple(dict.fromkeys(name for name, _ in seats))


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
