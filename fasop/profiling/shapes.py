"""What the shapes of a trace's operators tell of the model: its table of words, products and attention."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from chakra_et.et.columns import ExecutionTrace, TensorInfo
from fasop.errors import PlanError
from fasop.profiling.passes import Steps, forward_passes

# Where the second factor is among an operator's tensors; those of mm.out end with its output.
PRODUCTS = {"aten::mm": 1, "aten::addmm": 2, "aten::_addmm_activation": 2}
BATCHED = {"aten::bmm": 1, "aten::baddbmm": 2, "aten::_grouped_mm": 1}

Size = tuple[int, int]


class Table(NamedTuple):
    """The embedding of words on this rank, and the tokens looked up in it."""

    rows: int
    hidden: int
    batch: int
    seq: int


class Attention(NamedTuple):
    """Heads of queries and of keys on this rank, and the width of one."""

    heads: int
    kv_heads: int
    width: int


class Shapes(NamedTuple):
    """Of the forward passes of a trace.

    products: for each forward pass, how often it multiplies by a matrix of this size (inputs × outputs);
    batched: the same for products with several matrices; fused, unfused: what attention operators, and
    products of the size of attention, tell; routed: (experts, of which are taken).
    """

    table: Table
    products: list[Counter[Size]]
    batched: list[Counter[Size]]
    fused: set[Attention]
    unfused: set[Attention]
    routed: set[Size]


def read_shapes(trace: ExecutionTrace, steps: Steps, path: Path, own: str) -> Shapes:
    """Raises ``PlanError`` for a trace without an embedding, or whose passes can't be told apart.

    own: how a refusal begins.
    """
    assert trace.inputs is not None
    inputs = {row: shapes for row, shapes in _tensors(trace.inputs).items() if steps.forward[row]}
    tables = {
        row: Table(*shapes[0], *shapes[1])
        for row, shapes in inputs.items()
        if steps.names[row] == "aten::embedding" and [len(shape) for shape in shapes[:2]] == [2, 2]
    }
    if not tables:
        raise PlanError(
            f"{own}: no embedding in it: this rank holds a part of a pipeline; give traces of a run with one "
            "pipeline stage."
        )
    table = max(tables.values())
    lookups = np.array([row for row, found in tables.items() if found[:2] == table[:2]])
    number = forward_passes(steps, lookups, path)
    outputs = _tensors(trace.outputs) if trace.outputs is not None else {}
    products: list[Counter[Size]] = [Counter() for _ in lookups]
    batched: list[Counter[Size]] = [Counter() for _ in lookups]
    found = Shapes(table, products, batched, set(), set(), set())
    for row, shapes in inputs.items():
        name, at = str(steps.names[row]), int(number[row])
        if at < 0:
            continue
        if name in PRODUCTS and len(factor := _at(shapes, PRODUCTS[name])) == 2:
            found.products[at][factor[0], factor[1]] += 1
        elif name in BATCHED and len(factor := _at(shapes, BATCHED[name])) == 3:
            found.batched[at][factor[1], factor[2]] += 1
            found.unfused.update(_unfused(_at(shapes, BATCHED[name] - 1), factor, table))
        elif "attention" in name or "attn" in name:
            found.fused.update(_fused(shapes, table))
        elif name == "aten::topk" and shapes[0] and row in outputs and outputs[row][0]:
            found.routed.add((shapes[0][-1], outputs[row][0][-1]))
    return found


def _tensors(info: TensorInfo) -> dict[int, list[list[int]]]:
    """The shapes of each node's tensors; what is no tensor, or a list of tensors, is left out."""
    known: dict[bytes, list[list[int]]] = {}
    found = {}
    for row, text in zip(info.rows.tolist(), info.shapes, strict=True):
        if text not in known:
            known[text] = _parsed(text)
        if known[text]:
            found[row] = known[text]
    return found


def _parsed(text: bytes) -> list[list[int]]:
    try:
        values: Any = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return []
    if not isinstance(values, list):
        return []
    return [
        shape for shape in values if isinstance(shape, list) and all(isinstance(size, int) for size in shape)
    ]


def _fused(shapes: list[list[int]], table: Table) -> list[Attention]:
    """From queries and keys in any order of batch, position and head, the head's width last."""
    if len(shapes) < 3 or not all(len(shape) in (3, 4) for shape in shapes[:3]):
        return []
    query, key = shapes[:2]
    if len(query) == 3 and query[:2] == [table.batch, table.seq]:
        return []  # heads side by side in one row per token: their number isn't shown
    heads, rest = divmod(math.prod(query[:-1]), table.batch * table.seq)
    kv_heads, kv_rest = divmod(math.prod(key[:-1]), table.batch * table.seq)
    return [] if rest or kv_rest or not heads else [Attention(heads, kv_heads, query[-1])]


def _unfused(left: list[int], right: list[int], table: Table) -> list[Attention]:
    """From queries × keys (seq × width, width × seq) or weights × values (seq × seq, seq × width)."""
    if len(left) != 3:
        return []
    sizes = [*left[1:], right[2]]
    heads, rest = divmod(left[0], table.batch)
    if rest or sizes.count(table.seq) < 2:
        return []
    sizes.remove(table.seq)
    sizes.remove(table.seq)
    # A width of 1 is that of rotary angles: positions × frequencies.
    return [Attention(heads, heads, sizes[0])] if sizes[0] > 1 else []


def _at(shapes: list[list[int]], place: int) -> list[int]:
    return shapes[place] if place < len(shapes) else []
