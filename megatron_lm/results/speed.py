"""How fast a run is: time per iteration, samples/s, TFLOP/s.

TFLOP/s counts the model's floating-point operations, forward and backward, without those that recomputation
repeats: two per multiplication of a matrix product, three passes of equal size. For a GPT-2 with batch B,
sequence s, L layers, hidden size h and vocabulary V that is 72·B·s·L·h²·(1 + s/(6h) + V/(12·L·h)) per
iteration (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", eq. 3, which has 96 and V/16 because it counts the forward pass twice).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from megatron_lm.errors import SettingsError
from megatron_lm.logs import records
from megatron_lm.settings import MODELS, PREFIX, Size
from megatron_lm.settings.environment import read_settings
from megatron_lm.settings.values import SIZE_SETTINGS


def iterations(outputs: Iterable[bytes]) -> list[records.Iteration]:
    """All iteration lines of a run, in order; only the last rank's node has any."""
    found = [iteration for data in outputs for iteration in records.iterations(data)]
    return sorted(found, key=lambda iteration: iteration.number)


def typical(found: Sequence[records.Iteration]) -> float:
    """Median seconds per iteration, without the first line if there are more, because it includes the
    warm-up.
    """
    return statistics.median(iteration.seconds for iteration in (found[1:] or found))


def operations(size: Size, batch: int) -> float:
    """Floating-point operations per iteration of ``batch`` samples."""
    forward = size.layers * size.layer_operations + size.head_operations
    return 3.0 * batch * size.sequence * forward


def figures(found: Sequence[records.Iteration], settings: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, value) of the speed of a run that has at least one iteration line."""
    seconds, batch = typical(found), found[-1].global_batch_size
    rows = [
        ("median iteration" + (" without the first" if found[1:] else ""), f"{seconds:.4f} s"),
        ("throughput", f"{batch / seconds:.2f} samples/s"),
    ]
    size, ranks = _size(settings), settings.get("WORLD_SIZE", "")
    if size is not None and ranks.isdigit():
        total = operations(size, batch) / seconds / 1e12
        rows.append(("throughput", f"{total:.4g} TFLOP/s, {total / int(ranks):.4g} per rank"))
    return rows


def _size(settings: Mapping[str, str]) -> Size | None:
    """The model that a run's log names; None for an unknown one."""
    named = {PREFIX + name: settings[name] for name in ("MODEL", *SIZE_SETTINGS) if name in settings}
    if settings.get("MODEL", "") not in MODELS:
        return None
    try:
        return read_settings(named).size
    except SettingsError:
        return None
