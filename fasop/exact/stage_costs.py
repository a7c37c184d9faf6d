"""What a stage takes, for the ``exact`` cost model: seconds of compute and communication, bytes of memory.

All of it depends on which units a stage holds and on which GPUs it runs, so that a table for each kind of
seats serves every placement and partition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np

from fasop.exact.memory import activations, held_parameters, stage_gib
from fasop.exact.passes import Passes
from fasop.inputs.models import Model
from fasop.memo import memo
from fasop.plans import shapes
from fasop.plans.options import Options, Recompute
from fasop.plans.plan import StageChoice
from fasop.plans.shapes import CROWDED, INSIDE, Group, Seats, Shape, boundary_kinds, divisors, gpu_types

# Methods whose results hold for any number of stages.
SHARED = ("seconds", "_times", "once", "held", "memory", "_activations", "_table", "stacked", "p2p")
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


class Table(NamedTuple):
    """Of a stage [a, b] with the units a … b−1: seconds of forward and backward of one micro-batch, of the
    gradient reduction, and of the optimizer's update with the gathering of parameters; and which of the
    stage's choices that is. inf where there is no such stage, or none that fits.
    """

    forward: np.ndarray
    backward: np.ndarray
    reduction: np.ndarray
    update: np.ndarray
    chosen: np.ndarray


class StageCosts:
    """Tables for one shape on one cluster. n units; [a, b] stands for the units a … b−1."""

    def __init__(self, passes: Passes, shape: Shape, like: StageCosts | None = None) -> None:
        """like: tables for another number of stages, which share what doesn't depend on that."""
        self.passes, self.shape = passes, shape
        self.model, self.options, self.links = passes.model, passes.options, passes.links
        self.cluster = passes.links.cluster
        self.micro_batches = self.model.global_batch // shape.batch
        if like:
            for name in (f"_memo_{method}" for method in SHARED):
                self.__dict__[name] = like.__dict__.setdefault(name, {})

    @memo
    def choices(self, seats: Seats) -> tuple[StageChoice, ...]:
        """The ways in which a stage on these seats can work: one for all, or with ``per_stage`` its own."""
        given = self.options.recompute
        if not self.options.per_stage:
            shares = tuple((name, self.shape.mbs) for name in gpu_types(seats))
            return (StageChoice(self.shape.tp, given, shares),)
        # Stages choose whether to compute again, unless all of them shall.
        ways = RECOMPUTE if given == "none" else (given,)
        found = []
        for tp in divisors(math.gcd(*(count for _, count in seats))):
            # Heads can be split so, and whole groups of replicas are left for the experts.
            is_possible = self.model.most_tp % tp == 0 and self.shape.group // tp % self.shape.ep == 0
            if tp <= self.passes.max_tp and is_possible and (shares := self._even_finish(seats, tp)):
                found += [StageChoice(tp, recompute, shares) for recompute in ways]
        return tuple(found)

    def _even_finish(self, seats: Seats, tp: int) -> tuple[tuple[str, int], ...]:
        """Sequences for a replica of each GPU type so that all finish as early as possible; () for none."""
        replicas: dict[str, int] = {}
        for name, count in seats:
            replicas[name] = replicas.get(name, 0) + count // tp
        batch = self.shape.batch
        if len(replicas) != 2:
            each, rest = divmod(batch, sum(replicas.values()))
            return tuple((name, each) for name in replicas) if each and not rest else ()
        (one, some), (two, others) = replicas.items()
        best: float = np.inf
        chosen: tuple[tuple[str, int], ...] = ()
        for first in range(1, batch // some + 1):
            second, rest = divmod(batch - first * some, others)
            if rest or second < 1:
                continue
            slowest = max(self._layer_seconds(one, tp, first), self._layer_seconds(two, tp, second))
            if slowest < best:
                best, chosen = slowest, ((one, first), (two, second))
        return chosen

    @memo
    def _layer_seconds(self, name: str, tp: int, mbs: int) -> float:
        units = self.passes.units(name, tp, mbs, self.shape.ep)
        return float((units.forward + units.backward)[self.passes.layers].max())

    @memo
    def seconds(
        self, seats: Seats, choice: StageChoice, sharded: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds of each unit; all replicas wait for the slowest. sharded: with the
        collectives of ZeRO-2, ZeRO-3 and FSDP during the passes.
        """
        data = self.data_group(seats, choice.tp) if sharded else ()
        experts = data_group(seats, choice.tp, self.shape.ep) if self.model.experts else ()
        context = data_group(seats, choice.tp, self.model.cp)
        groups = data, experts, context
        each = [
            self.passes.replica(mbs, choice.recompute, tensor_group(seats, name, choice.tp), *groups)
            for name, mbs in choice.shares
        ]
        forward: np.ndarray = np.max([one for one, _ in each], axis=0)
        backward: np.ndarray = np.max([two for _, two in each], axis=0)
        return forward, backward

    def data_group(self, seats: Seats, tp: int) -> Group:
        """A GPU of each replica of a stage."""
        return data_group(seats, tp, self.shape.group // tp)

    def pure_seats(self, name: str) -> Seats:
        """The seats of a stage on GPUs of one type, in as few nodes as there can be."""
        size = self.cluster.size(self.cluster.gpu(name))
        nodes, rest = divmod(self.shape.group, size)
        return ((name, rest),) * (rest > 0) + ((name, size),) * nodes

    @memo
    def _times(self, seats: Seats, choice: StageChoice) -> tuple[np.ndarray, ...]:
        """Forward, backward, reduction and update seconds [a, b]; inf where b ≤ a, or where encoder and
        decoder would share one stage of several: a pipeline changes from one to the other between two stages.
        """
        each = self.seconds(seats, choice)
        forward, backward = (ranges(values) for values in each)
        if self.model.encoder_layers is not None and self.shape.pp > 1:
            decoder = self.model.encoder_layers + 1
            forward[:decoder, decoder + 1 :] = np.inf
        reduction, gather = self.once(seats, choice.tp)
        reduction = self.passes.exposed(reduction, each[1], totals)
        last = self.held(choice.tp), self.shape.ep, self.shape.group // choice.tp, totals
        updates = [
            self.passes.update(
                self.passes.units(name, choice.tp, mbs, self.shape.ep).update, self.cluster.gpu(name), *last
            )
            for name, mbs in choice.shares
        ]
        return forward, backward, reduction, np.max(updates, axis=0) + gather  # of the slowest GPU type

    @memo
    def once(self, seats: Seats, tp: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds [a, b] of the collectives that reduce gradients and gather parameters, once per step."""
        return self.passes.once(self.data_group(seats, tp), tp, *self.held(tp), self.shape.ep)

    @memo
    def held(self, tp: int) -> tuple[np.ndarray, np.ndarray]:
        """Parameters of one GPU [a, b], and those of them that belong to experts, 0 where b ≤ a."""
        return held_parameters(self.model, tp, self.shape.ep, totals)

    @memo
    def memory(self, choice: StageChoice, in_flight: float) -> np.ndarray:
        """GiB of one GPU [a, b], the margin included, with the activations of that many micro-batches."""
        tp, most = choice.tp, max(mbs for _, mbs in choice.shares)
        kept, head, largest = self._activations(tp, most, choice.recompute)
        replica = (tp, self.shape.ep, self.shape.group // tp)
        return stage_gib(self.model, self.options, replica, self.held(tp), kept * in_flight, (head, largest))

    @memo
    def _activations(self, tp: int, mbs: int, recompute: Recompute) -> tuple[np.ndarray, ...]:
        """Bytes [a, b]: kept per micro-batch in flight, and what the head and the largest layer need once."""
        kept, once = activations(self.model, tp, mbs, self.options, recompute)
        layers = self.passes.layers
        largest = np.zeros((len(layers) + 1,) * 2)
        for size in set(once[layers].tolist()):  # one of each kind of layer
            largest = np.maximum(largest, size * (ranges((layers & (once == size)).astype(float)) > 0))
        return ranges(kept), ranges(once * ~layers), largest

    @memo
    def free_gib(self, seats: Seats) -> float:
        """GiB that a stage may take of the smallest GPU."""
        gpus = [self.cluster.gpu(name) for name, _ in seats]
        return min(gpu.memory_gib - gpu.reserved_gib for gpu in gpus)

    def table(self, seats: Seats, in_flight: int, fit: bool = True) -> Table:
        """The fastest choice of each stage, of those that fit into memory, or of all without ``fit``."""
        if not fit and len(self.choices(seats)) == 1:
            in_flight = 0  # one table for all
        return self._table(seats, in_flight, fit)

    @memo
    def _table(self, seats: Seats, in_flight: int, fit: bool) -> Table:
        best: Table | None = None
        for index, choice in enumerate(self.choices(seats)):
            forward, backward, reduction, update = self._times(seats, choice)
            if fit:
                forward = np.where(self.memory(choice, in_flight) <= self.free_gib(seats), forward, np.inf)
            made = Table(forward, backward, reduction, update, np.full(forward.shape, index))
            # Choices whose hosts set the pace differ only in what comes once per step.
            step = self.micro_batches * (forward + backward) + reduction + update
            if best is None:
                best, least = made, step
                continue
            faster = step < least
            least = np.minimum(step, least)
            best = Table(*(np.where(faster, new, old) for new, old in zip(made, best, strict=True)))
        if best is None:
            n = len(self.model.kinds) + 1
            never, nothing = np.full((n, n), np.inf), np.zeros((n, n))
            best = Table(never, never, nothing, nothing, nothing.astype(int))
        return best

    @memo
    def stacked(self, kinds: tuple[Seats, ...], in_flight: int) -> np.ndarray:
        """Forward, backward, reduction and update seconds of stages that fit [which, kind of seats, a, b]."""
        return np.stack([np.stack(self.table(seats, in_flight)[:4]) for seats in kinds], axis=1)

    @memo
    def p2p(self, left: Seats, right: Seats, kind: int) -> float:
        """Seconds of one message between two stages; kind: of their boundary (``boundary_kinds``)."""
        source, target = _group(left), _group(right, 0 if kind == INSIDE else len(left))
        size = self.shape.batch * message_bytes(self.model, self.options, self.shape.tp)
        seconds = self.links.message(source, target, size, 2 if kind == CROWDED else 1)
        ends = (tensor_group(seats, seats[0][0], self.shape.tp) for seats in (left, right))
        return seconds + self.passes.output_gather(tuple(ends), self.shape.mbs)

    @memo
    def boundaries(self, placement: tuple[str, ...]) -> tuple[int, ...]:
        """What the messages over each boundary cross, as in ``boundary_kinds``."""
        return boundary_kinds(self.cluster, placement, self.shape)

    @memo
    def embedding_sync(self, holders: tuple[Seats, ...]) -> float:
        """Seconds of the all-reduce among the stages that hold a copy of the embedding."""
        if len(holders) < 2:
            return 0.0
        size = self.model.hidden * self.model.vocab / self.shape.tp * self.options.gradient_bytes
        # Stages follow each other through the nodes: a first node as large as the plan holds all of them.
        node = self.cluster.size(self.cluster.gpu(holders[0][0][0]))
        group = _group([(seats[0][0], 1) for seats in holders])
        if len(holders[0]) == 1 and self.shape.pp * self.shape.group <= node:
            group = _group([(holders[0][0][0], len(holders))])
        return self.links.collective(group, size, max(count for seats in holders for _, count in seats))


def _group(seats: Sequence[tuple[str, int]], first_node: int = 0) -> Group:
    return tuple(shapes.Part(node, name, count) for node, (name, count) in enumerate(seats, first_node))


def tensor_group(seats: Seats, name: str, tp: int) -> Group:
    """The GPUs of a tensor-parallel group of a type, in one node where that holds so many."""
    return shapes.first(_group(sorted(seats, key=lambda seat: (seat[0] != name, -seat[1]))), tp)


def data_group(seats: Seats, tp: int, ranks: int) -> Group:
    """The first ``ranks`` GPUs of a data-parallel group: one of each tensor-parallel group."""
    return shapes.first(shapes.every(_group(seats), tp)[0], ranks)


def ranges(values: np.ndarray) -> np.ndarray:
    """Sums of values[a:b] as [a, b], inf where b ≤ a."""
    ends = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(ends))
    return np.where(place > place[:, None], ends - ends[:, None], np.inf)


def totals(values: np.ndarray) -> np.ndarray:
    """``ranges`` with 0 in place of inf."""
    table = ranges(values)
    return np.where(np.isfinite(table), table, 0.0)


def message_bytes(model: Model, options: Options, tp: int) -> int:
    """Bytes that the GPUs of a replica send to the next stage for each sequence.

    Every tensor-parallel rank holds, and sends, the whole output, unless each sends a share of it.
    """
    whole = model.seq * model.hidden * options.activation_bytes
    shared = options.scatter_gather or options.sequence_parallel or options.per_stage
    return whole * (1 if shared else tp)
