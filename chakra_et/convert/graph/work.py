"""Floating-point operations and bytes of device work, from the shapes of the operators that launch it.

ASTRA-sim's roofline mode needs ``num_ops`` and ``tensor_size`` on compute nodes. Formulas, with a
multiply-add counted as two operations: matrix products 2·m·n·k; convolutions 2·output·(input channels per
group)·kernel; their backward twice that, once per gradient; attention 4·batch·heads·queries·keys·head size,
its backward 2.5 times that (Dao, FlashAttention-2, 2023, section 4.1); all other operators one operation per
element of their largest tensor. Bytes are those of the tensors that are read and written.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from chakra_et.arrays import coded, coded_pairs, first_rows, unique
from chakra_et.convert.graph.communication_arguments import item_bytes
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.traces.device_format import CPU_OP, KERNEL, MEMCPY, MEMSET

Shape = tuple[int, ...]
Counted = tuple[int, int] | None
"""Operations, and elements of the result; None if the shapes do not match the formula."""
Rule = Callable[[list[Shape | None], list[Any]], Counted]
# Twice the bandwidth (8 TB/s) and the sparse 4-bit rate (20 PFLOP/s) of NVIDIA's B200, its data sheet, 2024.
MOST_BYTES_PER_NS = 16_000
MOST_OPERATIONS_PER_NS = 40_000_000
DEPTH = 8
"""How many operators around a launch are searched for a formula."""


@dataclass(eq=False, repr=False)
class Work:
    """Operations and bytes per row of the device trace, int64; 0 if not known."""

    operations: np.ndarray
    bytes: np.ndarray


def find_work(rank: LinkedRank, parent: np.ndarray) -> Work:
    """Operations and bytes of each kernel, copy and memset; ``parent`` is the hierarchy's.

    The kernels of one operator share its work, see ``divided``.
    """
    device = rank.device
    operations = np.zeros(len(device), dtype=np.int64)
    moved = np.zeros(len(device), dtype=np.int64)
    copies = np.flatnonzero((device.category == MEMCPY) | (device.category == MEMSET))
    moved[copies] = np.maximum(device.bytes[copies], 0)
    kernels = np.flatnonzero((device.category == KERNEL) & ~rank.communication_rows.gpu)
    kernels = kernels[parent[kernels] >= 0]
    operators, of = coded(parent[kernels])
    works = _works(rank, parent, operators)
    length = (device.end - device.start)[kernels]
    operations[kernels], moved[kernels] = divided(works, of, length)
    return Work(operations, moved)


def _works(rank: LinkedRank, parent: np.ndarray, operators: np.ndarray) -> np.ndarray:
    """``work_of`` each operator, as for ``divided``; calls of one name with the same shapes are looked up
    once."""
    host, names = rank.host, rank.device.names
    row, name = rank.link.host_row[operators], rank.device.name[operators]
    by_shape = np.zeros(len(names), dtype=bool)
    by_shape[[code for code in unique(name).tolist() if rule_of(names[code]) not in WITH_VALUES]] = True
    alike = by_shape[name] & (row >= 0) & (rank.device.category[operators] == CPU_OP)
    texts = (*host.inputs[1:], *host.outputs[1:])
    _, call = coded_pairs(alike.astype(np.int8), name)
    for column in texts:
        _, call = coded_pairs(call, column.codes[row])
    _, first = first_rows(call)
    of_call = np.full((len(first), 2), -1, dtype=np.int64)
    for number, at in enumerate(first.tolist()):
        shapes = (column[row[at]] for column in texts)
        # Without a result of its own, it has that of an operator around it, which may be another.
        if alike[at] and operator_work(names[name[at]], b"[]", *shapes) is not None:
            of_call[number] = work_of(rank, parent, int(operators[at])) or (0, 0)
    works: np.ndarray = of_call[call]
    for at in np.flatnonzero(works[:, 0] < 0).tolist():
        works[at] = work_of(rank, parent, int(operators[at])) or (0, 0)
    return works


def divided(works: np.ndarray, of: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(operations, bytes) of each kernel: those of its operator, divided by the kernels' durations.

    ``works``: int64[operators, 2], operations and bytes of each, 0 if not known; ``of``: each kernel's
    operator; ``length``: each kernel's duration in ns.
    0 if no device could do as much in that time: an operator that takes a few rows of a large table does not
    read all of it.
    """
    whole = works.astype(np.float64)
    total = np.maximum(np.bincount(of, length, len(whole)), 1)
    most = np.column_stack((MOST_OPERATIONS_PER_NS * total, MOST_BYTES_PER_NS * total))
    whole[(whole > most).any(axis=1)] = 0
    shares = np.rint(whole[of] * (length / total[of])[:, None]).astype(np.int64)
    return shares[:, 0], shares[:, 1]


def operator_around(rank: LinkedRank, parent: np.ndarray, row: int) -> int:
    """The row of the innermost operator with arguments at or around ``row``, -1 for none."""
    for _ in range(DEPTH):
        if row < 0:
            break
        if rank.device.category[row] == CPU_OP and rank.link.host_row[row] >= 0:
            return row
        row = int(parent[row])
    return -1


def work_of(rank: LinkedRank, parent: np.ndarray, operator: int) -> Counted:
    """(operations, bytes) of the operator at row ``operator``, or of the next one around it that has
    shapes."""
    host, names = rank.host, rank.device.names
    for _ in range(DEPTH):
        operator = operator_around(rank, parent, operator)
        if operator < 0:
            break
        row = int(rank.link.host_row[operator])
        name = names[rank.device.name[operator]]
        # Only some formulas look at values, and ids of tensors in them make every call a new one.
        values = host.inputs[0][row] if rule_of(name) in WITH_VALUES else b"[]"
        texts = (column[row] for column in (*host.inputs[1:], *host.outputs[1:]))
        work = operator_work(name, values, *texts)
        if work is not None:
            return work
        operator = int(parent[operator])
    return None


@functools.lru_cache(maxsize=65536)
def operator_work(
    name: str, values: bytes, shapes: bytes, types: bytes, out_shapes: bytes, out_types: bytes
) -> Counted:
    """(operations, bytes) of one call of an operator, None where its shapes are not recorded.

    ``values``, ``shapes``, ``types``: JSON texts of the arguments; ``out_shapes`` and ``out_types`` may be
    empty lists.
    """
    try:
        arguments, dims, kinds, out_dims, out_kinds = (
            msgspec.json.decode(text) for text in (values, shapes, types, out_shapes, out_types)
        )
    except (msgspec.DecodeError, RecursionError):
        return None
    if not all(isinstance(part, list) for part in (arguments, dims, kinds, out_dims, out_kinds)):
        return None
    tensors = _tensors(dims, kinds)
    if not tensors:
        return None
    outputs = _tensors(out_dims, out_kinds)
    formula = rule_of(name)
    by_position = [tuple(d) if _is_shape(d) else None for d in dims]
    counted = formula(by_position, [_scalar(value) for value in arguments]) if formula else None
    each = tensors[0][1]
    if counted is None:
        largest = max(math.prod(shape) for shape, _ in (*tensors, *outputs))
        operations, made = largest, largest
    else:
        operations, made = counted
    read = sum(math.prod(shape) * size for shape, size in tensors)
    if formula in SELECTIONS and counted is not None:
        read = made * each
    written = sum(math.prod(shape) * size for shape, size in outputs) or made * each
    bound = (1 << 62) - 1
    return min(operations, bound), min(read + written, bound)


@functools.lru_cache(maxsize=4096)
def rule_of(name: str) -> Rule | None:
    """The formula for an operator; None means one operation per element."""
    short = name.rpartition("::")[2].rstrip("_")
    return next((rule for pattern, rule in FORMULAS if re.fullmatch(pattern, short)), None)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in value)


def _tensors(dims: Any, kinds: Any) -> list[tuple[Shape, int]]:
    found = []
    for shape, kind in zip(dims, kinds, strict=False):
        match = re.fullmatch(r"Tensor\((.*)\)", str(kind))
        size = item_bytes(match[1]) if match else 0
        if size and _is_shape(shape):
            found.append((tuple(shape), size))
    return found


def _scalar(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value.lower())
    except msgspec.DecodeError:
        return value


def _product(a: Shape | None, b: Shape | None) -> Counted:
    """Operations and elements of the result of a (batched) matrix product."""
    if not a or not b or len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        return None
    batch = math.prod(a[:-2]) or 1
    made = batch * a[-2] * b[-1]
    return 2 * made * a[-1], made


def _at(shapes: list[Shape | None], place: int) -> Shape | None:
    return shapes[place] if place < len(shapes) else None


def _mm(shapes: list[Shape | None], values: list[Any]) -> Counted:
    return _product(_at(shapes, 0), _at(shapes, 1))


def _addmm(shapes: list[Shape | None], values: list[Any]) -> Counted:
    return _product(_at(shapes, 1), _at(shapes, 2))


def _linear(shapes: list[Shape | None], values: list[Any]) -> Counted:
    x, weight = _at(shapes, 0), _at(shapes, 1)
    if not x or not weight or len(weight) != 2 or x[-1] != weight[1]:
        return None
    made = math.prod(x[:-1]) * weight[0]
    return 2 * made * weight[1], made


def _convolution(shapes: list[Shape | None], values: list[Any], padding_first: bool = False) -> Counted:
    x, weight = _at(shapes, 0), _at(shapes, 1)
    if not x or not weight or len(x) != len(weight) or len(x) < 3:
        return None
    space = len(x) - 2
    lists = [v for v in values if isinstance(v, list) and len(v) in (1, space) and set(map(type, v)) == {int}]
    if len(lists) < 2:
        return None
    wide = [value * space if len(value) == 1 else value for value in lists[:3]]
    stride, padding = (wide[1], wide[0]) if padding_first else (wide[0], wide[1])
    dilation = wide[2] if len(wide) > 2 else [1] * space
    out = [
        (x[2 + k] + 2 * padding[k] - dilation[k] * (weight[2 + k] - 1) - 1) // max(stride[k], 1) + 1
        for k in range(space)
    ]
    if min(out) <= 0:
        return None
    made = x[0] * weight[0] * math.prod(out)
    return 2 * made * weight[1] * math.prod(weight[2:]), made


def _library_convolution(shapes: list[Shape | None], values: list[Any]) -> Counted:
    """Operators of cuDNN, MIOpen and oneDNN have the padding before the stride."""
    return _convolution(shapes, values, padding_first=True)


def _convolution_backward(shapes: list[Shape | None], values: list[Any]) -> Counted:
    grad, x, weight = _at(shapes, 0), _at(shapes, 1), _at(shapes, 2)
    if not grad or not x or not weight or len(grad) < 3:
        return None
    once = 2 * math.prod(grad) * weight[1] * math.prod(weight[2:])
    masks = [v for v in values if isinstance(v, list) and v and all(isinstance(flag, bool) for flag in v)]
    wanted = sum(masks[-1][:2]) if masks else 2
    return once * max(wanted, 1), math.prod(x) + math.prod(weight)


def _attention(shapes: list[Shape | None], values: list[Any]) -> Counted:
    q, k, v = _at(shapes, 0), _at(shapes, 1), _at(shapes, 2)
    return _attended(q, k, v, 4)


def _attention_backward(shapes: list[Shape | None], values: list[Any]) -> Counted:
    q, k, v = _at(shapes, 1), _at(shapes, 2), _at(shapes, 3)
    return _attended(q, k, v, 10)


def _attended(q: Shape | None, k: Shape | None, v: Shape | None, factor: int) -> Counted:
    """4-dimensional tensors, (batch, heads, tokens, size) or (batch, tokens, heads, size)."""
    if not q or not k or not v or len(q) != 4 or len(k) != 4:
        return None
    size = q[3]
    tokens = math.prod(q) // max(size, 1)  # batch · heads · queries
    heads_first = q[0] == k[0] and (q[1] == k[1] or q[1] % max(k[1], 1) == 0) and k[2] >= k[1]
    keys = k[2] if heads_first else k[1]
    return factor * tokens * keys * size, math.prod(q)


def _embedding(shapes: list[Shape | None], values: list[Any]) -> Counted:
    """(table, index): the selected rows, not the whole table."""
    table, index = _at(shapes, 0), _at(shapes, 1)
    if not table or index is None:
        return None
    made = math.prod(index) * table[-1]
    return made, made


def _index_select(shapes: list[Shape | None], values: list[Any]) -> Counted:
    """(table, dimension, index): as many slices of that dimension as the index has elements."""
    table, index = _at(shapes, 0), _at(shapes, 2)
    dim = values[1] if len(values) > 1 else None
    if not table or index is None or type(dim) is not int or not -len(table) <= dim < len(table):
        return None
    made = math.prod(index) * math.prod(table) // max(table[dim], 1)
    return made, made


def _gather(shapes: list[Shape | None], values: list[Any]) -> Counted:
    """(table, dimension, index): one element for each of the index."""
    index = _at(shapes, 2)
    return None if index is None else (math.prod(index), math.prod(index))


FORMULAS: tuple[tuple[str, Rule], ...] = (
    (r"mm|bmm|matmul|_scaled_mm|dot|mv", _mm),
    (r"addmm|baddbmm|addbmm|_addmm_activation|addmv", _addmm),
    (r"linear", _linear),
    (r"convolution_backward", _convolution_backward),
    (r"conv[123]d|_?convolution|convolution_overrideable", _convolution),
    (r"(cudnn|miopen|mkldnn)_convolution(_relu|_add_relu)?", _library_convolution),
    (r"embedding", _embedding),
    (r"index_select", _index_select),
    (r"gather", _gather),
    (r"_(scaled_dot_product|flash|efficient|cudnn)_?\w*attention\w*backward", _attention_backward),
    (r"_?(scaled_dot_product|flash|efficient|cudnn)_?\w*attention\w*", _attention),
)
SELECTIONS = (_embedding, _index_select, _gather)
"""What they read is as large as what they make."""
WITH_VALUES = (_index_select, _convolution, _library_convolution, _convolution_backward)
