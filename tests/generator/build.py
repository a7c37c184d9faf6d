"""Random training programs with the given steps, threads, streams and oddities."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.generator.parts import Parts
from tests.generator.program import Await, Busy, Comm, Group, Instruction, Op, Program, Signal, Stream

COMM_STREAM = 30
SIDE_STREAM = 20


@dataclass(frozen=True)
class Features:
    """The features of a program. Sizes: ``steps``, ``operators`` per step, ``depth`` of nesting.

    ``devices``: GPUs of the process (0: none). ``nccl`` and ``gloo`` list collectives, by their c10d names;
    ``late``: the gloo collectives are asynchronous and waited for where their data is used. ``groups``:
    number of process groups. ``latency``, ``tail``, ``wake_up``, ``pick_up``: ns, as in ``Program`` and
    ``Parts``; all 0 gives a machine whose times the dependencies alone explain. ``resolution``: ns.
    """

    seed: int = 0
    steps: int = 1
    operators: int = 8
    depth: int = 3
    devices: int = 1
    step_annotations: bool = True
    side_streams: bool = False
    waits: tuple[str, ...] = ()
    graphs: bool = False
    overlap: bool = False
    autograd_thread: bool = False
    accumulate_on_main: bool = False
    nccl: tuple[str, ...] = ()
    nccl_kernels: str = "dev"
    gloo: tuple[str, ...] = ()
    late: bool = False
    groups: int = 1
    world_size: int = 2
    rank: int = 0
    orphans: bool = False
    worker_thread: bool = False
    latency: int = 0
    tail: int = 0
    wake_up: int = 0
    pick_up: int = 0
    resolution: int = 1


def build(features: Features) -> Program:
    """The program for these features; the same features give the same program."""
    return _Builder(features).program()


class _Builder:
    def __init__(self, features: Features) -> None:
        self.features = features
        self.random = random.Random(features.seed)
        memory = "cuda:0" if features.devices else "cpu"
        self.parts = Parts(
            self.random, features.resolution, features.tail, features.nccl_kernels, memory=memory
        )
        self.main: list[Instruction] = []
        self.autograd: list[Instruction] = []
        ranks = tuple(range(features.world_size))
        self.groups = [
            Group(str(n), ranks, "default_pg" if n == 0 else f"group_{n}") for n in range(features.groups)
        ]

    def program(self) -> Program:
        f = self.features
        for step in range(f.steps):
            body = self._step(step)
            name = f"ProfilerStep#{step + 2}"
            self.main += [Op(name, body, "user_annotation")] if f.step_annotations else body
            self.main.append(self.parts.python())
        if f.devices:
            self.main += [self.parts.synchronise("device", (device, -1)) for device in range(f.devices)]
        threads = {"main": self.main}
        if self.autograd:
            threads["autograd"] = self.autograd
        if f.worker_thread:
            threads["worker"] = self._worker()
        return Program(threads, self.groups, f.rank, f.world_size, f.latency, f.wake_up, f.pick_up)

    def _stream(self, number: int = 7) -> Stream | None:
        return (self.parts.device, number) if self.features.devices else None

    def _step(self, step: int) -> list[Instruction]:
        f, parts = self.features, self.parts
        body: list[Instruction] = [parts.python()]
        for device in range(max(f.devices, 1)):
            parts.device = device
            body += self._work_of_device(step)
        parts.device = 0
        optimizer = [parts.operator(self._stream(), 1) for _ in range(2)]
        return [
            *body,
            Op("Optimizer.step#AdamW.step", [parts.python(), *optimizer], "user_annotation"),
            parts.python(),
        ]

    def _work_of_device(self, step: int) -> list[Instruction]:
        f, parts, stream = self.features, self.parts, self._stream()
        forward: list[Instruction] = []
        operators: list[Op] = []
        extras = self._extras()
        for number in range(max(f.operators, len(extras))):
            if number < f.operators:
                operators.append(parts.operator(stream, f.depth))
                forward.append(operators[-1])
            if self.random.random() < 0.5:
                forward.append(Busy(parts.ns(300, 8_000)))
            if number < len(extras):
                forward += extras[number]
        return [
            Op("## forward ##", forward, "user_annotation"),
            parts.python(),
            *self._backward(step, operators),
        ]

    def _extras(self) -> list[list[Instruction]]:
        """Groups of instructions, one per feature, to insert between the forward operators."""
        f, parts, stream = self.features, self.parts, self._stream()
        extras: list[list[Instruction]] = []
        if stream is not None:
            if f.side_streams:
                extras.append(
                    parts.side_stream(stream, self._stream(SIDE_STREAM), [parts.operator(stream, 1)])
                )
            if f.graphs:
                extras.append([parts.graph(stream, 4, f.overlap)])
            if f.orphans:
                extras.append(
                    [parts.launch(stream, name="void launched_unseen()", recorded=False), parts.python()]
                )
            for wait in f.waits:
                extras.append(self._wait(wait, stream))
            for kind in f.nccl:
                op, join = parts.nccl(self._comm(kind), stream, self._stream(COMM_STREAM))
                extras.append([op, parts.leaf(), *join, parts.launch(stream)])
        for kind in f.gloo:
            late = [parts.leaf(), parts.operator(stream, 2)] if f.late else None
            extras.append(parts.gloo(self._comm(kind), late))
        self.random.shuffle(extras)
        return extras

    def _wait(self, kind: str, stream: Stream) -> list[Instruction]:
        parts = self.parts
        if kind == "item":
            return [parts.item(stream)]
        if kind == "copy":
            return [parts.blocking_copy(stream)]
        if kind == "event":
            event = parts.key("event")
            return [parts.record(event, stream), parts.leaf(), parts.synchronise("event", stream, event)]
        return [parts.synchronise(kind, stream)]

    def _comm(self, kind: str) -> Comm:
        f, group = self.features, self.random.choice(self.groups)
        elements = self.random.randint(1, 5_000)
        grown = elements * len(group.ranks)
        comm = Comm(kind, group.name, elements, elements)
        if kind in ("_allgather_base", "all_gather"):
            comm.out_elements = grown
        elif kind in ("_reduce_scatter_base", "reduce_scatter"):
            comm.elements = grown
        elif kind == "barrier":
            comm.elements = comm.out_elements = 1
        other = (f.rank + 1) % f.world_size
        if kind in ("send", "recv"):
            comm.source, comm.target = (f.rank, other) if kind == "send" else (other, f.rank)
        self.parts.storages += 1
        comm.storage = self.parts.storages
        return comm

    def _backward(self, step: int, operators: list[Op]) -> list[Instruction]:
        f, parts, stream = self.features, self.parts, self._stream()
        hooks: list[Instruction] = []
        joins: list[Instruction] = []
        if f.nccl and stream is not None:
            op, joins = parts.nccl(self._comm("allreduce"), stream, self._stream(COMM_STREAM))
            hooks.append(op)
        if not (f.autograd_thread and stream is not None):
            return [*parts.backward(operators, hooks, stream, "main"), *joins, parts.python()]
        name = f"{step} {parts.device}"
        middle: list[Instruction] = []
        if f.accumulate_on_main:
            hooks = [*hooks, Signal(f"accumulate {name}")]
            middle = parts.accumulate(f"accumulate {name}")
        self.autograd += [
            Await(f"backward {name}"),
            *parts.backward(operators, hooks, stream, "main"),
            *joins,
            Signal(f"backward done {name}"),
        ]
        return [Signal(f"backward {name}"), *middle, Await(f"backward done {name}"), parts.python()]

    def _worker(self) -> list[Instruction]:
        """An independent thread, such as a data loader."""
        body: list[Instruction] = []
        for _ in range(3 * self.features.steps):
            body += [Busy(self.parts.ns(5_000, 40_000)), self.parts.leaf()]
        return body
