"""The shapes that a plan can have on a cluster: degrees, and the nodes that its stages fall on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    size = min(cluster.size(gpu) for gpu in cluster.gpus)
    for tp in _tensor_degrees(model, cluster, max_tp):
        for dp in divisors(model.global_batch):
            most, rest = divmod(cluster.gpu_count, tp * dp)
            if not most >= 1 or (rest and not idle):
                continue
            deepest = min(most, model.layers) if idle else most
            for pp in range(deepest, 0, -1) if idle else [most]:
                # With fewer stages than there are GPUs for, whole nodes are idle.
                frees = pp == deepest or -(-pp * tp * dp // size) < -(-(pp + 1) * tp * dp // size)
                if pp <= model.layers and frees:
                    found += [
                        Shape(tp, dp, pp, mbs, ep)
                        for mbs in divisors(model.global_batch // dp)
                        for ep in experts
                        if dp % ep == 0
                    ]
    if not found:
        raise PlanError(_no_shape(model, cluster, max_tp))
    return found


def _tensor_degrees(model: Model, cluster: Cluster, max_tp: int) -> list[int]:
    sizes = {cluster.size(gpu) for gpu in cluster.gpus}
    heads = math.gcd(model.heads, model.kv_heads or model.heads)
    return [
        tp
        for tp in divisors(max(sizes))
        if tp <= max_tp and heads % tp == 0 and any(s % tp == 0 for s in sizes)
    ]


def _no_shape(model: Model, cluster: Cluster, max_tp: int) -> str:
    """Why no degrees fit, and the nearest number of nodes for which some do."""
    sizes = sorted({cluster.size(gpu) for gpu in cluster.gpus})
    most = cluster.node_count
    tps, dps = _tensor_degrees(model, cluster, max_tp), divisors(model.global_batch)

    def possible(nodes: int) -> bool:
        pairs = [divmod(nodes * sizes[0], tp * dp) for tp in tps for dp in dps]
        return any(rest == 0 and 1 <= stages <= model.layers for stages, rest in pairs)

    order = sorted(range(1, 2 * most + 1), key=lambda n: abs(n - most)) if len(sizes) == 1 else []
    near = next((n for n in order if possible(n)), None)
    advice = f"{near} nodes would work." if near else "use nodes of another size."
    return (
        f"no tp × dp × pp makes {cluster.gpu_count} GPUs ({most} nodes of {' or '.join(map(str, sizes))}) "
        f"with tp at most {max_tp} and a divisor of a node's GPUs and of {model.heads} heads, dp a divisor "
        f"of the global batch {model.global_batch}, and pp at most {model.layers} layers: {advice}"
    )


def blocks(cluster: Cluster, gpus_per_stage: int) -> list[Block]:
    """The kinds of block that placements of a shape are made of, one for each that can matter.

    Where a stage fills several nodes, mixed stages are kept only as far as they can be needed: swapping
    nodes between two mixed stages that share two types, or around a ring of them, leaves every stage with
    a subset of its types, which is never worse. What remains of that is a forest of stages and types, at
    most (types − 1) mixed stages, and with up to three types each is determined by the node counts.
    Where stages and nodes end together only now and then, all orders of nodes up to there are blocks;
    of more than ``MOST_BLOCKS``, those of the fewest types.
    """
    g = gpus_per_stage
    sizes = {gpu.name: cluster.size(gpu) for gpu in cluster.gpus}
    if all(g % size == 0 for size in sizes.values()):
        uniform = set(sizes.values())
        if len(uniform) == 1:
            mixes = _node_mixes(cluster, g // uniform.pop())
        else:
            mixes = _uneven_mixes(cluster, sizes, g)
        return [Block(nodes, (seats_of(nodes, sizes, 0, g),), ()) for nodes in mixes]
    counts = {gpu.name: count for gpu, count in zip(cluster.gpus, cluster.nodes, strict=True)}
    orders = list(itertools.islice(_orders(counts, sizes, g), MOST_BLOCKS + 1))
    if len(orders) > MOST_BLOCKS:
        some = (
            order
            for number in range(1, len(sizes) + 1)
            for names in itertools.combinations(sorted(sizes), number)
            for order in _orders({name: counts[name] for name in names}, sizes, g)
            if len(set(order)) == number
        )
        orders = list(itertools.islice(some, MOST_BLOCKS))
    found = []
    for nodes in orders:
        gpus = sum(sizes[name] for name in nodes)
        seats = tuple(seats_of(nodes, sizes, k * g, g) for k in range(gpus // g))
        found.append(Block(nodes, seats, _inside(nodes, sizes, g)[: len(seats) - 1], gpus % g == 0))
    return found


def left_out(cluster: Cluster, gpus_per_stage: int) -> bool:
    """Whether there are more kinds of block than ``blocks`` gives, where stages and nodes end apart."""
    sizes = {gpu.name: cluster.size(gpu) for gpu in cluster.gpus}
    if all(gpus_per_stage % size == 0 for size in sizes.values()):
        return False
    counts = {gpu.name: count for gpu, count in zip(cluster.gpus, cluster.nodes, strict=True)}
    return next(itertools.islice(_orders(counts, sizes, gpus_per_stage), MOST_BLOCKS, None), None) is not None


def _orders(counts: dict[str, int], sizes: dict[str, int], g: int) -> Iterator[tuple[str, ...]]:
    """Orders of the fewest nodes that hold whole stages of g GPUs, and none but whole ones, up to the GPUs at
    which stages and nodes of each type alone end together; and those that nothing is left to make whole.

    Nodes that lie in one stage are in the order of ``counts``: another makes no difference.
    """
    names = list(counts)
    most = math.lcm(g, *(sizes[name] for name in names))

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
                before = gpus - sizes[prefix[-1]]
                alone = before // g == (gpus + sizes[name] - 1) // g
                if alone and names.index(name) < names.index(prefix[-1]):
                    continue
            yield from extend((*prefix, name), gpus + sizes[name])
        if is_last and gpus > g:
            yield prefix

    return extend((), 0)


def seats_of(nodes: Sequence[str], sizes: dict[str, int], first: int, count: int) -> Seats:
    """The seats of ``count`` ranks from ``first`` on, where ranks are numbered through the nodes in order."""
    found, begin = [], 0
    for name in nodes:
        end = begin + sizes[name]
        taken = min(end, first + count) - max(begin, first)
        if taken > 0:
            found.append((name, taken))
        begin = end
    return tuple(sorted(found))


def _inside(nodes: Sequence[str], sizes: dict[str, int], g: int) -> tuple[bool, ...]:
    """Of each boundary between stages of g GPUs on these nodes, whether both stages are in one node."""
    node_of = [index for index, name in enumerate(nodes) for _ in range(sizes[name])]
    return tuple(node_of[k] == node_of[k + 2 * g - 1] for k in range(0, len(node_of) - 2 * g + 1, g))


def _node_mixes(cluster: Cluster, each: int) -> list[tuple[str, ...]]:
    """Node types of one stage on ``each`` nodes of one size, pure ones first."""
    counts = {gpu.name: count for gpu, count in zip(cluster.gpus, cluster.nodes, strict=True)}
    names = list(counts)
    mixes = {(name,) * each for name in names if counts[name] >= each}
    rest = {name: counts[name] % each for name in names}
    if len(names) <= 3:
        # One mixed stage takes what is left of all; two share one type and finish one other type each.
        if sum(rest.values()) == each:
            mixes.add(_mix(rest))
        if len(names) == 3:
            for shared, one in itertools.permutations(names, 2):
                if rest[one] and counts[shared] >= each - rest[one]:
                    mixes.add(_mix({shared: each - rest[one], one: rest[one]}))
    else:
        # With more types the left-over nodes are packed in the cluster's order of types.
        left = [name for name in names for _ in range(rest[name])]
        mixes |= {tuple(left[k : k + each]) for k in range(0, len(left) - each + 1, each)}
    return sorted(mixes, key=lambda nodes: (len(set(nodes)), [names.index(name) for name in nodes]))


def _uneven_mixes(cluster: Cluster, sizes: dict[str, int], gpus: int) -> list[tuple[str, ...]]:
    """Node types of one stage on nodes of several sizes: one type alone, or what stages of one type leave
    over, made up with another or with all.
    """
    counts = {gpu.name: count for gpu, count in zip(cluster.gpus, cluster.nodes, strict=True)}
    mixes = [_mix({name: gpus // size}) for name, size in sizes.items() if counts[name] * size >= gpus]
    rest = {name: counts[name] % (gpus // size) for name, size in sizes.items()}
    for one, two in itertools.permutations(sizes, 2):
        for number in range(rest[one], 0, -1):
            others, over = divmod(gpus - number * sizes[one], sizes[two])
            if not over and others <= counts[two]:
                mixes.append(_mix({name: {one: number, two: others}.get(name, 0) for name in sizes}))
                break
    if len(sizes) > 2 and sum(rest[name] * size for name, size in sizes.items()) == gpus:
        mixes.append(_mix(rest))
    return list(dict.fromkeys(mixes))


def _mix(counts: dict[str, int]) -> tuple[str, ...]:
    return tuple(name for name, count in counts.items() for _ in range(count))


def inside_node(cluster: Cluster, placement: Sequence[str], shape: Shape) -> tuple[bool, ...]:
    """Of each boundary between stages, whether all its messages stay within one node."""
    sizes = {gpu.name: cluster.size(gpu) for gpu in cluster.gpus}
    return _inside(placement, sizes, shape.group)[: shape.pp - 1]


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
    node_of = [at for at, name in enumerate(placement) for _ in range(cluster.size(cluster.gpu(name)))]
    g = shape.group
    others = crowded([set(node_of[k * g : (k + 1) * g]) for k in range(shape.pp)])
    return tuple(
        INSIDE if inside else CROWDED if other else BETWEEN
        for inside, other in zip(inside_node(cluster, placement, shape), others, strict=True)
    )


def stage_seats(cluster: Cluster, placement: Sequence[str], shape: Shape) -> tuple[Seats, ...]:
    """The seats of each stage of a placement."""
    sizes = {gpu.name: cluster.size(gpu) for gpu in cluster.gpus}
    return tuple(seats_of(placement, sizes, k * shape.group, shape.group) for k in range(shape.pp))


def gpu_types(seats: Seats) -> tuple[str, ...]:
    """The types of GPU of a stage, each once."""
    return tuple(dict.fromkeys(name for name, _ in seats))
