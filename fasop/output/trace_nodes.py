"""The nodes of one stage's trace: its events, with passes taken apart into layers where that matters.

A pass is one node, unless tensor-parallel collectives or exchanges with experts happen within it, or buckets
of gradients are reduced beside it. Then each layer has a node for every computation up to a collective, and
one for the collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from chakra_et.et.columns import CollectiveType
from fasop.exact.memory import copies, counted_twice, parameters
from fasop.exact.passes import BACKWARD_SUMS, FORWARD_SUMS
from fasop.exact.stage_costs import message_bytes
from fasop.plans.options import Recompute
from fasop.plans.plan import Plan
from fasop.schedule.events import Event, chunk_layers, layer_seconds

# Of the seconds of a measured layer that is faster than the links' model has its collectives, their part.
MOST = 0.9
COMPUTE, TENSOR, DATA = 0, 5, 6  # lanes; 1 to 4 are for messages
SUM, EXCHANGE = "S", "X"  # in a layer's pass: over the tensor-parallel ranks; of tokens, with experts


@dataclass(frozen=True)
class Node:
    """start, end: seconds; after: places in the list of nodes; collective, group: of a collective, among the
    "tensor", "data" or "embedding" ranks, those with a layer's "experts" or with "copies" of the same ones;
    size: bytes that a rank puts into a collective or a message.
    """

    name: str
    start: float
    end: float
    after: tuple[int, ...]
    lane: int
    event: Event
    collective: CollectiveType | None = None
    group: str = ""
    size: int = 0


class Piece(NamedTuple):
    """A part of a pass: a computation, or a collective of so many bytes."""

    name: str
    seconds: float
    collective: CollectiveType | None = None
    size: int = 0
    group: str = ""
    layer: int = -1  # that ends with it, counted from the first of the chunk


def stage_nodes(plan: Plan, stage: int, events: Sequence[Event]) -> list[Node]:
    """In order of start, each after all that it waits for. events: those of the stage, by start."""
    tp = stage_tp(plan, stage)
    beside = {place for event in events if event.bucket >= 0 for place in event.after}
    nodes: list[Node] = []
    last: list[int] = []  # the last node of each event
    layer_end: dict[tuple[int, int], int] = {}  # of each backward and layer, its last node
    reductions = sum(event.kind == "reduction" for event in events)
    for place, event in enumerate(events):
        if event.bucket >= 0:
            ends = [layer_end.get((one, event.layer), last[one]) for one in event.after]
        else:
            ends = [last[one] for one in event.after]
        after = tuple(ends)
        if event.kind not in ("forward", "backward"):
            for node in _once(plan, stage, event, reductions):
                nodes.append(replace(node, after=after))
                after = (len(nodes) - 1,)
        elif not plan.parts or (tp == 1 and plan.ep == 1 and place not in beside):
            nodes.append(
                Node(f"{event.kind} {event.micro_batch}", event.start, event.end, after, COMPUTE, event)
            )
        else:
            start = event.start
            for piece in _pieces(plan, stage, event, tp):
                lane = TENSOR if piece.collective is not None else COMPUTE
                end = min(start + piece.seconds, event.end)
                what = (piece.collective, piece.group, piece.size)
                nodes.append(Node(piece.name, start, end, after, lane, event, *what))
                start, after = end, (len(nodes) - 1,)
                if piece.layer > 0:
                    # The first layer's bucket may have the embedding's gradients too: it waits for the pass.
                    layer_end[place, piece.layer] = len(nodes) - 1
        last.append(len(nodes) - 1)
    order = sorted(range(len(nodes)), key=lambda at: (nodes[at].start, nodes[at].end))
    place_of = {at: new for new, at in enumerate(order)}
    return [replace(nodes[at], after=tuple(sorted(place_of[one] for one in nodes[at].after))) for at in order]


def stage_tp(plan: Plan, stage: int) -> int:
    return plan.choices[stage].tp if plan.choices else plan.tp


def _recompute(plan: Plan, stage: int) -> Recompute:
    return plan.choices[stage].recompute if plan.choices else plan.options.recompute


def _sequences(plan: Plan, stage: int) -> int:
    """Of a micro-batch, on the replica that has the most."""
    return max(mbs for _, mbs in plan.choices[stage].shares) if plan.choices else plan.mbs


def _once(plan: Plan, stage: int, event: Event, reductions: int) -> Iterator[Node]:
    """Whatever is no pass: messages, and what happens once per step, one after the other."""
    options, tp = plan.options, stage_tp(plan, stage)
    group = plan.tp * plan.dp
    span = event.start, event.end
    if event.kind in ("send", "receive"):
        size = plan.dp * plan.mbs * message_bytes(plan.model, options, plan.tp) // group
        lane = 1 + 2 * (not event.up) + (event.kind == "receive")
        name = f"{event.kind} {event.micro_batch} {'activations' if event.up else 'gradients'}"
        yield Node(name, *span, (), lane, event, size=size)
        return
    if event.kind == "update":
        yield Node("optimizer", *span, (), COMPUTE, event)
        return
    if event.kind == "embedding":
        size = plan.model.hidden * plan.model.vocab // plan.tp * options.gradient_bytes
        kind = CollectiveType.ALL_REDUCE
        yield Node("embedding all-reduce", *span, (), DATA, event, kind, "embedding", size)
        return
    if event.kind == "gather":
        name, kind, each = "parameter all-gather", CollectiveType.ALL_GATHER, options.activation_bytes
    else:
        kind = CollectiveType.REDUCE_SCATTER if options.zero else CollectiveType.ALL_REDUCE
        name, each = f"gradient {'reduce-scatter' if options.zero else 'all-reduce'}", options.gradient_bytes
        if event.bucket >= 0:
            name += f" {event.bucket}"
    held, of_experts = held_parameters(plan, stage)
    middle = event.end
    if of_experts:
        middle -= (event.end - event.start) * plan.parts[stage].experts
    for what, of, ranks, begin, end in (
        ("", held - of_experts, group // tp, event.start, middle),
        (" of experts", of_experts, group // tp // plan.ep, middle, event.end),
    ):
        if of:
            size = int(of * each) // (ranks if event.kind == "gather" else reductions)
            among = "copies" if what else "data"
            yield Node(name + what, begin, end, (), DATA, event, kind, among, max(size, 1))


def held_parameters(plan: Plan, stage: int) -> tuple[float, float]:
    """Parameters of a GPU of a stage, and those of them that belong to experts spread over several ranks."""
    begin = sum(plan.partition[:stage])
    own = slice(begin, begin + plan.partition[stage])
    tp = stage_tp(plan, stage)
    each, of_experts = parameters(plan.model, tp, plan.ep)
    held = float(each[own].sum() - counted_twice(plan.model, tp, copies(plan.model)[own].sum()))
    return held, float(of_experts[own].sum()) if plan.ep > 1 else 0.0


def _pieces(plan: Plan, stage: int, event: Event, tp: int) -> Iterator[Piece]:
    """A pass, computation by computation and collective by collective, in the order of its units."""
    is_forward = event.kind == "forward"
    each = layer_seconds(plan, stage)[not is_forward]
    units = _units(plan, stage, event.chunk)
    sums = [FORWARD_SUMS if is_forward else BACKWARD_SUMS]
    layers = sum(kind in "TD" for kind in units)
    ends = _end_seconds(plan, stage, units, event.end - event.start - each * layers, sums[0], tp)
    if not is_forward and _recompute(plan, stage) == "full":
        sums.append(FORWARD_SUMS)
    first = sum(chunk_layers(plan, stage)[: event.chunk])
    what = f"{event.kind} {event.micro_batch}"
    index = 0 if is_forward else layers - 1
    for kind in units if is_forward else reversed(units):
        if kind in ends:
            name = f"{what} {'embedding' if kind == 'E' else 'head'}"
            pattern = SUM * sums[0][kind] * (tp > 1)
            if pattern or ends[kind] > 0:
                yield from _collectives(plan, stage, name, ends[kind], pattern, tp)
            continue
        within = "".join(_within(plan, of[kind], tp) for of in sums)
        *pieces, end = _collectives(plan, stage, f"{what} layer {first + index}", each, within, tp)
        yield from pieces
        yield end._replace(layer=index)
        index += 1 if is_forward else -1


def _units(plan: Plan, stage: int, chunk: int) -> str:
    """The kinds of a chunk's units, in their order."""
    begin = sum(plan.partition[:stage])
    own = plan.model.kinds[begin : begin + plan.partition[stage]]
    if plan.virtual_stages == 1:
        return own
    # Interleaved: the first chunk of all has the embedding, the last the head.
    sizes = chunk_layers(plan, stage)
    embedding, head = "E" * (chunk == 0) * own.count("E"), "P" * (chunk == len(sizes) - 1) * own.count("P")
    return embedding + "T" * sizes[chunk] + head


def _end_seconds(
    plan: Plan, stage: int, units: str, rest: float, sums: dict[str, int], tp: int
) -> dict[str, float]:
    """Seconds of an embedding, and of the head, of what a pass takes besides its layers.

    A plan has no times of them alone: beside a head, an embedding is no more than its sums.
    """
    rest, embeddings = max(rest, 0.0), units.count("E")
    if "P" not in units:
        return {"E": rest / max(embeddings, 1)}
    alone = sums["E"] * plan.parts[stage].tensor_sum * (tp > 1)
    embedding = min(alone, rest / (embeddings + 1))
    return {"E": embedding, "P": rest - embeddings * embedding}


def _within(plan: Plan, sums: int, tp: int) -> str:
    """The collectives of a layer's pass in order: to the experts and back before the last sum."""
    pattern = SUM * sums if tp > 1 else ""
    return pattern[:-1] + 2 * EXCHANGE + pattern[-1:] if plan.ep > 1 else pattern


def _collectives(plan: Plan, stage: int, name: str, seconds: float, pattern: str, tp: int) -> Iterator[Piece]:
    """Computation that is followed by collectives, evenly."""
    if not pattern:
        yield Piece(name, seconds)
        return
    options, parts = plan.options, plan.parts[stage]
    alone = {SUM: parts.tensor_sum, EXCHANGE: parts.exchange}
    total = sum(alone[kind] for kind in pattern)
    scale = MOST * seconds / total if total > seconds else 1.0
    size = _sequences(plan, stage) * plan.model.seq * plan.model.hidden * options.activation_bytes
    for kind in pattern:
        yield Piece(name, (seconds - scale * total) / len(pattern))
        each = scale * alone[kind]
        if kind == EXCHANGE:
            routed = size * plan.model.top_k // tp
            yield Piece(f"{name} all-to-all", each, CollectiveType.ALL_TO_ALL, routed, "experts")
        elif options.sequence_parallel:
            halves = (CollectiveType.REDUCE_SCATTER, size), (CollectiveType.ALL_GATHER, size // tp)
            yield Piece(f"{name} reduce-scatter", each / 2, *halves[0], "tensor")
            yield Piece(f"{name} all-gather", each / 2, *halves[1], "tensor")
        else:
            yield Piece(f"{name} all-reduce", each, CollectiveType.ALL_REDUCE, size, "tensor")
