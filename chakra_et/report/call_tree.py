"""The calls of a run folded by name: modules, the operators in them, what these call, and their kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.report.columns import ANNOTATION, NODE_KINDS, name_codes, page_kinds, shared_codes
from chakra_et.report.run import ReportRun

LEAST = 1e-4
"""Calls with less than this part of the time of host and device are left out with all that is inside."""
MOST_DEPTH = 200


@dataclass(frozen=True)
class Call:
    """A call and all that is inside, by its names from the outermost on: all ranks and steps, ns.

    ``above``: the index of the call around it, -1 for none; callers stand before what they call.
    """

    above: int
    name: str
    count: int
    host_ns: int
    device_ns: int


def call_tree(run: ReportRun) -> list[Call]:
    """The calls of a run, each after the one around it, those with more time first. Modules come from the
    ``nn.Module`` of the outermost operator."""
    code, names = name_codes(run)
    steps = [at for at, name in enumerate(names) if name.startswith("ProfilerStep#")]
    code[np.isin(code, steps)] = len(names)
    names.append("ProfilerStep")
    path_of, above, name_of = _paths(run, code, names)
    kind, length = page_kinds(run), run.end_ns - run.start_ns
    on_device = np.isin(kind, [NODE_KINDS.index(each) for each in ("kernel", "copy", "transfer")])
    on_device &= ~run.graph.is_cpu
    count, there = len(above), path_of >= 0
    sums = [
        np.bincount(path_of[there], values[there].astype(float), count)
        for values in (
            run.graph.attribute("segment", 0) == 0,
            np.where(on_device, 0, length),
            np.where(on_device, length, 0),
        )
    ]
    for at in range(count - 1, -1, -1):  # what is inside stands behind
        if above[at] >= 0:
            for values in sums[1:]:
                values[above[at]] += values[at]
    roots = np.array(above) < 0
    limits = [LEAST * max(float(values[roots].sum()), 1.0) for values in sums[1:]]
    kept = (sums[1] >= limits[0]) | (sums[2] >= limits[1])
    order = sorted(np.flatnonzero(kept).tolist(), key=lambda at: -(sums[1][at] + sums[2][at]))
    inside: dict[int, list[int]] = {}
    for at in order:
        inside.setdefault(above[at], []).append(at)
    found: list[Call] = []
    pending = [(at, -1) for at in reversed(inside.get(-1, []))]
    while pending:
        at, outer = pending.pop()
        figures = (int(values[at]) for values in sums)
        found.append(Call(outer, names[name_of[at]], *figures))
        pending += [(each, len(found) - 1) for each in reversed(inside.get(at, []))]
    return found


def _paths(run: ReportRun, code: np.ndarray, names: list[str]) -> tuple[np.ndarray, list[int], list[int]]:
    """The path of each node, int64[N]; of each path the one around it, and the index of its last name.
    ``names`` gets those of modules."""
    above: list[int] = []
    name_of: list[int] = []
    known: dict[tuple[int, int], int] = {}

    def path(outer: int, name: int) -> int:
        at = known.setdefault((outer, name), len(above))
        if at == len(above):
            above.append(outer)
            name_of.append(name)
        return at

    module, modules = shared_codes(run, "module")
    place: dict[str, int] = {}
    root_of = []
    for each in modules:
        at = -1
        for part in each.split("/"):
            at = path(at, place.setdefault(part, len(names)))
            if place[part] == len(names):
                names.append(part)
        root_of.append(at)
    outermost = np.array([*root_of, -1])
    path_of, parent = np.full(len(code), -1), _parents(run)
    level = np.flatnonzero(parent < 0)
    outer = outermost[module[level]]
    children = np.argsort(parent, kind="stable")
    parents = parent[children]
    for _ in range(MOST_DEPTH):
        pairs, index = np.unique(np.stack([outer, code[level]]), axis=1, return_inverse=True)
        path_of[level] = np.array([path(*pair) for pair in pairs.T.tolist()], int)[index.reshape(-1)]
        first, last = (np.searchsorted(parents, level, side=side) for side in ("left", "right"))
        counts = last - first
        if not counts.sum():
            break
        offsets = np.repeat(first - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
        outer = np.repeat(path_of[level], counts)
        level = children[offsets + np.arange(int(counts.sum()))]
    return path_of, above, name_of


def _parents(run: ReportRun) -> np.ndarray:
    """The node around each node, -1 for none; of Python in an annotation, which has its event, this one."""
    event = run.graph.attribute("rf_id", -1)
    key = run.graph.trace_of * (event.max() + 2) + event
    kind = page_kinds(run)
    marks = np.flatnonzero((kind == ANNOTATION) & (event > 0))
    marks = marks[np.argsort(key[marks], kind="stable")]
    inside = np.flatnonzero((kind == NODE_KINDS.index("host overhead")) & (event > 0))
    at = np.searchsorted(key[marks], key[inside]).clip(max=len(marks) - 1)
    parent = run.parent.copy()
    if len(marks):
        same = key[marks[at]] == key[inside]
        parent[inside[same]] = marks[at[same]]
    return parent
