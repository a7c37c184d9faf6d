"""What a stage does once per step, after its last backward pass: reduce gradients, update parameters.

Arrays have one value for each stage that is looked at: any shape, the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fasop.exact.computed_times import hardware, update_seconds
from fasop.exact.passes import Passes
from fasop.inputs.clusters import Gpu
from fasop.plans.groups import Group
from fasop.plans.options import Options

Time = Any  # a float, or an array


def reduction_seconds(
    passes: Passes, data: Group, tp: int, held: np.ndarray, experts: tuple[np.ndarray, int]
) -> np.ndarray:
    """Seconds in which gradients are reduced, with ZeRO-1 reduce-scattered.

    Arguments as for ``Passes.over_copies``.
    """
    options = passes.options
    if options.zero >= 2:
        return np.zeros(held.shape)  # within every backward pass
    return passes.over_copies(data, tp, held, experts, options.gradient_bytes, options.zero == 0)


def gather_seconds(
    passes: Passes, data: Group, tp: int, held: np.ndarray, experts: tuple[np.ndarray, int]
) -> np.ndarray:
    """Seconds in which ranks that share the optimizer's states gather the parameters that each has updated.

    Arguments as for ``reduction_seconds``.
    """
    options = passes.options
    if options.zero not in (1, 2):
        return np.zeros(held.shape)
    return passes.over_copies(data, tp, held, experts, options.activation_bytes, False)


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


def step_end(synced: list[float], holders: Sequence[int], embedding: float, update: Sequence[float]) -> float:
    """When the last stage has updated its parameters: those with a copy of the embedding (``holders``) first
    sum it. synced: when each has its gradients.
    """
    if len(holders) > 1:
        done = max(synced[at] for at in holders) + embedding
        synced = [done if at in holders else end for at, end in enumerate(synced)]
    return max(end + seconds for end, seconds in zip(synced, update, strict=True))


def optimizer_seconds(
    passes: Passes, gpu: Gpu, held: np.ndarray, experts: tuple[np.ndarray, int], replicas: int
) -> np.ndarray | None:
    """Seconds of the optimizer over the parameters of a GPU, computed; None where the GPU is not known.

    held, experts: see ``Passes.over_copies``.
    """
    of = hardware(gpu.costs_of)
    if of is None:
        return None
    of_experts, ep = experts
    own = held
    if passes.options.zero:
        own = (held - of_experts) / replicas + of_experts / (replicas / ep)
    return own * (update_seconds(of, passes.options) / gpu.speed)
