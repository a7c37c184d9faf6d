"""What an operator of PyTorch takes on a GPU, from its class and shapes.

Matrix products take what ``kernel_times`` says; so does attention of a library (cuDNN, flash-attn). Every
other class is bound by one of: a latency, arithmetic, bytes over the bandwidth, or how many elements a
streaming multiprocessor or compute unit ("unit") handles one by one, by ``operator_times.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chakra_et.cost import gpus
from chakra_et.cost.attention import BACKWARD_PASS, FORWARD
from chakra_et.cost.gpus import Gpu
from chakra_et.cost.kernel_times import KernelTimes, kernel_times
from chakra_et.et import columns

FILE = Path(__file__).with_name("operator_times.json")
_TABLE: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
ERRORS: Mapping[str, float] = _TABLE["errors"]
"""One standard deviation of the logarithm of times on another vendor's GPU, by class."""
LIKE = {"nvidia": "H100", "amd": "MI300X"}
"""The GPUs to which the parameters were fitted; others of their vendors are taken to be like them."""
_TIMES = ("launch", "more", "least", "keys", "row")
_COUNTS = ("moves", "elements", "lines")
"""Parameters that are times, and that are counts per µs and unit; the others are parts of specified rates."""
_BY_ELEMENTS = ("softmax", "normalization")
"""Classes that with 16 bits are bound by arithmetic for each element; so are long rows, not aligned."""
GDDR = 0.85
"""Of the share of the bandwidth that kernels reach with HBM: NeuSight's elementwise kernels reach 74% on a T4
and 87 to 90% on A100 and V100, products 76% on an L40S."""
SETS = 2.0
"""Sets of operands that take turns in the cache, in a model's step: weights come from memory, activations
from the cache, if they fit."""
_LARGE = 8192
"""Rows, columns and K of a product at the rate that a GPU sustains."""
_LONG_ROW, _BLOCK = 1024, 512
"""PyTorch's softmax reads longer rows three times, by blocks of at most so many threads
(aten/src/ATen/native/cuda/SoftMax.cu)."""
_NORM_BLOCK, _UNKNOWN_ROW = 128, 0.84
"""Threads for each row of layer normalization, which reads rows twice (layer_norm_kernel.cu); the part that
it reads again from memory where the row isn't known."""
_NORM_BACKWARD = 2.15
"""Its backward pass, which has a second kernel along columns, over its forward pass, in traces of an H200."""
_FEW_CHANNELS = 4
_QUERIES, _KEYS = 128, 64
"""A block of flash attention has 128 queries and loops over 64 keys at a time."""
_ALIGNED, _AGAIN = 16, 256
"""Bytes that one load moves at most; after how many rows or columns AMD's libraries load the other matrix
again."""
_PER_THREAD = {"nvidia": 4, "amd": 8}
"""Elements per thread of PyTorch's kernels for tensors that aren't contiguous."""
_LANES, _LINE = {"nvidia": 32, "amd": 64}, 32
"""Threads that load together, and the bytes of memory that a load moves at least."""
_CACHED_UP_TO = 1.5
"""Where data are this many times the cache, none of them are found in it."""


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


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator. ``operations``, ``moved`` (bytes): 0 for none or unknown. ``type``: of the
    first tensor, as PyTorch names it, or ``tf32``. ``idle``: the GPU did nothing just before.

    ``tested``: of an operator that the fit may use.

    Matrix products: ``product``: batch, M, N, K; ``aligned``: at which multiples of bytes the rows of its
    three matrices start; ``along``: whether each of the first two lies along K. Convolutions: ``product``:
    passes and the M, N, K that each amounts to; ``channels`` of the input; ``alone``: each of them by
    itself. Attention: ``batch`` (times heads), ``queries``, ``keys``, ``size`` of a head, ``causal``,
    ``backward``; ``masked``: with a mask of its own; ``library``: by kernels that aren't PyTorch's own.
    ``row``: elements over which softmax runs. Elementwise: ``strided``: places are computed from indices;
    ``apart``: so many elements in a row don't lie beside each other; ``joins``: of ``cat``, elements of the
    longest tensor of its list; ``special``: with functions such as erf. Gather: rows move by 16 bytes, not
    one element at a time, where there are no ``operations``.
    """

    kind: str
    operations: float = 0.0
    moved: float = 0.0
    product: tuple[int, int, int, int] | None = None
    batch: int = 0
    queries: int = 0
    keys: int = 0
    size: int = 0
    causal: bool = False
    masked: bool = False
    backward: bool = False
    library: bool = False
    row: int = 0
    channels: int = 0
    aligned: tuple[int, int, int] = (16, 16, 16)
    along: tuple[bool, bool] = (True, False)
    alone: bool = False
    idle: bool = False
    tested: bool = True
    strided: bool = False
    apart: int = 0
    joins: int = 0
    special: bool = False
    type: str = "c10::BFloat16"

    @property
    def known(self) -> bool:
        return self.operations > 0 or self.moved > 0

    @property
    def shaped(self) -> bool:
        """Whether the sizes are known by which a library chooses kernels."""
        return self.product is not None or self.keys > 0 or self.channels > 0


def item_bytes(type_name: str) -> int:
    """Bytes per element of a PyTorch type name; 2 where it is unknown."""
    return columns.item_bytes(type_name) or 2


def number(type_name: str) -> str:
    """The key of ``Gpu.peaks`` for a PyTorch type name; 16 bits where it is unknown."""
    short = type_name.rpartition("::")[2].lower()
    if short.startswith("float8"):
        return "8 bit"
    return short if short in ("double", "float", "tf32") else "16 bit"


@dataclass(frozen=True)
class GpuModel:
    """A GPU with fitted ``parameters`` by "class.name"; times in µs. ``seen``: results."""

    kernels: KernelTimes
    parameters: Mapping[str, float]
    seen: dict[OperatorCall, float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def gpu(self) -> Gpu:
        return self.kernels.gpu

    @property
    def name(self) -> str:
        return self.gpu.name

    @property
    def vendor(self) -> str:
        return self.gpu.vendor

    def of(self, kind: str, name: str) -> float:
        return self.parameters[f"{'elementwise' if kind == 'memset' else kind}.{name}"]

    def peak(self, type_name: str) -> float:
        """Operations per second of matrix products of this type."""
        return self.gpu.peak(number(type_name))

    def micros(self, work: OperatorCall) -> float:
        """What an operator of known work takes."""
        if work not in self.seen:
            self.seen[work] = self._micros(work)
        return self.seen[work]

    def _micros(self, work: OperatorCall) -> float:
        if work.kind == "matrix product":
            return self._product(work)
        if work.kind == "attention" and work.size and (work.library or not work.tested):
            call = BACKWARD_PASS if work.backward else FORWARD
            point = [1, work.batch, work.batch, work.queries, work.keys, work.size, work.causal, call]
            return float(self.kernels.micros("attention", [point])[0])
        beyond = {"attention": self._attention, "convolution": self._convolution}.get(work.kind, self._moving)
        return self._launched(work, self.of(work.kind, "launch") + beyond(work))

    def _launched(self, work: OperatorCall, alone: float) -> float:
        """In a queue, the GPU's own work of starting a kernel counts too, and bounds small ones."""
        return alone if work.idle else max(alone + self.of("queue", "more"), self.of("queue", "least"))

    def _moving(self, work: OperatorCall) -> float:
        """What a kernel takes that mostly moves numbers."""
        if work.kind == "normalization" and work.row and work.backward:
            return _NORM_BACKWARD * self._moving(replace(work, moved=work.moved / 1.5, backward=False))
        kind = "softmax_long" if work.kind == "softmax" and work.row > _LONG_ROW else work.kind
        part = self.parameters.get(f"{kind}.memory", self.of("elementwise", "memory"))
        item = item_bytes(work.type)
        bounds = [self._stream(work.moved, part) * self._read_again(kind, work.row, item)]
        if kind in _BY_ELEMENTS or (kind == "softmax_long" and work.row * item % _ALIGNED):
            elements = work.moved / 2 / item
            bounds.append(self._each(elements, f"{kind}.elements"))
            if kind == "normalization" and work.row:
                at_once = self.gpu.units * self.gpu.threads / _NORM_BLOCK
                bounds[-1] += max(elements / work.row / at_once, 1) * self.of(kind, "row")
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

    def _read_again(self, kind: str, row: int, item: int) -> float:
        """How much longer rows take that don't stay in a cache from one reading to the next. ``held``: the
        part of it that they may fill; ``rise``: how much more makes all of them be read again; ``odd``: what
        a load of single elements adds, beside those of 16 bytes."""
        if kind == "softmax_long":
            each = _ALIGNED // item
            block = min(1 << math.ceil(math.log2(max(row / each / 2, 32))), _BLOCK)
            caches = self.gpu.units * self.gpu.near + self.gpu.cache / self.gpu.parts
            held = self.gpu.units * self.gpu.threads / block * row * item / caches
            loads = row // (each * block) + math.ceil(row % (each * block) / block)
            odd = self.of(kind, "odd") * (loads * each * block / row - 1)
            return (1 + self._beyond(kind, held)) * (1 + odd)
        if kind == "normalization":
            held = self.gpu.threads / _NORM_BLOCK * row * item / self.gpu.near
            return 1 + (self._beyond(kind, held) if row else _UNKNOWN_ROW) / 2
        return 1.0

    def _beyond(self, kind: str, held: float) -> float:
        """The part of rows that a cache, of which they would fill so much, doesn't keep."""
        return min(max((held - self.of(kind, "held")) / self.of(kind, "rise"), 0.0), 1.0)

    def _each(self, count: float, name: str) -> float:
        """µs for ``count`` things, of which each unit does so many per µs."""
        return count / (self.gpu.units * self.parameters[name])

    def _joined(self, work: OperatorCall) -> float:
        """Elements that bound ``cat``: on NVIDIA, each tensor of its list has two blocks of 512 threads per
        multiprocessor, half of what this holds; on AMD as many as it needs (ATen/native/cuda/Shape.cu)."""
        return work.operations if self.vendor == "amd" else max(work.joins, work.operations / 2)

    def _lines(self, work: OperatorCall) -> float:
        """Lines of memory that threads, which load together, load for elements that lie apart."""
        lanes = _LANES[self.vendor]
        beside = max(lanes // work.apart, 1)
        return work.operations * math.ceil(beside * item_bytes(work.type) / _LINE) / beside

    def limits(self, work: OperatorCall) -> tuple[float, float]:
        """What a kernel of unknown work takes at least, µs, and how fast it works beyond that: bytes per
        second, or operations where arithmetic bounds its class."""
        if work.kind == "matrix product":
            return self._products((1, 1, 1, 1), work.type), self._steady(work.type)
        least = self._launched(work, self.of(work.kind, "launch"))
        part = self.parameters.get(f"{work.kind}.memory", self.of("elementwise", "memory"))
        of_peak = self.parameters.get(f"{work.kind}.compute")
        if work.kind == "convolution":  # the part of what a product reaches
            return least, self._steady("") * self.of("convolution", "compute")
        return least, self.peak("") * of_peak if of_peak else self.gpu.memory * part

    def _steady(self, type_name: str) -> float:
        """Operations per second of a large product."""
        return 2e6 * _LARGE**3 / self._products((1, _LARGE, _LARGE, _LARGE), type_name)

    def _products(
        self, product: tuple[int, int, int, int], type_name: str, layout: Sequence[int] = ()
    ) -> float:
        kind = number(type_name)
        point = [*product, SETS, *layout]
        return float(self.kernels.micros("8 bit alone" if kind == "8 bit" else kind, [point])[0])

    def _attention(self, work: OperatorCall) -> float:
        blocks = work.batch * math.ceil(work.queries / _QUERIES)
        arithmetic = work.operations / (self.peak(work.type) * self.of("attention", "compute")) * 1e6
        if blocks:
            arithmetic *= math.ceil(blocks / self.gpu.units) * self.gpu.units / blocks
        waits = math.ceil(work.keys / _KEYS) * _KEYS / 1024 * self.of("attention", "keys")
        slower = self.of("attention", "masked") if work.masked else 1.0
        return max(max(waits, arithmetic) / slower, self._stream(work.moved))

    def _convolution(self, work: OperatorCall) -> float:
        least = self._stream(work.moved)
        if work.product is None or work.alone or 0 < work.channels <= _FEW_CHANNELS:
            part = self.of("convolution", "thin" if work.channels else "compute")
            rate = self.peak(work.type) if work.channels else self._steady(work.type)
            return max(work.operations / (rate * part) * 1e6, least)
        passes, m, n, k = work.product
        each = self._product(replace(work, product=(1, m, n, k))) / self.of("convolution", "compute")
        return max(passes * each, least) + (passes - 1) * self.of("convolution", "launch")

    def _stream(self, moved: float, part: float = 1.0) -> float:
        """µs to move bytes: faster where they fit into the cache, which the kernel before has filled."""
        return moved / (self.gpu.memory * part * self._cached(moved)) * 1e6

    def _cached(self, moved: float) -> float:
        """How many times faster bytes move that fit into the cache."""
        found = min(max(_CACHED_UP_TO - moved / self.gpu.cache, 0.0) / (_CACHED_UP_TO - 1), 1.0)
        return 1 + found * (self.of("cache", "speedup") - 1)

    def _waves(self, work: OperatorCall) -> float:
        """How much the last, partly filled wave of threads adds, where there is more than one."""
        waves = work.operations / (self.gpu.units * self.gpu.threads * _PER_THREAD[self.vendor])
        return math.ceil(waves) / waves if waves > 1 else 1.0

    def _product(self, work: OperatorCall) -> float:
        if work.product is None:
            least, rate = self.limits(work)
            return least + max(work.operations / rate * 1e6, self._stream(work.moved, 0.8))
        size, aligned = item_bytes(work.type), min(work.aligned)
        cores = number(work.type) not in ("float", "double")  # faster than single numbers are moved
        odd = cores and aligned < _ALIGNED and work.kind != "convolution"
        layout = (aligned, *work.along) if odd and self.vendor == "nvidia" else ()
        taken = self._products(work.product, work.type, layout)
        if odd and self.vendor == "amd":
            batch, rows, columns, depth = work.product
            again = max(columns / _AGAIN, 1.0), max(rows / _AGAIN, 1.0)
            elements = rows * depth * again[0], depth * columns * again[1], rows * columns
            moves = sum(n * size / by for n, by in zip(elements, work.aligned, strict=True) if by < _ALIGNED)
            taken = max(taken, self._each(batch * moves, "matrix product.moves"))
        return taken + self.of("matrix product", "launch")


def gpu_model(name: str, parameters: Mapping[str, float] | None = None) -> GpuModel:
    """The GPU ``name`` of the table or the one that a file describes, with its own parameters or other ones.
    Raises ``TraceError``."""
    gpu = gpus.gpu(name)
    return GpuModel(kernel_times(gpu), parameters or _parameters(gpu))


def _parameters(gpu: Gpu) -> dict[str, float]:
    """Those of the GPU that it is like: latencies pass in as many cycles there."""
    like = LIKE[gpu.vendor]
    faster = gpu.clock / gpus.gpu(like).clock
    found = {}
    for each, value in _TABLE[like].items():
        short = each.rpartition(".")[2]
        found[each] = value / faster if short in _TIMES else value * faster if short in _COUNTS else value
        if short == "memory" and gpu.kind == "GDDR":
            found[each] *= GDDR
    return found | dict(gpu.measured.get("operators", {}))
