"""Events in the Trace Event Format as a Perfetto trace (.pftrace), for https://ui.perfetto.dev.

Processes, threads, slices with their arguments, flows, and counters. Source of the field numbers: perfetto's
protos/perfetto/trace (trace_packet, track_event, track_descriptor, interned_data); times are ns on the
trace's default clock.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

from chakra_et.et.wire import FIXED64, message_field, tag, text_field, varint_field

SEQUENCE = 1
CLEARED, NEEDED = 1, 2  # SequenceFlags
BEGIN, END, COUNTER = 1, 2, 4  # TrackEvent.Type

Event = dict[str, Any]


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """A message of (field number, value) …: whole numbers, texts and messages."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(varint_field(number, value))
        elif isinstance(value, str):
            parts.append(text_field(number, value))
        else:
            parts.append(message_field(number, value))
    return b"".join(parts)


def interned(names: Mapping[int, Iterable[str]]) -> bytes:
    """The names that events refer to, numbered from 1: by field of InternedData."""
    table = b"".join(
        message((field, message((1, number), (2, name))))
        for field, of_field in names.items()
        for number, name in enumerate(of_field, 1)
    )
    return message((10, SEQUENCE), (13, CLEARED), (12, table))


def counter(uuid: int, process: int, label: str, levels: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """A counter track of a process, and its level from each moment on."""
    unit = "kernels" if "launched" in label else "bytes"
    yield message((60, message((1, uuid), (5, process), (2, label), (8, message((6, unit))))))
    head, event = varint_field(10, SEQUENCE), message((9, COUNTER), (11, uuid))
    for time, level in levels:
        yield varint_field(8, time) + head + message_field(11, event + varint_field(30, max(level, 0)))


class Slices:
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
        elif kind == "C":
            levels = self.counters.setdefault((event["pid"], str(event["name"])), [])
            levels.append((start, arguments["value"]))
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

    def write(self, file: IO[bytes]) -> int:
        """Write the trace, and return how many slices it has."""
        for packet in self._packets():
            file.write(message_field(1, packet))
        return sum(map(len, self.threads.values()))

    def _packets(self) -> Iterator[bytes]:
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
            yield from counter(track, process, label, sorted(levels))

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
