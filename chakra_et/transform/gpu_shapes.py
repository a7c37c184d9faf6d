"""What a call of an operator works on, from its arguments' recorded shapes, types, strides and values.

An elementwise operator's tensors lie in memory as PyTorch's TensorIterator finds them: dimensions that all
tensors cross in one go count as one. If one dimension with neighbouring elements is left, PyTorch has
vectorized kernels; else each element's place is computed from its index (aten/src/ATen/native/
TensorIterator.cpp, aten/src/ATen/native/cuda/Loops.cuh).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from chakra_et.cost.operator_times import OperatorCall, item_bytes
from chakra_et.cost.operator_work import CAUSAL, OVERWRITES, SELECTIONS, WITH_VALUES, operator_work, rule_of
from chakra_et.et.node_attributes import texts
from chakra_et.simulate.run import Run
from chakra_et.traces.fields import STRIDES, is_shape

_WRITES_FIRST = re.compile(r"aten::\w*(?<!_)_$|aten::copy_$")
_COMPARES = re.compile(r"aten::(eq|ne|lt|gt|le|ge|logical_\w+|isnan|isinf|isin)$")
_SPECIAL = re.compile(r"aten::(gelu|erf|erfc|tanh)(_backward)?_?$")
_ALIGNED_BYTES = 16
Shape = Sequence[int]


class Shapes:
    """The recorded arguments of operators, by node."""

    def __init__(self, run: Run) -> None:
        self.run = run
        inputs = [trace.inputs for trace in run.graph.traces]
        self.place = [
            {} if each is None else {row: k for k, row in enumerate(each.rows.tolist())} for each in inputs
        ]
        self.strides = [texts(trace, STRIDES) for trace in run.graph.traces]
        self.seen: dict[tuple[str, bytes, bytes, bytes, str], OperatorCall] = {}

    def work(self, kind: str, node: int) -> OperatorCall:
        """What the operator of ``node`` works on; without operations and bytes if that isn't recorded."""
        trace_of, row = int(self.run.graph.trace_of[node]), int(self.run.graph.row[node])
        trace = self.run.graph.traces[trace_of]
        at = self.place[trace_of].get(row)
        if at is None or trace.inputs is None:
            return OperatorCall(kind)
        name = self.run.names[int(self.run.name_of[node])]
        values = trace.inputs.values[at] if rule_of(name) in WITH_VALUES else b"[]"
        table, index = self.strides[trace_of]
        strides = table[index[row]] if index[row] >= 0 else ""
        key = (name, values, trace.inputs.shapes[at], trace.inputs.types[at], strides)
        if key not in self.seen:
            self.seen[key] = described(kind, *key)
        return self.seen[key]


def described(
    kind: str, name: str, values: bytes, shapes: bytes, types: bytes, strides: str = ""
) -> OperatorCall:
    """What a call of operator ``name`` works on, from the JSON texts of its arguments."""
    try:
        given_texts = shapes, types, strides or "[]", values
        dims, types_, given, _ = (msgspec.json.decode(text, type=list[Any]) for text in given_texts)
    except (msgspec.DecodeError, RecursionError):
        return OperatorCall(kind)
    if name == "aten::cat":
        return _joined(kind, dims)
    counted = operator_work(name, values, shapes, types, b"[]", b"[]")
    if counted is None:
        return OperatorCall(kind)
    steps = [each if is_shape(each) else None for each in given] + [None] * len(dims)
    found = [
        (shape, step, str(of)[7:-1])
        for shape, step, of in zip(dims, steps, types_, strict=False)
        if str(of).startswith("Tensor(") and is_shape(shape)
    ]
    if not found:
        return OperatorCall(kind)
    tensors, backward = [shape for shape, _, _ in found], "backward" in name
    work = OperatorCall(kind, float(counted[0]), float(counted[1]), type=found[0][2], backward=backward)
    if kind in ("elementwise", "copy"):
        return _elementwise(work, name, found)
    if kind == "matrix product":
        return _product(work, found[-2:] if "add" in name else found[:2])
    if kind == "attention":
        scaled = "scaled_dot_product" in name
        has_mask = len(dims) > 3 and is_shape(dims[3]) and len(dims[3]) > 0
        work = replace(work, masked=name in CAUSAL and scaled and not backward and has_mask)
        return _attention(work, tensors[1:] if backward else tensors, scaled)
    if (kind == "softmax" or "layer_norm" in name) and tensors[0]:
        return replace(work, row=tensors[0][-1])
    if kind == "convolution":
        return _convolution(work, tensors, backward)
    if kind == "gather" and rule_of(name) not in SELECTIONS:  # how much of a table it takes isn't known
        return OperatorCall(kind, type=work.type)
    return work


def _elementwise(work: OperatorCall, name: str, found: Sequence[tuple[list[int], Any, str]]) -> OperatorCall:
    """Bytes that are really touched, and how the tensors lie."""
    first = bool(_WRITES_FIRST.match(name))
    operands = [each for each in found if each[0] or len(found) == 1] or list(found)
    way = memory_layout([shape for shape, _, _ in operands], [step for _, step, _ in operands], first)
    if way is None:
        return work
    sizes = [item_bytes(of) for _, _, of in operands]
    touched = [count * size for count, size in zip(way.touched, sizes, strict=True)]
    made = touched[0] if first else way.elements * (1 if _COMPARES.match(name) else max(sizes))
    read = sum(touched[1:] if OVERWRITES.match(name) else touched)
    return replace(
        work,
        operations=float(way.elements),
        moved=float(read + made),
        strided=way.strided,
        apart=way.apart,
        special=bool(_SPECIAL.match(name)),
    )


def _joined(kind: str, dims: Sequence[Any]) -> OperatorCall:
    """``aten::cat``: the tensors of a list are read and written. Their type isn't recorded: 16 bits."""
    shapes = dims[0] if dims and isinstance(dims[0], list) else []
    sizes = [math.prod(shape) for shape in shapes if is_shape(shape) and shape] or [0]
    return OperatorCall(kind, float(sum(sizes)), 2 * 2.0 * sum(sizes), joins=max(sizes))


def _product(work: OperatorCall, pair: Sequence[tuple[list[int], Any, str]]) -> OperatorCall:
    """With batch, M, N and K of a product of two tensors, and how their rows are aligned."""
    if len(pair) != 2:
        return work
    (a, a_steps, of), (b, b_steps, _) = pair
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        return work
    if len(b) == 2:  # a batch of rows
        product = 1, math.prod(a[:-1]), b[-1], a[-1]
    else:
        product = math.prod(a[:-2]), a[-2], b[-1], a[-1]
    size = item_bytes(of)
    made = math.gcd(b[-1] * size, _ALIGNED_BYTES)
    return replace(
        work,
        product=product,
        aligned=(_aligned(a, a_steps, size), _aligned(b, b_steps, size), made),
        along=(_steps(a, a_steps)[-2] != 1 or a[-2] == 1, _steps(b, b_steps)[-2] == 1 < b[-1]),
    )


def _aligned(shape: list[int], steps: Any, size: int) -> int:
    """At which multiples of bytes, up to 16, the rows of a matrix start."""
    own = _steps(shape, steps)
    along = [step * size for step, width in zip(own, shape, strict=True) if step > 1 and width > 1]
    return math.gcd(*along, _ALIGNED_BYTES)


def _convolution(work: OperatorCall, tensors: Sequence[list[int]], backward: bool) -> OperatorCall:
    """With the input channels, and the matrix product that it amounts to."""
    if len(tensors) < 2 + backward or len(tensors[backward]) < 3:
        return work
    x, weight = tensors[backward], tensors[backward + 1]
    depth, columns = math.prod(weight[1:]), weight[0]
    rows = work.operations / max(2.0 * depth * columns, 1.0)
    passes = 1 + (backward and work.operations > 3.0 * math.prod(tensors[0]) * depth)  # one for each gradient
    product = (passes, round(rows / passes), columns, depth)
    return replace(work, channels=x[1], product=product, alone=weight[1] == 1)


def _attention(work: OperatorCall, tensors: Sequence[list[int]], heads_first: bool) -> OperatorCall:
    """With queries and keys. PyTorch's flash and efficient operators have tokens before heads."""
    if len(tensors) < 2 or len(tensors[0]) != 4 or len(tensors[1]) != 4:
        return work
    tokens, heads = (2, 1) if heads_first else (1, 2)
    query, key = tensors[0], tensors[1]
    whole = (10.0 if work.backward else 4.0) * math.prod(query) * key[tokens]
    return replace(
        work,
        keys=key[tokens],
        size=query[3],
        causal=work.operations < 0.75 * whole,
        batch=query[0] * query[heads],
        queries=query[tokens],
    )


@dataclass(frozen=True)
class MemoryLayout:
    """``elements`` of the result; ``touched[operands]``: elements that each tensor has in memory, without
    those that broadcasting repeats; ``strided``: whether places are computed; ``apart``: so many elements in
    a row don't lie beside each other in one of the tensors, 0 for none.
    """

    elements: int
    touched: tuple[int, ...]
    strided: bool = False
    apart: int = 0


def _steps(shape: Shape, given: Shape | None) -> list[int]:
    """The strides of a tensor, in elements: contiguous unless ``given``."""
    if given is not None and len(given) == len(shape):
        return list(given)
    strides = [1] * len(shape)
    for at in range(len(shape) - 2, -1, -1):
        strides[at] = strides[at + 1] * max(shape[at + 1], 1)
    return strides


def memory_layout(
    shapes: Sequence[Shape], strides: Sequence[Shape | None], first_is_result: bool
) -> MemoryLayout | None:
    """Of tensors with these shapes and strides (None: contiguous); None where shapes don't broadcast.

    ``first_is_result``: as with ``copy_`` and ``add_``; else the result lies like the first full-size tensor.
    """
    width = max((len(shape) for shape in shapes), default=0)
    padded = [[1] * (width - len(shape)) + list(shape) for shape in shapes]
    whole = [max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True)]
    if any(size not in (1, full) for sizes in padded for size, full in zip(sizes, whole, strict=True)):
        return None
    steps, touched = [], []
    for shape, own, sizes in zip(shapes, strides, padded, strict=True):
        given = [0] * (width - len(shape)) + _steps(shape, own)
        step = [0 if size == 1 else each for size, each in zip(sizes, given, strict=True)]
        steps.append(step)
        touched.append(math.prod(size for size, each in zip(sizes, step, strict=True) if each))
    elements = math.prod(whole)
    full = [step for step, count in zip(steps, touched, strict=True) if count == elements]
    like = steps[0] if first_is_result else (full[0] if full else _steps(whole, None))
    order = sorted((at for at in range(width) if whole[at] > 1), key=lambda at: (like[at], -at))
    sizes, crossed = _crossed([whole[at] for at in order], [[step[at] for at in order] for step in steps])
    fastest = [step[0] if step else 1 for step in crossed]
    strided = len(sizes) > 1 or any(step != 1 for step in fastest)
    apart = sizes[0] if sizes and any(step > 1 for step in fastest) else 0
    return MemoryLayout(elements, tuple(touched), strided and elements > 1, apart)


def _crossed(sizes: list[int], steps: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Neighbouring dimensions, fastest first, as one where every tensor crosses them in one go."""
    kept_sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in steps]
    for at, size in enumerate(sizes):
        if kept_sizes and all(
            own[-1] * kept_sizes[-1] == step[at] for own, step in zip(kept, steps, strict=True)
        ):
            kept_sizes[-1] *= size
            continue
        kept_sizes.append(size)
        for own, step in zip(kept, steps, strict=True):
            own.append(step[at])
    return kept_sizes, kept
