"""Pictures of a run for documents: its timeline, and where the time of its steps went. Both are SVG."""

from __future__ import annotations

import numpy as np

from chakra_et.drawing.lanes import Kind, Mark, Picture, PictureLane, Span
from chakra_et.report.columns import ANNOTATION, NODE_KINDS, page_kinds
from chakra_et.report.lanes import lay_out
from chakra_et.report.run import ReportRun
from chakra_et.report.steps import WHOLE, find_times
from chakra_et.report.verdict import duration
from chakra_et.simulate.breakdown import ACTIVITIES

# After Okabe and Ito (2008) and Tol (2021), so that deuteranopia leaves them apart; as in assets/page.css.
COLOURS = {
    "operator": "#009e73", "runtime": "#b5669a", "kernel": "#0072b2", "copy": "#56b4e9",
    "transfer": "#e69f00", "wait": "#882255", "host overhead": "#9aa5b4", "device overhead": "#b9c1cc",
    "compute": "#0072b2",
    "memory": "#56b4e9", "communication": "#e69f00", "idle": "#c3cad4",
}  # fmt: skip
WORDS = {"wait": "waits for other ranks", "transfer": "communication"}
LETTERS = 40


def timeline(run: ReportRun) -> Picture:
    """Every thread and stream of every rank, with the starts of the first rank's steps as marks."""
    rows, of_node = lay_out(run)
    kind = page_kinds(run)
    order = np.lexsort((run.start_ns, of_node))
    spans = []
    for node in order.tolist():
        if kind[node] == ANNOTATION:
            continue
        start, end = run.start_ns[node] / 1e9, run.end_ns[node] / 1e9
        arrived = start + run.wait_ns[node] / 1e9
        name = run.traces[run.graph.trace_of[node]].names[run.graph.row[node]][:LETTERS]
        row = int(of_node[node])
        if arrived > start:
            spans.append(
                Span(row, start, arrived, "wait", title=f"{name}: waits {duration((arrived - start) * 1e9)}")
            )
        spans.append(
            Span(
                row, arrived, end, NODE_KINDS[kind[node]], name, f"{name}: {duration((end - arrived) * 1e9)}"
            )
        )
    used = {span.kind for span in spans}
    steps = [step for step in find_times(run).steps if step.rank == run.ranks[0] and step.name != WHOLE]
    return Picture(
        f"{run.name}: {len(run.graph):,} nodes",
        [PictureLane(f"rank {row.rank}, {row.label}") for row in rows],
        spans,
        {each: Kind(WORDS.get(each, each), COLOURS[each]) for each in COLOURS if each in used},
        marks=[Mark(step.start_ns / 1e9, f"step {step.name}") for step in steps],
    )


def breakdown(run: ReportRun) -> Picture:
    """Where the time of the mean step of each rank went."""
    steps = find_times(run).steps
    spans, lanes = [], []
    for at, rank in enumerate(run.ranks):
        parts = np.array([step.parts_ns for step in steps if step.rank == rank]).mean(axis=0) / 1e9
        total, start = float(parts.sum()), 0.0
        lanes.append(PictureLane(f"rank {rank}", duration(total * 1e9)))
        for name, part in zip(ACTIVITIES, parts.tolist(), strict=True):
            if part > 0:
                share = f"{part / total:.0%}"
                spans.append(
                    Span(at, start, start + part, name, share, f"{name}: {duration(part * 1e9)}, {share}")
                )
                start += part
    used = {span.kind for span in spans}
    kinds = {name: Kind(name, COLOURS[name]) for name in ACTIVITIES if name in used}
    return Picture(f"{run.name}: where the time of a step went", lanes, spans, kinds)
