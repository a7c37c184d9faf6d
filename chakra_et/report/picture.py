"""A picture of a run for documents: where the time of its steps went."""

from __future__ import annotations

import numpy as np

from chakra_et.drawing.lanes import Kind, Picture, PictureLane, Span
from chakra_et.report.run import ReportRun
from chakra_et.report.steps import find_times
from chakra_et.simulate.breakdown import ACTIVITIES
from chakra_et.text import duration

# After Okabe and Ito (2008) and Tol (2021), so that deuteranopia leaves them apart; as in assets/page.css.
COLOURS = {
    "compute": "#0072b2", "memory": "#56b4e9", "communication": "#e69f00", "wait": "#882255",
    "host overhead": "#9aa5b4", "idle": "#c3cad4",
}  # fmt: skip


def breakdown(run: ReportRun) -> Picture:
    """Where the time of the mean step of each rank went."""
    steps = find_times(run).steps
    spans, lanes = [], []
    for at, rank in enumerate(run.ranks):
        parts = np.array([step.parts_ns for step in steps if step.rank == rank]).mean(axis=0)
        total, start = float(parts.sum()), 0.0
        lanes.append(PictureLane(f"rank {rank}", duration(total)))
        for name, part in zip(ACTIVITIES, parts.tolist(), strict=True):
            if part > 0:
                share, end = f"{part / total:.0%}", start + part / 1e9
                spans.append(Span(at, start, end, name, share, f"{name}: {duration(part)}, {share}"))
                start = end
    used = {span.kind for span in spans}
    kinds = {name: Kind(name, COLOURS[name]) for name in ACTIVITIES if name in used}
    return Picture(f"{run.name}: where the time of a step went", lanes, spans, kinds)
