"""NAME_stacks.txt: the time of the traced steps by operator stack.

A stack is the chain of enclosing operators and annotations, derived from the times in the device trace.
Python stacks are not recorded: they multiply the size of the device trace and slow down the measured steps
(and torch 2.4 then writes names that are not UTF-8).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

_COLUMNS = ("self_cpu_time_total", "cpu_time_total", "self_cuda_time_total", "cuda_time_total", "count")
_ON_CPU = ("cpu_op", "user_annotation")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")

Stack = tuple[str, ...]


class _Arguments(msgspec.Struct):
    external_id: int = msgspec.field(name="External id", default=0)


class _Event(msgspec.Struct):
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str | None = None
    args: _Arguments | None = None

    @property
    def external_id(self) -> int:
        return self.args.external_id if self.args else 0


class _Device(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


def format_stacks(device_trace: Path, limit: int = 100, without: int | None = None) -> str:
    """The ``limit`` most expensive operator stacks as a table; times in µs, summed over the traced steps.

    ``without``: number of the first step, if it is to be left out, with what precedes the second. Sorted by
    self GPU time if there is any, else by self CPU time. A kernel counts towards the operator that launched
    it. The columns are named as in the profiler's own tables.
    """
    events = msgspec.json.decode(device_trace.read_bytes(), type=_Device).events
    if without is not None:
        begin = min(
            (event.ts for event in events if event.name == f"ProfilerStep#{without + 1}"), default=0.0
        )
        events = [event for event in events if event.ts >= begin]
    rows = _sum_by_stack(events)
    key = 2 if any(row[2] for row in rows.values()) else 0
    ranked = sorted(rows.items(), key=lambda item: (-item[1][key], item[0]))
    total = sum(row[key] for row in rows.values()) or 1.0
    shown = sum(row[key] for _, row in ranked[:limit]) / total
    lines = [
        f"# {min(limit, len(ranked))} of {len(ranked)} operator stacks: {shown:.1%} of {_COLUMNS[key]}",
        "# times in microseconds, summed over the traced steps; innermost operator first",
        "  ".join(f"{name:>20}" for name in _COLUMNS) + "  operator < enclosing operators",
    ]
    for stack, row in ranked[:limit]:
        figures = [f"{value:20.3f}" for value in row[:-1]] + [f"{int(row[-1]):20d}"]
        lines.append("  ".join(figures) + "  " + " < ".join(reversed(stack)))
    return "\n".join(lines) + "\n"


def _sum_by_stack(events: list[_Event]) -> dict[Stack, list[float]]:
    """One row of ``_COLUMNS`` per stack, outermost operator first."""
    launched: defaultdict[int, float] = defaultdict(float)
    threads: defaultdict[int | str | None, list[_Event]] = defaultdict(list)
    for event in events:
        if event.cat in _ON_GPU:
            launched[event.external_id] += event.dur
        elif event.cat in _ON_CPU:
            threads[event.tid].append(event)

    rows: defaultdict[Stack, list[float]] = defaultdict(lambda: [0.0] * len(_COLUMNS))
    for thread in threads.values():
        for event, stack, within in _nest(thread):
            on_gpu = launched.pop(event.external_id, 0.0) if event.external_id else 0.0
            row = rows[stack]
            row[0] += within
            row[1] += within
            row[2] += on_gpu
            row[4] += 1
            if len(stack) > 1:
                rows[stack[:-1]][0] -= within
            for depth in range(1, len(stack) + 1):
                rows[stack[:depth]][3] += on_gpu
    return rows


def _nest(thread: list[_Event]) -> Iterator[tuple[_Event, Stack, float]]:
    """Each event of one thread with its stack and its duration in µs, clipped to its parent."""
    open_events: list[tuple[float, Stack]] = []
    for event in sorted(thread, key=lambda event: (event.ts, -event.dur)):
        while open_events and open_events[-1][0] <= event.ts:
            open_events.pop()
        end, parent = open_events[-1] if open_events else (float("inf"), ())
        stack = (*parent, re.sub(r"^ProfilerStep#\d+$", "ProfilerStep*", event.name))
        end = min(end, event.ts + event.dur)
        open_events.append((end, stack))
        yield event, stack, end - event.ts
