"""How fast a run is: time per iteration, samples/s, TFLOP/s.

TFLOP/s counts the model's floating-point operations, forward and backward, without those that recomputation
repeats: 72·B·s·L·h²·(1 + s/(6h) + V/(12·L·h)) per iteration, for batch B, sequence s, L layers, hidden size
h, vocabulary V (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", eq. 3, which has 96 and V/16 because it counts the forward pass twice).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from megatron_lm.logs import records
from megatron_lm.settings import MODELS

FORMULA = "72 B s L h^2 (1 + s/6h + V/12Lh) operations per iteration"


def iterations(outputs: Iterable[bytes]) -> list[records.Iteration]:
    """All iteration lines of a run, in order; only the last rank's node has any."""
    found = [iteration for data in outputs for iteration in records.iterations(data)]
    return sorted(found, key=lambda iteration: iteration.number)


def typical(found: Sequence[records.Iteration]) -> float:
    """Median seconds per iteration, without the first line if there are more, because it includes the
    warm-up.
    """
    return statistics.median(iteration.seconds for iteration in (found[1:] or found))


def operations(model: str, batch: int) -> float | None:
    """Floating-point operations per iteration; None for an unknown model."""
    if model not in MODELS:
        return None
    size = MODELS[model]
    s, h, layers, vocabulary = size.sequence, size.hidden, size.layers, size.vocabulary
    return 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (12 * layers * h))


def figures(found: Sequence[records.Iteration], settings: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, value) of the speed of a run that has at least one iteration line."""
    seconds, batch = typical(found), found[-1].global_batch_size
    rows = [
        ("median iteration" + (" without the first" if found[1:] else ""), f"{seconds:.4f} s"),
        ("throughput", f"{batch / seconds:.2f} samples/s"),
    ]
    ranks = settings.get("WORLD_SIZE", "")
    work = operations(settings.get("MODEL", ""), batch)
    if work is not None and ranks.isdigit():
        total = work / seconds / 1e12
        rows.append(("throughput", f"{total:.4g} TFLOP/s, {total / int(ranks):.4g} per rank ({FORMULA})"))
    return rows
