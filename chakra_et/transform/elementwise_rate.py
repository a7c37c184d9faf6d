"""How long an elementwise CPU operator takes in a run, by the bytes that it reads and writes."""

from __future__ import annotations

import re

import numpy as np

from chakra_et.cost.operator_work import operator_work
from chakra_et.et.columns import ExecutionTrace
from chakra_et.simulate.time_by_kind import KINDS, node_kinds

_NAMES = re.compile(r"aten::(add_?|sub_?|mul_?|div_?|copy_|lerp_?|addcmul_?|addcdiv_?)")
_LARGE = 1 << 16
"""Bytes from which a call's own cost no longer matters."""


class Elementwise:
    """``node_micros``: the median of an operator's node, mostly the call itself; ``micros_per_byte``: of
    large elementwise operators; None where the trace has none."""

    def __init__(self, trace: ExecutionTrace) -> None:
        operator = node_kinds(trace) == KINDS.index("operator")
        self.node_micros = float(np.median(trace.duration_micros[operator])) if operator.any() else 0.0
        taken, moved = 0.0, 0.0
        inputs = trace.inputs
        for at, row in enumerate([] if inputs is None else inputs.rows.tolist()):
            assert inputs is not None
            if _NAMES.fullmatch(trace.names[row]):
                work = operator_work(
                    trace.names[row], b"[]", inputs.shapes[at], inputs.types[at], b"[]", b"[]"
                )
                if work is not None and work[1] >= _LARGE:
                    taken += max(float(trace.duration_micros[row]) - self.node_micros, 0.0)
                    moved += work[1]
        self.micros_per_byte = taken / moved if moved else None

    def micros(self, size: float, nodes: int) -> float:
        """µs of ``nodes`` nodes that read and write ``size`` bytes in all."""
        return nodes * self.node_micros + size * (self.micros_per_byte or 0.0)
