"""What matrix products take, by their sizes: tiles, waves and splits of K, over a GPU's rates.

C[m, n] = A[m, k] · B[k, n] is cut into tiles, one of which a streaming multiprocessor ("unit") computes at a
time; K may be split among several units, which adds a reduction. Of every tile and split that libraries have
(``CONFIGURATIONS``) the fastest is taken. A wave of tiles is bound by arithmetic, by what a unit can load
from the L2 cache, by latencies (in cycles) along K, or by the number of its loads and stores where rows don't
start at multiples of 16 bytes; the whole by the bytes that come from memory, unless the operands are still in
L2. Long products are bound by the power limit: clocks fall within a millisecond.
Sources of the parts: NVIDIA, Matrix Multiplication Background User's Guide (tiles, waves, alignment); the
rest was found in the tables to which ``benchmarks/cost_accuracy.py`` fits the parameters, and in traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from chakra_et.cost.gpus import Gpu

START = {"burst": 0.95, "hot": 0.83, "memory": 0.8, "load": 1.1, "launch": 1.7, "fill": 1500.0, "split": 2.8}
START |= {"step": 160.0, "cache": 0.4}
"""What a GPU's parameters are before it is measured. ``burst`` and ``hot``: share of the peak for the first
half millisecond and later, at 1 W per TFLOP/s; ``memory``: share of the bandwidth; ``load``: what a unit
loads, over what tiles of 256 × 128 need at the peak; ``launch`` and ``split``: µs per kernel and per split
(8 bit: vLLM's and SGLang's kernels have none);
``fill`` and ``step``: cycles until a tile has its first operands and for 64 elements along K; ``cache``:
share of 64 bytes per cycle and unit that L2 delivers."""
WIDTHS = {"burst": 0.15, "hot": 0.15, "memory": 0.1, "load": 0.25, "launch": 0.25, "fill": 0.4, "split": 0.3}
WIDTHS |= {"step": 0.15, "cache": 0.25}
"""One standard deviation of their logarithms."""
GDDR = {"burst": 0.74, "hot": 0.6}
"""Of GPUs with GDDR: an RTX PRO 6000 Server Edition reaches 417 TFLOP/s in single products of bfloat16, and
both editions 360 in long ones (zzc0721/torch-performance-test-data, issues 160 and 162, 2026)."""
FLOAT = {"burst": 0.9, "hot": 2.0, "load": 6.0}
"""Of products without tensor cores, whose clocks fall no further when they last."""
AMD = {"burst": 0.65, "hot": 0.6, "fill": 4500.0}
"""MI300X: 669 of 1307 TFLOP/s at best (S. Bekman, Machine Learning Engineering, 2024)."""
POWER = {"HBM": (0.2, 0.3), "GDDR": (0.5, 1.0), "float": (1.3, 1.3)}
"""Exponents of watts per TFLOP/s in ``burst`` and ``hot``: with GDDR, at clocks above 2 GHz, power bounds all
of the rate; large dies with HBM lower their voltage."""
FLOAT_WATTS = 13.0, 5.0
"""Watts per TFLOP/s above which power doesn't bound 32-bit arithmetic: before 8-bit products, with them."""
_EDGES = (16, 32, 64, 128, 256), (16, 32, 64, 96, 128, 192, 256)
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def _split(tiles: Iterable[tuple[int, int]]) -> np.ndarray:
    return np.array([(*tile, parts) for tile in tiles for parts in _SPLITS], float).T


CONFIGURATIONS = _split((a, b) for a in _EDGES[0] for b in _EDGES[1] if 32 * 16 <= a * b <= 256 * 128)
"""Rows and columns of tiles, and parts of K."""
MORE_TILES = {
    "H100": ((192, 192), (192, 128), (128, 320), (320, 128), (128, 176), (176, 128), (128, 160), (160, 128))
}
"""What products of 16 bits take beside them, on a GPU and those like it, where rows are aligned: cuBLAS's
kernels for Hopper, which have many more since CUDA 12.6 (cublasLtMatmulTile_t). These are in the names of a
trace's kernels (``nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NNN``), of A · B or of its transpose. Ampere's
table says that it lacks them; more of them say no more of Hopper's."""
_OF_GPU = {name: np.hstack([CONFIGURATIONS, _split(tiles)]) for name, tiles in MORE_TILES.items()}
_UNBATCHED = tuple(
    np.array([split > 1 or (high, wide) not in tiles for high, wide, split in CONFIGURATIONS.T.tolist()])
    for tiles in (((64, 128), (64, 64), (32, 128), (128, 32)), ((128, 128),))
)
"""What batched products without tensor cores don't take, before and since Ampere: NeuSight's tables have the
names of kernels (``volta_sgemm_128x64_nn``)."""
_LARGEST, _ALONG, _NORM = 256 * 128, (64, 8), 5
"""Elements of the largest tile; of K per step, with tensor cores and without; how sharply the slowest bound
rules."""
_EDGE_LOSS = 16.0, 7.0
"""Rows and columns that a tile loses to its edges, with tensor cores and without."""
_AGAIN = {"nvidia": 0.6, "amd": 1.0}
"""The part of ``fill`` that further tiles take, as others compute meanwhile."""
_TWO_LOADS = 1200.0
"""Cycles in which a thread that quantises loads 16 elements, once for the largest of their row and again."""
_COOL = 400.0
"""µs at full power before clocks fall."""
_WARM_STEP, _KEPT, _KEPT_APART = 0.8, (0.9, 1.2), (0.45, 1.35)
"""Latency from L2 over that from memory; parts of L2 up to which it keeps all operands, and from which none:
NVIDIA's undivided one, and others, which fade as halves keep copies of each other's lines."""
SCALED: dict[str, list[tuple[float, int, int]]] = {
    "H100": [(256, 64, 64), (np.inf, 128, 128)],
    "B200": [(64, 64, 64), (256, 64, 128), (np.inf, 128, 128)],
    "L40S": [(16, 16, 64), (64, 32, 64), (128, 64, 64), (256, 128, 64), (np.inf, 128, 128)],
}
"""Up to how many rows SGLang's products of 8 bits, with quantisation, have which tiles, on a GPU and those
like it (sgl-kernel/csrc/gemm/fp8_gemm_kernel.cu; B200: those of one of a pair of units); other GPUs of NVIDIA
are taken to have the last. They never split K."""
_ALONE, _FED, _PORT = 0.95, 2.0, 64.0
"""Where such tiles leave units idle: the share of the peak that power allows the others, and how many times
as much L2 delivers to them at most, or as many bytes per cycle if that is more."""
_IN_LINES, _SQUARE = {"L40S": "rows", "H100": "short"}, 128
"""GPUs, and those like them, on which these products go through their tiles in lines, along the rows of C or
its short side, and the edge of these tiles."""
_COPIES, _LANES = 4, 32
"""Bytes of a move where rows start at multiples of as many but not of 16, at others 2: cuBLAS's kernels are
named ``align8``, ``align2`` and ``align1`` for 16 bits, ``align4`` and ``align1`` for TF32, the same for all
three matrices. Threads of a warp, which move together: each has 16 bytes of a tile, and takes them move by
move (CUTLASS, PredicatedTileIterator)."""
_COPIED, _ALONG_K, _ACROSS_K, _STORED = 10, 8, 4, 9
"""Cycles for which a move of a warp occupies a unit. Copies past the registers (from 4 bytes on), along K as
across: between one product of an H100's trace and the fastest of an A100's. Through registers, one for each
line of 128 bytes: those of threads side by side are 16 bytes apart, along K in 8 rows of 64
bytes. Two rows of 256 bytes that start anywhere are 18 sectors of 32 bytes; 2 are stored per cycle."""
_ROWS = 1024
"""Shapes that are computed at a time."""


def start(gpu: Gpu, number: str) -> dict[str, float]:
    """The prior of a GPU's parameters."""
    if number in ("float", "double"):
        return START | FLOAT
    found = START | (AMD if gpu.vendor == "amd" else GDDR if gpu.kind == "GDDR" else {})
    if number == "8 bit":  # an instruction takes twice as many elements along K
        slower = {"burst": found["burst"] * 0.78, "hot": found["hot"] * 0.75}
        return found | slower | {"split": 20.0, "step": found["step"] / 2}
    return found


def product_micros(
    gpu: Gpu,
    parameters: Mapping[str, float],
    points: np.ndarray,
    number: str,
    quantised: bool = False,
) -> np.ndarray:
    """µs of products of a type of number (key of ``Gpu.peaks``), float[R].

    ``points[R, 5]``: batch, m, n, k, and how many sets of operands take turns in the cache (1: the same as
    just before); ``points[R, 8]``, where rows aren't aligned: also at which multiples of bytes they start,
    and whether A and B lie along K. With 8 bit, C has 16 bits, and A is quantised from 16 bits by a kernel
    before unless it is ``quantised``.
    """
    item = {"8 bit": 1.0, "16 bit": 2.0, "double": 8.0}.get(number, 4.0)
    parts = np.array_split(points, range(_ROWS, len(points), _ROWS))
    scaled = number == "8 bit" and not quantised
    taken = np.concatenate([_micros(gpu, parameters, part, number, item, scaled) for part in parts])
    return taken + _quantising(gpu, parameters, points) if scaled else taken


def _quantising(gpu: Gpu, parameters: Mapping[str, float], points: np.ndarray) -> np.ndarray:
    """µs of the kernel that quantises A: each row by 256 threads, or by a warp where there are 16 rows per
    unit (sgl-kernel/csrc/gemm/per_token_quant_fp8.cu)."""
    m, n, k, sets = points[:, 1:].T
    threads = np.where(m < 16 * gpu.units, 256, 32)
    rounds = np.maximum(m * threads / (gpu.units * gpu.threads), 1)
    waiting = rounds * (parameters["fill"] + _TWO_LOADS * k / 16 / threads) / (gpu.clock / 1e6)
    found, passed = _found(gpu, sets * (3 * m * k + k * n) + 2 * m * n), 3 * m * k
    return parameters["launch"] + waiting + moved(gpu, parameters, passed * (1 - found), passed * found)


def _found(gpu: Gpu, kept: np.ndarray) -> np.ndarray:
    """The part of bytes that are in L2, where so many take turns in it."""
    most, none = _KEPT if gpu.parts == 1 and gpu.vendor == "nvidia" else _KEPT_APART
    return np.clip((none - kept / (gpu.cache / gpu.parts)) / (none - most), 0, 1)


def moved(gpu: Gpu, parameters: Mapping[str, float], loaded: np.ndarray, found: np.ndarray) -> np.ndarray:
    """µs for bytes from memory, and from L2."""
    cached = found / (64 * gpu.units * gpu.clock / 1e6 * parameters["cache"])
    return loaded / (gpu.memory / 1e6 * parameters["memory"]) + cached


def _micros(
    gpu: Gpu, parameters: Mapping[str, float], points: np.ndarray, number: str, item: float, scaled: bool
) -> np.ndarray:
    batch, m, n, k, sets, *layout = np.hsplit(points, points.shape[1])
    written = max(item, 2.0)
    more = MORE_TILES.keys() & {gpu.name, gpu.like} if number in ("16 bit", "tf32") and not layout else ()
    high, wide, parts = next((_OF_GPU[name] for name in more), CONFIGURATIONS)
    simple = number in ("float", "double")
    edge, again = _EDGE_LOSS[simple], _AGAIN[gpu.vendor]
    clock, peak = gpu.clock / 1e6, gpu.peak(number) / 1e6  # per µs
    early, late = POWER["float" if simple else gpu.kind]
    per_tflop = gpu.watts / (gpu.peak("float" if simple else "16 bit") / 1e12)
    if simple:
        per_tflop = min(per_tflop / FLOAT_WATTS["8 bit" in gpu.peaks or gpu.vendor == "amd"], 1.0)
    burst = min(parameters["burst"] * per_tflop**early, 1.05)
    hot = min(parameters["hot"] * per_tflop**late, burst)
    operations = (2 * batch * m * n * k)[:, 0]

    tiles = batch * np.ceil(m / high) * np.ceil(n / wide) * parts
    depth = np.ceil(k / parts / _ALONG[simple]) * _ALONG[simple]
    waves = np.ceil(tiles / gpu.units)
    together = np.clip(np.floor(_LARGEST / (high * wide)), 1, 4 if gpu.vendor == "nvidia" else 1)
    rounds = np.ceil(tiles / (gpu.units * together))
    part = (1 + edge * (1 / 256 + 1 / 128)) / (1 + edge * (1 / high + 1 / wide))
    family = next((of for of in (gpu.name, gpu.like, "L40S") if of in SCALED), "")
    tiled = scaled and family and gpu.vendor == "nvidia"
    idle = waves * gpu.units / tiles if tiled else 1.0
    rate = peak * np.clip(burst * idle, burst, max(burst, _ALONE))
    arithmetic = waves * 2 * high * wide * depth / (rate / gpu.units * part)
    load = parameters["load"] * peak / gpu.units * (256 + 128) / (256 * 128) * item / 2  # bytes per µs
    load = np.minimum(load * idle, np.maximum(load * _FED, _PORT * clock))
    moving = waves * ((high + wide) * depth * item + high * wide * written) / load

    passed = batch * ((m * k + k * n) * item + m * n * written)
    kept = batch * (sets * (m * k + k * n) * item + m * n * written)
    found = _found(gpu, kept)
    waiting = rounds * depth / _ALONG[0] * parameters["step"] / clock * (1 - found * (1 - _WARM_STEP))
    loaded = passed * (1 - found)
    if lines := scaled and (_IN_LINES.get(gpu.name) or _IN_LINES.get(gpu.like)):
        side = m if lines == "rows" else np.minimum(m, n)
        loaded = np.maximum(loaded, _loaded_again(gpu, side, m * n, k))
    memory = moved(gpu, parameters, loaded, passed * found)

    bounds = [arithmetic, moving, waiting, memory]
    if layout:
        turns = np.where(rounds > 1, rounds * together, waves)
        bounds.append(turns * _narrow_moves(depth, item, *layout) / clock)
    bound = sum(each**_NORM for each in bounds) ** (1 / _NORM)
    summed = parameters["split"] + 2 * 4 * parts * batch * m * n / (load * gpu.units)
    all_of = bound + (1 + (rounds - 1) * again) * parameters["fill"] / clock + np.where(parts > 1, summed, 0)
    if simple and gpu.vendor == "nvidia":
        all_of = np.where((batch > 1) & _UNBATCHED["tf32" in gpu.peaks], np.inf, all_of)
    if tiled:
        steps = np.array(SCALED[family])
        tile = steps[np.searchsorted(steps[:, 0], m[:, 0])]
        all_of = np.where((high == tile[:, 1:2]) & (wide == tile[:, 2:]) & (parts == 1), all_of, np.inf)
    best = all_of.min(axis=1)
    heated = np.maximum(np.minimum(best, operations / (peak * burst)) - _COOL, 0)
    return parameters["launch"] + best + (burst / hot - 1) * heated


def _narrow_moves(depth: np.ndarray, item: float, aligned: np.ndarray, *along: np.ndarray) -> np.ndarray:
    """Cycles for which the moves of a tile occupy a unit; infinite for tiles that libraries don't have."""
    high, wide, parts = CONFIGURATIONS
    copied = aligned >= _COPIES
    of_a, of_b = (np.where(copied, _COPIED, np.where(each > 0, _ALONG_K, _ACROSS_K)) for each in along)
    moves = ((high * of_a + wide * of_b) * depth + high * wide * _STORED) / _LANES
    square = (high == wide) & np.isin(high, (32, 128)) & (parts == 1)
    fits = np.where(copied, np.minimum(high, wide) >= 64, square)
    return np.where(fits, moves * item / np.where(copied, _COPIES, 2), np.inf)


def _loaded_again(gpu: Gpu, side: np.ndarray, made: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Bytes that waves of square tiles load, line by line along a ``side`` of C, ``made`` elements, where the
    operand of that side doesn't stay in L2: CUTLASS's kernels of vLLM and SGLang. cuBLAS keeps waves
    square."""
    wave = gpu.units * _SQUARE**2
    span = np.minimum(side, gpu.units * _SQUARE)
    return made / wave * (span + wave / span) * k * (1 - _found(gpu, side * k))
