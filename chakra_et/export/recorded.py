"""The device traces of a run as they were recorded, with every level of its slices, all ranks in one file.

Python frames, modules, operators, runtime calls and device work keep their nesting, arguments and flows; a
conversion keeps the path and the hash of each trace (``device_traces`` in NAME_conversion.json).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from chakra_et.et.wire import FIXED64, message_field, tag, varint_field
from chakra_et.export.perfetto import BEGIN, END, NEEDED, SEQUENCE, counter, interned, message
from chakra_et.traces.records import read_records

Event = dict[str, Any]
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
    found = _Slices()
    _read(traces, found.add)
    for packet in found.packets():
        file.write(message_field(1, packet))
    return sum(map(len, found.threads.values()))


class _Slices:
    """The slices of all threads (process, thread), each as (start ns, minus its length, encoded event)."""

    def __init__(self) -> None:
        self.threads: dict[tuple[int, Any], list[tuple[int, int, bytes]]] = {}
        self.labels: dict[tuple[int, Any], str] = {}
        self.counters: dict[tuple[int, str], list[tuple[int, int]]] = {}
        # Numbers of names: of events (2), categories (1) and arguments (3), see InternedData.
        self.names: dict[int, dict[str, int]] = {1: {}, 2: {}, 3: {}}
        self.flows: dict[tuple[int, Any, int], bytes] = {}
        self.flow_ids: dict[str, int] = {}

    def add(self, event: Event) -> None:
        kind, thread = event.get("ph"), (event["pid"], event.get("tid"))
        start = round(float(event.get("ts") or 0) * 1000)
        given = event.get("args")
        arguments: Event = given if isinstance(given, dict) else {}
        if kind == "M":
            if event.get("name") in ("process_name", "thread_name"):
                at = thread if event["name"] == "thread_name" else (event["pid"], None)
                self.labels[at] = str(arguments.get("name", ""))
        elif kind == "X":
            body = varint_field(10, self._name(2, str(event.get("name", ""))))
            body += varint_field(3, self._name(1, str(event.get("cat", ""))))
            body += b"".join(message_field(4, self._argument(*each)) for each in arguments.items())
            length = round(float(event.get("dur") or 0) * 1000)
            self.threads.setdefault(thread, []).append((start, -length, body))
        elif kind in ("s", "t", "f") and "id" in event:
            number = self.flow_ids.setdefault(f"{event.get('cat')} {event['id']}", len(self.flow_ids) + 1)
            flow = tag(48 if kind == "f" else 47, FIXED64) + struct.pack("<Q", number)
            place = (*thread, start)
            self.flows[place] = self.flows.get(place, b"") + flow
        elif event.get("name") == "[memory]" and type(arguments.get("Total Allocated")) is int:
            device = f"{arguments.get('Device Type', '')}:{arguments.get('Device Id', '')} allocated"
            level = (start, arguments["Total Allocated"])
            self.counters.setdefault((event["pid"], device), []).append(level)

    def _name(self, field: int, text: str) -> int:
        known = self.names[field]
        return known.setdefault(text, len(known) + 1)

    def _argument(self, name: str, value: Any) -> bytes:
        head = varint_field(1, self._name(3, name))
        if isinstance(value, bool) or (isinstance(value, int) and 0 <= value < 1 << 63):
            return head + varint_field(3, int(value))
        return head + message_field(6, (value if isinstance(value, str) else json.dumps(value)).encode())

    def packets(self) -> Iterator[bytes]:
        processes = dict.fromkeys(process for process, _ in (*self.threads, *self.counters))
        for process in processes:
            about = message((1, process), (6, self.labels.get((process, None), f"process {process}")))
            yield message((60, message((1, process), (3, about))))
        yield interned(self.names)
        track = 1 << 40
        for number, (thread, slices) in enumerate(self.threads.items(), 1):
            slices.sort(key=lambda each: each[:2])
            for lane in self._lanes(thread, slices):
                track += 1
                label = self.labels.get(thread, str(thread[1]))
                about = message((1, thread[0]), (2, number), (5, label))
                yield message((60, message((1, track), (5, thread[0]), (2, label), (4, about))))
                head = message((10, SEQUENCE), (13, NEEDED))
                for time, body in lane:
                    begins = varint_field(9, BEGIN if body else END) + varint_field(11, track) + body
                    yield varint_field(8, time) + head + message_field(11, begins)
        for (process, label), levels in self.counters.items():
            track += 1
            yield from counter(track, process, label, "bytes", sorted(levels))

    def _lanes(
        self, thread: tuple[int, Any], slices: list[tuple[int, int, bytes]]
    ) -> list[list[tuple[int, bytes]]]:
        """Begins (with their event) and ends (without) in order of time; a slice that overlaps another one
        without lying within it, as kernels of one stream may, goes to a further lane.
        """
        lanes: list[list[tuple[int, bytes]]] = []
        open_ends: list[list[int]] = []
        for start, minus, body in slices:
            end, at = start - minus, 0
            while at < len(lanes):
                ends = open_ends[at]
                while ends and ends[-1] <= start:
                    lanes[at].append((ends.pop(), b""))
                if not ends or end <= ends[-1]:
                    break
                at += 1
            else:
                lanes.append([])
                open_ends.append([])
            open_ends[at].append(end)
            lanes[at].append((start, body + self.flows.pop((*thread, start), b"")))
        for lane, ends in zip(lanes, open_ends, strict=True):
            lane += [(end, b"") for end in reversed(ends)]
        return lanes
