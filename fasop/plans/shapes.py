"""The shapes that a plan can have on a cluster: degrees, and the nodes that its stages fall on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Protocol

from fasop.errors import PlanError
from fasop.inputs.clusters import Cluster
from fasop.inputs.models import Model


class Degrees(Protocol):
    """Whatever has the degrees of a plan."""

    @property
    def tp(self) -> int: ...

    @property
    def dp(self) -> int: ...

    @property
    def pp(self) -> int: ...

    @property
    def mbs(self) -> int: ...


@dataclass(frozen=True)
class Shape:
    """Degrees of a plan: tensor, data, pipeline, and sequences a micro-batch."""

    tp: int
    dp: int
    pp: int
    mbs: int


@dataclass(frozen=True)
class Block:
    """The smallest run of whole nodes that holds whole stages.

    nodes: GPU types in rank order; stages: for each stage, the types of the nodes it is on, sorted (a
    stage on nodes of two types goes at the pace of the slower); inside: whether the boundary after each
    stage but the last stays within one node.
    """

    nodes: tuple[str, ...]
    stages: tuple[tuple[str, ...], ...]
    inside: tuple[bool, ...]


def divisors(value: int) -> list[int]:
    """In ascending order."""
    return [d for d in range(1, value + 1) if value % d == 0]


def shapes(model: Model, cluster: Cluster, max_tp: int) -> list[Shape]:
    """All degrees that use every GPU. Raises ``PlanError`` where there are none."""
    found = []
    for tp in divisors(cluster.gpus_per_node):
        if tp > max_tp or model.heads % tp:
            continue
        for dp in divisors(cluster.gpu_count // tp):
            pp = cluster.gpu_count // (tp * dp)
            if model.global_batch % dp == 0 and pp <= model.layers:
                found += [Shape(tp, dp, pp, mbs) for mbs in divisors(model.global_batch // dp)]
    if not found:
        raise PlanError(_no_shape(model, cluster, max_tp))
    return found


def _no_shape(model: Model, cluster: Cluster, max_tp: int) -> str:
    """Why no degrees fit, and the nearest number of nodes for which some do."""
    size, most = cluster.gpus_per_node, cluster.node_count

    def possible(nodes: int) -> bool:
        for tp in divisors(size):
            if tp <= max_tp and model.heads % tp == 0:
                for dp in divisors(model.global_batch):
                    stages, rest = divmod(nodes * size, tp * dp)
                    if rest == 0 and 1 <= stages <= model.layers:
                        return True
        return False

    near = next((n for n in sorted(range(1, 2 * most + 1), key=lambda n: abs(n - most)) if possible(n)), None)
    text = (
        f"no tp × dp × pp makes {cluster.gpu_count} GPUs ({most} nodes of {size}) with tp at most "
        f"{max_tp} and a divisor of {size} and of {model.heads} heads, dp a divisor of the global batch "
        f"{model.global_batch}, and pp at most {model.layers} layers"
    )
    return f"{text}: {near} nodes would work." if near else f"{text}: use nodes of another size."


def blocks(cluster: Cluster, gpus_per_stage: int) -> list[Block]:
    """The kinds of block that placements of a shape are made of, one for each that can matter.

    Where a stage fills several nodes, mixed stages are kept only as far as they can be needed: swapping
    nodes between two mixed stages that share two types, or around a ring of them, leaves every stage with
    a subset of its types, which is never worse. What remains of that is a forest of stages and types, at
    most (types − 1) mixed stages, and with up to three types each is determined by the node counts.
    """
    size, g = cluster.gpus_per_node, gpus_per_stage
    names = [gpu.name for gpu in cluster.gpus]
    if g % size == 0:
        return [Block(nodes, (tuple(sorted(set(nodes))),), ()) for nodes in _node_mixes(cluster, g // size)]
    length = g * size // gcd(g, size)
    found = []
    for nodes in itertools.product(names, repeat=length // size):
        if any(nodes.count(name) > count for name, count in zip(names, cluster.nodes, strict=True)):
            continue
        spans = [(k * g // size, ((k + 1) * g - 1) // size) for k in range(length // g)]
        stages = tuple(tuple(sorted(set(nodes[a : b + 1]))) for a, b in spans)
        inside = tuple(a == b == c == d for (a, b), (c, d) in itertools.pairwise(spans))
        found.append(Block(nodes, stages, inside))
    return found


def _node_mixes(cluster: Cluster, each: int) -> list[tuple[str, ...]]:
    """Node types of one stage on ``each`` nodes, pure ones first."""
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
        mixes |= {tuple(left[k : k + each]) for k in range(0, len(left), each)}
    return sorted(mixes, key=lambda nodes: (len(set(nodes)), [names.index(name) for name in nodes]))


def _mix(counts: dict[str, int]) -> tuple[str, ...]:
    return tuple(name for name, count in counts.items() for _ in range(count))


def placements(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Every order of the cluster's nodes that differs in types, for checks of small clusters."""

    def extend(prefix: tuple[str, ...], left: dict[str, int]) -> Iterator[tuple[str, ...]]:
        if not any(left.values()):
            yield prefix
        for name, count in left.items():
            if count:
                yield from extend((*prefix, name), {**left, name: count - 1})

    yield from extend((), {gpu.name: n for gpu, n in zip(cluster.gpus, cluster.nodes, strict=True)})


def inside_node(cluster: Cluster, gpus_per_stage: int) -> tuple[bool, ...]:
    """Of each boundary between stages, whether all its messages stay within one node."""
    size, g = cluster.gpus_per_node, gpus_per_stage
    return tuple(k * g // size == ((k + 2) * g - 1) // size for k in range(cluster.gpu_count // g - 1))


def kinds_of(
    cluster: Cluster, placement: tuple[str, ...], gpus_per_stage: int
) -> tuple[tuple[str, ...], ...]:
    """GPU types of each stage of a placement."""
    size = cluster.gpus_per_node
    stages = cluster.gpu_count // gpus_per_stage
    spans = [(k * gpus_per_stage // size, ((k + 1) * gpus_per_stage - 1) // size) for k in range(stages)]
    return tuple(tuple(sorted(set(placement[a : b + 1]))) for a, b in spans)
