"""The hierarchy of events: parent operator, calling module, and phase of the training step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from chakra_et.arrays import unique
from chakra_et.convert.graph.batches import RECEIVES, SENDS
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import ANNOTATION, CPU_OP, RUNTIME

OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
BACKWARD = "autograd::engine::evaluate_function"


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
    parent = _operator_parents(rank)
    modules, of_frame = _module_paths(rank)
    module = _modules_of_rows(rank, parent, of_frame)
    return Hierarchy(parent, module, modules, _phases(rank, parent, module))


def _operator_parents(rank: LinkedRank) -> np.ndarray:
    device, calls = rank.device, rank.calls
    parent = np.where(calls >= 0, calls, rank.timeline.parent)
    for item in rank.communication.items:
        if not item.on_gpu:
            parent[item.event] = item.launch
    named = (device.category == CPU_OP) | (device.category == ANNOTATION)
    # Skip runtime calls and other events that are neither operators nor annotations.
    nearest = _nearest(named, rank.timeline.parent)
    return np.where(parent >= 0, nearest[parent], -1)


def _module_paths(rank: LinkedRank) -> tuple[list[str], np.ndarray]:
    """The paths, and the index of the path of each module frame."""
    frames = rank.device.modules
    paths: dict[str, int] = {}
    of_frame = np.zeros(len(frames), dtype=np.int64)
    stacks: dict[int, list[tuple[int, str]]] = {}
    rows = zip(
        frames.thread.tolist(), frames.start.tolist(), frames.end.tolist(), frames.name.tolist(), strict=True
    )
    for row, (thread, start, end, name) in enumerate(rows):
        stack = stacks.setdefault(thread, [])
        while stack and stack[-1][0] <= start:
            stack.pop()
        path = f"{stack[-1][1]}/{frames.names[name]}" if stack else frames.names[name]
        stack.append((end, path))
        of_frame[row] = paths.setdefault(path, len(paths))
    return list(paths), of_frame


def _modules_of_rows(rank: LinkedRank, parent: np.ndarray, of_frame: np.ndarray) -> np.ndarray:
    device, frames = rank.device, rank.device.modules
    module = np.full(len(device), -1, dtype=np.int64)
    if not len(frames):
        return module
    for thread in unique(frames.thread).tolist():
        own = np.flatnonzero(frames.thread == thread)
        rows = np.flatnonzero((device.thread == thread) & (device.category < RUNTIME))
        around = _enclosing(frames.start[own], frames.end[own], device.start[rows])
        module[rows] = np.where(around >= 0, of_frame[own[around]], -1)
    # A backward operator belongs to the module of its forward operator.
    forward = np.flatnonzero((device.sequence >= 0) & (device.forward_thread <= 0) & (module >= 0))
    of_sequence = dict(zip(device.sequence[forward].tolist(), module[forward].tolist(), strict=True))
    backward = np.flatnonzero((device.sequence >= 0) & (device.forward_thread > 0) & (module < 0))
    module[backward] = [of_sequence.get(number, -1) for number in device.sequence[backward].tolist()]
    return _inherited(module, parent, -1)


def _enclosing(start: np.ndarray, end: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """For each moment, the innermost of the nested spans (sorted by start) that contains it, -1 for none."""
    outer = np.full(len(start), -1, dtype=np.int64)
    stack: list[int] = []
    for row, (s, _) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while stack and end[stack[-1]] <= s:
            stack.pop()
        outer[row] = stack[-1] if stack else -1
        stack.append(row)
    found = np.searchsorted(start, moments, side="right") - 1
    while (late := (found >= 0) & (end[found] <= moments)).any():
        found = np.where(late, outer[found], found)
    return found


def _phases(rank: LinkedRank, parent: np.ndarray, module: np.ndarray) -> np.ndarray:
    device = rank.device
    names = device.names
    optimizer = np.array([name.startswith(OPTIMIZER) for name in names], dtype=bool)[device.name]
    engine = np.array([name.startswith(BACKWARD) for name in names], dtype=bool)[device.name]
    phase = np.full(len(device), Phase.UNKNOWN, dtype=np.int64)
    operators = device.category == CPU_OP
    phase[operators & ((module >= 0) | (device.sequence >= 0))] = Phase.FORWARD
    phase[engine | (operators & (device.forward_thread > 0))] = Phase.BACKWARD
    phase[optimizer] = Phase.OPTIMIZER
    # Everything that the engine runs is backward, even recomputed activations.
    inside = _inherited(np.where(engine | optimizer, phase, Phase.UNKNOWN), parent, Phase.UNKNOWN)
    phase = np.where(inside != Phase.UNKNOWN, inside, phase)
    _phase_of_messages(device, phase)
    return _inherited(phase, parent, Phase.UNKNOWN)


def _phase_of_messages(device: DeviceTrace, phase: np.ndarray) -> None:
    """A pipeline sends (detached) what its last operators computed, and receives what its next ones need."""
    kinds = [np.isin(device.name, [device.names.index(n) for n in names if n in device.names])
             for names in ((*SENDS, "aten::detach_", "detach_"), RECEIVES)]  # fmt: skip
    computes = np.isin(phase, (Phase.FORWARD, Phase.BACKWARD)) & ~kinds[0] & ~kinds[1]
    for is_message, step in zip(kinds, (-1, 0), strict=True):
        for thread in unique(device.thread[is_message]).tolist():
            known = np.flatnonzero(computes & (device.thread == thread))
            rows = np.flatnonzero(is_message & (device.thread == thread))
            at = np.searchsorted(known, rows) + step
            near = (at >= 0) & (at < len(known))
            phase[rows[near]] = phase[known[at[near]]]


def _nearest(known: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """For each row, itself or its nearest ancestor that is ``known``, -1 for none; without recursion."""
    rows = np.arange(len(parent))
    up = np.append(np.where(known, rows, parent), -1)  # the last entry stands for no ancestor
    for _ in range(len(parent).bit_length()):
        further = up[up]  # each round doubles the distance
        if (further == up).all():
            break
        up = further
    return up[:-1]


def _inherited(values: np.ndarray, parent: np.ndarray, missing: int) -> np.ndarray:
    """``values``; missing ones are taken from the nearest ancestor that has one."""
    at = _nearest(values != missing, parent)
    return np.where(at >= 0, values[at], missing)
