"""A step of a plan as Chakra execution traces, one for each rank, that a network simulator can replay.

A pass is one node, unless tensor-parallel collectives or exchanges with experts happen within it, or buckets
of gradients are reduced beside it. Then each layer has a node for every computation up to a collective, and
one for the collective.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from chakra_et.et import file as et_file
from chakra_et.et.columns import Attribute, CollectiveType, ExecutionTrace, NodeType, Ragged, Strings
from chakra_et.et.node_attributes import set_integers, set_texts
from chakra_et.files import write_text
from chakra_et.names import RunFiles
from fasop.errors import PlanError
from fasop.exact.kernels import TENSOR_SUMS
from fasop.exact.memory import held_parameters
from fasop.exact.stage_costs import message_bytes
from fasop.inputs.models import LAYERS
from fasop.plans.plan import Plan
from fasop.schedule.events import Event, chunk_layers, layer_seconds, step_time

WORLD = "1"  # the group of all ranks
# Groups that the files describe in Megatron's words, from which readers take the mesh.
AXES = {
    "tensor": "TENSOR_MODEL_PARALLEL_GROUP",
    "data": "DATA_PARALLEL_GROUP",
    "pipeline": "PIPELINE_MODEL_PARALLEL_GROUP",
}
# Share of a measured layer's time that its collectives get where, by their links alone, they take longer.
MOST = 0.9
COMPUTE, TENSOR, DATA = 0, 5, 6  # lanes; 1 to 4 are for messages
SUM, EXCHANGE = "S", "X"  # in a layer's pass: over the tensor-parallel ranks; of tokens, with experts
ALL = float("inf")


class Piece(NamedTuple):
    """A part of an event: a computation, a message or a collective, of so many bytes on each rank.

    group: the "tensor", "data" or "embedding" ranks, those with a layer's "experts" or with "copies" of the
    same ones; layer: that ends with it, counted from the first of the chunk.
    """

    name: str
    seconds: float = ALL  # that are left of the event
    collective: CollectiveType | None = None
    size: int = 0
    group: str = ""
    layer: int = -1


class Node(NamedTuple):
    """start, end: seconds; after: places in the list of nodes."""

    piece: Piece
    event: Event
    start: float
    end: float
    after: tuple[int, ...]


def write(plan: Plan, events: Sequence[Event], folder: Path, name: str) -> list[Path]:
    """Write NAME.RANK.et for every rank, and NAME_comm_groups.json; returns the .et files.

    Rank t + tp·d + tp·dp·stage, as the cost models number them. Raises ``OSError``, and ``PlanError`` for a
    plan whose communication within passes the traces would lack.
    """
    if (zero := plan.options.zero) >= 2:
        why = "it communicates within every pass, which traces lack: plan with --zero 0 or 1."
        raise PlanError(f"--et: a plan with --zero {zero} can't be written: {why}")
    if plan.weight_gradients:
        raise PlanError("--et: a zero-bubble plan can't be written: traces have whole backward passes.")
    folder.mkdir(parents=True, exist_ok=True)
    run = RunFiles(folder, name)
    whole, written = step_time(list(events)), []
    each = plan.tp * plan.dp
    groups = {WORLD: list(range(each * plan.pp))}
    names: dict[tuple[str, int], str] = {}  # of each kind of group and first rank
    progress = tqdm(total=each * plan.pp, unit="rank", disable=not sys.stderr.isatty())
    for stage in range(plan.pp):
        first = next(at for at, event in enumerate(events) if event.stage == stage)
        own = [event for event in events if event.stage == stage]
        own = [replace(event, after=tuple(one - first for one in event.after)) for event in own]
        nodes = _nodes(plan, stage, own)
        shared = _shared(plan, nodes, whole)
        used = sorted({node.piece.group for node in nodes} - {""})
        peers = np.array([node.event.peer for node in nodes]) * each
        kinds = [["", *used].index(node.piece.group) for node in nodes]
        index = np.where(shared.types == NodeType.COMP, -1, kinds)
        sends, receives = (shared.types == kind for kind in (NodeType.COMM_SEND, NodeType.COMM_RECV))
        for place in range(each):
            rank = stage * each + place
            table = [WORLD]
            for kind in used:
                ranks = list(_group(plan, kind, stage, place))
                if (kind, ranks[0]) not in names:
                    names[kind, ranks[0]] = str(len(names) + 2)
                    groups[names[kind, ranks[0]]] = ranks
                table.append(names[kind, ranks[0]])
            trace = shared
            for end, is_rank in (("comm_src", sends), ("comm_dst", receives)):
                values = np.where(is_rank, rank, peers + place)
                trace = set_integers(trace, end, "int32", values, sends | receives)
            trace = set_texts(trace, "pg_name", table, index)
            written.append(run.et_file(rank))
            described = {of: ("", text, list(_group(plan, of, stage, place))) for of, text in AXES.items()}
            metadata = {**trace.metadata, "rank": rank, "process_groups": json.dumps(described)}
            et_file.write(written[-1], replace(trace, metadata=metadata))
            progress.update()
    progress.close()
    write_text(run.groups_file, json.dumps(groups, indent=1) + "\n")
    return written


def _group(plan: Plan, kind: str, stage: int, place: int) -> Sequence[int]:
    """The ranks of the group that a stage's rank is in."""
    tp, ep, each = plan.choice(stage).tp, plan.ep, plan.tp * plan.dp
    first, replica, rank = stage * each, place // tp, place % tp
    if kind == "embedding":
        return [holder * each + place for holder in plan.model.embedding_stages(plan.partition)]
    if kind == "pipeline":
        return range(place, each * plan.pp, each)
    if kind == "tensor":
        return range(first + replica * tp, first + (replica + 1) * tp)
    if kind == "data":
        return range(first + rank, first + each, tp)
    if kind == "experts":
        begin = first + rank + replica // ep * ep * tp
        return range(begin, begin + ep * tp, tp)
    return range(first + rank + replica % ep * tp, first + each, tp * ep)


def _shared(plan: Plan, nodes: list[Node], whole: float) -> ExecutionTrace:
    start = np.array([round(node.start * 1e6) for node in nodes])
    end = np.array([round(node.end * 1e6) for node in nodes])
    offsets = np.cumsum([0, *(len(node.after) for node in nodes)])
    rows = np.arange(len(nodes))
    pieces, events = [node.piece for node in nodes], [node.event for node in nodes]
    messages = {"send": NodeType.COMM_SEND, "receive": NodeType.COMM_RECV}
    collective = np.array([piece.collective is not None for piece in pieces])
    others = [messages.get(event.kind, NodeType.COMP) for event in events]
    trace = ExecutionTrace(
        ids=np.arange(1, len(nodes) + 1, dtype=np.uint64),
        names=Strings([piece.name.encode() for piece in pieces], rows),
        types=np.where(collective, NodeType.COMM_COLL, others).astype(np.uint8),
        start_micros=start.astype(np.uint64),
        duration_micros=(end - start).astype(np.uint64),
        data_deps=Ragged(offsets, np.array([one + 1 for node in nodes for one in node.after], np.uint64)),
        ctrl_deps=Ragged(np.zeros(len(nodes) + 1, dtype=np.int64), np.zeros(0, dtype=np.uint64)),
        attributes={"is_cpu_op": Attribute("bool", rows, np.zeros(len(rows), dtype=np.int64))},
        metadata={
            "schema": "fasop",
            "world_size": plan.tp * plan.dp * plan.pp,
            "measured_end_micros": int(end.max(initial=0)),
            "clock_domain": plan.cluster.name,
            "trace_start_ns": 0,
            "planned_step_micros": round(whole * 1e6),
            "plan": f"{plan.model.name} on {plan.cluster.name}: tp {plan.tp}, dp {plan.dp}, pp {plan.pp}, "
            f"micro-batches of {plan.mbs}, layers {'-'.join(map(str, plan.layers))}",
        },
    )
    every = np.ones(len(nodes), dtype=bool)
    between = ~collective & (trace.types != NodeType.COMP)
    trace = set_texts(trace, "kind", ["kernel", "collective", "p2p"], collective + 2 * between)
    phases = ["forward", "backward", "optimizer"]
    trace = set_texts(trace, "phase", phases, np.array([phases.index(_phase(event)) for event in events]))
    lanes = [_lane(node) for node in nodes]
    for name, values, present in (
        ("lane", lanes, every),
        ("stream", lanes, every),
        ("micro_batch", [event.micro_batch for event in events], every),
        ("chunk", [event.chunk for event in events], every),
        ("comm_size", [piece.size for piece in pieces], collective | between),
        ("comm_type", [int(piece.collective or 0) for piece in pieces], collective),
    ):
        trace = set_integers(trace, name, "int64", np.array(values), present)
    # A tag that differs for all messages between two ranks.
    tags = [2 * (event.chunk * plan.micro_batches + event.micro_batch) + event.up for event in events]
    return set_integers(trace, "comm_tag", "int32", np.array(tags), between)


def _phase(event: Event) -> str:
    """As in recorded traces: gradients are reduced in the backward pass."""
    if event.kind in ("update", "gather"):
        return "optimizer"
    return "forward" if event.kind == "forward" or (event.peer >= 0 and event.up) else "backward"


def _lane(node: Node) -> int:
    event = node.event
    if event.kind in ("send", "receive"):
        return 1 + 2 * (not event.up) + (event.kind == "receive")
    communicating = TENSOR if event.kind in ("forward", "backward") else DATA
    return COMPUTE if node.piece.collective is None else communicating


def _nodes(plan: Plan, stage: int, events: Sequence[Event]) -> list[Node]:
    """In order of start, each after all that it waits for. events: those of the stage, by start."""
    beside = {place for event in events if event.bucket >= 0 for place in event.after}
    within = plan.parts and (plan.choice(stage).tp > 1 or plan.ep > 1)
    reductions = sum(event.kind == "reduction" for event in events)
    nodes: list[Node] = []
    last: list[int] = []  # the last node of each event
    layer_end: dict[tuple[int, int], int] = {}  # of each backward and layer, its last node
    for place, event in enumerate(events):
        after = tuple(layer_end.get((one, event.layer), last[one]) for one in event.after)
        if event.kind not in ("forward", "backward"):
            pieces = _once(plan, stage, event, reductions)
        elif within or (plan.parts and place in beside):
            pieces = _pass(plan, stage, event)
        else:
            pieces = iter([Piece(f"{event.kind} {event.micro_batch}")])
        start = event.start
        for piece in pieces:
            end = min(start + piece.seconds, event.end)
            nodes.append(Node(piece, event, start, end, after))
            start, after = end, (len(nodes) - 1,)
            if piece.layer > 0:
                # The first layer's bucket may have the embedding's gradients too: it waits for the pass.
                layer_end[place, piece.layer] = len(nodes) - 1
        last.append(len(nodes) - 1)
    order = sorted(range(len(nodes)), key=lambda at: (nodes[at].start, nodes[at].end))
    place_of = {at: new for new, at in enumerate(order)}
    return [nodes[at]._replace(after=tuple(sorted(place_of[one] for one in nodes[at].after))) for at in order]


def _once(plan: Plan, stage: int, event: Event, reductions: int) -> Iterator[Piece]:
    """Whatever is no pass: messages, and what happens once per step, one after the other."""
    options, model, group = plan.options, plan.model, plan.tp * plan.dp
    if event.kind in ("send", "receive"):
        size = plan.dp * plan.mbs * message_bytes(model, options, plan.tp) // group
        name = f"{event.kind} {event.micro_batch} {'activations' if event.up else 'gradients'}"
        yield Piece(name, size=size)
        return
    if event.kind == "update":
        yield Piece("optimizer")
        return
    if event.kind == "embedding":
        size = model.hidden * model.vocab // plan.tp * options.gradient_bytes
        yield Piece("embedding all-reduce", ALL, CollectiveType.ALL_REDUCE, size, "embedding")
        return
    if event.kind == "gather":
        name, kind, each = "parameter all-gather", CollectiveType.ALL_GATHER, options.activation_bytes
    else:
        kind = CollectiveType.REDUCE_SCATTER if options.zero else CollectiveType.ALL_REDUCE
        name, each = f"gradient {'reduce-scatter' if options.zero else 'all-reduce'}", options.gradient_bytes
        if event.bucket >= 0:
            name += f" {event.bucket}"
    tp = plan.choice(stage).tp
    units = plan.units(stage)
    held, of_experts = map(float, held_parameters(plan.model, tp, plan.ep, lambda each: each[units].sum()))
    of_experts *= plan.ep > 1
    others = (event.end - event.start) * (1 - plan.parts[stage].experts) if of_experts else ALL
    for what, of, ranks, seconds, among in (
        ("", held - of_experts, group // tp, others, "data"),
        (" of experts", of_experts, group // tp // plan.ep, ALL, "copies"),
    ):
        if of and ranks > 1:
            size = int(of * each) // (ranks if event.kind == "gather" else reductions)
            yield Piece(name + what, seconds, kind, max(size, 1), among)


def _pass(plan: Plan, stage: int, event: Event) -> Iterator[Piece]:
    """A pass, computation by computation and collective by collective, in the order of its units."""
    choice, is_forward = plan.choice(stage), event.kind == "forward"
    each = layer_seconds(plan, stage)[not is_forward]
    sizes = chunk_layers(plan, stage)
    units = plan.model.kinds[plan.units(stage)]
    if plan.virtual_stages > 1:
        # Interleaved: the first chunk of all has the embedding, the last the head.
        embedding = "E" * (event.chunk == 0) * units.count("E")
        head = "P" * (event.chunk == len(sizes) - 1) * units.count("P")
        units = embedding + "T" * sizes[event.chunk] + head
    way = int(not is_forward)
    layers = sum(kind in LAYERS for kind in units)
    # A plan has no separate times of embedding and head: on a stage with both, the embedding takes as long
    # as its collectives.
    rest = max(event.end - event.start - each * layers, 0.0)
    embeddings, is_split = units.count("E"), choice.tp > 1
    ends = {"E": rest / max(embeddings, 1)}
    if "P" in units:
        once = TENSOR_SUMS["E"][way] * plan.parts[stage].tensor_sum * is_split
        ends["E"] = min(once, rest / (embeddings + 1))
        ends["P"] = rest - embeddings * ends["E"]
    ways = [way] if is_forward or choice.recompute != "full" else [way, 0]
    first = sum(sizes[: event.chunk])
    what = f"{event.kind} {event.micro_batch}"
    index = 0 if is_forward else layers - 1
    for kind in units if is_forward else reversed(units):
        if kind in ends:
            name = f"{what} {'embedding' if kind == 'E' else 'head'}"
            pattern = SUM * TENSOR_SUMS[kind][way] * is_split
            if pattern or ends[kind] > 0:
                yield from _collectives(plan, stage, name, ends[kind], pattern)
            continue
        pattern = ""
        for of in ways:
            pattern += SUM * TENSOR_SUMS[kind][of] * is_split
            if plan.ep > 1 and kind != "F":
                # To the experts and back, before the last sum.
                pattern = pattern[:-1] + 2 * EXCHANGE + pattern[-1:] if is_split else pattern + 2 * EXCHANGE
        *pieces, end = _collectives(plan, stage, f"{what} layer {first + index}", each, pattern)
        yield from pieces
        yield end._replace(layer=index)
        index += 1 if is_forward else -1


def _collectives(plan: Plan, stage: int, name: str, seconds: float, pattern: str) -> Iterator[Piece]:
    """Computation that is followed by collectives, evenly."""
    if not pattern:
        yield Piece(name, seconds)
        return
    options, parts, choice = plan.options, plan.parts[stage], plan.choice(stage)
    alone = {SUM: parts.tensor_sum, EXCHANGE: parts.exchange}
    total = sum(alone[kind] for kind in pattern)
    scale = MOST * seconds / total if total > seconds else 1.0
    sequences = max(mbs for _, mbs in choice.shares)  # on the replica that has the most
    size = sequences * plan.model.seq * plan.model.hidden * options.activation_bytes
    for kind in pattern:
        yield Piece(name, (seconds - scale * total) / len(pattern))
        each = scale * alone[kind]
        if kind == EXCHANGE:
            routed = size * plan.model.top_k // choice.tp
            yield Piece(f"{name} all-to-all", each, CollectiveType.ALL_TO_ALL, routed, "experts")
        elif options.sequence_parallel:
            gathered = size // choice.tp
            yield Piece(f"{name} reduce-scatter", each / 2, CollectiveType.REDUCE_SCATTER, size, "tensor")
            yield Piece(f"{name} all-gather", each / 2, CollectiveType.ALL_GATHER, gathered, "tensor")
        else:
            yield Piece(f"{name} all-reduce", each, CollectiveType.ALL_REDUCE, size, "tensor")
