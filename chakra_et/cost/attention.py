"""What fused attention takes: blocks of queries that loop over the keys (Dao, FlashAttention-2, 2023).

A unit multiplies Q by Kᵀ, takes exponentials (16 per cycle and unit: Shah et al., FlashAttention-3, 2024) and
multiplies by V. Heads that share keys share blocks, where the library packs them. Blocks too few for all
units are split along the keys; the last block of a causal call goes the longest way. The backward pass has
five products in place of two, and as many times more of all else that a block does; kernels before and after
it sum products of its operands, clear and convert the gradient of Q (cuDNN's, in traces of an H200).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from chakra_et.cost.gpus import Gpu
from chakra_et.cost.products import moved

_PRIOR = {
    "burst": (0.66, 0.15),
    "exponentials": (0.6, 0.3),
    "memory": (0.77, 0.1),
    "launch": (9.0, 0.3),
    "fill": (3000.0, 0.5),
    "cache": (0.3, 0.3),
    "diagonal": (128.0, 0.4),
    "packed": (0.8, 0.5),
    "single": (1.0, 0.3),
    "tail": (0.5, 0.5),
}
"""What parameters are before a GPU is measured, and one standard deviation of their logarithms. ``burst`` and
``exponentials``: shares of the rates; ``memory``: share of the bandwidth; ``launch``: µs; ``fill``: cycles
that a block adds; ``cache``: as for products; ``diagonal``: masked keys that are multiplied all the same;
``packed``: whether heads that share keys share blocks, from 0 to 1; ``single``: time of a block alone on its
unit over that of one among others; ``tail``: the part of the last wave that idle units cost."""
START, WIDTHS = ({name: each[at] for name, each in _PRIOR.items()} for at in (0, 1))
_LOWER = {"GDDR": 0.88, "amd": 0.79}
"""Of ``burst``. With GDDR: tensor cores rest while exponentials are taken, so that power takes the square
root of what it takes of products' rate. MI300X: a trace of Triton's kernels (``check_gpus.py``)."""
FORWARD, BACKWARD_PASS, INTO_CACHE = 0, 1, 2
"""Kinds of calls: the last is a forward pass that also writes keys and values into a cache."""
_CALLS = np.array([(0.5, 0.4, 1.0), (0.8, 2.5, 2.5), (1.0, 1.0, 1.0)]).T
"""By kind of call, what multiplies ``launch``, ``fill`` and the time of a block for each key. Public tables
are of the last kind, which has further kernels and looks up where keys lie. Others: cuDNN on an H200."""
BACKWARD = 0.7
"""On A100, FlashAttention-2 reaches 70 to 75% of its forward rate in backward passes (Dao 2023, figure 5)."""
_BESIDE, _SUMMED = 14, 8
"""Bytes for each element of Q that the kernels beside a backward pass move; and where heads share keys, whose
gradients are summed then."""
_QUERIES, _KEYS, _EXPONENTIALS, _NORM = 128, 64, 16, 4
_LEAST_SPLIT = 256
"""Keys that a part of a split block has at least."""


def start(gpu: Gpu) -> dict[str, float]:
    """The prior of a GPU's parameters."""
    return START | {"burst": START["burst"] * _LOWER.get(gpu.kind, _LOWER.get(gpu.vendor, 1.0))}


def attention_micros(gpu: Gpu, parameters: Mapping[str, float], points: np.ndarray) -> np.ndarray:
    """µs of attention in 16 bits, float[R].

    ``points[R, 8]``: batch, heads, heads of keys and values, queries, keys, head size, whether causal, and
    the kind of call.
    """
    batch, heads, shared, queries, keys, size, causal, call = points.T
    backward, clock = call == BACKWARD_PASS, gpu.clock / 1e6
    launch, fill, more = _CALLS[:, call.astype(int)]
    slower = np.where(backward & ("8 bit" not in gpu.peaks), BACKWARD, 1)  # before Hopper
    unit = gpu.peak("16 bit") / 1e6 * min(parameters["burst"], 1.0) / gpu.units * slower
    packed = min(parameters["packed"], 1.0)
    blocks = (batch * shared * np.ceil(queries * heads / shared / _QUERIES)) ** packed
    blocks = blocks * (batch * heads * np.ceil(queries / _QUERIES)) ** (1 - packed)
    whole = np.ceil(keys / _KEYS) * _KEYS
    seen = np.minimum(keys - np.minimum(queries - 1, keys) / 2 + parameters["diagonal"], whole)
    seen = np.where(causal > 0, seen, whole)
    powers = _QUERIES / (_EXPONENTIALS * clock * parameters["exponentials"])
    per_key = more * np.hypot(4 * _QUERIES * size / unit, powers)  # µs of a block on a unit

    waves = blocks / gpu.units
    # Rounded, as the powers make 132.0000000001 of 132 blocks.
    idle = np.where(waves > 1, parameters["tail"] * (np.ceil(np.round(waves, 9)) - waves) / waves, 0)
    shares = waves * seen * per_key * (1 + idle)
    splits = np.minimum(np.maximum(np.floor(1 / waves), 1), np.maximum(keys / _LEAST_SPLIT, 1))
    longest = keys / splits * per_key * parameters["single"]

    def memory(count: np.ndarray) -> np.ndarray:
        found = np.clip(1.5 - count / (gpu.cache / gpu.parts), 0, 1)
        return moved(gpu, parameters, count * (1 - found), count * found)

    asked, kept = batch * size * heads * queries, 2 * batch * size * 2 * shared * keys
    passed = (2 * 2 * asked + kept) * np.where(backward, 2, 1)
    bound = (shares**_NORM + longest**_NORM + memory(passed) ** _NORM) ** (1 / _NORM)
    beside = backward * asked * (_BESIDE + _SUMMED * (shared < heads))
    written = memory(np.where(call == INTO_CACHE, 2 * kept, beside))
    fill = fill * np.maximum(waves, 1) * parameters["fill"] / clock
    return launch * parameters["launch"] + written + bound + fill
