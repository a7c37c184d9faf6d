"""Field names and event categories in the Kineto traces of all known writers."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from chakra_et.traces.fields import Number

CPU_CATEGORIES = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
SYNC_CATEGORY = "cuda_sync"
CATEGORIES = (*CPU_CATEGORIES, *GPU_CATEGORIES, SYNC_CATEGORY)
CPU_OP, ANNOTATION, RUNTIME, DRIVER, KERNEL, MEMCPY, MEMSET, SYNC = range(len(CATEGORIES))
# Names for the above in traces of older writers and other vendors.
_ALIASES = {
    "cpu_op": "Operator cpu_instant_event",
    "cuda_runtime": "Runtime hip_runtime xpu_runtime mtia_runtime privateuse1_runtime",
    "cuda_driver": "privateuse1_driver xpu_driver",
    "kernel": "Kernel concurrent_kernel mtia_ccp_events",
    "gpu_memcpy": "Memcpy",
    "gpu_memset": "Memset",
}
CODES = {name: code for code, name in enumerate(CATEGORIES)}
CODES |= {alias: CODES[name] for name, aliases in _ALIASES.items() for alias in aliases.split()}
# Category → the loss as which its events are counted (an id of ``findings.TABLE``), as they become no node.
NOT_A_NODE = {
    "Trace": "profiler-span",
    "gpu_user_annotation": "gpu-annotation",
    "python_function": "python-frame",
    "cuda_event": "event-record",
    "overhead": "profiler-overhead",
}
MEMORY = "[memory]"
MODULE = "nn.Module: "
"""Prefix of the names of Python frames that are forward calls of modules."""


class Args(msgspec.Struct, gc=False):
    """The arguments that the conversion needs; -1, None or empty if absent."""

    external_id: Number = msgspec.field(name="External id", default=-1)
    rf_id: Number = msgspec.field(name="Record function id", default=-1)
    sequence: Number = msgspec.field(name="Sequence number", default=-1)
    forward_thread: Number = msgspec.field(name="Fwd thread id", default=-1)
    correlation: Number = -1
    stream: Number = None
    original_stream: Number = None
    device: Number = None
    sync_kind: str | None = msgspec.field(name="cuda_sync_kind", default=None)
    wait_on_stream: Number = None
    record_correlation: Number = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=None)
    collective: str | None = msgspec.field(name="Collective name", default=None)
    dtype: str | None = None
    in_elements: Number = msgspec.field(name="In msg nelems", default=None)
    out_elements: Number = msgspec.field(name="Out msg nelems", default=None)
    in_split: Any = msgspec.field(name="In split size", default=None)
    out_split: Any = msgspec.field(name="Out split size", default=None)
    group_name: Number = msgspec.field(name="Process Group Name", default=None)
    group_description: str | None = msgspec.field(name="Process Group Description", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    group_size: Number = msgspec.field(name="Group size", default=None)
    source_rank: Number = msgspec.field(name="Src Rank", default=None)
    target_rank: Number = msgspec.field(name="Dst Rank", default=None)
    bytes: Number = -1
    grid: msgspec.Raw = msgspec.Raw(b"")
    block: msgspec.Raw = msgspec.Raw(b"")
    graph_id: Number = msgspec.field(name="graph id", default=-1)
    name: Any = None
    memory_bytes: Any = msgspec.field(name="Bytes", default=None)
    allocated: Any = msgspec.field(name="Total Allocated", default=None)
    reserved: Any = msgspec.field(name="Total Reserved", default=None)
    device_type: Any = msgspec.field(name="Device Type", default=None)
    device_id: Any = msgspec.field(name="Device Id", default=None)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b""))
    concrete: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw(b""))
    strides: msgspec.Raw = msgspec.field(name="Input Strides", default=msgspec.Raw(b""))


class Event(msgspec.Struct, gc=False):
    ph: str
    name: Any = ""
    cat: str | None = None
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: float | int | str = 0.0
    dur: float | int | str = 0.0
    args: Args | None = None


class HeaderFields(msgspec.Struct):
    """A trace without its events."""

    distributedInfo: Any = None
    deviceProperties: Any = None
    baseTimeNanoseconds: Any = None
    host_name: Any = None
    chakra_et: Any = None
    chakra_et_repairs: Any = None


class Header(HeaderFields, kw_only=True):
    traceEvents: list[Event]


_Time = Annotated[float, Meta(ge=0, lt=1e15)]


class Recording(msgspec.Struct, frozen=True):
    """What our tracer writes into the device trace about the recording itself: the field ``chakra_et``.

    Behind the structure step and outside of all steps, the tracer repeats a small computation whose CPU time
    without recording it has measured before. What it takes longer is the cost of recording.

    ``structure_step``: the step in which the ExecutionTraceObserver ran; its times are not used if a step
    follows. ``step_us``: duration by the host's clock and CPU time of the process, in µs, of each step from
    the first of the training on, the first ``untraced_steps`` of which ran without a profiler.
    ``untraced_total_us``: with a GPU, how many of the last untraced steps were measured together, from an
    idle device to an idle device, and both times of all of them.
    ``plain_us``, ``recorded_us``: CPU time of the computation: ``operators``, and with a GPU ``launches``, of
    which there are as many as that says. ``passes``: how often it ran within the recording.
    """

    structure_step: Annotated[int, Meta(ge=0)]
    untraced_steps: Annotated[int, Meta(ge=0)]
    step_us: list[tuple[_Time, _Time]]
    untraced_total_us: tuple[Annotated[int, Meta(ge=1, le=10**6)], _Time, _Time] | None = None
    plain_us: dict[str, _Time] = {}
    recorded_us: dict[str, _Time] = {}
    passes: Annotated[int, Meta(ge=1)] = 1
    launches: Annotated[int, Meta(ge=1)] = 1

    @property
    def untraced_us(self) -> list[tuple[float, float]]:
        """As ``untraced_alone_us``. With a GPU the mean of them for each, with the device's work."""
        if self.untraced_total_us:
            steps, wall, cpu = self.untraced_total_us
            return [(wall / steps, cpu / steps)] * steps
        return self.untraced_alone_us

    @property
    def untraced_alone_us(self) -> list[tuple[float, float]]:
        """The later half of the untraced steps: allocator and caches warm up in the first ones. With a GPU
        these are the host's times, which may be ahead of the device."""
        return self.step_us[max(1, self.untraced_steps // 2) : self.untraced_steps]

    @property
    def timed_us(self) -> list[tuple[float, float]]:
        """The steps that count: those after the structure step or, without any, that step itself."""
        return self.step_us[self.structure_step + 1 :] or self.step_us[self.structure_step :]

    def added_us(self, what: str) -> float:
        """CPU time that recording adds to one pass of the operators or of the launches."""
        return max(self.recorded_us.get(what, 0.0) - self.plain_us.get(what, 0.0), 0.0)


def read_recording(field: Any) -> Recording | None:
    """The field's value; None if it is absent or not ours."""
    try:
        return msgspec.convert(field, Recording)
    except msgspec.ValidationError:
        return None
