"""Records what one training process does, as a host trace and a device trace that can be linked.

    with ChakraTracer("outputs", "gpt2_2gpu", 2, 1, 3, rank, world_size) as tracer:
        for batch in batches:
            train(batch)
            tracer.step()

Every rank writes its own pair: NAME_host.json and NAME_device.json for rank 0, NAME_rank1_host.json …
for the others; rank 0 adds NAME_stacks.txt and NAME_manifest.json. All are in place when the last active
step ends, and later steps run untouched.

The host trace comes from PyTorch's ExecutionTraceObserver, the device trace from Kineto. The profiler
starts and stops the observer with its own recording: by hand, the two would cover different steps.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

from chakra_et.capture import groups as trace_groups
from chakra_et.capture import manifest as trace_manifest
from chakra_et.capture.check import PairReport, check_pair, inspect_pair
from chakra_et.capture.config import TraceConfig, check_trace_name
from chakra_et.capture.files import TraceFiles
from chakra_et.capture.signals import hold_signals
from chakra_et.capture.stacks import format_stacks

__all__ = ["ChakraTracer", "TraceConfig", "check_pair", "check_trace_name"]

log = logging.getLogger(__name__)

# A collective that fails wakes this thread before its own thread has closed its record, and torch 2.4
# corrupts its memory when the profiler is stopped in between.
_SETTLE_SECONDS = 1.0

_ordinal = itertools.count()
_recording: weakref.WeakSet[ExecutionTraceObserver] = weakref.WeakSet()


class ChakraTracer:
    """Traces ``active_steps`` training steps of this process; a context manager with ``step()``.

    Args:
        output_dir: folder of the traces, made where absent.
        trace_name: base name of the files, see ``check_trace_name``.
        wait_steps, warmup_steps, active_steps: steps to leave alone, to warm the profiler up, to record.
        rank, world_size: this process among all; every rank has a tracer of its own.
        gzip: write .json.gz.
        run_info: model and run configuration for the manifest (rank 0's is kept).
        patience: seconds that rank 0 waits for the other ranks' records when all goes well.

    Raises ValueError on arguments that make no sense, or before ``init_process_group`` (the traces would
    lack the groups); OSError, from any method, where the traces can't be written. After an exception in
    the ``with`` body what was recorded is written all the same, and the manifest says why it is not all.
    """

    def __init__(
        self,
        output_dir: str | Path,
        trace_name: str,
        wait_steps: int,
        warmup_steps: int,
        active_steps: int,
        rank: int,
        world_size: int = 1,
        gzip: bool = False,
        run_info: dict[str, Any] | None = None,
        patience: float = 60.0,
    ):
        TraceConfig(True, str(output_dir), trace_name, wait_steps, warmup_steps, active_steps)
        initialized = dist.is_available() and dist.is_initialized()
        known = (dist.get_rank(), dist.get_world_size()) if initialized else (0, 1)
        if (rank, world_size) != known:
            raise ValueError(
                f"the tracer was given rank {rank} of {world_size}, but torch.distributed knows rank "
                f"{known[0]} of {known[1]}: create the tracer after init_process_group"
            )
        self.name, self.rank, self.world_size = trace_name, rank, world_size
        self.schedule = {"wait_steps": wait_steps, "warmup_steps": warmup_steps, "active_steps": active_steps}
        self.first, self.end = wait_steps + warmup_steps, wait_steps + warmup_steps + active_steps
        self.run_info, self.patience = run_info or {}, patience
        self.files = TraceFiles(Path(output_dir), trace_name, rank, gzip)
        self.steps_done, self.finished = 0, False
        self._clock: list[float] = []

    def __enter__(self) -> ChakraTracer:
        self.files.prepare()
        self._mailbox = trace_manifest.Mailbox(f"trace/{next(_ordinal)}", self.rank, self.world_size)
        self._groups = trace_manifest.process_groups()
        self._backend = dist.get_backend() if self._groups else None
        self._groups_named = contextlib.ExitStack()
        if len(self._groups) > 1 and self._backend != "nccl":
            self._groups_named.enter_context(trace_groups.named_groups())
        self._observer = ExecutionTraceObserver()
        self._observer.register_callback(str(self.files.partial("host")))
        _recording.add(self._observer)
        self._profiler = _make_profiler(self._observer, self.schedule)
        self._settle_device()
        self._profiler.__enter__()
        self._clock.append(time.perf_counter())
        return self

    def step(self) -> None:
        """Say that a training step has ended. Call it after each step, on every rank."""
        if self.finished:
            return
        self.steps_done += 1
        self._clock.append(time.perf_counter())
        if self.steps_done not in (self.first, self.end):
            self._profiler.step()
            return
        with hold_signals() as held:
            self._settle_device()
            self._profiler.step()
            if self.steps_done == self.end:
                self._finish(None, held)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.finished:
            return
        whole_steps = max(0, self.steps_done - self.first)
        reason = f"training ended after {whole_steps} of {self.schedule['active_steps']} active steps"
        if error is not None:
            reason += f" ({' '.join([type(error).__name__ + ':', *str(error).splitlines()[:1]]).rstrip(':')})"
        began = self.steps_done >= self.first and (whole_steps > 0 or error is not None)
        with hold_signals() as held:
            if began and error is not None and self.world_size > 1:
                time.sleep(_SETTLE_SECONDS)
            try:
                if began:
                    self._finish(reason, held)
                else:
                    self._discard(reason)
            except Exception as second:
                if error is None:
                    raise
                log.error("rank %d: %s", self.rank, second)

    def _settle_device(self) -> None:
        # Kernels under way when recording begins would be recorded without the calls that launched them.
        if self.steps_done == self.first and torch.cuda.is_available():
            torch.cuda.synchronize()

    def _finish(self, reason: str | None, held: list[int]) -> None:
        """Stop recording and write this rank's files; on rank 0 also the manifest of all ranks."""
        began = time.monotonic()
        report, entries, failure = PairReport(), {}, None
        try:
            self._stop()
            report = self._write_partials()
            entries = self.files.publish()
        except OSError as error:
            failure = _unwritable(
                f"the traces of rank {self.rank} can't be written", self.files.folder, error
            )
            reason = str(failure)
        finally:
            self.files.remove_partials()
        record = self._record(reason, report, entries)
        if self.rank:
            self._mailbox.send(record)
        else:
            # After a failure the others' files are about as large as ours, and a dead rank never answers.
            patience = 5 + 2 * (time.monotonic() - began) if reason else self.patience
            try:
                self._gather(record, lambda: min(patience, 2) if held else patience)
            except OSError as error:
                failure = failure or _unwritable("the manifest can't be written", self.files.folder, error)
        if failure is not None:
            raise failure

    def _gather(self, own: dict[str, Any], patience: Callable[[], float]) -> None:
        """On rank 0: collect the ranks' records and write the manifest."""
        # First by itself: if this process is ended while it waits, its own part is told.
        self._write_manifest({0: own})
        manifest = self._write_manifest(self._mailbox.collect(own, patience))
        trace_manifest.log_summary(manifest, self.files.folder)

    def _discard(self, reason: str) -> None:
        self._stop()
        self.files.remove_partials()
        if self.rank == 0:
            log.warning("no trace %s was written: %s, the first being step %d", self.name, reason, self.first)

    def _stop(self) -> None:
        self.finished = True
        self._groups_named.close()
        # Groups that were made since the start; none are listed any more once the group is destroyed.
        self._groups = trace_manifest.process_groups() or self._groups
        # Leaving the profiler also unregisters the observer, and only that completes the host trace.
        self._profiler.__exit__(None, None, None)
        _recording.discard(self._observer)

    def _write_partials(self) -> PairReport:
        self._profiler.export_chrome_trace(str(self.files.partial("device")))
        annotated = min(self.steps_done, self.end - 1) - self.first + 1
        report = inspect_pair(self.files.partial("host"), self.files.partial("device"), annotated)
        if report.truncated:
            # Neither writer reports a failed write.
            free = shutil.disk_usage(self.files.folder).free / 1e6
            raise OSError(
                f"the {' and '.join(report.truncated)} trace is cut off, as by a full disk or a quota "
                f"({free:.0f} MB are free); make room or choose another --trace-output-dir"
            )
        if self.rank == 0:
            stacks = format_stacks(self.files.partial("device"))
            self.files.partial("stacks").write_text(stacks, encoding="utf-8")
            self.files.remove_foreign(self.world_size)
        return report

    def _record(self, reason: str | None, report: PairReport, entries: dict[str, Any]) -> dict[str, Any]:
        whole = range(self.first, min(self.steps_done, self.end))
        untraced = list(itertools.pairwise(self._clock))[: self.first]
        return {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": trace_manifest.device_name(),
            "complete": reason is None,
            "reason": reason,
            "files": entries,
            "steps": [number for number in sorted(report.steps) if number in whole],
            "unfinished_step": next((number for number in report.steps if number not in whole), None),
            "step_times_us": {str(number): report.steps[number] for number in sorted(report.steps)},
            "untraced_step_times_us": {
                str(number): round((end - start) * 1e6, 3) for number, (start, end) in enumerate(untraced)
            },
            "check": {
                "linkable": bool(entries) and not report.problems,
                "host_nodes": report.host_nodes,
                "device_events": report.device_events,
                "linked": report.linked,
                "unlinked": report.unlinked,
                "problems": report.problems,
            },
            "process_groups": self._groups,
        }

    def _write_manifest(self, records: dict[int, dict[str, Any]]) -> dict[str, Any]:
        manifest = trace_manifest.build_manifest(
            records,
            self.world_size,
            trace_name=self.name,
            run=self.run_info,
            schedule=self.schedule,
            backend=self._backend,
        )
        trace_manifest.write_json(self.files.path("manifest"), manifest)
        return manifest


def _unwritable(what: str, folder: Path, error: OSError) -> OSError:
    return OSError(f"{what} to {folder}: {error.strerror or error}")


def _make_profiler(observer: ExecutionTraceObserver, steps: dict[str, int]) -> profile:
    activities = [ProfilerActivity.CPU]
    # The observer sees every thread, Kineto by itself only those that inherit the starting one's state.
    wanted = {"profile_all_threads": True}
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        # Without these events a stream that waits for another can't be told from an idle one.
        wanted["enable_cuda_sync_events"] = True
    else:
        # Kineto would complain about the absent GPU; what goes wrong on a CPU shows in the self-check.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return profile(
        activities=activities,
        schedule=schedule(
            wait=steps["wait_steps"], warmup=steps["warmup_steps"], active=steps["active_steps"], repeat=1
        ),
        record_shapes=True,
        execution_trace_observer=observer,
        experimental_config=_experimental_config(wanted),
    )


def _experimental_config(wanted: dict[str, bool]) -> Any:
    """Kineto's experimental options: those of ``wanted`` that this build knows, or None."""
    try:
        from torch._C._profiler import _ExperimentalConfig
    except ImportError:
        return None
    known: dict[str, Any] = {}
    for name in wanted:
        with contextlib.suppress(TypeError):
            option: dict[str, Any] = {name: wanted[name]}
            _ExperimentalConfig(**option)
            known |= option
    return _ExperimentalConfig(**known)


def _stop_in_child() -> None:
    # A child that is forked while recording, such as a data-loader worker, has the same open file: its
    # own operators would end up in the middle of this process's trace.
    for observer in list(_recording):
        observer.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_in_child)
