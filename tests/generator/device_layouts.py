"""The device trace of a run, as Kineto writes it."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.generator.layouts import (
    ABSOLUTE_US,
    BASE_NS,
    DTYPE_BYTES,
    KINETO_DTYPES,
    PID,
    START_US,
    Layout,
    thread_ids,
    worker_id,
)
from tests.generator.machine import LINKED_CATEGORIES, Event, Run
from tests.generator.program import Comm, Program

# Lanes that a writer may put into ``stream``, so that ``original_stream`` is needed.
REWRITTEN = 1000


def device_trace(program: Program, run: Run, layout: Layout) -> dict[str, Any]:
    """The document, its events in the layout's order."""
    return _Device(program, run, layout).document()


class _Device:
    def __init__(self, program: Program, run: Run, layout: Layout) -> None:
        self.program, self.run, self.layout = program, run, layout
        self.tids = thread_ids(list(program.threads))
        self.group_number = {group.name: number for number, group in enumerate(program.groups)}
        self.recorded = {event.number for event in run.events}

    def document(self) -> dict[str, Any]:
        events = [self._event(event) for event in self.run.events]
        events += [self._sync(event) for event in self.run.events if event.sync and self.layout.sync_events]
        if self.layout.extras:
            events += self._extras()
        if self.layout.order == "time":
            events.sort(key=lambda event: event["ts"])
        elif self.layout.order == "by category":
            events.sort(key=lambda event: event["cat"])
        else:
            random.Random(7).shuffle(events)
        events += self._flows() if self.layout.flows else []
        events += self._names()
        header: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [], "record_shapes": 1}
        if self.layout.distributed and self.program.groups:
            header["distributedInfo"] = self._distributed()
        if self.layout.time == "relative":
            header |= {"host_name": "node0", "displayTimeUnit": "ms", "baseTimeNanoseconds": BASE_NS}
        return header | {"traceEvents": events, "traceName": "trace.json"}

    def _time(self, ns: int) -> float | int:
        if self.layout.time == "absolute":
            assert ns % 1000 == 0, "absolute times without fractions need a resolution of 1000 ns"
            return ABSOLUTE_US + ns // 1000
        return ((START_US if self.layout.time == "relative" else ABSOLUTE_US) * 1000 + ns) / 1000

    def _duration(self, ns: int) -> float | int:
        return ns // 1000 if self.layout.time == "absolute" else ns / 1000

    def _id(self, number: int) -> int | str:
        return str(number) if self.layout.string_ids else number

    def _event(self, event: Event) -> dict[str, Any]:
        if event.lane[0] == "gpu":
            pid, tid = event.lane[1], event.lane[2]
        elif event.lane[0] == "comm":
            worker = worker_id(self.group_number[event.lane[1]], event.thread)
            pid, tid = PID, worker if event.thread >= 0 else self.tids["main"]
        else:
            pid, tid = PID, self.tids[event.lane[1]]
        args: dict[str, Any] = {}
        if event.external:
            args["External id"] = event.external
        if event.category in LINKED_CATEGORIES:
            if self.layout.ids:
                args["Record function id"] = event.rf_id
            args["Ev Idx"] = event.number
            if event.sequence >= 0:
                # Kineto's own thread numbers, from 1; 0 for operators of the forward pass.
                forward = list(self.tids).index(event.forward) + 1 if event.forward else 0
                args |= {"Fwd thread id": forward, "Sequence number": event.sequence}
        elif event.lane[0] == "gpu":
            args |= self._device_args(event)
        elif event.correlation:
            args |= {"cbid": 211, "correlation": event.correlation}
        return {
            "ph": "X",
            "cat": event.category,
            "name": event.name,
            "pid": self._id(pid),
            "tid": self._id(tid),
            "ts": self._time(event.start),
            "dur": self._duration(event.end - event.start),
            "args": args,
        }

    def _device_args(self, event: Event) -> dict[str, Any]:
        _, device, stream = event.lane
        args: dict[str, Any] = {
            "device": device,
            "context": 1,
            "stream": stream,
            "correlation": event.correlation,
        }
        if self.layout.original_stream:
            args |= {"stream": REWRITTEN + stream % 2, "original_stream": stream}
        if event.comm is not None and self.layout.comm_args:
            args |= self._comm_args(event.comm)
        return args

    def _comm_args(self, comm: Comm) -> dict[str, Any]:
        group = next(group for group in self.program.groups if group.name == comm.group)
        args: dict[str, Any] = {
            "Collective name": comm.kind,
            "dtype": KINETO_DTYPES[comm.dtype],
            "In msg nelems": comm.elements,
            "Out msg nelems": comm.out_elements,
            "Group size": len(group.ranks),
            "Process Group Name": group.name,
            "Process Group Description": group.description,
            "Process Group Ranks": str(list(group.ranks)),
        }
        if comm.kind == "send":
            args["Dst Rank"] = comm.target
        elif comm.kind == "recv":
            args["Src Rank"] = comm.source
        return args

    def _sync(self, call: Event) -> dict[str, Any]:
        device, stream = call.sync["stream"]
        args = {
            "cuda_sync_kind": call.sync["kind"],
            "stream": stream,
            "correlation": call.correlation,
            "device": device,
        }
        if "wait_on" in call.sync:
            args |= {"wait_on_stream": call.sync["wait_on"][1], "wait_on_cuda_event_id": 5}
            args["wait_on_cuda_event_record_corr_id"] = call.sync["record"]
        return {
            "ph": "X",
            "cat": "cuda_sync",
            "name": call.sync["kind"],
            "pid": self._id(device),
            "tid": self._id(stream),
            "ts": self._time(call.start),
            "dur": self._duration(call.end - call.start),
            "args": args | {"context": 1},
        }

    def _extras(self) -> list[dict[str, Any]]:
        """Events that the converter must count and leave out."""
        start, length = self._time(0), self._duration(self.run.end)
        shared = {"ph": "X", "ts": start, "dur": length}
        return [
            shared
            | {
                "cat": "Trace",
                "name": "PyTorch Profiler (0)",
                "pid": "Spans",
                "tid": "PyTorch Profiler",
                "args": {},
            },
            shared
            | {
                "cat": "gpu_user_annotation",
                "name": "forward",
                "pid": 0,
                "tid": 7,
                "args": {"External id": 2},
            },
            shared
            | {
                "cat": "python_function",
                "name": "train.py(1): step",
                "pid": PID,
                "tid": PID,
                "args": {"Python id": 1},
            },
            shared | {"cat": "overhead", "name": "Activity Buffer Request", "pid": -1, "tid": 0, "args": {}},
            shared | {"cat": "news_of_2031", "name": "unheard of", "pid": PID, "tid": PID, "args": {}},
        ]

    def _flows(self) -> list[dict[str, Any]]:
        by_number = {event.number: event for event in self.run.events}
        flows = []
        for flow, (source, target) in enumerate(self.run.flows):
            if source in by_number and target in by_number:
                flows += self._flow("fwdbwd", flow, by_number[source], by_number[target])
        for event in self.run.events:
            if event.lane[0] == "gpu" and event.call in by_number:
                flows += self._flow("ac2g", event.correlation, by_number[event.call], event)
        return flows

    def _flow(self, kind: str, number: int, source: Event, target: Event) -> list[dict[str, Any]]:
        ends = []
        for ph, event in (("s", source), ("f", target)):
            row = self._event(event)
            end = {
                "ph": ph,
                "id": number,
                "pid": row["pid"],
                "tid": row["tid"],
                "ts": row["ts"],
                "cat": kind,
                "name": kind,
            }
            ends.append(end | ({"bp": "e"} if ph == "f" else {}))
        return ends

    def _names(self) -> list[dict[str, Any]]:
        start = self._time(0)
        threads = [
            {
                "ph": "M",
                "name": "thread_name",
                "ts": start,
                "pid": self._id(PID),
                "tid": self._id(tid),
                "args": {"name": f"thread {tid}"},
            }
            for tid in self.tids.values()
        ]
        instant = {
            "ph": "i",
            "s": "g",
            "name": "Iteration Start: PyTorch Profiler",
            "pid": "Traces",
            "tid": "Trace",
            "ts": start,
        }
        return [*threads, instant]

    def _distributed(self) -> dict[str, Any]:
        groups = [
            {
                "pg_name": g.name,
                "pg_desc": g.description,
                "backend_config": "cpu:gloo,cuda:nccl",
                "pg_size": len(g.ranks),
                "ranks": list(g.ranks),
            }
            for g in self.program.groups
        ]
        return {
            "backend": "nccl",
            "rank": self.program.rank,
            "world_size": self.program.world_size,
            "pg_count": len(groups),
            "pg_config": groups,
        }


def comm_bytes(comm: Comm) -> int:
    """The input of this rank."""
    return comm.elements * DTYPE_BYTES[comm.dtype]


def device_text(document: dict[str, Any], layout: Layout) -> str:
    """Indented as by Kineto, or on one line."""
    return json.dumps(document) if layout.text == "line" else json.dumps(document, indent=2)
