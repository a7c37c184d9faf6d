"""The trace layouts of all profiler versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Layout:
    """``host``: schema of the host trace. ``time``: microseconds since ``baseTimeNanoseconds`` ("relative"),
    absolute ones without fractions ("absolute", as before PyTorch 2.3) or with them. ``ids``: False leaves
    the record-function ids out. ``sync_events``: cuda_sync records are there. ``comm_args``: communication
    kernels carry their arguments (PyTorch 2.2 on), ``comm_attrs`` record_param_comms does in the host trace.
    ``text``: as Kineto and the observer lay it out, or on one line. ``order`` of the device trace's events.
    ``original_stream``: the writer put its own lanes into ``stream``. ``extras``: annotations on device
    lanes, Python frames and the profiler's own records are there too.
    """

    host: Literal["1.0.1", "1.0.2", "1.0.3", "1.1.0", "1.1.1", "9.9.9"] = "1.1.1"
    time: Literal["relative", "absolute", "absolute decimals"] = "relative"
    ids: bool = True
    sync_events: bool = True
    comm_args: bool = True
    comm_attrs: bool = True
    flows: bool = True
    distributed: bool = True
    string_ids: bool = False
    text: Literal["profiler", "line"] = "profiler"
    order: Literal["time", "shuffled", "by category"] = "time"
    original_stream: bool = False
    extras: bool = True
    gz: bool = False


PID = 4242
BASE_NS = 1_790_857_026_000_000_000
START_US = 4_365_894_270_274
"""The machine's time 0 in a trace with relative times: µs since ``BASE_NS``."""
ABSOLUTE_US = 1_694_128_201_427_784
DTYPE_BYTES = {"float": 4, "long int": 8, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8}
"""Type names of the host trace → bytes."""
KINETO_DTYPES = {
    "float": "Float",
    "long int": "Long",
    "int": "Int",
    "c10::BFloat16": "BFloat16",
    "c10::Half": "Half",
    "double": "Double",
}


def thread_ids(threads: list[str]) -> dict[str, int]:
    """The operating system's id of each CPU thread; the first has the process's."""
    return {name: PID + 117 * number for number, name in enumerate(threads)}


def worker_id(group: int, worker: int) -> int:
    """The thread id of a gloo worker: each group creates its threads consecutively."""
    return PID + 5000 + 10 * group + worker


def zero_ns(layout: Layout) -> int:
    """The machine's time 0 in ns since the epoch, as the trace has it."""
    return BASE_NS + START_US * 1000 if layout.time == "relative" else ABSOLUTE_US * 1000
