"""Whether a trace is of the model that it is taken for: sizes read from the shapes of its operators."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chakra_et.et.columns import ExecutionTrace
from fasop.errors import PlanError
from fasop.inputs.models import Model

MATRIX = re.compile(rb"\[(\d+),(\d+)\]")
TOKENS = re.compile(rb"\[\[(\d+),(\d+)\],\[(\d+),(\d+)\]")
PADDING = 1024  # rows that a vocabulary may be padded by


def vocabulary_rows(
    model: Model, trace: ExecutionTrace, path: Path, tp: int, mbs: int, is_backward: NDArray[np.bool_]
) -> int:
    """Rows of the token embedding on this rank; is_backward: of each node.

    Raises ``PlanError`` where a size of the trace is not the model's, or a part of the model is missing.
    """
    assert trace.inputs is not None
    own = f"{path}: taken as {model.name}"
    tables, products = [], []
    for row, shapes in zip(trace.inputs.rows.tolist(), trace.inputs.shapes, strict=True):
        name = trace.names[row]
        if is_backward[row]:
            continue
        if name == "aten::embedding" and (match := TOKENS.match(shapes)):
            tables.append(tuple(map(int, match.groups())))
        elif name in ("aten::addmm", "aten::mm") and (matrices := MATRIX.findall(shapes)):
            products.append((int(matrices[-1][0]), int(matrices[-1][1])))
    if not tables:
        raise PlanError(
            f"{own}: no embedding in it: this rank holds a part of a pipeline; give traces of a run with one "
            "pipeline stage."
        )
    rows, hidden, batch, seq = max(tables)
    for what, found, expected in (("hidden", hidden, model.hidden), ("seq", seq, model.seq)):
        if found != expected:
            raise PlanError(
                f"{own}: {what} is {found} in it, {expected} in the model: give the model it is of."
            )
    if not 0 <= rows * tp - model.vocab <= PADDING * tp:
        raise PlanError(
            f"{own}: its embedding has {rows} rows on each of {tp} tensor-parallel ranks, the model's "
            f"vocabulary {model.vocab}: give the model it is of, and its --tp."
        )
    if batch != mbs:
        raise PlanError(f"{own}: its micro-batches have {batch} sequences: give --mbs {batch}.")
    micro_batches = sum(table[:2] == (rows, hidden) for table in tables)
    _check_layers(own, model, products, tp, micro_batches)
    if not any(rows in product for product in products):
        raise PlanError(
            f"{own}: no head in it (no product with its {rows} words): this rank holds a part of a pipeline; "
            "give traces of a run with one pipeline stage."
        )
    return rows


def _check_layers(
    own: str, model: Model, products: list[tuple[int, int]], tp: int, micro_batches: int
) -> None:
    """Each layer multiplies with (hidden, feed-forward) once per micro-batch, or twice where it is gated."""
    width = model.ffn_width // tp
    count = products.count((model.hidden, width))
    if model.gated:
        count = products.count((model.hidden, 2 * width)) or count // 2
    layers = count / micro_batches
    if layers != model.layers:
        raise PlanError(
            f"{own}: {layers:g} layers with a feed-forward part of {width} in it, {model.layers} in the "
            "model: give the model it is of; a rank with fewer layers holds a part of a pipeline, and "
            "compiled or fused layers can't be told apart."
        )
