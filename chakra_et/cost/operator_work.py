"""Floating-point operations and bytes of operators, from their arguments' shapes and types.

ASTRA-sim's roofline mode needs ``num_ops`` and ``tensor_size`` on compute nodes. Formulas, with a
multiply-add counted as two operations: matrix products 2·m·n·k; convolutions 2·output·(input channels per
group)·kernel; their backward twice that, once per gradient; attention 4·batch·heads·queries·keys·head size,
its backward 2.5 times that (Dao, FlashAttention-2, 2023, section 4.1); all other operators one operation per
element of their largest tensor or list of tensors. Bytes are those of the tensors that are read and written.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

from chakra_et.et.columns import item_bytes

Shape = tuple[int, ...]
Counted = tuple[int, int] | None
"""Operations, and elements of the result; None if the shapes do not match the formula."""
Rule = Callable[[list[Shape | None], list[Any]], Counted]
OVERWRITES = re.compile(r"aten::(_foreach_)?(copy|fill|zero|normal|uniform|random)_$")
"""Operators that don't read their first tensor."""
DEPTH = 8
"""How many operators around a launch are searched for a formula."""


@functools.lru_cache(maxsize=65536)
def operator_work(
    name: str, values: bytes, shapes: bytes, types: bytes, out_shapes: bytes, out_types: bytes,
    causal: bool = False,
) -> Counted:  # fmt: skip
    """(operations, bytes) of one call of an operator, None where its shapes are not recorded.

    ``values``, ``shapes``, ``types``: JSON texts of the arguments; ``out_shapes`` and ``out_types`` may be
    empty lists. ``causal``: whether a kernel's name says that an attention is causal, see ``CAUSAL_KERNEL``.
    """
    try:
        arguments, dims, kinds, out_dims, out_kinds = (
            msgspec.json.decode(text) for text in (values, shapes, types, out_shapes, out_types)
        )
    except (msgspec.DecodeError, RecursionError):
        return None
    if not all(isinstance(part, list) for part in (arguments, dims, kinds, out_dims, out_kinds)):
        return None
    tensors, outputs = _tensors(dims, kinds), _tensors(out_dims, out_kinds)
    if not tensors:
        return None
    formula = rule_of(name)
    by_position = [tuple(d) if _is_shape(d) else None for d in dims]
    counted = formula(by_position, [_scalar(value) for value in arguments]) if formula else None
    each = tensors[0][0][1]
    if counted is None and formula in SELECTIONS:
        return None
    if counted is None:
        operations = made = max(sum(math.prod(shape) for shape, _ in of) for of in (*tensors, *outputs))
    else:
        operations, made = counted
        operations = round(operations * _seen(name, by_position, arguments, causal))
    operands = tensors[1:] if OVERWRITES.match(name) else tensors
    read, written = (
        sum(math.prod(shape) * size for of in each_of for shape, size in of)
        for each_of in (operands, outputs)
    )
    written = written or made * each
    if formula in SELECTIONS:
        read = written = made * each
    bound = (1 << 62) - 1
    return min(operations, bound), min(read + written, bound)


@functools.lru_cache(maxsize=4096)
def rule_of(name: str) -> Rule | None:
    """The formula for an operator; None means one operation per element."""
    short = name.rpartition("::")[2].rstrip("_")
    return next((rule for pattern, rule in FORMULAS if re.fullmatch(pattern, short)), None)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in value)


def _tensors(dims: list[Any], kinds: list[Any]) -> list[list[tuple[Shape, int]]]:
    """As ``shaped_tensors``, of each argument that is a tensor or a list of tensors."""
    found = []
    for shape, kind in zip(dims, map(str, kinds), strict=False):
        in_list = isinstance(shape, list) and kind.startswith("GenericList[")
        of = (shape, re.findall(r"Tensor\([^)]*\)", kind)) if in_list else ([shape], [kind])
        found.append(shaped_tensors(*of))
    return [each for each in found if each]


def shaped_tensors(dims: list[Any], kinds: list[Any]) -> list[tuple[Shape, int]]:
    """Shape and bytes per element of each tensor among an operator's arguments, by their shapes and types."""
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


def _at(shapes: list[Shape | None], place: int) -> Shape | None:
    return shapes[place] if place < len(shapes) else None


def _product(shapes: list[Shape | None], values: list[Any], first: int = 0) -> Counted:
    """A (batched) matrix product of the tensors ``first`` and the next."""
    a, b = _at(shapes, first), _at(shapes, first + 1)
    if not a or not b or len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        return None
    batch = math.prod(a[:-2]) or 1
    made = batch * a[-2] * b[-1]
    return 2 * made * a[-1], made


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


_library_convolution = functools.partial(_convolution, padding_first=True)
"""Operators of cuDNN, MIOpen and oneDNN have the padding before the stride."""


def _convolution_backward(shapes: list[Shape | None], values: list[Any]) -> Counted:
    grad, x, weight = _at(shapes, 0), _at(shapes, 1), _at(shapes, 2)
    if not grad or not x or not weight or len(grad) < 3:
        return None
    once = 2 * math.prod(grad) * weight[1] * math.prod(weight[2:])
    masks = [v for v in values if isinstance(v, list) and v and all(isinstance(flag, bool) for flag in v)]
    wanted = sum(masks[-1][:2]) if masks else 2
    return once * max(wanted, 1), math.prod(x) + math.prod(weight)


def _attention(shapes: list[Shape | None], values: list[Any], first: int = 0, factor: int = 4) -> Counted:
    """4-dimensional tensors, (batch, heads, tokens, size) or (batch, tokens, heads, size)."""
    q, k, v = (_at(shapes, first + at) for at in range(3))
    if not q or not k or not v or len(q) != 4 or len(k) != 4:
        return None
    size = q[3]
    tokens = math.prod(q) // max(size, 1)  # batch · heads · queries
    heads_first = q[0] == k[0] and (q[1] == k[1] or q[1] % max(k[1], 1) == 0) and k[2] >= k[1]
    keys = k[2] if heads_first else k[1]
    return factor * tokens * keys * size, math.prod(q)


_attention_backward = functools.partial(_attention, first=1, factor=10)


def _seen(name: str, shapes: list[Shape | None], values: list[Any], causal: bool) -> float:
    """The part (0 to 1) of the keys that the queries of an attention see: about half, if it is causal."""
    at = CAUSAL.get(name, len(values))
    causal &= rule_of(name) in (_attention, _attention_backward)
    if not causal and (at >= len(values) or str(values[at]).lower() != "true"):
        return 1.0
    first = int("backward" in name)
    tokens = 2 if "scaled_dot_product" in name else 1
    query, key = _at(shapes, first), _at(shapes, first + 1)
    if not query or not key or len(query) != 4 or len(key) != 4:
        return 1.0
    return max(1 - (query[tokens] - 1) / 2 / max(key[tokens], 1), 0.5)


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


def _elements(shapes: list[Shape | None], values: list[Any], places: tuple[int, ...]) -> Counted:
    """As many as the tensors at these places have; None for a single one, which may stand for many."""
    made = sum(math.prod(_at(shapes, place) or ()) for place in places)
    return (made, made) if made > len(places) else None


_by_index, _by_source, _into_cache = (
    functools.partial(_elements, places=places) for places in ((2,), (3,), (0, 1))
)
"""(table, dimension, index, ...), of index_put (table, indices, values); (table, dimension, index, source);
(keys, values, cache of keys, cache of values, index), as vLLM and SGLang have it."""


FORMULAS: tuple[tuple[str, Rule], ...] = (
    (r"mm|bmm|matmul|_scaled_mm|dot|mv", _product),
    (r"addmm|baddbmm|addbmm|_addmm_activation|addmv", functools.partial(_product, first=1)),
    (r"linear", _linear),
    (r"convolution_backward", _convolution_backward),
    (r"conv[123]d|_?convolution|convolution_overrideable", _convolution),
    (r"(cudnn|miopen|mkldnn)_convolution(_relu|_add_relu)?", _library_convolution),
    (r"embedding", _embedding),
    (r"index_select", _index_select),
    (r"gather|scatter(_add|_reduce)?|_?index_put(_impl)?", _by_index),
    (r"index_(copy|add)", _by_source),
    (r"(store|(reshape|concat)_and)_cache\w*", _into_cache),
    (r"_(scaled_dot_product|flash|efficient|cudnn)_?\w*att(ention|n)\w*backward", _attention_backward),
    (r"_?(scaled_dot_product|flash|efficient|cudnn)_?\w*att(ention|n)\w*", _attention),
)
SELECTIONS = (_embedding, _index_select, _by_index, _by_source, _into_cache)
"""They read and write a part of a table, as large as their formula says."""
WITH_VALUES = (
    _index_select, _convolution, _library_convolution, _convolution_backward, _attention,
    _attention_backward,
)  # fmt: skip
CAUSAL = {
    "aten::scaled_dot_product_attention": 5,
    "aten::_scaled_dot_product_flash_attention": 4,
    "aten::_scaled_dot_product_flash_attention_backward": 11,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 4,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "aten::_scaled_dot_product_efficient_attention": 6,
    "aten::_scaled_dot_product_efficient_attention_backward": 11,
    "aten::_scaled_dot_product_cudnn_attention": 6,
    "aten::_scaled_dot_product_cudnn_attention_backward": 14,
    "aten::_flash_attention_forward": 8,
    "aten::_flash_attention_backward": 11,
    "flash_attn::_flash_attn_forward": 5,
    "flash_attn::_flash_attn_backward": 11,
}
"""Where the argument is_causal stands."""
CAUSAL_KERNEL = re.compile(
    r"flash_(fwd|bwd_dq_dk_dv\w*)_kernel<.*>, (true|false), true\b|flash_fwd_splitkv_kernel<.*>, true\b"
    r"|(?<!non)(?<!no)(?<!non_)(?<!no_)causal",
    re.IGNORECASE,
)
"""Names of kernels of causal attention: by FlashAttention-2's template arguments (its launch templates:
traits, Is_dropout, Is_causal; or traits, Is_causal), or by the word."""
