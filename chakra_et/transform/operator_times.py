"""How the times of operators and kernels follow from their work, where the shapes of tensors change."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from chakra_et.arrays import nearest
from chakra_et.cost.operator_work import WITH_VALUES, operator_work, rule_of
from chakra_et.et.columns import ExecutionTrace, NodeType, TensorInfo
from chakra_et.et.node_attributes import has, in_phase, parents, set_integers
from chakra_et.job.operators import first_nodes, shapes_in
from chakra_et.simulate.time_by_kind import KINDS, node_kinds
from chakra_et.transform.gpu import resized_kernels

_IDLE_KERNEL_MICROS = 2.0
VIEWS = re.compile(
    r"aten::(_unsafe_view|view|reshape|t|transpose|permute|expand|as_strided|slice|select|narrow|split|chunk|"
    r"unbind|unsqueeze|squeeze|flatten|detach_?|alias|resolve_conj|resolve_neg|empty\w*|resize_|to)"
)
"""Operators that return a view, or memory as it is: their time doesn't depend on sizes."""
_LISTED = re.compile(r"aten::_(foreach|fused)_")
_ELEMENTWISE = re.compile(r"aten::(add_?|sub_?|mul_?|div_?|copy_|lerp_?|addcmul_?|addcdiv_?)")
_DEVICE = re.compile(rb'"\w+:\d+"\]')
"""Ends the description of a tensor that a device holds."""
_LARGE = 1 << 16
"""Bytes from which a call's own cost no longer matters."""


def work_ratios(
    trace: ExecutionTrace, resized: Callable[[bytes], bytes]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each row: the operations of its operator, their ratio of new to old, whether it is an operator with
    shapes whose work the CPU does in it, and the ratio of bytes; float64. An operator on lists of tensors
    does some itself, also where it calls one for each.

    resized: the JSON text of an operator's shapes → that of the new ones.
    """
    operations, ratio, moved = np.zeros(len(trace)), np.ones(len(trace)), np.ones(len(trace))
    leaf, on_cpu, parent = np.zeros(len(trace)), trace.column("is_cpu_op") != 0, parents(trace)
    if trace.inputs is None:
        return operations, ratio, leaf, moved
    tensors, listed = trace.inputs, np.zeros(len(trace), bool)
    by_cpu = on_cpu.copy()
    for at, row in enumerate(tensors.rows.tolist()):
        name, shapes, types = trace.names[row], tensors.shapes[at], tensors.types[at]
        by_cpu[row] &= not _DEVICE.search(tensors.values[at])
        if VIEWS.fullmatch(name):
            continue
        listed[row] = bool(_LISTED.search(name))
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
    # What a device does the host only asks for, in as long, whatever the sizes are.
    launcher = nearest(on_cpu & (operations > 0), parent)
    device = np.flatnonzero(~on_cpu & (launcher >= 0))
    by_cpu[launcher[device[trace.types[device] < NodeType.COMM_SEND]]] = False
    # An operator does its work itself where none that it calls has a good part of its operations.
    called = np.zeros(len(trace))
    below = np.flatnonzero(on_cpu & (parent >= 0))
    np.maximum.at(called, parent[below], operations[below])
    leaf[tensors.rows] = (by_cpu & (listed | (called <= operations / 2)))[tensors.rows]
    # Of an operator that was interrupted by others, the first node has the shapes.
    first = first_nodes(trace, tensors.rows)
    rest = np.flatnonzero(on_cpu & (first >= 0))
    for column in (operations, ratio, leaf, moved):
        column[rest] = column[first[rest]]
    # Device work has its launcher's ratio.
    for column in (operations, ratio, moved):
        column[device] = column[launcher[device]]
    return operations, ratio, leaf, moved


def resized(
    trace: ExecutionTrace, text: Callable[[bytes], bytes], phase: bytes = b""
) -> tuple[ExecutionTrace, np.ndarray]:
    """The trace with the shapes that ``text`` makes of its own and the times of compute that follow from
    these, and (nodes that take another time, their µs before, after). ``phase``: only what the CPU does in
    it changes."""
    operations, ratio, leaf, moved = work_ratios(trace, text)
    computes, on_device = trace.types < NodeType.COMM_SEND, trace.column("is_cpu_op") == 0
    on_cpu = computes & ~on_device & (leaf > 0)
    changes = (on_cpu | computes & on_device) & (ratio != 1)
    if phase:
        changes &= ~on_device & in_phase(trace, phase)
    recorded, taken = trace, trace.duration_micros.astype(float)
    # What one takes without work stays: on the CPU the median of such operators.
    idle = on_cpu & (operations == 0)
    floor = np.where(on_cpu, float(np.median(taken[idle])) if idle.any() else 0.0, _IDLE_KERNEL_MICROS)
    times = np.where(taken > floor, floor + (taken - floor) * ratio, taken)
    for name, factor in (("num_ops", ratio), ("tensor_size", moved)):
        if name in trace.attributes and not phase:
            values = np.rint(trace.column(name) * factor).astype(np.int64)
            trace = set_integers(trace, name, trace.attributes[name].kind, values, has(trace, name))

    def reshaped(info: TensorInfo | None) -> TensorInfo | None:
        if info is None:
            return None
        kept = np.zeros(len(trace), bool) if not phase else ~changes
        of_row = zip(kept[info.rows].tolist(), info.shapes, strict=True)
        return replace(info, shapes=[shapes if stays else text(shapes) for stays, shapes in of_row])

    outputs = trace.outputs if phase else reshaped(trace.outputs)
    made = replace(trace, inputs=reshaped(trace.inputs), outputs=outputs)
    modelled = resized_kernels(recorded, made)
    times = np.rint(np.where(np.isnan(modelled), times, modelled))
    duration = np.where(changes, times, taken).astype(np.uint64)
    count = np.array([changes.sum(), taken[changes].sum(), duration[changes].sum()], np.int64)
    return replace(made, duration_micros=duration), count


def elements_in(shapes: bytes) -> int:
    """The elements of all tensors in the JSON text of shapes."""
    return sum(int(np.prod(shape)) for shape in shapes_in(shapes))


class Elementwise:
    """How long an elementwise CPU operator takes in a run. ``node_micros``: the median of an operator's node,
    mostly the call itself; ``micros_per_byte``, read or written, of large ones; 0 where there are none."""

    def __init__(self, trace: ExecutionTrace) -> None:
        operator = node_kinds(trace) == KINDS.index("operator")
        self.node_micros = float(np.median(trace.duration_micros[operator])) if operator.any() else 0.0
        taken, moved, tensors = 0.0, 0.0, trace.inputs
        for at, row in enumerate(tensors.rows.tolist() if tensors else ()):
            if tensors and _ELEMENTWISE.fullmatch(name := trace.names[row]):
                work = operator_work(name, b"[]", tensors.shapes[at], tensors.types[at], b"[]", b"[]")
                if work is not None and work[1] >= _LARGE:
                    taken += max(float(trace.duration_micros[row]) - self.node_micros, 0.0)
                    moved += work[1]
        self.micros_per_byte = taken / moved if moved else 0.0

    def micros(self, size: float, nodes: int) -> float:
        """µs of ``nodes`` nodes that read and write ``size`` bytes in all."""
        return nodes * self.node_micros + size * self.micros_per_byte
