"""What a stage takes, for the ``exact`` cost model: seconds of compute and messages, bytes of memory.

All of it depends on which units a stage holds and on which GPU types it runs, so that a table for each
set of types serves every placement and partition.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from fasop.inputs.clusters import Cluster, Gpu
from fasop.inputs.costs import Costs
from fasop.inputs.models import Model
from fasop.memo import memo
from fasop.plans.plan import Recompute
from fasop.plans.shapes import Shape

GIB = 2**30
# Of the bytes that the formulas give, for buffers and fragmentation; the published tool's margin.
MEMORY_MARGIN = 1.10
# What a message loses of the bandwidth between two nodes, and between two GPUs of a node: measured by the
# authors of FASOP (HPDC 2024).
INTER_LOSS, INTRA_LOSS = 1.05, 3.5
BITS = 16  # of an activation or a gradient

Kinds = tuple[str, ...]  # the GPU types of one stage


@dataclass(frozen=True)
class Options:
    """How the job is run. overlap: the gradients' all-reduce runs beside the last backward pass."""

    recompute: Recompute = "none"
    sharded_optimizer: bool = False
    overlap: bool = False


class StageCosts:
    """Tables for one shape on one cluster. n units; [a, b] stands for the units a … b−1."""

    def __init__(
        self, model: Model, cluster: Cluster, costs: Costs | None, shape: Shape, options: Options
    ) -> None:
        """``costs`` None: for the tables of memory alone."""
        self.model, self.cluster, self.shape, self.options = model, cluster, shape, options
        self.micro_batches = model.global_batch // (shape.dp * shape.mbs)
        self._gpus = {gpu.name: gpu for gpu in cluster.gpus}
        self._costs = costs
        self._width = model.heads * model.d_kv if model.d_kv else model.hidden  # of queries, keys and values
        self._kinds = model.units
        if model.encoder_layers is not None:
            head = model.encoder_layers + 2
            self._kinds = self._kinds[:head] + "D" * (len(self._kinds) - head)
        n = len(self._kinds)
        self.sizes = np.maximum(np.arange(n + 1)[None] - np.arange(n + 1)[:, None], 1)
        self.params = self._parameters()
        stage = shape.tp * shape.dp
        self._sharing = min(cluster.gpus_per_node, stage)  # ranks of a stage that send from one node
        self._message = shape.mbs * model.seq * model.hidden * BITS

    def of(self, kinds: Kinds) -> list[Gpu]:
        return [self._gpus[name] for name in kinds]

    @memo
    def unit_times(self, kinds: Kinds) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds of each unit; replicas wait for the slowest type."""
        assert self._costs is not None
        all_costs = [self._costs.of(gpu, self.shape.tp, self.shape.mbs) for gpu in self.of(kinds)]
        forward = np.max([cost.forward for cost in all_costs], axis=0)
        backward = np.max([cost.backward for cost in all_costs], axis=0)
        layers = np.array([unit == "T" for unit in self.model.units])
        if self.options.recompute == "full":
            backward = backward + forward * layers
        elif self.options.recompute == "selective":
            # The scores' share of a layer's multiply-adds: 4s against 24h + 4s a token and channel.
            model = self.model
            share = 4 * model.seq / (24 * model.hidden + 4 * model.seq)
            backward = backward + forward * layers * share
        return forward, backward

    @memo
    def compute(self, kinds: Kinds) -> np.ndarray:
        """Seconds of forward and backward [a, b], inf where b ≤ a, or where encoder and decoder would share
        one stage of several: a pipeline changes from one to the other between two stages.
        """
        forward, backward = self.unit_times(kinds)
        seconds = _ranges(forward + backward)
        if self.model.encoder_layers is not None and self.shape.pp > 1:
            decoder = self.model.encoder_layers + 1
            seconds[:decoder, decoder + 1 :] = np.inf
        return seconds

    @memo
    def forward(self, kinds: Kinds) -> np.ndarray:
        """Seconds of the forward pass alone [a, b], inf where b ≤ a."""
        return _ranges(self.unit_times(kinds)[0])

    def p2p(self, left: Kinds, right: Kinds, inside: bool) -> float:
        """Seconds of one message between two stages, ``inside`` one node or between two."""
        if inside:
            gpus = self.of(left)
            return max(self._message * INTRA_LOSS / g.intra_bandwidth + g.intra_latency for g in gpus)
        gpus = self.of(left) + self.of(right)
        slowest = min(gpu.inter_bandwidth for gpu in gpus)
        return self._message * self._sharing * INTER_LOSS / slowest + max(gpu.inter_latency for gpu in gpus)

    @memo
    def all_reduce(self, kinds: Kinds) -> np.ndarray:
        """Seconds of the gradients' all-reduce [a, b] of a stage, once a step."""
        dp, tp, size = self.shape.dp, self.shape.tp, self.cluster.gpus_per_node
        gpus = self.of(kinds)
        if dp == 1:
            return np.zeros(self.sizes.shape)
        # A ring sends 2(dp−1)/dp of the gradients over each of its links.
        bits = self.params * BITS * 2 * (dp - 1) / dp
        within = tp * dp <= size and size % (tp * dp) == 0
        rings = max(size // dp, 1) if within else min(tp, size)
        seconds = max(1 / g.intra_bandwidth * (rings if g.shared_bus else 1) for g in gpus)
        latency = max(gpu.intra_latency for gpu in gpus)
        if not within:
            seconds = max(seconds, rings / min(gpu.inter_bandwidth for gpu in gpus))
            latency = max(latency, *(gpu.inter_latency for gpu in gpus))
        all_reduce = bits * seconds + 2 * (dp - 1) * latency
        if self.options.overlap:
            # The last bucket, about a unit's gradients, is only ready when the backward pass ends.
            backward = _ranges(self.unit_times(kinds)[1])
            backward[np.isinf(backward)] = 0.0
            all_reduce = np.maximum(all_reduce - backward, all_reduce / self.sizes)
        return all_reduce

    def embedding_sync(self, holders: list[Kinds]) -> float:
        """Seconds of the all-reduce among the stages that hold a copy of the embedding."""
        count = len(holders)
        if count < 2:
            return 0.0
        gpus = [gpu for kinds in holders for gpu in self.of(kinds)]
        bits = self.model.hidden * self.model.vocab / self.shape.tp * BITS * 2 * (count - 1) / count
        if self.cluster.node_count == 1:
            seconds = max((self._sharing if g.shared_bus else 1) / g.intra_bandwidth for g in gpus)
            return bits * seconds + 2 * (count - 1) * max(gpu.intra_latency for gpu in gpus)
        seconds = self._sharing / min(gpu.inter_bandwidth for gpu in gpus)
        return bits * seconds + 2 * (count - 1) * max(gpu.inter_latency for gpu in gpus)

    def memory(self, in_flight: int) -> np.ndarray:
        """GiB of one GPU [a, b], the margin included, with the activations of that many micro-batches."""
        weights = 6 + 12 / self.shape.dp if self.options.sharded_optimizer else 18
        kept, once = self._activations()
        size: np.ndarray = weights * self.params + kept * in_flight + once
        return size * MEMORY_MARGIN / GIB

    def cap(self, kinds: Kinds) -> float:
        """GiB of the smallest GPU."""
        return min(gpu.memory_gib for gpu in self.of(kinds))

    def _parameters(self) -> np.ndarray:
        """Parameters of one GPU [a, b]."""
        h, vocab, tp = self.model.hidden, self.model.vocab, self.shape.tp
        attention = 4 * h * self._width
        params = {"E": h * vocab / tp, "P": h * vocab / tp, "T": (attention + 8 * h * h + 13 * h) / tp}
        params["D"] = params["T"] + attention / tp
        table = _ranges(np.array([params[kind] for kind in self._kinds]))
        if "P" in self._kinds:
            # First and last unit on one stage share one matrix.
            table[0, -1] -= params["P"]
        return table

    @memo
    def _activations(self) -> tuple[np.ndarray, np.ndarray]:
        """Activation bytes [a, b]: kept for each micro-batch in flight, and needed once.

        A layer's activations: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
        Transformer Models", sequence parallelism off; the head's: 4sbh + 4sbV over tp.
        """
        model, tp = self.model, self.shape.tp
        s, b, h, heads = model.seq, self.shape.mbs, model.hidden, model.heads
        width = self._width
        token, scores = s * b * (10 * h + (16 * h + 8 * width) / tp), 5 * heads * s * s * b / tp
        if self.options.recompute != "none":
            scores = 0.0
        kept = {"E": s * b * h, "P": 0.0, "T": token + scores}
        kept["D"] = kept["T"] + s * b * (5 * h + 8 * width / tp) + scores
        once = {"E": 0.0, "T": 0.0, "D": 0.0, "P": (4 * s * b * h + 4 * s * b * model.vocab) / tp}
        largest = 0.0
        if self.options.recompute == "full":
            largest = kept["D" if model.encoder_layers else "T"] + 5 * heads * s * s * b / tp
            kept["T"] = kept["D"] = 2 * s * b * h
        layers = _ranges(np.array([float(kind in "TD") for kind in self._kinds]))
        return (
            _ranges(np.array([float(kept[kind]) for kind in self._kinds])),
            _ranges(np.array([once[kind] for kind in self._kinds])) + largest * (layers > 0),
        )


def _ranges(values: np.ndarray) -> np.ndarray:
    """Sums of values[a:b] as [a, b], inf where b ≤ a."""
    ends = np.concatenate([[0.0], np.cumsum(values)])
    return np.where(_after(len(ends)), ends[None, :] - ends[:, None], np.inf)


@functools.lru_cache(maxsize=8)
def _after(n: int) -> np.ndarray:
    """[a, b]: whether b > a."""
    return np.arange(n)[None, :] > np.arange(n)[:, None]
