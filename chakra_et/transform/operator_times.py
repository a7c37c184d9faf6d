"""How the times of operators and kernels follow from their work, where the shapes of tensors change."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from chakra_et.cost.operator_work import DEPTH, WITH_VALUES, operator_work, rule_of
from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.edges import rows_of

_IDLE_KERNEL_NS = 2_000.0
VIEWS = re.compile(
    r"aten::(_unsafe_view|view|reshape|t|transpose|permute|expand|as_strided|slice|select|narrow|split|chunk|"
    r"unbind|unsqueeze|squeeze|flatten|detach_?|alias|resolve_conj|resolve_neg|empty\w*|resize_|to)"
)
"""Operators that return a view, or memory as it is: their time doesn't depend on sizes."""


def idle_ns(own_ns: np.ndarray, on_cpu: np.ndarray, operations: np.ndarray) -> float:
    """What an operator of the CPU without work takes: the median."""
    idle = on_cpu & (operations == 0)
    return float(np.median(own_ns[idle])) if idle.any() else 0.0


def resized_times(taken: np.ndarray, idle: float, on_cpu: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """Times in ns after the operations of operators and kernels have changed by ``ratio``: what one takes
    without work stays."""
    floor = np.where(on_cpu, idle, _IDLE_KERNEL_NS)
    changed: np.ndarray = np.where(taken > floor, floor + (taken - floor) * ratio, taken)
    return changed


def work_ratios(
    trace: ExecutionTrace, resized: Callable[[bytes], bytes]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each row: the operations of its operator, their ratio of new to old, whether it is an operator with
    shapes that does its work itself, and the ratio of bytes; float64.

    resized: the JSON text of an operator's shapes → that of the new ones.
    """
    operations, ratio, moved = np.zeros(len(trace)), np.ones(len(trace)), np.ones(len(trace))
    parent = rows_of(trace.ids, trace.column("parent", -1).clip(0).astype(np.uint64))
    leaf, on_cpu = np.zeros(len(trace)), trace.column("is_cpu_op") != 0
    if trace.inputs is None:
        return operations, ratio, leaf, moved
    tensors = trace.inputs
    for at, row in enumerate(tensors.rows.tolist()):
        name, shapes, types = trace.names[row], tensors.shapes[at], tensors.types[at]
        if VIEWS.fullmatch(name):
            continue
        values = tensors.values[at] if rule_of(name) in WITH_VALUES else b"[]"
        before = operator_work(name, values, shapes, types, b"[]", b"[]")
        if before is None or not before[0]:
            continue
        operations[row] = before[0]
        changed = resized(shapes)
        if changed != shapes:
            after = operator_work(name, values, changed, types, b"[]", b"[]")
            ratio[row] = after[0] / before[0] if after else 1.0
            moved[row] = after[1] / before[1] if after and before[1] else 1.0
    # An operator does its work itself where none that it calls has a good part of its operations.
    called = np.zeros(len(trace))
    below = np.flatnonzero(on_cpu & (parent >= 0))
    np.maximum.at(called, parent[below], operations[below])
    leaf[tensors.rows] = (called <= operations / 2)[tensors.rows]
    # Of an operator that was interrupted by others, the first node has the shapes.
    first = _first_nodes(trace, tensors.rows)
    rest = np.flatnonzero(on_cpu & (first >= 0))
    for column in (operations, ratio, leaf, moved):
        column[rest] = column[first[rest]]
    around = np.where(on_cpu, -1, parent)
    for _ in range(DEPTH):  # device work has its launcher's ratio
        known = (around >= 0) & (operations[around] > 0)
        operations, ratio, moved = (
            np.where(known, column[around], column) for column in (operations, ratio, moved)
        )
        around = np.where((around >= 0) & ~known, parent[around], -1)
    return operations, ratio, leaf, moved


def _first_nodes(trace: ExecutionTrace, rows: np.ndarray) -> np.ndarray:
    """For each row, that of ``rows`` which is of the same operator (attribute rf_id), -1 for none; int64."""
    record = trace.column("rf_id", -1)
    known = rows[record[rows] > 0]
    found = np.full(len(trace), -1)
    if len(known):
        known = known[np.argsort(record[known], kind="stable")]
        at = np.minimum(np.searchsorted(record[known], record), len(known) - 1)
        found = np.where(record[known][at] == record, known[at], -1)
    return found
