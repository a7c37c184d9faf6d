"""PyTorch's profiler and execution-trace observer as one recording.

The host trace comes from PyTorch's ExecutionTraceObserver, the device trace from Kineto. The observer takes
about 10 µs per operator, Kineto without shapes less than 1 µs. So the observer runs in one step only, the
structure step; Kineto records that step and the active ones, whose times count. The conversion matches them.

Kineto has one session per process. A second profiler takes it over without an error, and stopping or
exporting the lost session crashes the process. So a Recorder checks before each transition whose session it
is, and raises CaptureError instead of touching another profiler's.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ExecutionTraceObserver, ProfilerAction, ProfilerActivity, profile

from chakra_et.capture import gloo
from chakra_et.capture.heap import Reserve

# What recording costs is the CPU time of a small computation, once before the recording and once within it.
PASSES = 6
LAUNCHES = 200
_RUNNING = "another profiler is already running in this process"

_registered: weakref.WeakSet[ExecutionTraceObserver] = weakref.WeakSet()
# Observers that found another one registered. Deleting one would unregister the other, so they are kept.
_foreign: list[ExecutionTraceObserver] = []


class _Observer(ExecutionTraceObserver):
    """PyTorch's observer, which does not end while a thread of gloo is still ending a record.

    Gloo frees the calling thread first. Without the wait the record would lack its end, and after
    ``unregister_callback`` it would be written to freed memory, which crashes the training.
    """

    def stop(self) -> None:
        gloo.wait_until_idle()
        super().stop()

    def unregister_callback(self) -> None:
        gloo.wait_until_idle()
        super().unregister_callback()


class CaptureError(RuntimeError):
    """The capture can't continue; the training can."""


class Recorder:
    """Records ``active_steps`` after ``wait_steps`` + ``warmup_steps``.

    ``structure``: the step in which the observer runs: the last of the warm-up or, without one, the first
    active step. ``steps``: duration of each step so far by the host's clock, and the CPU time of the process
    in it, both in s; those before the structure step are untraced. ``memory`` also records allocations and
    frees as events of the device trace. Methods raise CaptureError if another profiler is running in this
    process; the recording is then lost, and ``abandon`` cleans up.
    """

    def __init__(self, wait_steps: int, warmup_steps: int, active_steps: int, memory: bool):
        self.memory = memory
        self.first, self.end = wait_steps + warmup_steps, wait_steps + warmup_steps + active_steps
        self.structure = self.first - 1 if warmup_steps else self.first
        self.steps: list[tuple[float, float]] = []
        # A profiler that prepares early notices one that another part of the program has prepared. With a GPU
        # it slows the program down from then on, and the structure step may be slow.
        early = max(min(wait_steps, self.structure - 1), 0)
        self.prepared = self.structure if torch.cuda.is_available() else early
        self._untraced_from = max(1, self.prepared // 2)
        self._marks: dict[int, tuple[float, float]] = {}
        self._plain_us: dict[str, float] = {}
        self._recorded_us: dict[str, float] = {}
        self._polling: list[int] = []
        self._began = self._now()
        self._observer: ExecutionTraceObserver | None = None
        self._profiler: Any = None
        self._taken = False
        self._reserve = Reserve()
        self._unhook: Callable[[], None] = lambda: None

    def start(self, host_trace: Path) -> None:
        """Begin with step 0; the observer writes ``host_trace``."""
        if torch.autograd._profiler_enabled() or _is_other_prepared():
            raise CaptureError(_RUNNING)
        self._observer = _register(host_trace)
        self._plain_us = _pass_us()
        self._profiler = self._make_profiler()
        self._unhook = self._watch_sessions()
        self._settle_device()
        self._profiler.__enter__()
        self._polling = gloo.polling_clocks()
        self._began = self._now()

    def step(self) -> None:
        """End the current step and begin the next."""
        self._require_session()
        wall, cpu = self._now()
        self.steps.append((wall - self._began[0], cpu - self._began[1]))
        if self.structure + 1 < len(self.steps) == self.end:
            self._describe()
        self._settle_device()
        self._profiler.step()
        if len(self.steps) == 1:  # the program has made its process groups
            self._polling = gloo.polling_clocks()
        self._began = self._now()

    def stop(self) -> None:
        """End the recording; the host trace is then complete."""
        self._require_session()
        if self._recording:
            self._describe()
        self._profiler.__exit__(None, None, None)
        self._forget()

    def export(self, device_trace: Path) -> None:
        """Write the device trace of a stopped recording."""
        self._profiler.export_chrome_trace(str(device_trace))

    def abandon(self) -> None:
        """End a recording that has failed, without touching the session of another profiler."""
        if self._observer is not None:
            self._observer.unregister_callback()
        if self._profiler is not None and not self._taken and self._recording:
            self._profiler.__exit__(None, None, None)
        elif self._profiler is not None:
            self._profiler.current_action = ProfilerAction.NONE  # or the next one would take it for prepared
        self._profiler = None
        self._forget()

    def _now(self) -> tuple[float, float]:
        cpu = time.process_time()
        for clock in self._polling:
            with contextlib.suppress(OSError):  # the thread has ended
                cpu -= time.clock_gettime(clock)
        return time.perf_counter(), cpu

    @property
    def _recording(self) -> bool:
        return self.structure <= len(self.steps) < self.end

    def _action(self, step: int) -> ProfilerAction:
        """The profiler's schedule. PyTorch asks for it when one step's record has ended and before the next
        one begins: only there can the observer stop without an operator cut in two."""
        if step == self.structure + 1 and self._observer is not None:
            if step < self.end:
                self._observer.stop()
            self._recorded_us = _pass_us()
            self._describe()
        if step < self.prepared or step >= self.end:
            return ProfilerAction.NONE
        if step < self.structure:
            return ProfilerAction.WARMUP
        self._reserve.refill()
        return ProfilerAction.RECORD if step < self.end - 1 else ProfilerAction.RECORD_AND_SAVE

    def _describe(self) -> None:
        """Write into the device trace what the conversion needs to find the untraced times."""
        facts = {
            "structure_step": self.structure,
            "untraced_steps": len(self.untraced),
            "step_us": [[round(wall * 1e6, 3), round(cpu * 1e6, 3)] for wall, cpu in self.steps],
            "untraced_total_us": self._untraced_total(),
            "plain_us": self._plain_us,
            "recorded_us": self._recorded_us,
            "passes": PASSES,
            "launches": LAUNCHES,
        }
        self._profiler.add_metadata_json("chakra_et", json.dumps(facts))

    @property
    def untraced(self) -> list[tuple[float, float]]:
        """The steps without a profiler."""
        return self.steps[: self.structure]

    def _untraced_total(self) -> list[float] | None:
        """How many untraced steps count, and what they took together; with a GPU only."""
        if len(self._marks) < 2:
            return None
        begin, end = (self._marks[at] for at in (self._untraced_from, self.prepared))
        taken = [round((b - a) * 1e6, 3) for a, b in zip(begin, end, strict=True)]
        return [self.prepared - self._untraced_from, *taken]

    def _require_session(self) -> None:
        if self._taken:
            raise CaptureError("another profiler was started in this process and ended the recording")
        if not self._recording and torch.autograd._profiler_enabled():
            raise CaptureError(_RUNNING)

    def _watch_sessions(self) -> Callable[[], None]:
        """Notice whether another profiler prepares a session from now on; returns how to stop that."""
        kind: Any = autograd_profiler.profile
        prepare = kind._prepare_trace

        def prepare_and_note(session: Any) -> Any:
            self._taken |= session is not self._profiler.profiler
            return prepare(session)

        kind._prepare_trace = prepare_and_note
        return lambda: setattr(kind, "_prepare_trace", prepare)

    def _forget(self) -> None:
        self._unhook()
        self._reserve.pins.clear()
        if self._observer is not None:
            _registered.discard(self._observer)

    def _settle_device(self) -> None:
        # Kernels in flight when recording begins would be recorded without the calls that launched them, and
        # those of the structure step aren't converted. The host runs ahead of the device, so that only what
        # some steps take together, with all of their kernels, tells how long one takes.
        at, measured = len(self.steps), (self._untraced_from, self.prepared)
        if torch.cuda.is_available() and at in (self.structure, self.structure + 1, *measured):
            torch.cuda.synchronize()
            if at in measured:
                self._marks[at] = self._now()

    def _make_profiler(self) -> profile:
        activities = [ProfilerActivity.CPU]
        # The observer sees all threads, Kineto by itself only those that inherit the starting thread's state.
        # PyTorch reports memory to the profiler of one thread only, so with both there are no memory events.
        wanted = {"profile_all_threads": not self.memory}
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            # Without these events a stream that waits for another looks idle.
            wanted["enable_cuda_sync_events"] = True
        else:
            # Kineto would complain about the absent GPU; problems on a CPU show in the self-check.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        return profile(
            activities=activities,
            schedule=self._action,
            profile_memory=self.memory,
            execution_trace_observer=self._observer,
            experimental_config=experimental_config(wanted),
        )


def _register(host_trace: Path) -> ExecutionTraceObserver:
    """A registered observer. Raises CaptureError if there is one already: a process can have one only.

    PyTorch does not report that; but only the first one opens its file, and only it may be unregistered.
    """
    observer = _Observer()
    observer.register_callback(str(host_trace))
    if not host_trace.exists():
        _foreign.append(observer)
        raise CaptureError("another ExecutionTraceObserver is registered in this process")
    _registered.add(observer)
    return observer


def experimental_config(wanted: dict[str, Any]) -> Any:
    """Kineto's experimental options: those of ``wanted`` that this build of PyTorch has."""
    known: dict[str, Any] = {}
    for name, value in wanted.items():
        with contextlib.suppress(TypeError):
            _ExperimentalConfig(**{name: value})
            known[name] = value
    return _ExperimentalConfig(**known)


def _pass_us() -> dict[str, float]:
    """CPU time, in µs, of a small training (``operators``) and, with a GPU, of ``LAUNCHES`` small kernels
    (``launches``)."""
    with torch.inference_mode(False), torch.enable_grad():
        found = {"operators": _shortest_us(_train)}
        if torch.cuda.is_available():
            found["launches"] = _shortest_us(_launch)
    return found


def _shortest_us(run: Callable[[], object]) -> float:
    """The shortest CPU time, in µs, of ``PASSES`` calls, without that of freeing what they return."""
    taken = []
    for _ in range(PASSES):
        began = time.process_time()
        kept = run()
        taken.append(time.process_time() - began)
        del kept
    return round(min(taken) * 1e6, 3)


def _train() -> None:
    inputs = torch.ones(8, 8, device="cpu")
    weights = [torch.ones(8, 8, device="cpu", requires_grad=True) for _ in range(8)]
    for _ in range(2):
        outputs = inputs
        for weight in weights:
            # No matrix product: its threads would wait for each other on a busy machine.
            outputs = torch.tanh(outputs * weight.t() + weight)
        outputs.sum().backward()
        with torch.no_grad():
            for weight in weights:
                weight.add_(inputs, alpha=0.0).mul_(1.0)


def _launch() -> None:
    on_device = torch.ones(8, device="cuda")
    for _ in range(LAUNCHES):
        on_device.mul_(1.0)
    torch.cuda.synchronize()


def _is_other_prepared(kind: type = profile) -> bool:
    """Whether a profiler of the program is in its warm-up: preparing another one would break it."""
    # isinstance would ask every object for its __class__, which some answer with a warning.
    others = [found for found in gc.get_objects() if issubclass(type(found), kind)]
    return any(other.step_rec_fn and other.current_action is ProfilerAction.WARMUP for other in others)


def _stop_in_child() -> None:
    # A child that is forked during the recording, such as a data-loader worker, shares the open file: its
    # operators would end up in the middle of this process's trace.
    for observer in list(_registered):
        observer.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_in_child)
