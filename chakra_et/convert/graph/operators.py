"""What the operators tell of events: the hierarchy (parent, module, phase), and operations and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from chakra_et.arrays import coded, coded_pairs, nearest
from chakra_et.convert.graph.communication_arguments import RECEIVES, SENDS
from chakra_et.convert.graph.link import operators_and_annotations
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.convert.graph.timeline import named
from chakra_et.cost.operator_work import CAUSAL_KERNEL, DEPTH, WITH_VALUES, Counted, operator_work, rule_of
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import CPU_OP, KERNEL, MEMCPY, MEMSET, RUNTIME

OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
BACKWARD = "autograd::engine::evaluate_function"
# Twice the bandwidth (8 TB/s) and the sparse 4-bit rate (20 PFLOP/s) of NVIDIA's B200, its data sheet, 2024.
MOST_BYTES_PER_NS = 16_000
MOST_OPERATIONS_PER_NS = 40_000_000


class Phase(IntEnum):
    """Phase of a training step; its lower-case name is the value of the ``phase`` attribute."""

    UNKNOWN = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3


PHASE_NAMES = [phase.name.lower() for phase in Phase]


@dataclass(eq=False, repr=False)
class Hierarchy:
    """One entry per row of the device trace, int64.

    ``parent``: row of the innermost operator or annotation around it (for device work, around its launch), -1
    at the top. ``module``: index into ``modules``, paths such as ``ResNet_0/Conv2d_3``, -1 for none.
    ``phase``: value of ``Phase``.
    """

    parent: np.ndarray
    module: np.ndarray
    modules: list[str]
    phase: np.ndarray


def find_hierarchy(rank: LinkedRank) -> Hierarchy:
    """The hierarchy of a rank. Modules need Python frames in the trace (``with_stack``)."""
    around = np.where(rank.calls >= 0, rank.calls, rank.timeline.parent)
    for item in rank.communication.items:
        if not item.on_gpu:
            around[item.event] = item.launch
    # Skip runtime calls and other events that are neither operators nor annotations.
    known = nearest(operators_and_annotations(rank.device), rank.timeline.parent)
    parent = np.where(around >= 0, known[around], -1)
    modules, module = _modules(rank.device, parent)
    return Hierarchy(parent, module, modules, _phases(rank.device, parent, module))


def _modules(device: DeviceTrace, parent: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The paths, and the index of the path of each row."""
    frames = device.modules
    paths: dict[str, int] = {}
    module = np.full(len(device), -1, dtype=np.int64)
    if not len(frames):
        return [], module
    of_frame = np.zeros(len(frames), dtype=np.int64)
    outer = np.full(len(frames), -1, dtype=np.int64)
    stacks: dict[int, list[tuple[int, str, int]]] = {}
    columns = (column.tolist() for column in (frames.thread, frames.start, frames.end, frames.name))
    for row, (thread, start, end, name) in enumerate(zip(*columns, strict=True)):
        stack = stacks.setdefault(thread, [])
        while stack and stack[-1][0] <= start:
            stack.pop()
        path = frames.names[name]
        if stack:
            path, outer[row] = f"{stack[-1][1]}/{path}", stack[-1][2]
        stack.append((end, path, row))
        of_frame[row] = paths.setdefault(path, len(paths))
    for thread in stacks:
        own = np.flatnonzero(frames.thread == thread)
        rows = np.flatnonzero((device.thread == thread) & (device.category < RUNTIME))
        # The innermost frame around the start of each event.
        at = np.searchsorted(frames.start[own], device.start[rows], side="right") - 1
        found = np.where(at >= 0, own[at], -1)
        while (late := (found >= 0) & (frames.end[found] <= device.start[rows])).any():
            found = np.where(late, outer[found], found)
        module[rows] = np.where(found >= 0, of_frame[found], -1)
    # A backward operator belongs to the module of its forward operator.
    forward = np.flatnonzero((device.sequence >= 0) & (device.forward_thread <= 0) & (module >= 0))
    of_sequence = dict(zip(device.sequence[forward].tolist(), module[forward].tolist(), strict=True))
    backward = np.flatnonzero((device.sequence >= 0) & (device.forward_thread > 0) & (module < 0))
    module[backward] = [of_sequence.get(number, -1) for number in device.sequence[backward].tolist()]
    return list(paths), _inherited(module, parent, -1)


def _phases(device: DeviceTrace, parent: np.ndarray, module: np.ndarray) -> np.ndarray:
    optimizer = named(device, lambda name: name.startswith(OPTIMIZER))
    engine = named(device, lambda name: name.startswith(BACKWARD))
    phase = np.full(len(device), Phase.UNKNOWN, dtype=np.int64)
    operators = device.category == CPU_OP
    phase[operators & ((module >= 0) | (device.sequence >= 0))] = Phase.FORWARD
    phase[engine | (operators & (device.forward_thread > 0))] = Phase.BACKWARD
    phase[optimizer] = Phase.OPTIMIZER
    # Everything that the engine runs is backward, even recomputed activations.
    inside = _inherited(np.where(engine | optimizer, phase, Phase.UNKNOWN), parent, Phase.UNKNOWN)
    phase = np.where(inside != Phase.UNKNOWN, inside, phase)
    # A pipeline sends (detached) what its last operators computed, and receives what its next ones need.
    sends = named(device, lambda name: name in (*SENDS, "aten::detach_", "detach_"))
    receives = named(device, lambda name: name in RECEIVES)
    computes = np.isin(phase, (Phase.FORWARD, Phase.BACKWARD)) & ~sends & ~receives
    for is_message, step in ((sends, -1), (receives, 0)):
        for thread in np.unique(device.thread[is_message]).tolist():
            known = np.flatnonzero(computes & (device.thread == thread))
            rows = np.flatnonzero(is_message & (device.thread == thread))
            at = np.searchsorted(known, rows) + step
            near = (at >= 0) & (at < len(known))
            phase[rows[near]] = phase[known[at[near]]]
    return _inherited(phase, parent, Phase.UNKNOWN)


def _inherited(values: np.ndarray, parent: np.ndarray, missing: int) -> np.ndarray:
    """``values``; missing ones are taken from the nearest ancestor that has one."""
    at = nearest(values != missing, parent)
    return np.where(at >= 0, values[at], missing)


# ---- operations and bytes of device work, from the operators that launch it ----


def find_work(rank: LinkedRank, parent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64[rows]: operations and bytes of each kernel, copy and memset, 0 if not known; ``parent`` is the
    hierarchy's.

    The kernels of one operator share its work, see ``divided``.
    """
    device = rank.device
    operations = np.zeros(len(device), dtype=np.int64)
    copies = (device.category == MEMCPY) | (device.category == MEMSET)
    moved = np.where(copies, np.maximum(device.bytes, 0), 0).astype(np.int64)
    kernels = np.flatnonzero((device.category == KERNEL) & ~rank.communication_rows.gpu & (parent >= 0))
    operators, of = coded(parent[kernels])
    causal = np.zeros(len(operators), dtype=bool)
    causal[of[named(device, CAUSAL_KERNEL.search)[kernels]]] = True
    works = _works(rank, parent, operators, causal)
    length = (device.end - device.start)[kernels]
    operations[kernels], moved[kernels] = divided(works, of, length)
    return operations, moved


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


def _works(rank: LinkedRank, parent: np.ndarray, operators: np.ndarray, causal: np.ndarray) -> np.ndarray:
    """int64[operators, 2]: operations and bytes of the operator at each of these rows, or of the next one of
    a library around it that has shapes (others, as a compiled model, call several kernels), 0 if not known;
    ``causal``: of each, as in ``operator_work``."""
    device, values = rank.device, rank.host.inputs[0]
    texts = (*rank.host.inputs[1:], *rank.host.outputs[1:])
    # Only some formulas look at values, and ids of tensors in them make every call a new one.
    with_values = np.array([rule_of(name) in WITH_VALUES for name in device.names], dtype=bool)
    works = np.zeros((len(operators), 2), dtype=np.int64)
    left, at = np.arange(len(operators)), operators
    describes = (device.category == CPU_OP) & (rank.host_row >= 0)
    of_library = named(device, lambda name: "::" in name)
    for _ in range(DEPTH):
        described = np.flatnonzero(describes[at])
        row, name = rank.host_row[at[described]], device.name[at[described]]
        # Equal texts have the same place, so that calls that are alike are counted once.
        columns = (causal[left[described]], *(text.starts[row] for text in texts))
        code = np.where(with_values[name], len(with_values) + row, name)
        for column in columns:
            _, code = coded_pairs(code, column)
        _, first = np.unique(code, return_index=True)
        counted: list[Counted] = [
            operator_work(
                device.names[name[call]],
                values[row[call]] if with_values[name[call]] else b"[]",
                *(text[row[call]] for text in texts),
                causal[left[described[call]]],
            )
            for call in first.tolist()
        ]
        known = np.array([work is not None for work in counted], dtype=bool)[code]
        found = np.array([work or (0, 0) for work in counted], dtype=np.int64).reshape(-1, 2)
        works[left[described[known]]] = found[code[known]]
        left = np.delete(left, described[known])
        at = parent[np.delete(at, described[known])]
        left, at = left[at >= 0], at[at >= 0]
        describes &= of_library
    return works
