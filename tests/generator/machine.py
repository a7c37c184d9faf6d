"""Run a program: compute all times and dependencies.

Threads run at the same time; each stream does its queue in order; each gloo group has one network link,
which its communications share in order. Nothing else is contended for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.generator.program import (
    Await,
    AwaitComm,
    Block,
    Busy,
    Comm,
    Instruction,
    Launch,
    Op,
    Post,
    Program,
    Record,
    Signal,
    Stream,
    StreamWait,
    Tensor,
)

LINKED_CATEGORIES = ("cpu_op", "user_annotation")
Lane = tuple
"""("cpu", thread name), ("gpu", device, stream) or ("comm", group, …)."""
Point = tuple[Lane, int]


@dataclass
class Event:
    """A recorded event, ns. ``busy``: its self time without waits.

    ``call``: number of the launching call, ``launch_ns`` when it was put on the queue (device work);
    ``launcher`` likewise of a communication. ``recorded`` is False for what the trace does not show.
    ``rf_id``, ``external`` and ``correlation`` are 0 where the profiler gives none.
    """

    number: int
    name: str
    category: str
    lane: Lane
    start: int
    end: int = -1
    parent: int = -1
    busy: int = 0
    rf_id: int = 0
    external: int = 0
    correlation: int = 0
    sequence: int = -1
    forward: str = ""
    tensors: list[Tensor] = field(default_factory=list)
    comm: Comm | None = None
    call: int = -1
    key: str = ""
    thread: int = 0
    sync: dict = field(default_factory=dict)
    recorded: bool = True


@dataclass
class Edge:
    """A true dependency of ``target``. Kinds as in the report of a conversion.

    ``source_event``, ``target_event``: numbers of the events off the CPU at its ends, -1 on a CPU thread.
    """

    kind: str
    source: Point
    target: Point
    source_event: int = -1
    target_event: int = -1


@dataclass
class Run:
    """The execution. ``busy``: ns that each CPU thread worked between its first and last event, without
    waits. ``flows``: (forward, backward) event numbers, as Kineto draws its fwdbwd arrows."""

    events: list[Event]
    edges: list[Edge]
    busy: dict[str, int]
    end: int
    flows: list[tuple[int, int]]

    def by_key(self) -> dict[str, Event]:
        return {event.key: event for event in self.events if event.key}


@dataclass
class _Exit:
    event: Event | None


@dataclass
class _Thread:
    name: str
    instructions: Iterator[Instruction | _Exit]
    clock: int = 0
    stack: list[Event] = field(default_factory=list)
    busy: int = 0
    unseen: int = 0
    seen: bool = False

    @property
    def lane(self) -> Lane:
        return ("cpu", self.name)


@dataclass
class _Queue:
    """A stream: when it is free, its last work, and what its next work must wait for.

    ``before_call``: free and last as they were before the call ``call`` launched anything.
    """

    free: int = 0
    last: Event | None = None
    call: int = -1
    before_call: tuple[int, Event | None] = (0, None)
    waits: list[Event] = field(default_factory=list)


def run(program: Program, changes: dict[str, int] | None = None) -> Run:
    """Run the program with some durations changed: key → ns to add."""
    return _Machine(program, changes or {}).run()


class _Machine:
    def __init__(self, program: Program, changes: dict[str, int]) -> None:
        self.program, self.changes = program, changes
        self.events: list[Event] = []
        self.edges: list[Edge] = []
        self.streams: dict[Stream, _Queue] = {}
        self.records: dict[str, tuple[Event | None, int, Stream]] = {}
        self.signals: dict[str, Point] = {}
        self.waiting: dict[str, list[_Thread]] = {}
        self.comms: dict[str, Event] = {}
        self.links: dict[Lane, int] = {}
        self.workers: dict[str, list[int]] = {}
        self.rf_id = self.external = 1
        self.correlation = 0

    def run(self) -> Run:
        threads = [_Thread(name, self._walk(body)) for name, body in self.program.threads.items()]
        ready = [(0, number) for number in range(len(threads))]
        finished = 0
        while ready:
            # The thread that is furthest behind goes on, so that queues fill in the order of time.
            _, number = heapq.heappop(ready)
            thread = threads[number]
            instruction = next(thread.instructions, None)
            if instruction is None:
                finished += 1
                continue
            for runnable in self._step(thread, instruction):
                heapq.heappush(ready, (runnable.clock, threads.index(runnable)))
        assert finished == len(threads), f"threads wait for ever: {list(self.waiting)}"
        return Run(
            [event for event in self.events if event.recorded],
            self.edges,
            {thread.name: thread.busy for thread in threads},
            max(event.end for event in self.events),
            self._flows(),
        )

    def _walk(self, body: list[Instruction]) -> Iterator[Instruction | _Exit]:
        for instruction in body:
            yield instruction
            if isinstance(instruction, Op):
                yield from self._walk(instruction.body)
                yield _Exit(None)

    def _step(self, thread: _Thread, instruction: Instruction | _Exit) -> list[_Thread]:
        """Execute one instruction; returns the threads that can resume."""
        match instruction:
            case Op():
                thread.stack.append(self._enter(thread, instruction))
            case _Exit():
                thread.stack.pop().end = thread.clock
            case Busy(ns, key):
                self._work(thread, max(ns + self.changes.get(key, 0), 0), key)
            case Launch():
                self._launch(thread, instruction)
            case Record(event, stream):
                self.records[event] = (self._queue(stream).last, thread.stack[-1].correlation, stream)
            case StreamWait(event, stream):
                self._stream_wait(thread, event, stream)
            case Block():
                self._block(thread, instruction)
            case Signal(key):
                self.signals[key] = (thread.lane, thread.clock)
                return [thread, *(self._resume(waiter, key) for waiter in self.waiting.pop(key, []))]
            case Await(key):
                if key not in self.signals:
                    self.waiting.setdefault(key, []).append(thread)
                    return []
                self._resume(thread, key)
            case Post():
                self._post(thread, instruction)
            case AwaitComm(key):
                self._wait_until(thread, "collective", [self.comms[key]])
        return [thread]

    def _enter(self, thread: _Thread, op: Op) -> Event:
        event = self._event(op.name, op.category, thread.lane, thread.clock, recorded=op.recorded)
        if op.recorded:
            thread.busy += thread.unseen if thread.seen else 0
            thread.seen, thread.unseen = True, 0
        event.parent = thread.stack[-1].number if thread.stack else -1
        event.tensors, event.comm, event.sequence, event.forward = (
            op.tensors,
            op.comm,
            op.sequence,
            op.forward,
        )
        if op.category in LINKED_CATEGORIES:
            self.rf_id, self.external = self.rf_id + 1, self.external + 1
            event.rf_id, event.external = self.rf_id, self.external
        elif op.category != "python_function":
            self.correlation += 1
            event.correlation = self.correlation
            event.external = next((e.external for e in reversed(thread.stack) if e.external), 0)
        return event

    def _event(self, name: str, category: str, lane: Lane, start: int, recorded: bool = True) -> Event:
        event = Event(len(self.events), name, category, lane, start, recorded=recorded)
        self.events.append(event)
        return event

    def _work(self, thread: _Thread, ns: int, key: str) -> None:
        thread.clock += ns
        owner = next((event for event in reversed(thread.stack) if event.recorded), None)
        if owner is None:
            thread.unseen += ns
            return
        thread.busy += ns
        owner.busy += ns
        owner.key = key or owner.key

    def _queue(self, stream: Stream) -> _Queue:
        return self.streams.setdefault(stream, _Queue())

    def _launch(self, thread: _Thread, work: Launch) -> None:
        queue, call = self._queue(work.stream), thread.stack[-1]
        ns = max(work.ns + self.changes.get(work.key, 0), 0)
        ready = [thread.clock + self.program.latency, *(event.end for event in queue.waits)]
        if call.number != queue.call:
            queue.call, queue.before_call = call.number, (queue.free, queue.last)
        free, last = queue.before_call if work.overlap else (queue.free, queue.last)
        ready.append(free)
        event = self._event(work.name, work.category, ("gpu", *work.stream), max(ready))
        event.end, event.busy, event.key, event.comm = event.start + ns, ns, work.key, work.comm
        event.call, event.correlation, event.external = call.number, call.correlation, call.external
        if call.recorded:
            self._edge("launch", (thread.lane, thread.clock), event)
        if last is not None:
            self._edge("stream order", last, event)
        for awaited in queue.waits:
            self._edge("synchronisation", awaited, event)
        queue.waits = []
        queue.last = event if event.end >= queue.free else queue.last
        queue.free = max(queue.free, event.end)

    def _stream_wait(self, thread: _Thread, event: str, stream: Stream) -> None:
        last, recording_call, recorded_on = self.records[event]
        if last is not None:
            self._queue(stream).waits.append(last)
        thread.stack[-1].sync = {
            "kind": "Stream Wait Event",
            "stream": stream,
            "wait_on": recorded_on,
            "record": recording_call,
        }

    def _block(self, thread: _Thread, block: Block) -> None:
        call = thread.stack[-1]
        if block.on == "device":
            done = [queue.last for stream, queue in self.streams.items() if stream[0] == block.stream[0]]
            call.sync = {"kind": "Context Sync", "stream": (block.stream[0], -1)}
        elif block.on == "event":
            last, recording_call, recorded_on = self.records[block.event]
            done = [last]
            call.sync = {
                "kind": "Event Sync",
                "stream": (recorded_on[0], -1),
                "wait_on": recorded_on,
                "record": recording_call,
            }
        else:
            done = [self._queue(block.stream).last]
            if block.on == "stream":
                call.sync = {"kind": "Stream Sync", "stream": block.stream}
        self._wait_until(thread, "synchronisation", [event for event in done if event is not None])

    def _post(self, thread: _Thread, post: Post) -> None:
        comm = post.comm
        group = next(group for group in self.program.groups if group.name == comm.group)
        point_to_point = comm.kind in ("send", "recv")
        link = ("comm", comm.group, *((comm.kind, comm.source, comm.target) if point_to_point else ()))
        workers = self.workers.setdefault(comm.group, [0] * group.threads)
        worker = min(range(len(workers)), key=lambda number: workers[number])
        begin = thread.clock + (
            0 if point_to_point else max(self.program.pick_up, workers[worker] - thread.clock)
        )
        event = self._event(post.name, "user_annotation", link, begin)
        ns = max(post.ns + self.changes.get(post.key, 0), 0)
        event.end, event.busy, event.key, event.comm = (
            max(begin, self.links.get(link, 0)) + ns,
            ns,
            post.key,
            comm,
        )
        event.thread, event.call = -1 if point_to_point else worker, thread.stack[-1].number
        if not point_to_point:
            workers[worker] = event.end
        self.links[link] = event.end
        self.rf_id, self.external = self.rf_id + 1, self.external + 1
        event.rf_id, event.external = self.rf_id, self.external
        event.parent = thread.stack[-1].number
        self.comms[post.key] = event
        self._edge("launch", (thread.lane, thread.clock), event)

    def _wait_until(self, thread: _Thread, kind: str, done: list[Event]) -> None:
        for event in done:
            resumed = thread.clock if event.end <= thread.clock else event.end + self.program.wake_up
            thread.clock = max(thread.clock, resumed)
        resumed_at = (thread.lane, thread.clock)
        self.edges += [Edge(kind, (event.lane, event.end), resumed_at, event.number) for event in done]

    def _resume(self, thread: _Thread, key: str) -> _Thread:
        source, moment = self.signals[key]
        if moment >= thread.clock:
            thread.clock = moment + self.program.wake_up
        self.edges.append(Edge("inter thread", (source, moment), (thread.lane, thread.clock)))
        return thread

    def _edge(self, kind: str, source: Event | Point, target: Event) -> None:
        point, number = (
            ((source.lane, source.end), source.number) if isinstance(source, Event) else (source, -1)
        )
        self.edges.append(Edge(kind, point, (target.lane, target.start), number, target.number))

    def _flows(self) -> list[tuple[int, int]]:
        forward = {e.sequence: e.number for e in reversed(self.events) if e.sequence >= 0 and not e.forward}
        backward = {e.sequence: e.number for e in reversed(self.events) if e.sequence >= 0 and e.forward}
        return [(forward[number], event) for number, event in backward.items() if number in forward]
