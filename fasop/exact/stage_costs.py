"""What a stage takes, for the ``exact`` cost model: seconds of compute and communication, bytes of memory.

All of it depends on which units a stage holds and on which GPUs it runs, so that a table for each kind of
seats serves every placement and partition.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from fasop.exact.gradients_and_optimizer import (
    exposed_seconds,
    gather_seconds,
    optimizer_seconds,
    reduction_seconds,
)
from fasop.exact.memory import activations, copies, counted_twice, parameters, stage_gib
from fasop.exact.passes import Passes
from fasop.exact.stage_variants import Variant, Variants, data_group, tensor_group
from fasop.inputs.models import Model
from fasop.memo import memo, sharing
from fasop.plans.groups import Group, Part
from fasop.plans.options import Options, Recompute
from fasop.plans.shapes import CROWDED, INSIDE, Seats, Shape, boundary_kinds


class Table(NamedTuple):
    """Of a stage [a, b] with the units a … b−1: seconds of forward and backward of one micro-batch, of the
    gradient reduction, and of the optimizer's update with the gathering of parameters; which variant that
    is. inf where there is no such stage, or none that fits.
    """

    forward: np.ndarray
    backward: np.ndarray
    reduction: np.ndarray
    update: np.ndarray
    variant: np.ndarray


class StageCosts:
    """Tables for one shape on one cluster. n units; [a, b] stands for the units a … b−1."""

    def __init__(self, passes: Passes, shape: Shape) -> None:
        self.passes, self.shape = passes, shape
        self.model, self.options, self.links = passes.model, passes.options, passes.links
        self.cluster = passes.links.cluster
        self.micro_batches = self.model.global_batch // shape.batch
        self.variants = Variants(passes, shape)
        self._message = shape.batch * message_bytes(self.model, self.options, shape.tp)
        self.by_size: dict[object, dict[object, object]] = {}  # what searches derive from the tables

    def of(self, shape: Shape) -> StageCosts:
        """The same tables for a shape with another number of stages, of which both have several, or one."""
        made = sharing(self, "boundaries", "embedding_sync")
        made.shape = shape
        return made

    @memo
    def _times(self, seats: Seats, variant: Variant) -> tuple[np.ndarray, ...]:
        """Forward, backward, reduction and update seconds [a, b]; inf where b ≤ a, or where encoder and
        decoder would share one stage of several: a pipeline changes from one to the other between two stages.
        """
        each = self.variants.seconds(seats, variant)
        forward, backward = (ranges(values) for values in each)
        if self.model.encoder_layers is not None and self.shape.pp > 1:
            decoder = self.model.encoder_layers + 1
            forward[:decoder, decoder + 1 :] = np.inf
        reduction, gather = self.once(seats, variant.tp)
        if self.options.overlap:
            layers = finite(ranges(self.passes.layers.astype(float)))
            of_layers = finite(ranges(each[1] * self.passes.layers))
            hidden = of_layers - of_layers / np.maximum(layers, 1)
            reduction = exposed_seconds(self.options, reduction, hidden, layers)
        return forward, backward, reduction, self._update(variant) + gather

    @memo
    def once(self, seats: Seats, tp: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds [a, b] of the collectives that reduce gradients and gather parameters, once per step."""
        held, of_experts = self.held(tp)
        data = data_group(seats, tp, self.shape.group // tp)
        what = (self.passes, data, tp, held, (of_experts, self.shape.ep))
        reduction, gather = (each(*what) for each in (reduction_seconds, gather_seconds))
        return reduction, gather

    @memo
    def held(self, tp: int) -> tuple[np.ndarray, np.ndarray]:
        """Parameters of one GPU [a, b], and those of them that belong to experts, 0 where b ≤ a."""
        held, of_experts = (finite(ranges(each)) for each in parameters(self.model, tp, self.shape.ep))
        held = held - counted_twice(self.model, tp, finite(ranges(copies(self.model))))
        return held, of_experts

    def _update(self, variant: Variant) -> np.ndarray:
        """Seconds of the optimizer, on the slowest GPU type."""
        held, of_experts = self.held(variant.tp)
        slowest = np.zeros(held.shape)
        for name, mbs in variant.shares:
            gpu = self.cluster.gpu(name)
            measured = self.passes.units(name, variant.tp, mbs, self.shape.ep).update
            sharers = self.shape.group // variant.tp
            if measured is not None:
                shared = sharers if self.options.zero else 1
                slowest = np.maximum(slowest, finite(ranges(measured)) / shared)
                continue
            experts = of_experts, self.shape.ep
            seconds = optimizer_seconds(self.passes, gpu, held, experts, sharers)
            if seconds is not None:
                slowest = np.maximum(slowest, seconds)
        return slowest

    def memory(self, variant: Variant, in_flight: float) -> np.ndarray:
        """GiB of one GPU [a, b], the margin included, with the activations of that many micro-batches."""
        most = max(mbs for _, mbs in variant.shares)
        return self._memory(variant.tp, most, variant.recompute, in_flight)

    @memo
    def _memory(self, tp: int, mbs: int, recompute: Recompute, in_flight: float) -> np.ndarray:
        kept, head, largest = self._activations(tp, mbs, recompute)
        replica = (tp, self.shape.ep, self.shape.group // tp)
        held = self.held(tp)
        return stage_gib(self.model, self.options, replica, held, kept * in_flight, (head, largest))

    @memo
    def _activations(self, tp: int, mbs: int, recompute: Recompute) -> tuple[np.ndarray, ...]:
        """Bytes [a, b]: kept per micro-batch in flight, and what the head and the largest layer need once."""
        kept, once = activations(self.model, tp, mbs, self.options, recompute)
        layers = self.passes.layers
        largest = np.zeros((len(layers) + 1,) * 2)
        for size in set(once[layers].tolist()):  # one of each kind of layer
            largest = np.maximum(largest, size * (ranges((layers & (once == size)).astype(float)) > 0))
        return ranges(kept), ranges(once * ~layers), largest

    def cap(self, seats: Seats) -> float:
        """GiB of the smallest GPU."""
        return min(self.cluster.gpu(name).memory_gib for name, _ in seats)

    def free(self, seats: Seats) -> float:
        """GiB that the model can have of the smallest GPU."""
        gpus = [self.cluster.gpu(name) for name, _ in seats]
        return min(gpu.memory_gib - gpu.reserved_gib for gpu in gpus)

    def table(self, seats: Seats, in_flight: int, fit: bool = True) -> Table:
        """The fastest variant of each stage, of those that fit into memory, or of all without ``fit``."""
        variants = self.variants.of(seats)
        if len(variants) == 1 and not fit:
            in_flight = 0  # one table for all
        return self._table(seats, in_flight, fit)

    def too_large(self, seats: Seats, in_flight: int) -> np.ndarray:
        """0 [a, b] where the one variant of a stage fits into memory, else inf."""
        (variant,) = self.variants.of(seats)
        return np.where(self.memory(variant, in_flight) <= self.free(seats), 0.0, np.inf)

    @memo
    def stacked(self, kinds: tuple[Seats, ...], in_flight: int) -> np.ndarray:
        """Forward, backward, reduction and update seconds of stages that fit [which, kind of seats, a, b]."""
        return np.stack([np.stack(self.table(seats, in_flight)[:4]) for seats in kinds], axis=1)

    @memo
    def _table(self, seats: Seats, in_flight: int, fit: bool) -> Table:
        best: Table | None = None
        for index, variant in enumerate(self.variants.of(seats)):
            forward, backward, reduction, update = self._times(seats, variant)
            if fit:
                fits = self.memory(variant, in_flight) <= self.free(seats)
                forward = np.where(fits, forward, np.inf)
            made = Table(forward, backward, reduction, update, np.full(forward.shape, index))
            if best is None:
                best = made
                continue
            faster = forward + backward < best.forward + best.backward
            best = Table(*(np.where(faster, new, old) for new, old in zip(made, best, strict=True)))
        if best is None:
            n = len(self.model.kinds) + 1
            never, nothing = np.full((n, n), np.inf), np.zeros((n, n))
            best = Table(never, never, nothing, nothing, nothing.astype(int))
        return best

    @memo
    def p2p(self, left: Seats, right: Seats, kind: int) -> float:
        """Seconds of one message between two stages; kind: of their boundary (``boundary_kinds``)."""
        source = tuple(Part(node, name, count) for node, (name, count) in enumerate(left))
        shift = 0 if kind == INSIDE else len(left)
        target = tuple(Part(node + shift, name, count) for node, (name, count) in enumerate(right))
        seconds = self.links.message(source, target, self._message, 2 if kind == CROWDED else 1)
        ends = (tensor_group(seats, seats[0][0], self.shape.tp) for seats in (left, right))
        return seconds + output_gather(self.passes, tuple(ends), self.shape.mbs)

    @memo
    def boundaries(self, placement: tuple[str, ...]) -> tuple[int, ...]:
        """What the messages over each boundary cross, as in ``boundary_kinds``."""
        return boundary_kinds(self.cluster, placement, self.shape)

    @memo
    def embedding_sync(self, holders: tuple[Seats, ...]) -> float:
        """Seconds of the all-reduce among the stages that hold a copy of the embedding."""
        if len(holders) < 2:
            return 0.0
        tp = self.shape.tp
        size = self.model.hidden * self.model.vocab / tp * self.options.gradient_bytes
        # Stages follow each other through the nodes: a first node as large as the plan holds all of them.
        first = self.cluster.size(self.cluster.gpu(holders[0][0][0]))
        one_node = len(holders[0]) == 1 and self.shape.pp * self.shape.group <= first
        rings = max(count for seats in holders for _, count in seats)
        if one_node:
            group: Group = (Part(0, holders[0][0][0], len(holders)),)
        else:
            group = tuple(Part(node, seats[0][0], 1) for node, seats in enumerate(holders))
        return self.links.collective(group, size, rings)


def output_gather(passes: Passes, ends: tuple[Group, ...], mbs: int) -> float:
    """Seconds in which a stage's output, of which its ranks got a share each, becomes whole again.

    ends: the tensor-parallel groups at both ends of a boundary, of which gradients take the other direction.
    """
    if not passes.options.scatter_gather or passes.options.sequence_parallel:
        return 0.0
    size = mbs * passes.model.seq * passes.model.hidden * passes.options.activation_bytes
    return max(passes.links.collective(group, size, 1, False) for group in ends)


def ranges(values: np.ndarray) -> np.ndarray:
    """Sums of values[a:b] as [a, b], inf where b ≤ a."""
    ends = np.concatenate([[0.0], np.cumsum(values)])
    return np.where(_after(len(ends)), ends[None, :] - ends[:, None], np.inf)


@functools.lru_cache(maxsize=8)
def _after(n: int) -> np.ndarray:
    """[a, b]: whether b > a."""
    return np.arange(n)[None, :] > np.arange(n)[:, None]


def finite(table: np.ndarray) -> np.ndarray:
    """The table with 0 where it is inf."""
    return np.where(np.isfinite(table), table, 0.0)


def message_bytes(model: Model, options: Options, tp: int) -> int:
    """Bytes that the GPUs of a replica send to the next stage for each sequence.

    Every tensor-parallel rank holds, and sends, the whole output, unless each sends a share of it.
    """
    whole = model.seq * model.hidden * options.activation_bytes
    shared = options.scatter_gather or options.sequence_parallel or options.per_stage
    return whole * (1 if shared else tp)
