"""How fast a run is: time per iteration, samples/s, TFLOP/s.

TFLOP/s counts the model's floating-point operations, forward and backward, without those that recomputation
repeats: two per multiplication of a matrix product, three passes of equal size. For a GPT-2 with batch B,
sequence s, L layers, hidden size h and vocabulary V that is 72·B·s·L·h²·(1 + s/(6h) + V/(12·L·h)) per
iteration (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", eq. 3, which has 96 and V/16 because it counts the forward pass twice).
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Mapping, Sequence

from chakra_et.cost import gpus as gpu_table
from megatron_lm.errors import SettingsError
from megatron_lm.logs import records
from megatron_lm.settings import MODELS, PREFIX, Size
from megatron_lm.settings.conf import read_settings
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


def figures(
    found: Sequence[records.Iteration], settings: Mapping[str, str], gpu_name: str = ""
) -> list[tuple[str, str]]:
    """(name, value) of the training and its speed, of a run that has at least one iteration line.

    gpu_name: as its driver has it; of a known one, MFU is the share of its peak for PRECISION.
    """
    seconds, batch = typical(found), found[-1].global_batch_size
    rows = [
        ("median iteration" + (" without the first" if found[1:] else ""), f"{seconds:.4f} s"),
        ("throughput", f"{batch / seconds:.2f} samples/s"),
    ]
    size, ranks = None, settings.get("WORLD_SIZE", "")
    if settings.get("MODEL") in MODELS:
        named = {PREFIX + name: settings[name] for name in ("MODEL", *SIZE_SETTINGS) if name in settings}
        with contextlib.suppress(SettingsError):
            size = read_settings(named).size
    if size is not None and ranks.isdigit():
        total = operations(size, batch) / seconds
        rows.append(("operations", f"{total / 1e12:.4g} TFLOP/s, {total / 1e12 / int(ranks):.4g} per rank"))
        if known := gpu_table.by_driver(gpu_name):
            number = "float" if settings.get("PRECISION") == "fp32" else "half"
            peak = gpu_table.gpu(known).peak(number)
            rows.append(
                ("MFU", f"{100 * total / int(ranks) / peak:.1f}% of {known}'s {peak / 1e12:.4g} TFLOP/s")
            )
    if found[-1].loss is not None:
        rows.append(("last loss", f"{found[-1].loss:.6g}"))
    if skipped := sum(each.skipped for each in found):
        rows.append(
            ("skipped steps", f"{skipped}, as fp16 gradients overflowed and the loss scale was lowered")
        )
    return rows
