"""The program of a simulated process: threads of instructions, with operators around them.

A duration that a test may want to change has a ``key``; ``machine.run`` takes the changes by key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Stream = tuple[int, int]
"""(device, stream)"""


@dataclass
class Tensor:
    """A tensor as in the host trace."""

    storage: int
    elements: int
    dtype: str = "float"
    device: str = "cuda:0"


@dataclass
class Comm:
    """One collective, send or receive. ``kind``: its name in c10d's ``record_param_comms``."""

    kind: str
    group: str = "0"
    elements: int = 256
    out_elements: int = 256
    dtype: str = "float"
    asynchronous: bool = False
    source: int = -1
    target: int = -1
    tag: int = 0
    storage: int = 0


@dataclass
class Busy:
    """The thread works for ``ns``."""

    ns: int
    key: str = ""


@dataclass
class Op:
    """Something that the profiler records on a CPU thread around ``body``.

    ``recorded`` is False for calls that are missing from the trace. ``sequence`` and ``forward`` (name of
    the forward thread) as autograd numbers them.
    """

    name: str
    body: list[Instruction] = field(default_factory=list)
    category: Literal["cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "python_function"] = (
        "cpu_op"
    )
    tensors: list[Tensor] = field(default_factory=list)
    comm: Comm | None = None
    sequence: int = -1
    forward: str = ""
    recorded: bool = True


@dataclass
class Launch:
    """Put work on a stream's queue; the call around it is the launching call.

    ``overlap``: runs beside what the same call launched before it (parallel branches of a graph).
    """

    name: str
    ns: int
    stream: Stream
    category: Literal["kernel", "gpu_memcpy", "gpu_memset"] = "kernel"
    comm: Comm | None = None
    overlap: bool = False
    key: str = ""


@dataclass
class Record:
    """cudaEventRecord: ``event`` covers all work on the stream so far."""

    event: str
    stream: Stream


@dataclass
class StreamWait:
    """cudaStreamWaitEvent: later launches on ``stream`` wait for ``event``."""

    event: str
    stream: Stream


@dataclass
class Block:
    """The thread waits for the device: all of it, a stream, an event, or for the copy launched last."""

    on: Literal["device", "stream", "event", "copy"]
    stream: Stream = (0, 7)
    event: str = ""


@dataclass
class Signal:
    """Wake all threads that wait for ``key``."""

    key: str


@dataclass
class Await:
    """Wait until ``key`` has been signalled."""

    key: str


@dataclass
class Post:
    """Pass a communication to the backend's worker threads (gloo)."""

    name: str
    ns: int
    comm: Comm
    key: str = ""


@dataclass
class AwaitComm:
    """Wait until the communication ``key`` is done."""

    key: str


Instruction = Busy | Op | Launch | Record | StreamWait | Block | Signal | Await | Post | AwaitComm


@dataclass
class Group:
    """A process group: PyTorch's name, its ranks and how many gloo threads it has."""

    name: str
    ranks: tuple[int, ...]
    description: str = ""
    threads: int = 2


@dataclass
class Program:
    """``threads``: name → what it does; "main" is the process's first thread.

    ``latency``: ns from the launch to the earliest start of device work; ``wake_up``: ns from the end of
    what a thread waits for until it runs; ``pick_up``: ns until a gloo thread takes a new task.
    """

    threads: dict[str, list[Instruction]]
    groups: list[Group] = field(default_factory=list)
    rank: int = 0
    world_size: int = 1
    latency: int = 0
    wake_up: int = 0
    pick_up: int = 0
