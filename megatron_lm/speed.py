"""How fast a run is: the time of an iteration, samples/s, TFLOP/s.

TFLOP/s counts the floating-point operations of the model, forward and backward, without what
recomputation repeats: 72·B·s·L·h²·(1 + s/(6h) + V/(12·L·h)) an iteration, for batch B, sequence s, L
layers, hidden size h, vocabulary V (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training
on GPU Clusters Using Megatron-LM", eq. 3, which has 96 and V/16 as it counts the forward twice).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from megatron_lm import logs
from megatron_lm.settings import MODELS

FORMULA = "72 B s L h^2 (1 + s/6h + V/12Lh) operations an iteration"


def iterations(outputs: Iterable[bytes]) -> list[logs.Iteration]:
    """All iteration lines of a run, in order; only the last rank's node has any."""
    found = [iteration for data in outputs for iteration in logs.iterations(data)]
    return sorted(found, key=lambda iteration: iteration.number)


def typical(found: Sequence[logs.Iteration]) -> float:
    """Median seconds of an iteration, without the first line where there are more: it holds the warm-up."""
    return statistics.median(iteration.seconds for iteration in (found[1:] or found))


def operations(model: str, batch: int) -> float | None:
    """Floating-point operations of one iteration; None for a model that is not known."""
    if model not in MODELS:
        return None
    size = MODELS[model]
    s, h, layers, vocabulary = size.sequence, size.hidden, size.layers, size.vocabulary
    return 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (12 * layers * h))


def figures(found: Sequence[logs.Iteration], settings: Mapping[str, str]) -> list[tuple[str, str]]:
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
        rows.append(("throughput", f"{total:.4g} TFLOP/s, {total / int(ranks):.4g} a rank ({FORMULA})"))
    return rows
