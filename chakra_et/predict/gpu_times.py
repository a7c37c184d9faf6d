"""What an operator takes on a GPU, from its class, shapes and the GPU's parameters (``gpus.json``).

Every class is bound by one of: a latency, arithmetic, bytes over the bandwidth, or how many elements a
streaming multiprocessor or compute unit ("unit") handles one by one. Matrix products run as rounds of tiles,
one per unit at a time: of several tile sizes that which ends first is taken, as libraries do. Matrices whose
rows don't start at a multiple of 16 bytes are loaded and stored in smaller moves (NVIDIA, Matrix
Multiplication Background User's Guide, 2023), and the number of these bounds such products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from chakra_et.cost import networks
from chakra_et.cost.units import parse_rate
from chakra_et.predict.gpu_call import Work, item_bytes
from chakra_et.predict.gpu_table import parameters_of, table

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
_SPLITS, _LEAST_DEPTH = {"nvidia": (1, 2, 4, 8), "amd": (1, 2)}, 256
"""Into how many parts K is split, where each keeps this many elements; their results are summed up."""
_LONG_ROW = 1024
"""PyTorch's softmax reads longer rows more than once (aten/src/ATen/native/cuda/SoftMax.cu)."""
_FEW_CHANNELS = 4
_QUERIES, _KEYS = 128, 64
"""A block of flash attention has 128 queries and loops over 64 keys at a time."""
_ALIGNED, _ODD_TILES, _AGAIN = 16, (32, 128), 256
"""Bytes that one load moves at most; edges of cuBLAS's tiles where matrices aren't aligned to that; after how
many rows or columns AMD's libraries load the other matrix again."""
_ALONG, _ACROSS, _STORED = 8, 4, 9
"""In how many lines of the L1 cache the 32 loads of a warp lie, or pairs of sectors its stores. Each thread
loads 16 bytes, move by move (CUTLASS, PredicatedTileAccessIterator): threads side by side are 16 bytes apart,
so 32 lie in 4 lines of 128 bytes. Along K, where a tile is 64 bytes long at a time, they lie in 8 rows. Two
rows of 256 bytes that start anywhere are 18 sectors of 32 bytes, of which 2 are written per cycle."""
_NARROW = 2
"""Numbers of at most so many bytes, and TF32, are multiplied faster than they are moved one at a time."""
_THREADS = 2048
"""Threads that a streaming multiprocessor or compute unit holds."""
_PER_THREAD = {"nvidia": 4, "amd": 8}
"""Elements per thread of PyTorch's kernels for tensors that aren't contiguous."""
_LANES, _LINE = {"nvidia": 32, "amd": 64}, 32
"""Threads that load together, and the bytes of memory that a load moves at least."""
_CACHED_UP_TO = 1.5
"""Where data are this many times the cache, none of them are found in it."""


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
        return self._launched(work, self.of(work.kind, "launch") + self._taken(work))

    def _launched(self, work: Work, alone: float) -> float:
        """In a queue, the GPU's own work of starting a kernel counts too, and bounds small ones."""
        return alone if work.idle else max(alone + self.of("queue", "more"), self.of("queue", "least"))

    def _taken(self, work: Work) -> float:
        """Beyond the launch."""
        if work.kind == "matrix product":
            return self._product(work)
        if work.kind == "attention":
            return self._attention(work)
        if work.kind == "convolution":
            return self._convolution(work)
        return self._moving(work)

    def _moving(self, work: Work) -> float:
        """What a kernel takes that mostly moves numbers."""
        part = self.parameters.get(f"{work.kind}.memory", self.of("elementwise", "memory"))
        if work.kind == "softmax" and work.row > _LONG_ROW:
            part = self.of("softmax", "long")
        bounds = [self._stream(work.moved, part)]
        if work.kind == "gather":
            bounds.append(self._each(work.operations, "gather.elements"))
        if work.joins:
            bounds.append(self._each(self._joined(work), "joined.elements"))
        if work.strided:
            places = self._each(self._waves(work) * work.operations, "strided.elements")
            bounds.append(places / self._cached(work.moved))
        if work.apart:
            bounds.append(self._each(self._lines(work), "strided.lines"))
        if work.special:
            bounds.append(self._each(work.operations, "special.elements"))
        return max(bounds) + work.special * self.of("special", "more")

    def _each(self, count: float, name: str) -> float:
        """µs for ``count`` things, of which each unit does so many per µs."""
        return count / (self.units * self.parameters[name])

    def _joined(self, work: Work) -> float:
        """Elements that bound ``cat``: on NVIDIA, each tensor of its list has two blocks of 512 threads per
        multiprocessor, half of what this holds; on AMD as many as it needs (aten/src/ATen/native/cuda/
        Shape.cu).
        """
        return work.operations if self.vendor == "amd" else max(work.joins, work.operations / 2)

    def _lines(self, work: Work) -> float:
        """Lines of memory that threads, which load together, load for elements that lie apart."""
        lanes = _LANES[self.vendor]
        beside = max(lanes // work.apart, 1)
        lines = math.ceil(beside * item_bytes(work.type) / _LINE)
        return work.operations * lines / beside

    def limits(self, work: Work) -> tuple[float, float]:
        """What a kernel of unknown work takes at least, µs, and how fast it works beyond that: bytes per
        second, or operations where arithmetic bounds its class.
        """
        least = self._launched(work, self.of(work.kind, "launch"))
        part = self.parameters.get(f"{work.kind}.memory", self.of("elementwise", "memory"))
        of_peak = self.parameters.get(f"{work.kind}.compute")
        if work.kind == "convolution":  # the part of what a product reaches
            of_peak = self.of("convolution", "compute") * self.of("matrix product", "compute")
        return least, self.peak("") * of_peak if of_peak else self.memory * part

    def _attention(self, work: Work) -> float:
        blocks = work.batch * math.ceil(work.queries / _QUERIES)
        arithmetic = self._arithmetic(work, "compute")
        if blocks:
            arithmetic *= math.ceil(blocks / self.units) * self.units / blocks
        waits = math.ceil(work.keys / _KEYS) * _KEYS / 1024 * self.of("attention", "keys")
        slower = self.of("attention", "masked") if work.masked else 1.0
        return max(max(waits, arithmetic) / slower, self._stream(work.moved))

    def _convolution(self, work: Work) -> float:
        least = self._stream(work.moved)
        if work.product is None or work.alone or 0 < work.channels <= _FEW_CHANNELS:
            return max(self._arithmetic(work, "thin" if work.channels else "compute"), least)
        each = self._product(work) / self.of("convolution", "compute")
        return max(work.product[0] * each, least) + (work.product[0] - 1) * self.of("convolution", "launch")

    def _arithmetic(self, work: Work, name: str) -> float:
        return work.operations / (self.peak(work.type) * self.of(work.kind, name)) * 1e6

    def _stream(self, moved: float, part: float = 1.0) -> float:
        """µs to move bytes: faster where they fit into the cache, which the kernel before has filled."""
        return moved / (self.memory * part * self._cached(moved)) * 1e6

    def _cached(self, moved: float) -> float:
        """How many times faster bytes move that fit into the cache."""
        found = min(max(_CACHED_UP_TO - moved / self.cache, 0.0) / (_CACHED_UP_TO - 1), 1.0)
        return 1 + found * (self.of("cache", "speedup") - 1)

    def _waves(self, work: Work) -> float:
        """How much the last, partly filled wave of threads adds, where there is more than one."""
        waves = work.operations / (self.units * _THREADS * _PER_THREAD[self.vendor])
        return math.ceil(waves) / waves if waves > 1 else 1.0

    def _product(self, work: Work) -> float:
        part = self.of("matrix product", "memory")
        if work.product is None:
            return max(self._arithmetic(work, "compute"), self._stream(work.moved, part))
        batch, rows, columns, depth = work.product
        if min(rows, columns) == 1 and self.vendor == "nvidia":  # cuBLAS has kernels for vectors
            return self._stream(work.moved, part)
        rate = self.peak(work.type) * self.of("matrix product", "compute") / self.units / 1e6
        fixed, waiting = self.of("matrix product", "tile"), self.of("matrix product", "depth") / 1024
        best = math.inf
        for high, wide in _tiles(self.vendor):
            tiles = batch * math.ceil(rows / high) * math.ceil(columns / wide)
            full = math.sqrt(min(high * wide / (high + wide) / _FULL_TILE, 1.0))
            each = max(2 * high * wide / (rate * full), waiting)  # µs per element of K
            for parts in _SPLITS[self.vendor]:
                if parts == 1 or depth >= parts * _LEAST_DEPTH:
                    rounds = math.ceil(tiles * parts / self.units)
                    summed = self.of("matrix product", "split") if parts > 1 else 0.0
                    best = min(best, rounds * (depth / parts * each + fixed) + summed)
        return max(best, self._moves(work, *work.product), self._stream(work.moved, part))

    def _moves(self, work: Work, batch: int, rows: int, columns: int, depth: int) -> float:
        """µs to load and store the matrices whose rows aren't aligned, in moves of as many bytes as they are.
        cuBLAS moves all three as it must the worst.
        """
        size, aligned = item_bytes(work.type), work.aligned
        narrow = size <= _NARROW or work.type == "tf32"
        if not narrow or work.kind == "convolution" or min(aligned) >= _ALIGNED:
            return 0.0
        if self.vendor == "nvidia":
            lines = min(self._odd_tiles(work, batch, rows, columns, depth, edge) for edge in _ODD_TILES)
            return lines * size / min(aligned) / self.of("matrix product", "moves")
        elements = (
            rows * depth * max(columns / _AGAIN, 1.0),
            depth * columns * max(rows / _AGAIN, 1.0),
            rows * columns,
        )
        moves = [count * size / by for count, by in zip(elements, aligned, strict=True) if by < _ALIGNED]
        return self._each(batch * sum(moves), "matrix product.moves")

    def _odd_tiles(self, work: Work, batch: int, rows: int, columns: int, depth: int, edge: int) -> float:
        """Lines that the busiest multiprocessor loads and stores, by square tiles of this edge, if each move
        is one element. Two tiles share a multiprocessor: their registers fill it.
        """
        tiles = batch * math.ceil(rows / edge) * math.ceil(columns / edge)
        together = 2 if tiles > self.units else 1
        loads = depth * sum(_ALONG if along else _ACROSS for along in work.along)
        each = edge * (loads + edge * _STORED) / _LANES["nvidia"]
        return math.ceil(tiles / self.units / together) * together * each


def gpu_model(name: str, parameters: Mapping[str, float] | None = None) -> GpuModel:
    """The GPU ``name`` of the table, with its own parameters or other ones. Raises ``TraceError``."""
    spec = networks.gpu(name)
    entry = table()[spec.name]
    peaks = {kind: parse_rate(text) for kind, text in entry["peaks"].items()}
    return GpuModel(
        spec.name,
        entry["vendor"],
        entry["units"],
        float(entry["cache"].removesuffix(" MB")) * 1e6,
        spec.memory,
        {"16 bit": spec.peak, **peaks},
        parameters or parameters_of(spec.name),
    )


@functools.cache
def _tiles(vendor: str) -> tuple[tuple[int, int], ...]:
    edges = _EDGES[vendor]
    return tuple((high, wide) for high in edges for wide in edges if high * wide <= _LARGEST_TILE)
