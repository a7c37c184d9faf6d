#!/usr/bin/env python3
"""Whether Kineto's external ids could be put in after a recording without them.

    python benchmarks/external_ids.py TRACE.json.gz …       Kineto's device traces that have them

``disable_external_correlation`` of PyTorch's profiler would make recording on a GPU cheaper, but MLCommons'
linker needs "External id" on the device's events. Here the ids of runtime calls and device events are
stripped and derived: that of the innermost operator around the call on its thread, or of the annotation
where no operator is around; a device event has that of the call with its correlation id. Printed of each
trace and category: events with a recorded id, and how many of them the derived id equals; derived ids of
events that have none recorded.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

CALLS = ("cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_sync")
AROUND = ("cpu_op", "user_annotation")
Event = dict[str, Any]


def main() -> int:
    for path in sys.argv[1:]:
        opened = gzip.open if path.endswith(".gz") else open
        with opened(path, "rb") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        derived = derived_ids(events)
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for at, event in enumerate(events):
            recorded = event.get("args", {}).get("External id")
            if event.get("cat") in (*CALLS, *DEVICE):
                what = "none" if recorded is None else "same" if derived.get(at) == recorded else "other"
                found[event["cat"]][what if recorded is not None or at not in derived else "new"] += 1
        for category, counts in sorted(found.items()):
            known = counts["same"] + counts["other"]
            share = f"{counts['same'] / known:.2%}" if known else "-"
            print(f"{Path(path).name:45} {category:13} {known:7,} {share:>8}  new {counts['new']:,}")
    return 0


def derived_ids(events: list[Event]) -> dict[int, int]:
    """Index of an event → its external id; events outside of any operator or annotation are left out."""
    threads: dict[Any, list[tuple[float, float, int]]] = defaultdict(list)
    for at, event in enumerate(events):
        if event.get("cat") in (*AROUND, *CALLS):
            threads[event["pid"], event["tid"]].append((event["ts"], -event.get("dur", 0), at))
    derived: dict[int, int] = {}
    of_call: dict[int, int] = {}
    for rows in threads.values():
        open_events: list[tuple[float, Event]] = []
        # Of two with equal times, the operator is around the call, and the lower id around the higher.
        for begin, length, at in sorted(rows, key=lambda row: (*row[:2], _inner(events[row[2]]))):
            while open_events and open_events[-1][0] <= begin:
                open_events.pop()
            event = events[at]
            if event["cat"] in AROUND:
                open_events.append((begin - length, event))
            elif of := [e for cat in AROUND for _, e in reversed(open_events) if e["cat"] == cat]:
                derived[at] = of[0]["args"]["External id"]
                of_call[event["args"].get("correlation", -1)] = derived[at]
    for at, event in enumerate(events):
        if event.get("cat") in DEVICE and event["args"].get("correlation") in of_call:
            derived[at] = of_call[event["args"]["correlation"]]
    return derived


def _inner(event: Event) -> tuple[int, int]:
    return event["cat"] in CALLS, event.get("args", {}).get("External id", 0)


if __name__ == "__main__":
    sys.exit(main())
