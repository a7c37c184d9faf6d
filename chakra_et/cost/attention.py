"""What fused attention takes: blocks of queries that loop over the keys (Dao, FlashAttention-2, 2023).

A unit multiplies Q by Kᵀ, takes exponentials (16 per cycle and unit: Shah et al., FlashAttention-3, 2024) and
multiplies by V. The backward pass does the two products again and four more; nothing public times it by
shape, so its rate is that of the forward pass times ``BACKWARD``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from chakra_et.cost import products
from chakra_et.cost.gpus import Gpu

START = {
    "burst": 0.85,
    "exponentials": 0.6,
    "memory": 0.7,
    "launch": 5.0,
    "fill": 3000.0,
    "step": 700.0,
    "cache": 0.3,
    "diagonal": 128.0,
}
"""``burst`` and ``exponentials``: shares of the rates, the first at 1 W per TFLOP/s; ``memory``: share of the
bandwidth; ``launch``: µs; ``fill`` and ``step``: cycles per block and per 64 keys; ``cache``: as for
products; ``diagonal``: masked keys that are multiplied all the same."""
WIDTHS = {
    "burst": 0.15,
    "exponentials": 0.3,
    "memory": 0.2,
    "launch": 0.3,
    "fill": 0.5,
    "step": 0.3,
    "cache": 0.3,
    "diagonal": 0.4,
}

BACKWARD = 0.7
"""FlashAttention-2 reaches 70 to 75% of its forward rate in the backward pass (Dao 2023, figure 5)."""
_QUERIES, _KEYS, _EXPONENTIALS, _NORM = 128, 64, 16, 4


def start(gpu: Gpu) -> dict[str, float]:
    """The prior of a GPU's parameters: with GDDR and of AMD as much lower as products'."""
    lower = products.start(gpu, "16 bit")["burst"] / products.START["burst"]
    return START | {"burst": START["burst"] * lower}


def attention_micros(gpu: Gpu, parameters: Mapping[str, float], points: np.ndarray) -> np.ndarray:
    """µs of attention in 16 bits, float[R].

    ``points[R, 8]``: batch, heads, heads of keys and values, queries, keys, head size, whether causal,
    whether backward.
    """
    batch, heads, shared, queries, keys, size, causal, backward = points.T
    clock = gpu.clock / 1e6
    peak = gpu.peak("16 bit") / 1e6
    early = products.POWER[gpu.kind][0]
    rate = peak * min(parameters["burst"] * (gpu.watts / (peak / 1e6)) ** early, 1.0)
    rate = rate * np.where(backward > 0, BACKWARD, 1)
    seen = np.where(causal > 0, keys - np.minimum(queries - 1, keys) / 2 + parameters["diagonal"], keys)
    seen = np.minimum(seen, np.ceil(keys / _KEYS) * _KEYS)
    blocks = batch * heads * np.ceil(queries / _QUERIES)
    waves = blocks / gpu.units
    whole = np.where(waves > 1, 1 + 0.5 * (np.ceil(waves) - waves) / waves, 1 / np.maximum(waves, 1e-9))
    pairs = batch * heads * np.ceil(queries / 16) * 16 * seen
    pairs = np.maximum(pairs, 0) * whole
    multiplied = 4 * pairs * size * np.where(backward > 0, 2.5, 1) / rate
    powers = pairs / (_EXPONENTIALS * gpu.units * clock * parameters["exponentials"])
    waiting = np.ceil(waves / 2) * np.where(waves > 2, seen, keys) / _KEYS * parameters["step"] / clock
    moved = 2 * batch * size * (2 * heads * queries + 4 * shared * keys) * np.where(backward > 0, 2, 1)
    found = np.clip(1.5 - moved / (gpu.cache / gpu.parts), 0, 1)
    memory = moved * (1 - found) / (gpu.memory / 1e6 * parameters["memory"])
    memory = memory + moved * found / (64 * gpu.units * clock * parameters["cache"])
    bound = ((multiplied**2 + powers**2) ** (_NORM / 2) + waiting**_NORM + memory**_NORM) ** (1 / _NORM)
    taken: np.ndarray = parameters["launch"] + bound + np.ceil(waves / 2) * parameters["fill"] / clock
    return taken
