"""What a stage does once per step, after its last backward pass: reduce gradients, update parameters.

Arrays have one value for each stage that is looked at: any shape, the same for all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fasop.exact.passes import Passes
from fasop.exact.roofline import update_seconds
from fasop.inputs.clusters import Gpu
from fasop.inputs.gpus import hardware
from fasop.plans.groups import Group, group_size
from fasop.plans.options import Options

Time = Any  # a float, or an array


def reduction_seconds(
    passes: Passes, data: Group, tp: int, held: np.ndarray, experts: tuple[np.ndarray, int]
) -> np.ndarray:
    """Seconds in which gradients are reduced, with ZeRO-1 reduce-scattered.

    data: one GPU of each replica; held: parameters of a GPU; experts: the share of them that belongs to
    experts, and among how many ranks these are spread.
    """
    options = passes.options
    if options.zero >= 2:
        return np.zeros(held.shape)  # within every backward pass
    return _over_replicas(passes, data, tp, held * options.gradient_bytes, experts, options.zero == 0)


def gather_seconds(
    passes: Passes, data: Group, tp: int, held: np.ndarray, experts: tuple[np.ndarray, int]
) -> np.ndarray:
    """Seconds in which ranks that share the optimizer's states gather the parameters that each has updated.

    Arguments as for ``reduction_seconds``.
    """
    options = passes.options
    if options.zero not in (1, 2):
        return np.zeros(held.shape)
    return _over_replicas(passes, data, tp, held * options.activation_bytes, experts, False)


def exposed_seconds(
    options: Options, reduction: np.ndarray, hidden: np.ndarray, layers: np.ndarray
) -> np.ndarray:
    """Seconds of ``reduction`` after the last backward pass.

    With ``overlap`` there is a bucket per layer, which is reduced once the layer's backward has ended, after
    the buckets before it; ``hidden``: seconds from the end of the first layer's backward to that of the last.
    """
    if not options.overlap:
        return reduction
    seconds: np.ndarray = np.maximum(reduction - hidden, reduction / np.maximum(layers, 1))
    return seconds


def synchronized(options: Options, stage_end: Time, backward_end: Time, exposed: Time) -> Time:
    """When stages have their gradients: once the last message is sent, unless buckets go out beside it."""
    if options.overlap:
        return np.maximum(stage_end, backward_end + exposed)
    return stage_end + exposed


def _over_replicas(
    passes: Passes, data: Group, tp: int, size: np.ndarray, experts: tuple[np.ndarray, int], reduces: bool
) -> np.ndarray:
    """Seconds of a collective over ``size`` bytes of parameters, the experts' among fewer ranks."""
    if group_size(data) == 1:
        return np.zeros(size.shape)
    if not passes.model.experts:
        return passes.over_replicas(data, tp, size, reduces)
    share, ranks = experts
    # Each expert has as many copies as there are groups of expert-parallel ranks.
    copies = _spread(data, group_size(data) // max(ranks, 1))
    others: np.ndarray = passes.over_replicas(data, tp, size * (1 - share), reduces)
    total: np.ndarray = others + passes.over_replicas(copies, tp, size * share, reduces)
    return total


def _spread(data: Group, ranks: int) -> Group:
    """A group of fewer ranks over the same nodes."""
    parts, missing = [], ranks
    for part in data:
        if missing:
            parts.append(part._replace(gpus=min(1 if ranks <= len(data) else part.gpus, missing)))
            missing -= parts[-1].gpus
    return tuple(parts)


def optimizer_seconds(
    passes: Passes, gpu: Gpu, tp: int, mbs: int, held: np.ndarray, sharers: int
) -> np.ndarray | None:
    """Seconds of the optimizer over the parameters of a GPU, computed; None where the GPU is not known."""
    if gpu.costs_of not in hardware():
        return None
    shared = sharers if passes.options.zero else 1
    per_parameter = update_seconds(hardware()[gpu.costs_of], 1.0, passes.options) / gpu.speed
    return held * (per_parameter / shared)
