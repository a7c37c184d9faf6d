"""The optimizer of one rank on its pieces of the parameters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.node_attributes import in_phase
from chakra_et.job.operators import Shape, with_shapes
from chakra_et.transform.operator_times import idle_ns, resized_times, work_ratios
from chakra_et.transform.tensors import list_ratios


@dataclass(frozen=True)
class Sharded:
    """``nodes`` of the optimizer take ``after`` µs in place of ``before``."""

    trace: ExecutionTrace
    nodes: int
    before: float
    after: float


def with_sharded_optimizer(
    trace: ExecutionTrace, parameters: Collection[Shape], place: int, ranks: int
) -> Sharded:
    """The trace whose optimizer works on the piece of rank ``place`` of each tensor with the shape of one of
    the ``parameters``. Times follow the operations, but for what an operator without work takes."""

    def piece(shape: Shape) -> Shape:
        if shape not in parameters:
            return shape
        rows = -(-shape[0] // ranks)
        return (min(max(shape[0] - place * rows, 0), rows), *shape[1:])

    def text(shapes: bytes) -> bytes:
        return with_shapes(shapes, piece)

    operations, ratio, leaf, _ = work_ratios(trace, text)
    list_ratios(trace, text, ratio, leaf)
    on_cpu = (trace.column("is_cpu_op") != 0) & (leaf > 0)
    changes = in_phase(trace, b"optimizer") & on_cpu & (ratio != 1)
    taken = trace.duration_micros.astype(float) * 1000
    changed = resized_times(taken, idle_ns(taken, on_cpu, operations), on_cpu, ratio)
    micros = np.where(changes, np.rint(changed / 1000), trace.duration_micros)
    inputs = trace.inputs
    if inputs is not None:
        pairs = zip(inputs.rows.tolist(), inputs.shapes, strict=True)
        inputs = replace(inputs, shapes=[text(shapes) if changes[row] else shapes for row, shapes in pairs])
    made = replace(trace, duration_micros=micros.astype(np.uint64), inputs=inputs)
    before, after = (float(each[changes].sum()) for each in (trace.duration_micros, micros))
    return Sharded(made, int(changes.sum()), before, after)
