"""What a page takes from the device traces: the call stacks of threads, Python frames among them, and what
holds the memory at its peak.

A page holds at most ``MOST`` slices: all of a typical step, and of the rest the longest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from chakra_et.report.run import NODE_KINDS, ReportRun
from chakra_et.report.timeline import MOST_DEPTH, NO_STACKS, ROUNDING_NS, Stacks, lanes_of
from chakra_et.report.times import ReportStep
from chakra_et.traces import device_format as kineto
from chakra_et.traces.fields import as_column, as_number, indices
from chakra_et.traces.records import Taker, read_records

MOST, MOST_RANKS, MOST_OWNERS = 200_000, 8, 20
OUTSIDE = "outside of operators"
_KINDS = {kineto.CPU_OP: "operator", kineto.ANNOTATION: "annotation"}
_KINDS |= dict.fromkeys((kineto.RUNTIME, kineto.DRIVER), "runtime")
_KIND_OF: dict[str | None, int] = {"python_function": NODE_KINDS.index("python")}
for _name, _code in kineto.CODES.items():
    if _code in _KINDS:
        _KIND_OF[_name] = NODE_KINDS.index(_KINDS[_code])


_Clock = Callable[[Any], Any]
"""Of a moment, or an array of them, in ns."""


class _Block(kineto.Args, gc=False):
    """``memory_bytes`` is negative where a block is freed."""

    address: Any = msgspec.field(name="Addr", default=None)


class _Event(kineto.Event, gc=False):
    args: _Block | None = None


class _StackedTrace(kineto.HeaderFields, kw_only=True):
    traceEvents: list[_Event]


class _StackTaker(Taker):
    """The slices of all threads of one trace."""

    def __init__(self, names: dict[str, int], threads: dict[Any, int]) -> None:
        self.names, self.threads = names, threads
        self.columns: list[tuple[np.ndarray, ...]] = []
        self.memory: list[_Event] = []

    def take(self, events: list[_Event]) -> None:
        self.memory += [each for each in events if each.name == kineto.MEMORY]
        found = [each for each in events if each.ph == "X" and each.cat in _KIND_OF]
        if found:
            times = (as_column([getattr(each, of) for each in found], np.float64) for of in ("ts", "dur"))
            name = indices([str(each.name) for each in found], self.names)
            thread = indices([(str(each.pid), str(each.tid)) for each in found], self.threads, tuple)
            self.columns.append((*times, name, thread, np.array([_KIND_OF[each.cat] for each in found])))


def read_stacks(
    run: ReportRun, traces: Mapping[int, Path], steps: Sequence[ReportStep]
) -> tuple[Stacks, list[dict[str, Any]]]:
    """The call stacks of the first ranks, and what holds their memory at its peak."""
    ranks = [rank for rank in run.ranks if rank in traces][:MOST_RANKS]
    names: dict[str, int] = {}
    threads: dict[Any, int] = {}
    found: list[Any] = []
    owners: list[dict[str, Any]] = []
    for rank in ranks:
        number = run.ranks.index(rank)
        taker = _StackTaker(names, threads)
        read_records(traces[rank], "traceEvents", lambda _: _StackedTrace, taker)
        if not taker.columns:
            continue
        begin, length, name, thread, kind = map(np.concatenate, zip(*taker.columns, strict=True))
        known = np.isfinite(begin) & (length >= 0)
        start, lasts = np.rint(np.where(known, (begin, length), 0.0) * 1000).astype(np.int64)
        end = start + lasts
        of_rank = [step for step in steps if step.rank == rank]
        on_run = _clock(run, number, of_rank, start, end, name, list(names))
        if on_run is None:
            continue
        owners += _peak_owners(run, number, on_run, taker.memory)
        step = sorted(of_rank, key=lambda each: each.lasts_ns)[len(of_rank) // 2]
        start, end = on_run(start), on_run(end)
        known &= end > 0
        inside = (start < step.end_ns) & (end > step.start_ns)
        order = np.lexsort((start - end, ~inside, ~known))[: min(int(known.sum()), MOST // len(ranks))]
        order = order[np.lexsort((start[order] - end[order], start[order], thread[order]))]
        depth = _depths(thread[order], start[order], end[order])
        nested = np.isin(thread[order], np.unique(thread[order][depth > 0])) & (depth < MOST_DEPTH)
        chosen, depth = order[nested], depth[nested]
        row = thread[chosen].astype(np.int64) * MOST_DEPTH + depth
        columns = (each[chosen] for each in (start, end, name, kind))
        found.append((np.full(len(chosen), number), row, *columns))
    if not found:
        return NO_STACKS, owners
    trace, row, start, end, name, kind = map(np.concatenate, zip(*found, strict=True))
    return Stacks(trace, row, start, end, name, kind, list(names), [tid for _, tid in threads]), owners


def _peak_owners(run: ReportRun, number: int, on_run: _Clock, events: list[_Event]) -> list[dict[str, Any]]:
    """What holds the memory of a rank's device (of its CPU where no other is known) when most is allocated,
    the most first: the module and the outermost operator that allocated it."""
    known = [(event.args, event) for event in events if event.args and event.args.allocated and event.ts]
    of_devices = [each for each in known if each[0].device_type] or known
    known = sorted(of_devices, key=lambda each: as_number(each[1].ts, 0))
    if not known:
        return []
    at, (peak, _) = max(enumerate(known), key=lambda each: as_number(each[1][0].allocated, 0))
    blocks: dict[Any, tuple[_Block, _Event]] = {}
    for block, event in known[: at + 1]:
        if (block.device_type, block.device_id) == (peak.device_type, peak.device_id):
            blocks.pop(block.address, None)
            if as_number(block.memory_bytes, 0) > 0:
                blocks[block.address] = block, event
    lane, labels = lanes_of(run.traces[number])
    own = run.graph.scatter(np.arange(len(run.graph)))[number]
    order = np.argsort(run.start_ns[own], kind="stable")
    on_thread = {label: own[order][lane[order] == at] for at, (_, label) in labels.items()}
    is_operator = run.node_kinds == NODE_KINDS.index("operator")
    (module, modules), (code, names) = run.graph.codes("module"), run.names
    held, count = Counter[str](), Counter[str]()
    for block, event in blocks.values():
        moment, owner = on_run(round(as_number(event.ts, 0) * 1000)), OUTSIDE
        nodes = on_thread.get(f"thread {event.tid}", own[:0])
        before = int(np.searchsorted(run.start_ns[nodes], moment, side="right")) - 1
        if before >= 0 and moment <= run.end_ns[nodes[before]] + ROUNDING_NS:
            node = inner = int(nodes[before])
            while node >= 0:
                owner = names[code[node]] if is_operator[node] else owner
                node = int(run.parent[node])
            owner = f"{modules[module[inner]]}: {owner}" if module[inner] >= 0 else owner
        held[owner] += int(as_number(block.memory_bytes, 0))
        count[owner] += 1
    held["allocated before the recording"] = max(int(as_number(peak.allocated, 0)) - held.total(), 0)
    found = held.most_common(MOST_OWNERS)
    return [
        {"rank": run.ranks[number], "owner": owner, "bytes": size, "blocks": count[owner] or None}
        for owner, size in found
        if size
    ]


def _clock(
    run: ReportRun, number: int, steps: Sequence[ReportStep], start: np.ndarray, end: np.ndarray,
    name: np.ndarray, names: list[str],
) -> _Clock | None:  # fmt: skip
    """What leads from the trace's times to the run's. Step by step, as the run's lack the cost of recording
    and the step with the observer; without steps, the median over names of what is between first starts."""
    marks = [names.index(of) for step in steps if (of := f"ProfilerStep#{step.name}") in names]
    if steps and len(marks) == len(steps):
        rows = [int(np.argmax(name == mark)) for mark in marks]
        begins = run.start_ns[run.job.steps[number].first]
        lasts = min(steps[-1].end_ns - begins[-1], end[rows[-1]] - start[rows[-1]])  # a device may go on
        given = np.append(start[rows], end[rows[-1]])
        wanted = np.append(begins, begins[-1] + lasts)
    elif (shift := _shift(run, number, start, name, names)) is not None:
        given, wanted = np.zeros(1), np.array([shift])
    else:
        return None

    def on_run(moment: Any) -> Any:
        beyond = np.minimum(moment - given[0], 0) + np.maximum(moment - given[-1], 0)
        return np.rint(np.interp(moment, given, wanted) + beyond).astype(np.int64)

    return on_run


def _shift(run: ReportRun, number: int, start: np.ndarray, name: np.ndarray, names: list[str]) -> int | None:
    code, known = run.names
    own = run.graph.trace_of == number
    never = np.iinfo(np.int64).max
    first = np.full((2, max(len(known), len(names))), never)
    np.minimum.at(first[0], code[own], run.start_ns[own])
    np.minimum.at(first[1], name, start)
    place = {text: at for at, text in enumerate(names)}
    pairs = [(at, place[text]) for at, text in enumerate(known) if text in place and first[0, at] < never]
    away = [int(first[0, at] - first[1, other]) for at, other in pairs if first[1, other] < never]
    return int(np.median(away)) if away else None


def _depths(thread: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """How many slices of its thread are open where each begins, int64[K]; sorted by thread and start.

    One that ends after the open one, as by rounded times, is inside if most of it is.
    """
    depth, ends, last = [], [0], -1
    for of, begin, finish in zip(thread.tolist(), start.tolist(), end.tolist(), strict=True):
        if of != last:
            ends, last = [], of
        while ends and (ends[-1] <= begin or (ends[-1] < finish and 2 * ends[-1] <= begin + finish)):
            ends.pop()
        depth.append(len(ends))
        ends.append(finish)
    return np.array(depth, dtype=np.int64)
