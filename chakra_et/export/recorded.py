"""The device traces of a run as they were recorded, with every level of its slices, all ranks in one file.

Python frames, modules, operators, runtime calls and device work keep their nesting, arguments and flows; a
conversion keeps the path and the hash of each trace (``device_traces`` in NAME_conversion.json).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from chakra_et.export.perfetto import Event, Slices
from chakra_et.traces.records import read_records

_PROCESSES = 1000  # of one rank


class _Trace(msgspec.Struct):
    traceEvents: list[dict[str, Any]] = []
    baseTimeNanoseconds: int = 0


class _Taker:
    """Gives the events of a trace to ``use``, with the process ids of a rank."""

    def __init__(self, rank: int, use: Callable[[Event], None]) -> None:
        self.rank, self.use, self.seen = rank, use, dict[Any, int]()

    def take(self, records: list[Event]) -> None:
        for event in records:
            own = self.seen.setdefault(event.get("pid"), len(self.seen))
            event["pid"] = (self.rank + 1) * _PROCESSES + own
            if "id" in event:
                event["id"] = f"{self.rank}:{event['id']}"
            if event.get("ph") == "M" and event.get("name") == "process_name":
                event["args"] = {"name": f"rank {self.rank}: {(event.get('args') or {}).get('name', '')}"}
            self.use(event)

    def leave_out(self, record: bytes) -> None:
        pass


def _read(traces: Mapping[int, Path], use: Callable[[Event], None]) -> None:
    for rank, path in sorted(traces.items()):
        read_records(path, "traceEvents", lambda _: _Trace, _Taker(rank, use))


def write_chrome(traces: Mapping[int, Path], file: IO[bytes]) -> int:
    """Write all events of the ranks' traces in the Trace Event Format; returns how many slices there are."""
    count, separator = 0, b'{"displayTimeUnit": "ns", "traceEvents": [\n'

    def use(event: Event) -> None:
        nonlocal count, separator
        file.write(separator + json.dumps(event, separators=(",", ":")).encode())
        count, separator = count + (event.get("ph") == "X"), b",\n"

    _read(traces, use)
    file.write(b"\n]}\n")
    return count


def write_perfetto(traces: Mapping[int, Path], file: IO[bytes]) -> int:
    """Write the slices, flows and memory of the ranks' traces for Perfetto; returns how many slices."""
    found = Slices()
    _read(traces, found.add)
    return found.write(file)
