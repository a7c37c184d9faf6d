"""Where the time of a run went: by step, by name, by module, and by call."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from chakra_et.diagnose.rates import KERNEL_KINDS, WORK, amount_per_second, without_numbers
from chakra_et.et.node_attributes import EDGE_NAMES, in_phase
from chakra_et.report.run import ANNOTATION, NODE_KINDS, PHASES, ReportRun
from chakra_et.simulate.breakdown import activity, union_ns

WHOLE = "whole trace"
OPERATOR, KERNEL, COPY, TRANSFER = map(NODE_KINDS.index, ("operator", "kernel", "copy", "transfer"))
DEVICE = (KERNEL, COPY)


@dataclass(frozen=True)
class ReportStep:
    """One step of one rank, or its whole trace where it has none; of a planned run, the planned step.

    ``name``: the number of the ProfilerStep, or ``WHOLE``. It lasts from ``start_ns``, by the device where
    that is behind (see ``measured_steps.Steps``), to the start of the next one or the end of the trace.
    ``parts_ns``: by ``simulate.breakdown.ACTIVITIES``; they add up to the step's time. ``phases_ns``: by
    ``PHASES``, the time in which work or transfers of that phase run on the device, or on the threads of a
    rank without device work. ``replayed_ns``: its time in the joint device replay.
    """

    rank: int
    name: str
    start_ns: int
    end_ns: int
    parts_ns: tuple[int, ...]
    hidden_ns: int
    phases_ns: tuple[int, ...]
    replayed_ns: int

    @property
    def lasts_ns(self) -> int:
        return self.end_ns - self.start_ns


def find_steps(run: ReportRun) -> list[ReportStep]:
    """Where the time of each rank went, rank by rank, by the times that the run shows."""
    found: list[ReportStep] = []
    replayed = run.job.step_times(run.job.start_ns, run.job.end_ns)
    columns = map(run.graph.scatter, (run.start_ns, run.end_ns, run.wait_ns, run.job.kind))
    of_trace = zip(run.ranks, run.traces, run.job.steps, replayed, *columns, strict=True)
    for rank, trace, steps, lasting, start, end, wait, kind in of_trace:
        bounds = steps.bounds_ns(run.start_ns[steps.nodes], run.end_ns[steps.nodes])
        begins, ends = bounds[:-1], bounds[1:]
        if run.base == "planned" and not steps.marked:  # one step of all ranks, until the last one ends
            begins, ends = run.start_ns.min(keepdims=True), run.end_ns.max(keepdims=True)
            lasting = [max(map(sum, replayed))]
        at = activity(trace, start, end, wait)
        on_device = np.isin(kind, DEVICE) & (trace.column("is_cpu_op") == 0)
        works = (on_device if on_device.any() else kind == OPERATOR) | (kind == TRANSFER)
        chosen = (works & in_phase(trace, phase.encode()) for phase in PHASES)
        phases = [union_ns((start + wait)[each], end[each], begins, ends).tolist() for each in chosen]
        names = [name.partition("#")[2] or WHOLE for name in steps.names]
        rows = (
            names,
            begins.tolist(),
            ends.tolist(),
            map(tuple, at.parts(begins, ends).tolist()),
            at.hidden_ns(begins, ends).tolist(),
            zip(*phases, strict=True),
            lasting,
        )
        found += [ReportStep(rank, *each) for each in zip(*rows, strict=True)]
    return found


@dataclass(frozen=True)
class Entry:
    """All nodes of one kind and name.

    ``count``: calls, all ranks. ``self_ns``: their own time, without operators inside; waiting for other
    ranks counts for communication. ``longest_ns``: of the longest node. ``device_ns``: time of the device
    work that an operator launched itself. ``rank_ns``: ``self_ns`` by rank. ``per_second``: operations per
    second (FLOP/s), over the nodes whose operations are known; ``bytes_per_second`` likewise; None for none.
    ``work``: the class of kernels; ``of_peak``: which part of the GPU's peak (of arithmetic, or of bytes
    where these bound it) is reached, above 1 where data come from a cache or are counted too high;
    ``times_usual``: how many times as long it takes as such work usually does on this GPU, see ``rates``;
    None for unknown.
    """

    kind: str
    name: str
    count: int
    self_ns: int
    longest_ns: int
    device_ns: int
    rank_ns: tuple[int, ...]
    per_second: float | None
    bytes_per_second: float | None
    work: str | None = None
    of_peak: float | None = None
    times_usual: float | None = None


@dataclass(frozen=True)
class Module:
    """Time of the nodes that belong to a module itself, without the modules in it; all ranks, ns.

    ``phases_ns``: device time by ``PHASES``, or host time in a run without device work.
    """

    path: str
    count: int
    host_ns: int
    device_ns: int
    communication_ns: int
    phases_ns: tuple[int, ...]


def by_name(run: ReportRun) -> list[Entry]:
    """One entry for each kind and name, the most time first. Annotations are left out."""
    graph = run.graph
    code, names = run.names
    if run.base == "planned":  # the numbers of micro-batches and layers don't make other operators
        names, plain = without_numbers(names)
        code = plain[code]
    kind, length = run.node_kinds, run.end_ns - run.start_ns
    keys, of_node = np.unique(kind * len(names) + code, return_inverse=True)
    of_node = of_node.reshape(-1)
    count, ranks = len(keys), len(run.ranks)
    self_ns = _sum(of_node, length, count)
    by_rank = _sum(of_node * ranks + graph.trace_of, length, count * ranks)
    longest = np.zeros(count, dtype=np.int64)
    np.maximum.at(longest, of_node, length)
    work = np.isin(kind, DEVICE) & (run.parent >= 0)
    launched = _sum(run.parent[work], length[work], len(graph))
    told = (kind == KERNEL) & run.rates.told
    amounts = [amount_per_second(graph.attribute(each, 0) * told, of_node, length, count) for each in WORK]
    work_of, by_length = np.full(count, -1), np.argsort(length)
    work_of[of_node[by_length]] = run.rates.kind[by_length]
    columns = (
        [NODE_KINDS[at] for at in (keys // len(names)).tolist()],
        [names[at] for at in (keys % len(names)).tolist()],
        _sum(of_node, graph.attribute("segment", 0) == 0, count).tolist(),
        self_ns.tolist(),
        longest.tolist(),
        _sum(of_node, launched, count).tolist(),
        map(tuple, by_rank.reshape(count, ranks).tolist()),
        *amounts,
        [KERNEL_KINDS[at] if at >= 0 else None for at in work_of.tolist()],
        *zip(*run.rates.of(of_node, length, count), strict=True),
    )
    entries = [Entry(*each) for each in zip(*columns, strict=True)]
    order = np.argsort(-self_ns, kind="stable").tolist()
    return [entries[at] for at in order if entries[at].kind != NODE_KINDS[ANNOTATION]]


IDLE = ("waits for a launch", "waits for other work", "gap between kernels")
SHORT_GAP_NS = 10_000


def idle_time(run: ReportRun) -> list[list[int]] | None:
    """Why the device of each rank does nothing between its first and its last work, ns by ``IDLE``; None
    without device work.

    By what comes next: it ``waits for a launch`` where that call ended after the gap had begun, so that the
    host is late. Else it was queued: a gap of up to ``SHORT_GAP_NS`` is between kernels, a longer one is
    spent waiting for an event, another stream, or another rank.
    """
    graph = run.graph
    kind = run.node_kinds
    works = (np.isin(kind, (KERNEL, COPY)) | (kind == TRANSFER)) & ~graph.is_cpu
    if not (works & (kind != TRANSFER)).any():  # gloo's communication alone
        return None
    launched = np.full(len(graph), np.iinfo(np.int64).min)
    launches = run.edge_kinds == EDGE_NAMES.index("launch")
    np.maximum.at(launched, graph.target[launches], run.end_ns[graph.source[launches]])
    found = []
    for at in range(len(run.ranks)):
        node = np.flatnonzero(works & (graph.trace_of == at))
        node = node[np.argsort(run.start_ns[node], kind="stable")]
        begins = np.maximum.accumulate(run.end_ns[node])[:-1]
        following = node[1:]
        gap = np.maximum(run.start_ns[following] - begins, 0)
        late = np.clip(launched[following] - begins, 0, gap)
        rest = gap - late
        short = rest <= SHORT_GAP_NS
        found.append([int(late.sum()), int(rest[~short].sum()), int(rest[short].sum())])
    return found


def by_module(run: ReportRun) -> list[Module]:
    """The modules in the order of their paths; empty where none are recorded."""
    module, paths = run.graph.codes("module")
    phase, _ = run.graph.codes("phase", PHASES)
    known = np.flatnonzero(module >= 0)
    kind = run.node_kinds[known]
    module, phase = module[known], phase[known]
    length = (run.end_ns - run.start_ns)[known]
    device, communicates = np.isin(kind, DEVICE), kind == TRANSFER
    host = ~device & ~communicates
    shown = device if device.any() else host
    calls = (run.graph.attribute("segment", 0)[known] == 0) & (kind == OPERATOR)
    chosen = [host, device, communicates, *(shown & (phase == at) for at in range(len(PHASES)))]
    parts = [calls, *(np.where(which, length, 0) for which in chosen)]
    sums = np.array([_sum(module, part, len(paths)) for part in parts]).T.tolist()
    rows = sorted(zip(paths, sums, strict=True))
    return [Module(path, n, cpu, gpu, sent, tuple(each)) for path, (n, cpu, gpu, sent, *each) in rows]


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
    code, names = run.names[0].copy(), list(run.names[1])
    steps = [at for at, name in enumerate(names) if name.startswith("ProfilerStep#")]
    code[np.isin(code, steps)] = len(names)
    names.append("ProfilerStep")
    path_of, above, name_of = _paths(run, code, names)
    length, there = run.end_ns - run.start_ns, path_of >= 0
    on_device = np.isin(run.node_kinds, (*DEVICE, TRANSFER)) & ~run.graph.is_cpu
    parts = run.graph.attribute("segment", 0) == 0, length * ~on_device, length * on_device
    sums = [np.bincount(path_of[there], each[there], len(above)) for each in parts]
    for at in range(len(above) - 1, -1, -1):  # what is inside stands behind
        if above[at] >= 0:
            for values in sums[1:]:
                values[above[at]] += values[at]
    roots = np.array(above) < 0
    kept = np.logical_or(*(each >= LEAST * max(float(each[roots].sum()), 1.0) for each in sums[1:]))
    inside = defaultdict[int, list[int]](list)
    for at in np.argsort(-(sums[1] + sums[2]), kind="stable")[::-1].tolist():
        if kept[at]:
            inside[above[at]].append(at)
    found: list[Call] = []
    pending = [(at, -1) for at in inside[-1]]
    while pending:
        at, outer = pending.pop()
        found.append(Call(outer, names[name_of[at]], *(int(values[at]) for values in sums)))
        pending += [(each, len(found) - 1) for each in inside[at]]
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

    module, modules = run.graph.codes("module")
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
    kind = run.node_kinds
    marks = np.flatnonzero((kind == ANNOTATION) & (event > 0))
    marks = marks[np.argsort(key[marks], kind="stable")]
    inside = np.flatnonzero((kind == NODE_KINDS.index("host overhead")) & (event > 0))
    at = np.searchsorted(key[marks], key[inside]).clip(max=len(marks) - 1)
    parent = run.parent.copy()
    if len(marks):
        same = key[marks[at]] == key[inside]
        parent[inside[same]] = marks[at[same]]
    return parent


def _sum(index: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    """int64[count]: the sum of the values of each index, exact up to 2^53 ns (104 days)."""
    return np.rint(np.bincount(index, values, count)).astype(np.int64)
