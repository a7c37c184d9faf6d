"""Forward and backward seconds of a model's units on one replica of a stage.

A replica is a tensor-parallel group that works on its own micro-batch. Its passes hold the computation and
all that is communicated within them: tensor-parallel collectives, tokens on their way to experts, and what
ZeRO-2 and ZeRO-3 exchange for every micro-batch.
"""

from __future__ import annotations

import math

import numpy as np

from fasop.exact.communication import Communication
from fasop.exact.memory import parameters
from fasop.exact.unit_times import Compute, UnitSeconds
from fasop.inputs.models import Model
from fasop.memo import memo
from fasop.plans.groups import Group, every, group_size
from fasop.plans.options import Options, Recompute

# Sums over the tensor-parallel group in each unit's forward and backward pass: a layer's output after
# attention and after the feed-forward part, a decoder's after cross-attention too, and as many gradients of
# inputs; the embedding's output; the gradient of the head's input (Shoeybi et al. 2019, "Megatron-LM").
FORWARD_SUMS = {"E": 1, "T": 2, "D": 3, "P": 0}
BACKWARD_SUMS = {"E": 0, "T": 2, "D": 3, "P": 1}


class Passes:
    """The passes of one model, run one way, on one cluster."""

    def __init__(
        self, model: Model, compute: Compute, links: Communication, options: Options, max_tp: float = math.inf
    ) -> None:
        """max_tp: largest tensor-parallel degree that a stage may choose."""
        self.max_tp = max_tp
        self.model, self.compute, self.links, self.options = model, compute, links, options
        self.layers = np.array([kind in "TD" for kind in model.kinds])
        self._sums = [
            np.array([sums[kind] for kind in model.kinds], dtype=float)
            for sums in (FORWARD_SUMS, BACKWARD_SUMS)
        ]

    @memo
    def units(self, name: str, tp: int, mbs: int, ep: int = 1, nodes: int = 1) -> UnitSeconds:
        """What the units take on a GPU type, in tensor-parallel groups that span so many nodes."""
        gpu = self.links.cluster.gpu(name)
        size = self.links.cluster.size(gpu)
        return self.compute.of(gpu, tp, mbs, ep, size if nodes == 1 and tp <= size else 0)

    @memo
    def replica(
        self, mbs: int, recompute: Recompute, tensor: Group, data: Group, experts: Group
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds per unit, forward and backward, of a micro-batch of ``mbs`` sequences.

        tensor: the replica's GPUs; data: one GPU of each replica of the stage; experts: those among which a
        layer's experts are spread.
        """
        options, tp, ep = self.options, group_size(tensor), max(group_size(experts), 1)
        units = self.units(tensor[0].gpu, tp, mbs, ep, len(tensor))
        forward, backward = units.forward, units.backward
        once = self.sum_seconds(tensor, mbs)
        if units.has_collectives:
            # A unit that was timed alone ends with its last collective. Where launches decide, the next
            # unit's are made meanwhile in a run.
            forward, backward = (
                np.maximum(least, seconds - once * (sums > 0))
                for seconds, least, sums in zip((forward, backward), units.least, self._sums, strict=True)
            )
        else:
            forward, backward = (
                seconds + once * sums for seconds, sums in zip((forward, backward), self._sums, strict=True)
            )
        if ep > 1:
            routed = 2 * self.exchange_seconds(experts, tp, mbs) * self.layers
            forward, backward = forward + routed, backward + routed
        if recompute == "full":
            backward = backward + forward * self.layers
        elif recompute == "selective":
            backward = backward + units.scores
        if options.zero >= 2 and group_size(data) > 1:
            gathered, reduced = self._sharded(data, tp, ep)
            forward, backward = self._beside(forward, gathered), self._beside(backward, gathered + reduced)
        return forward, backward

    def sum_seconds(self, tensor: Group, mbs: int) -> float:
        """Seconds of one sum of activations over a tensor-parallel group; with sequence parallelism, of the
        reduce-scatter and all-gather in its place.
        """
        size = mbs * self.model.seq * self.model.hidden * self.options.activation_bytes
        if self.options.sequence_parallel:
            return 2 * self.links.collective(tensor, size, 1, False)
        return self.links.collective(tensor, size, 1)

    def _beside(self, seconds: np.ndarray, communication: np.ndarray) -> np.ndarray:
        """Compute and communication one after the other, or at once with ``overlap``."""
        at_once: np.ndarray = np.maximum(seconds, communication)
        return at_once if self.options.overlap else seconds + communication

    def exchange_seconds(self, experts: Group, tp: int, mbs: int) -> float:
        """Seconds in which a layer's tokens go to their experts, or come back; 0 for a single rank."""
        model = self.model
        size = mbs * model.seq * model.top_k * model.hidden * self.options.activation_bytes / tp
        return self.links.exchange(experts, size, tp)

    @memo
    def _sharded(self, data: Group, tp: int, ep: int) -> tuple[np.ndarray, np.ndarray]:
        """Seconds per unit to gather parameters (ZeRO-3), and to reduce-scatter gradients (ZeRO-2)."""
        held, of_experts = parameters(self.model, tp, ep)
        what = (data, tp, held, (of_experts, ep))
        gather = self.over_copies(*what, self.options.activation_bytes, False)
        reduce = self.over_copies(*what, self.options.gradient_bytes, False)
        return gather * (self.options.zero == 3), reduce

    def over_copies(
        self,
        data: Group,
        tp: int,
        held: np.ndarray,
        experts: tuple[np.ndarray, int],
        each: int,
        reduces: bool,
    ) -> np.ndarray:
        """Seconds of a collective of ``each`` bytes per parameter among the GPUs that hold the same ones.

        data: one GPU of each replica; held: parameters of a GPU; experts: those that belong to experts, and
        among how many ranks these are spread, of which each has its own.
        """
        of_experts, ep = experts
        if ep == 1:
            return self.over_replicas(data, tp, held * each, reduces)
        copies, beside = every(data, ep)
        others = self.over_replicas(data, tp, (held - of_experts) * each, reduces)
        total: np.ndarray = others + self.over_replicas(copies, tp * beside, of_experts * each, reduces)
        return total

    def over_replicas(self, data: Group, tp: int, size: np.ndarray, reduces: bool) -> np.ndarray:
        """Seconds of a collective of ``size`` bytes per GPU among the replicas of a stage; 0 for 0 bytes, or
        for a single replica.
        """
        # Where the stage has but a part of a node between others, its neighbour reduces over the same link.
        sizes = [self.links.cluster.size(self.links.cluster.gpu(part.gpu)) for part in data]
        shared = len(data) > 1 and any(part.gpus * tp < size for part, size in zip(data, sizes, strict=True))
        begin, per_byte = self.links.ring(data, float(size.max(initial=0.0)), tp * (1 + shared), reduces)
        seconds: np.ndarray = np.where(size > 0, begin + size * per_byte, 0.0)
        return seconds
