"""Take the structure from one step and the times from the steps after it.

Our tracer runs the ExecutionTraceObserver in one step, which it slows down, and lets Kineto alone record the
steps that follow. Their operators are matched with those of the structure step by thread, order and name.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from chakra_et.arrays import unique
from chakra_et.convert.graph.link import Link, aligned
from chakra_et.convert.graph.timeline import STEP, steps
from chakra_et.findings import Findings
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import ANNOTATION, CPU_OP, RUNTIME

POOLED = "gloo:"


def with_structure(
    device: DeviceTrace, calls: np.ndarray, linked: Link
) -> tuple[np.ndarray, float, DeviceTrace, Link, Findings]:
    """The rows whose times count, the ns that recording took per operator by the tracer's measurement, the
    trace with record-function ids in all steps, its link, and how many operators were matched.

    Kineto alone records no such ids, without which the calls of gloo's operations aren't known. A matched
    operator gets that of the structure step; in the second step and later, plus more than the highest one.
    All rows and 0 if the trace doesn't tell a structure step.
    """
    findings = Findings()
    every = np.arange(len(device))
    known = dict(steps(device))
    recording = device.recording
    if recording is None or recording.structure_step not in known:
        return every, 0.0, device, linked, findings
    structure = known[recording.structure_step]
    began, ended = device.start[structure], device.end[structure]
    timed = [row for number, row in known.items() if number > recording.structure_step]
    begins = device.start[timed]
    step_of = np.searchsorted(begins, device.start, side="right")  # 0: the structure step or beside it
    on_cpu = (device.category == CPU_OP) | (device.category == ANNOTATION)
    measured = on_cpu & (step_of == 0) & (device.start > ended)
    called = device.start[(step_of == 0) & (device.start > ended) & (device.category == RUNTIME)]
    operators = (
        int((measured & (device.start < called.min(initial=np.iinfo(np.int64).max))).sum()) / recording.passes
    )
    per_operator = recording.added_us("operators") * 1000 / max(operators, 1.0)
    if not timed:
        step_of = np.where(device.start <= ended, 1, 0)
    host_row, record = linked.host_row.copy(), device.rf_id.copy()
    ids = int(record.max()) + 1
    source = np.flatnonzero(on_cpu & (step_of == 0) & (device.start >= began) & ~measured)
    for step in range(1, len(timed) + 1):
        rows = np.flatnonzero(on_cpu & (step_of == step))
        pairs = _matched(device, source, rows)
        host_row[pairs[:, 1]] = host_row[pairs[:, 0]]
        own = device.rf_id[pairs[:, 0]]
        record[pairs[:, 1]] = np.where(own > 0, own + (step - 1) * ids, own)
        findings.add("structure-matched", len(pairs))
        findings.add("structure-differs", len(rows) - len(pairs))
    kept = np.flatnonzero(np.where(calls >= 0, step_of[calls], step_of) > 0)
    findings.add("structure-step", len(every) - len(kept))
    return kept, per_operator, replace(device, rf_id=record), replace(linked, host_row=host_row), findings


def _matched(device: DeviceTrace, source: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Pairs of rows int64[K, 2]. Operations of gloo, which whichever of its threads is free works on, are
    matched in the order of their calls; what is left of other threads is matched regardless of the thread."""
    names = [STEP if name.startswith(STEP) else name for name in device.names]
    pooled = np.array([name.startswith(POOLED) for name in device.names], dtype=bool)[device.name]
    found: list[tuple[int, int]] = []

    def match(sources: np.ndarray, targets: np.ndarray) -> None:
        texts = [[names[code] for code in device.name[side].tolist()] for side in (sources, targets)]
        found.extend((int(sources[a]), int(targets[b])) for a, b in aligned(*texts))

    def called(side: np.ndarray) -> np.ndarray:
        # A record-function id is given at the call, before a thread of gloo begins.
        of_pool = side[pooled[side]]
        ordered: np.ndarray = of_pool[np.lexsort((device.start[of_pool], device.rf_id[of_pool]))]
        return ordered

    match(called(source), called(rows))
    source, rows = source[~pooled[source]], rows[~pooled[rows]]
    for thread in unique(device.thread[rows]).tolist():
        match(source[device.thread[source] == thread], rows[device.thread[rows] == thread])
    taken = np.array(found, dtype=np.int64).reshape(-1, 2)
    match(source[~np.isin(source, taken[:, 0])], rows[~np.isin(rows, taken[:, 1])])
    return np.array(found, dtype=np.int64).reshape(-1, 2)
