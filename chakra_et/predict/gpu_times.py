"""What an operator takes on a GPU, from its class, shapes and the GPU's parameters (``gpus.json``).

Every class is bound by one of: a latency, arithmetic, or bytes over the bandwidth that kernels of this class
reach. Matrix products run as rounds of tiles, one per streaming multiprocessor or compute unit at a time: of
several tile sizes that which ends first is taken, as libraries do. Rows that don't start at a multiple of
16 bytes can't be moved by the fast paths (NVIDIA, Matrix Multiplication Background User's Guide, 2023): such
products get a bandwidth of their own.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chakra_et.network import presets
from chakra_et.network.units import parse_rate

CLASSES = (
    "attention",
    "convolution",
    "matrix product",
    "softmax",
    "normalization",
    "copy",
    "gather",
    "reduction",
    "elementwise",
    "memory copy",
    "memset",
)
"""Classes of kernels, by the operator that launched them."""
FILE = Path(__file__).with_name("gpus.json")
_EDGES = {"nvidia": (16, 32, 64, 128, 256), "amd": (16, 32, 64, 96, 128, 160, 192, 224, 256)}
"""Edges of tiles, as in the names of kernels of cuBLAS and hipBLASLt."""
_PRECISIONS = {
    "double": ("double",),
    "float": ("float",),
    "tf32": ("tf32", "float"),
    "float8": ("8 bit",),
}
_LARGEST_TILE = 256 * 256
_FULL_TILE = 64.0  # 128 · 128 / (128 + 128): operations per element from which a tile is bound by arithmetic
_SPLITS, _LEAST_DEPTH = (1, 2, 4, 8), 256
"""Into how many parts K is split, where each keeps this many elements; their results are summed up."""
_LONG_ROW = 1024
"""PyTorch's softmax reads longer rows more than once (aten/src/ATen/native/cuda/SoftMax.cu)."""
_FEW_CHANNELS = 4
_QUERIES, _KEYS, _ATTENTION_BLOCKS = 128, 64, 2
"""A block of flash attention has 128 queries and loops over 64 keys at a time; two run on a unit."""
_ALIGNED_BYTES, _NARROW = 16, 2
"""Numbers of at most so many bytes are moved 16 bytes at a time, or else far slower."""
_THREADS = 2048
"""Threads that a streaming multiprocessor or compute unit holds."""
_PER_THREAD = {"nvidia": 4, "amd": 8}
"""Elements per thread of PyTorch's kernels for tensors that aren't contiguous."""
_LARGE, _SCATTERED = 16e6, 0.3
"""A copy of more bytes than the first at less than this part of the bandwidth has strides that recorded
shapes don't tell."""
_CACHED_UP_TO = 1.5
"""Where data are this many times the cache, none of them are found in it."""


@dataclass(frozen=True)
class Work:
    """One call of an operator. ``operations``, ``moved`` (bytes): 0 for none or unknown. ``product``: batch,
    M, N, K of a matrix product. Attention: ``batch`` (times heads), ``queries``, ``keys``. ``row``: elements
    over which softmax runs. ``channels``: input channels of a convolution. ``idle``: the GPU did nothing just
    before. ``scattered``: neighbours in memory aren't moved together. ``type``: of the first tensor, as
    PyTorch names it, or ``tf32``.
    """

    kind: str
    operations: float = 0.0
    moved: float = 0.0
    product: tuple[int, int, int, int] | None = None
    batch: int = 0
    queries: int = 0
    keys: int = 0
    row: int = 0
    channels: int = 0
    idle: bool = False
    scattered: bool = False
    type: str = "c10::BFloat16"

    @property
    def known(self) -> bool:
        return self.operations > 0 or self.moved > 0

    @property
    def shaped(self) -> bool:
        """Whether the sizes are known by which a library chooses kernels."""
        return self.product is not None or self.keys > 0 or self.channels > 0


@dataclass(frozen=True)
class GpuModel:
    """A GPU: ``units`` that run tiles, ``cache`` bytes, ``memory`` bytes per second, ``peaks`` operations per
    second by type of number, and fitted ``parameters`` by "class.name"; times in µs. ``seen``: results.
    """

    name: str
    vendor: str
    units: int
    cache: float
    memory: float
    peaks: Mapping[str, float]
    parameters: Mapping[str, float]
    seen: dict[Work, float] = field(default_factory=dict, compare=False, repr=False)

    def of(self, kind: str, name: str) -> float:
        return self.parameters[f"{'elementwise' if kind == 'memset' else kind}.{name}"]

    def peak(self, type_name: str) -> float:
        """Operations per second of matrix products of this type."""
        for name in _PRECISIONS.get(type_name.rpartition("::")[2].lower().partition("_")[0], ()):
            if name in self.peaks:
                return self.peaks[name]
        return self.peaks["16 bit"]

    def micros(self, work: Work) -> float:
        """What an operator of known work takes."""
        if work not in self.seen:
            self.seen[work] = self._micros(work)
        return self.seen[work]

    def _micros(self, work: Work) -> float:
        full = self.of(work.kind, "launch")
        launch = max(full - self.of("idle", "less"), 0.0)
        busy = launch if work.idle else full
        if work.kind == "matrix product":
            return busy + self._product(work)
        if work.kind == "attention":
            blocks = work.batch * math.ceil(work.queries / _QUERIES)
            rounds = max(math.ceil(blocks / (self.units * _ATTENTION_BLOCKS)), 1)
            keys = math.ceil(work.keys / _KEYS) * _KEYS
            waits = rounds * keys / 1024 * self.of("attention", "keys")
            return busy + max(waits, self._arithmetic(work, "compute"), self._stream(work.moved))
        if work.kind == "convolution":
            thin = 0 < work.channels <= _FEW_CHANNELS
            return busy + max(self._arithmetic(work, "thin" if thin else "compute"), self._stream(work.moved))
        long = work.kind == "softmax" and work.row > _LONG_ROW
        part = self.of(work.kind, "long" if long else "memory")
        moved = work.moved * (self._waves(work) if work.kind == "copy" else 1.0)
        if work.scattered:
            part, moved = self.of("scattered", "memory"), work.moved
        taken = launch + self._stream(moved, part)
        return taken if work.idle else max(taken, full)

    def limits(self, kind: str) -> tuple[float, float]:
        """What a kernel of unknown work takes at least, µs, and how fast it works beyond that: bytes per
        second, or operations where arithmetic bounds its class.
        """
        arithmetic = self.parameters.get(f"{kind}.compute")
        fast = self.peak("") * arithmetic if arithmetic else self.memory * self.of(kind, "memory")
        return self.of(kind, "launch"), fast

    def marked(self, work: Work, micros: float) -> Work:
        """``work``, marked as scattered if it took too long here to have moved neighbours together."""
        large = work.kind in ("copy", "elementwise") and work.moved >= _LARGE
        slow = large and work.moved / micros * 1e6 < _SCATTERED * self.memory
        return replace(work, scattered=True) if slow else work

    def _arithmetic(self, work: Work, name: str) -> float:
        return work.operations / (self.peak(work.type) * self.of(work.kind, name)) * 1e6

    def _stream(self, moved: float, part: float = 1.0) -> float:
        """µs to move bytes: faster where they fit into the cache, which the kernel before has filled."""
        cached = min(max(_CACHED_UP_TO - moved / self.cache, 0.0) / (_CACHED_UP_TO - 1), 1.0)
        faster = 1 + cached * (self.of("cache", "speedup") - 1)
        return moved / (self.memory * part * faster) * 1e6

    def _waves(self, work: Work) -> float:
        """How much the last, partly filled wave of threads adds where there is more than one."""
        waves = work.operations / (self.units * _THREADS * _PER_THREAD[self.vendor])
        return math.ceil(waves) / waves if waves > 1 else 1.0

    def _product(self, work: Work) -> float:
        size = item_bytes(work.type)
        part = self.of("matrix product", "memory")
        if work.product is None:
            return max(self._arithmetic(work, "compute"), self._stream(work.moved, part))
        batch, rows, columns, depth = work.product
        if size <= _NARROW and any(side * size % _ALIGNED_BYTES for side in (columns, depth)):
            part = self.of("matrix product", "unaligned")
        rate = self.peak(work.type) * self.of("matrix product", "compute") / self.units / 1e6
        if min(rows, columns) == 1 and self.vendor == "nvidia":  # cuBLAS has kernels for vectors
            return self._stream(work.moved, part)
        fixed, waiting = self.of("matrix product", "tile"), self.of("matrix product", "depth") / 1024
        best = math.inf
        for high, wide in _tiles(self.vendor):
            tiles = batch * math.ceil(rows / high) * math.ceil(columns / wide)
            full = math.sqrt(min(high * wide / (high + wide) / _FULL_TILE, 1.0))
            each = max(2 * high * wide / (rate * full), waiting)  # µs per element of K
            for parts in _SPLITS:
                if parts == 1 or depth >= parts * _LEAST_DEPTH:
                    rounds = math.ceil(tiles * parts / self.units)
                    summed = self.of("matrix product", "split") if parts > 1 else 0.0
                    best = min(best, rounds * (depth / parts * each + fixed) + summed)
        return max(best, self._stream(work.moved, part))


def gpu_model(name: str, parameters: Mapping[str, float] | None = None) -> GpuModel:
    """The GPU ``name`` of the table, with its own parameters or other ones. Raises ``TraceError``."""
    spec = presets.gpu(name)
    entry = table()[spec.name]
    peaks = {kind: parse_rate(text) for kind, text in entry["peaks"].items()}
    return GpuModel(
        spec.name,
        entry["vendor"],
        entry["units"],
        float(entry["cache"].removesuffix(" MB")) * 1e6,
        spec.memory,
        {"16 bit": spec.peak, **peaks},
        parameters or table()[entry.get("like", spec.name)]["parameters"],
    )


@functools.cache
def table() -> dict[str, Any]:
    """``gpus.json``."""
    loaded: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return loaded


@functools.cache
def _tiles(vendor: str) -> tuple[tuple[int, int], ...]:
    edges = _EDGES[vendor]
    return tuple((high, wide) for high in edges for wide in edges if high * wide <= _LARGEST_TILE)


def item_bytes(type_name: str) -> int:
    """Bytes per element of a PyTorch type name; 2 where it is unknown."""
    short = type_name.rpartition("::")[2].lower()
    sizes = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "long int": 8, "long": 8}
    return 1 if short.startswith(("float8", "bool", "unsigned char", "signed char")) else sizes.get(short, 2)
