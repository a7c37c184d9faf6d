#!/usr/bin/env python3
"""CPU time of converting traces with ever more streams and threads: linear in the events.

    python benchmarks/many_lanes.py                 100,000 streams and 50,000 threads, and a tenth of each

One kernel a stream, or two operators a thread; the last column is CPU time over that of a tenth of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chakra_et import cli
from chakra_et.convert.pair import convert_pair
from chakra_et.text import table
from chakra_et.traces.sets import Pair


@dataclass
class Config:
    """How many lanes."""

    streams: int = field(default=100_000, metadata={"help": "streams of the device"})
    threads: int = field(default=50_000, metadata={"help": "threads of the host"})


def event(name: str, category: str, tid: int, start: float, lasts: float, **args: Any) -> dict[str, Any]:
    fields = {"ph": "X", "name": name, "cat": category, "pid": 0 if "stream" in args else 10, "tid": tid}
    return {**fields, "ts": start, "dur": lasts, "args": args}


def streams(count: int) -> list[dict[str, Any]]:
    """A thread that launches one kernel on each stream."""
    events = []
    for at in range(count):
        launch = {"correlation": at + 1}
        events += [
            event("aten::mm", "cpu_op", 10, 10 * at, 8),
            event("cudaLaunchKernel", "cuda_runtime", 10, 10 * at + 1, 3, **launch),
            event("gemm", "kernel", at + 1, 10 * at + 5, 4, device=0, stream=at + 1, **launch),
        ]
    return events


def threads(count: int) -> list[dict[str, Any]]:
    """Threads that run two operators each, one inside the other."""
    return [
        event(name, "cpu_op", 1000 + at, 10 * at + after, lasts)
        for at in range(count)
        for name, after, lasts in (("aten::linear", 0, 8), ("aten::mm", 2, 3))
    ]


def seconds(events: list[dict[str, Any]], folder: Path) -> float:
    """CPU time of converting a trace of these events."""
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    begin = time.process_time()
    convert_pair(Pair(-1, None, path))
    return time.process_time() - begin


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    rows: list[tuple[str, ...]] = [("lanes", "events", "CPU, s", "times")]
    with tempfile.TemporaryDirectory() as folder:
        seconds(streams(100), Path(folder))  # imports
        for make, count in ((streams, config.streams), (threads, config.threads)):
            before = 0.0
            for lanes in (count // 10, count):
                events = make(lanes)
                took = seconds(events, Path(folder))
                times = f"{took / before:.1f}" if before else ""
                rows.append((f"{lanes:,} {make.__name__}", f"{len(events):,}", f"{took:.2f}", times))
                before = took
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
