"""Forward and backward seconds of a model's units on one replica of a stage, and what comes once per step.

A replica is a tensor-parallel group that works on its own micro-batch. Its passes hold the computation and
all that is communicated within them: tensor-parallel collectives, tokens on their way to experts, and what
ZeRO-2 and ZeRO-3 exchange for every micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from chakra_et.cost import gpus
from fasop.errors import PlanError
from fasop.exact.communication import Communication
from fasop.exact.kernels import tensor_sums
from fasop.exact.memory import parameters
from fasop.exact.recipes import constant, constant_name, hardware, update_seconds, weight_share, with_host
from fasop.exact.unit_times import Compute, UnitSeconds
from fasop.inputs.clusters import Gpu
from fasop.inputs.models import LAYERS, Model
from fasop.memo import memo
from fasop.plans.options import Options, Recompute
from fasop.plans.shapes import Group, every, first, group_size

Time = Any  # a float, or an array
Total = Callable[[np.ndarray], np.ndarray]  # sums values of all units over the units of some stages
Held = tuple[np.ndarray, np.ndarray]  # parameters of a GPU, and those of them that belong to experts
SPLIT_NOTE = "zero-bubble: the share of weights' gradients is computed (A100's on unknown GPUs), not measured"


class Passes:
    """The passes of one model, run one way, on one cluster."""

    def __init__(
        self, model: Model, compute: Compute, links: Communication, options: Options, max_tp: float = math.inf
    ) -> None:
        """max_tp: largest tensor-parallel degree that a stage may choose. Raises ``PlanError``."""
        if options.shard and model.experts:
            raise PlanError(f"{model.name}: shard {options.shard}: a model with experts has no HSDP here.")
        self.max_tp = max_tp
        self.model, self.compute, self.links, self.options = model, compute, links, options
        self.layers = np.array([kind in LAYERS for kind in model.kinds])
        self._routed = np.array([kind in "TD" for kind in model.kinds])
        self._sums = tensor_sums(model)

    @memo
    def units(self, name: str, tp: int, mbs: int, ep: int = 1, nodes: int = 1) -> UnitSeconds:
        """What the units take on a GPU type, in tensor-parallel groups that span so many nodes."""
        gpu = self.links.cluster.gpu(name)
        size = self.links.cluster.size(gpu)
        return self.compute.of(gpu, tp, mbs, ep, size if nodes == 1 and tp <= size else 0)

    @memo
    def replica(
        self,
        mbs: int,
        recompute: Recompute,
        tensor: Group,
        data: Group,
        experts: Group,
        context: Group = (),
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds per unit, forward and backward, of a micro-batch of ``mbs`` sequences.

        tensor: the replica's GPUs; data: one GPU of each replica of the stage; experts: those among which a
        layer's experts are spread; context: of each replica that shares its sequences.
        """
        options, tp, ep = self.options, group_size(tensor), max(group_size(experts), 1)
        units = self.units(tensor[0].gpu, tp, mbs, ep, len(tensor))
        once, passes = self.sum_seconds(tensor, mbs), np.array([units.forward, units.backward])
        if ep > 1:
            passes = passes + 2 * self.exchange_seconds(experts, tp, mbs) * self._routed
        if units.has_collectives:
            # A unit that was timed alone ends with its last collective. In a run the host launches the next
            # unit meanwhile, where launches set the pace.
            forward, backward = np.maximum(units.least, passes - once * (self._sums > 0))
        elif options.engine == "eager":  # vTrain adds collectives to layers that were timed without them
            forward, backward = with_host(passes, units.hosts) + once * self._sums
        else:
            is_late = self.model.experts > 0
            forward, backward = with_host(passes + once * self._sums, units.hosts, is_late)
        waits = self.context_seconds(context, tp, mbs, units.scores)
        forward, backward = forward + waits[0], backward + waits[1]
        if recompute == "full":
            backward = backward + options.recomputed * forward * self.layers
        elif recompute == "selective":
            backward = backward + units.scores + waits[0]
        if "operators" in options.again:  # their inputs are gathered again
            backward = backward + once * self.layers
        if options.zero >= 2 and group_size(data) > 1:
            gathered, reduced = self._sharded(data, tp, ep)
            forward, backward = self._beside(forward, gathered), self._beside(backward, gathered + reduced)
        return forward, backward

    def weight_gradients(self, mbs: int, tensor: Group, ep: int) -> np.ndarray:
        """Seconds per unit in which a backward pass computes gradients of weights."""
        name, tp = tensor[0].gpu, group_size(tensor)
        units = self.units(name, tp, mbs, ep, len(tensor))
        gpu = hardware(self.links.cluster.gpu(name).costs_of) or gpus.gpu("A100")
        sums = units.has_collectives * self.sum_seconds(tensor, mbs) * self._sums[1]
        share = weight_share(gpu, self.model, tp, mbs, self.options, ep)
        return np.asarray(share * np.maximum(units.backward - sums, 0.0))

    def sum_seconds(self, tensor: Group, mbs: int) -> float:
        """Seconds of one sum of activations over a tensor-parallel group; with sequence parallelism, of the
        reduce-scatter and all-gather in its place.
        """
        size = mbs * self.model.seq * self.model.hidden * self.options.activation_bytes
        # Between nodes the network decides, not how kernels of both kinds share a GPU.
        longer = constant(constant_name("tensor", None, self.options)) if len(tensor) == 1 else 1.0
        if self.options.sequence_parallel:
            # Reduce-scattered in 16 bits, gathered in what products take.
            halves = 1 + self.options.gathered_bytes / self.options.activation_bytes
            return halves * longer * self.links.collective(tensor, size, 1, False)
        return longer * self.links.collective(tensor, size, 1)

    def context_seconds(self, context: Group, tp: int, mbs: int, attention: np.ndarray) -> np.ndarray:
        """Seconds that attention waits in each unit's forward and backward pass [2, unit] for tokens of the
        ranks that share its sequences; attention: seconds of that in the forward pass [unit].
        """
        model, ranks = self.model, group_size(context)
        if ranks < 2:
            return np.zeros((2, len(attention)))
        times = np.array([{"T": 1, "F": 1, "D": 2}.get(kind, 0) for kind in model.kinds])
        tokens = mbs * model.seq * self.options.activation_bytes / tp
        values = (model.v_width or model.head_width) / model.head_width
        query, key = tokens * model.width, tokens * model.kv_width
        if model.by_heads:  # queries, keys and values there, the output back; and all of their gradients
            sizes = query, key, key * values, query * values
            seconds = sum(self.links.exchange(context, size, 1, tp) for size in sizes)
            return np.array([seconds * times] * 2)
        waits = []
        for work in (1, 2):  # backward with the gradients of keys and values, and at least twice the products
            sent_sizes = 0.0, work * key * (1 + values)
            latency, sent = (self.links.to_neighbour(context, size, tp) for size in sent_sizes)
            # A block of keys and values is on its way while the one before it is worked on.
            late = (ranks - 1) * (sent * times - work * attention / ranks)
            waits.append(np.maximum(late, latency * times))
        return np.array(waits)

    def _beside(self, seconds: np.ndarray, communication: np.ndarray) -> np.ndarray:
        """Compute and communication one after the other; or with ``overlap`` at once, which takes some of the
        GPU's units and bandwidth from the compute.
        """
        share = constant(constant_name("beside", None, self.options)) if self.options.overlap else 1.0
        return np.asarray(np.maximum(seconds + share * communication, communication))

    def exchange_seconds(self, experts: Group, tp: int, mbs: int) -> float:
        """Seconds in which a layer's tokens go to their experts, or come back; 0 for a single rank."""
        model = self.model
        size = mbs * model.seq * model.hidden * self.options.activation_bytes / tp
        ranks, is_fast = group_size(experts), self.options.fast_dispatch
        copies = model.receivers(ranks) if is_fast and ranks > 1 else model.top_k
        longer = constant(constant_name("tokens", None, self.options))
        return longer * self.links.exchange(experts, size, copies, tp)

    @memo
    def _sharded(self, data: Group, tp: int, ep: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds per unit to gather parameters (ZeRO-3), and to reduce-scatter gradients (ZeRO-2)."""
        among = self.options.shared(group_size(data))
        what = (first(data, among), tp, *parameters(self.model, tp, ep), ep)
        gather = self._over_copies(*what, self.options.gathered_bytes, False)
        reduce = self._over_copies(*what, self.options.gradient_bytes, False)
        if among < group_size(data):  # HSDP: the sums of each group's shares over all of them
            copies, beside = every(data, among)
            size = parameters(self.model, tp, ep)[0] * (self.options.gradient_bytes / among)
            reduce = reduce + self.over_replicas(copies, tp * beside, size, True)
        return gather * (self.options.zero == 3), reduce * (not self.options.adapters)

    def once(
        self, data: Group, tp: int, held: np.ndarray, of_experts: np.ndarray, ep: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds in which gradients are reduced once per step, with ZeRO-1 reduce-scattered; and in which
        ranks that share the optimizer's states gather the parameters that each has updated.

        data: one GPU of each replica; held: parameters of a GPU, an array of any shape; of_experts: those
        that belong to experts, which are spread over ``ep`` ranks.
        """
        options, what = self.options, (data, tp, held, of_experts, ep)
        reduction = gather = np.zeros(held.shape)
        if options.adapters:
            return reduction, gather
        if options.zero < 2:  # else within every backward pass
            reduction = self._over_copies(*what, options.gradient_bytes, options.zero == 0)
        if options.zero in (1, 2):
            if options.overlap:  # all but a layer's beside the next forward passes
                layers = [each[self.layers].max() for each in parameters(self.model, tp, ep)]
                pairs = zip((held, of_experts), layers, strict=True)
                what = (data, tp, *(np.minimum(each, most) for each, most in pairs), ep)
            gather = self._over_copies(*what, options.gathered_bytes, False)
        return reduction, gather

    def exposed(self, reduction: np.ndarray, backward: np.ndarray, total: Total) -> np.ndarray:
        """Seconds of ``reduction`` after the last backward pass; backward: seconds of that [unit].

        With ``overlap`` there is a bucket per layer, which is reduced once the layer's backward has ended,
        after the buckets before it: those of all but the first layer go beside the others' backward.
        """
        if not self.options.overlap:
            return reduction
        layers, of_layers = np.maximum(total(1.0 * self.layers), 1), total(backward * self.layers)
        return np.maximum(reduction - (of_layers - of_layers / layers), reduction / layers)

    def update(
        self, measured: np.ndarray | None, gpu: Gpu, held: Held, ep: int, replicas: int, total: Total
    ) -> np.ndarray:
        """Seconds of the optimizer over the parameters of a GPU: ``measured`` [unit], or computed; 0 where
        the GPU is not known.
        """
        if measured is not None:
            return total(measured) / (replicas if self.options.zero else 1)
        (size, of_experts), known = held, hardware(gpu.costs_of)
        if known is None or self.options.adapters:
            return np.zeros(size.shape)
        if self.options.zero:
            replicas = self.options.shared(replicas)
            size = (size - of_experts) / replicas + of_experts / max(replicas / ep, 1)
        seconds = update_seconds(known, self.options, self.links.cluster.size(gpu))
        return size * (seconds / (1 if self.options.offload else gpu.speed))

    def output_gather(self, ends: tuple[Group, ...], mbs: int) -> float:
        """Seconds in which a stage's output, of which its ranks got a share each, becomes whole again.

        ends: the tensor-parallel groups at both ends of a boundary, which gradients cross the other way.
        """
        if not self.options.scatter_gather or self.options.sequence_parallel:
            return 0.0
        size = mbs * self.model.seq * self.model.hidden * self.options.activation_bytes
        return max(self.links.collective(group, size, 1, False) for group in ends)

    def _over_copies(
        self,
        data: Group,
        tp: int,
        held: np.ndarray,
        of_experts: np.ndarray,
        ep: int,
        width: int,
        reduces: bool,
    ) -> np.ndarray:
        """Seconds of a collective of ``width`` bytes per parameter among the GPUs that hold the same ones."""
        if ep == 1:
            return self.over_replicas(data, tp, held * width, reduces)
        copies, beside = every(data, ep)
        others = self.over_replicas(data, tp, (held - of_experts) * width, reduces)
        return others + self.over_replicas(copies, tp * beside, of_experts * width, reduces)

    def over_replicas(self, data: Group, tp: int, size: np.ndarray, reduces: bool) -> np.ndarray:
        """Seconds of a collective of ``size`` bytes per GPU among replicas; 0 for none or a single one."""
        # Where the stage has but a part of a node between others, its neighbour reduces over the same link.
        sizes = [self.links.cluster.size(self.links.cluster.gpu(part.gpu)) for part in data]
        shared = len(data) > 1 and any(part.gpus * tp < size for part, size in zip(data, sizes, strict=True))
        begin, per_byte = self.links.ring(data, float(size.max(initial=0.0)), tp * (1 + shared), reduces)
        return np.where(size > 0, begin + size * per_byte, 0.0)


def synchronized(options: Options, stage_end: Time, backward_end: Time, exposed: Time) -> Time:
    """When stages have their gradients: once the last message is sent, unless buckets go out beside it."""
    if options.overlap:
        return np.maximum(stage_end, backward_end + exposed)
    return stage_end + exposed


def step_end(synced: list[float], holders: Sequence[int], embedding: float, update: Sequence[float]) -> float:
    """When the last stage has updated its parameters: those with a copy of the embedding (``holders``) first
    sum it. synced: when each has its gradients.
    """
    if len(holders) > 1:
        done = max(synced[at] for at in holders) + embedding
        synced = [done if at in holders else end for at, end in enumerate(synced)]
    return max(end + seconds for end, seconds in zip(synced, update, strict=True))
