"""Record what one training process does, as a host trace and a device trace that can be linked.

    from chakra_et import ChakraTracer

    with ChakraTracer("outputs", "my_run", active_steps=1) as tracer:
        for batch in batches:
            train(batch)
            tracer.step()

Every rank writes its own pair: NAME_host.json and NAME_device.json on rank 0, NAME_rank1_host.json … on the
others; rank 0 adds NAME_manifest.json. All files are in place when the last active step ends; later steps run
untouched.

A failure of the tracer never ends the training: it is one warning per rank, and the run goes on without a
trace. ``strict=True`` raises instead.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from chakra_et.capture import gloo
from chakra_et.capture import manifest as trace_manifest
from chakra_et.capture.check import PairReport, inspect_pair
from chakra_et.capture.config import TraceConfig, check_trace_name
from chakra_et.capture.manifest import Mailbox, TraceFiles, notify, summarise
from chakra_et.capture.recorder import Recorder

__all__ = ["ChakraTracer", "TraceConfig", "check_trace_name"]

# A failed collective wakes this thread before its own thread has closed its record, and torch 2.4 corrupts
# its memory if the profiler is stopped in between.
_SETTLE_SECONDS = 1.0

_ordinal = itertools.count()


class ChakraTracer:
    """Traces ``active_steps`` training steps of this process; a context manager with ``step()``.

    Create it after ``init_process_group``, on every rank, so that the traces contain the process groups. One
    that is entered without ``with`` ends with the interpreter if not before.

    Args:
        output_dir: folder for the traces; created if absent.
        trace_name: base name of the files, see ``check_trace_name``.
        wait_steps, warmup_steps, active_steps: steps to leave alone, to warm the profiler up, to record.
        rank, world_size: this process among all (default: as torch.distributed or the launcher has them).
        gzip: write .json.gz.
        run_info: model and run configuration for the manifest (rank 0's is kept).
        patience: seconds that rank 0 waits for the other ranks' records at the end if all goes well.
        memory: also record allocations and frees (``[memory]`` events of the device trace).
        strict: raise the tracer's own failures (OSError, CaptureError) instead of warning.

    Raises ValueError for arguments out of range, or a rank that torch.distributed doesn't have. After an
    exception in the ``with`` body, the steps recorded so far are still written; the manifest has the reason.
    ``written``: whether this rank's traces are in place.
    """

    def __init__(
        self,
        output_dir: str | Path,
        trace_name: str,
        wait_steps: int = TraceConfig.trace_wait_steps,
        warmup_steps: int = TraceConfig.trace_warmup_steps,
        active_steps: int = TraceConfig.trace_active_steps,
        rank: int | None = None,
        world_size: int | None = None,
        gzip: bool = False,
        run_info: dict[str, Any] | None = None,
        patience: float = 60.0,
        memory: bool = False,
        strict: bool = False,
    ):
        self.schedule = {"wait_steps": wait_steps, "warmup_steps": warmup_steps, "active_steps": active_steps}
        for name, steps in self.schedule.items():
            least = int(name == "active_steps")
            if type(steps) is not int or steps < least:
                raise ValueError(f"{name} is {steps!r}: give a whole number of at least {least}.")
        TraceConfig(True, str(output_dir), trace_name)  # refuses what can't be a name or folder
        known = _place() or (0, 1)
        given = (known[0] if rank is None else rank, known[1] if world_size is None else world_size)
        if given != known:
            raise ValueError(
                f"the tracer was given rank {given[0]} of {given[1]}, but torch.distributed has rank "
                f"{known[0]} of {known[1]}: create the tracer after init_process_group"
            )
        self.folder, self.name, self.gzip = Path(output_dir), trace_name, gzip
        self.first, self.end = wait_steps + warmup_steps, wait_steps + warmup_steps + active_steps
        self.run_info, self.patience = run_info or {}, patience
        self.memory, self.strict = memory, strict
        self.steps_done, self.finished, self.written, self._awaits = 0, False, False, False

    def __enter__(self) -> ChakraTracer:
        self._pid = os.getpid()
        self.rank, self.world_size = _place() or _place_by_launcher()
        self.files = TraceFiles(self.folder, self.name, self.rank, self.gzip)
        self._mailbox = Mailbox(f"trace/{next(_ordinal)}", self.rank, self.world_size)
        self._groups, self._backend = trace_manifest.process_groups(), trace_manifest.backend()
        self._groups_named = contextlib.ExitStack()
        self._called: dict[str, dict[str, Any] | None] = {}
        self._group_threads: dict[str, list[int]] = {}
        self._recorder = Recorder(**self.schedule, memory=self.memory)
        with self._guarded():
            self.files.prepare()
            self._name_groups()
            self._recorder.start(self.files.unfinished("host"))
        atexit.unregister(gloo.wait_until_idle)  # once per process, however many traces it makes
        atexit.register(gloo.wait_until_idle)
        # PyTorch crashes if it still records while the interpreter shuts down.
        atexit.register(self.__exit__, None, None, None)
        return self

    def describe(self, model: Any, config: dict[str, Any]) -> None:
        """Put the model's class and size, and its configuration, into the manifest, unless that has other
        ``run_info``."""
        parameters = sum(parameter.numel() for parameter in model.parameters())
        described = {"model": type(model).__name__, "parameters": parameters, "config": config}
        self.run_info = self.run_info or described

    def step(self) -> None:
        """Mark the end of a training step. Call it after each step, on every rank."""
        if os.getpid() != self._pid or self.finished and not self._awaits:
            return
        self.steps_done += 1
        with self._guarded():
            if self._awaits:
                self._collect(0.0)
            elif self.steps_done not in (self._recorder.structure, self.end):
                self._recorder.step()
            else:
                with hold_signals() as held:
                    self._name_groups()
                    self._recorder.step()
                    if self.steps_done == self.end:
                        self._finish(None, held)

    def _name_groups(self) -> None:
        """Label gloo's operations from the structure step on: a label costs some µs, and the steps before are
        the untraced ones."""
        if self.steps_done == self._recorder.structure and trace_manifest.backend() not in (None, "nccl"):
            self._groups_named.enter_context(gloo.named_groups(self._note_group))

    def _note_group(self, name: str) -> None:
        """Keep what is known of a group when it is first called: it may be destroyed before the end."""
        if name not in self._called:
            groups = trace_manifest.process_groups()
            self._called[name] = next((each for each in groups if each["name"] == name), None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if os.getpid() != self._pid or self.finished and not self._awaits:  # forked, or done
            return
        whole_steps = max(0, self.steps_done - self.first)
        reason = f"training ended after {whole_steps} of {self.schedule['active_steps']} active steps"
        if not self.steps_done and error is None:
            reason += " (step() was never called; call it at the end of each step)"
        if error is not None:
            reason += f" ({' '.join([type(error).__name__ + ':', *str(error).splitlines()[:1]]).rstrip(':')})"
        began = self.steps_done >= self.first and (whole_steps > 0 or error is not None)
        with self._guarded(training_failed=error is not None), hold_signals() as held:
            if self._awaits:
                self._collect(5.0 if error else self.patience, held, last=True)
                return
            if began and error is not None and self.world_size > 1:
                time.sleep(_SETTLE_SECONDS)
            if began:
                self._finish(reason, held)
                return
            self._stop()
            self.files.discard()
            if self.rank == 0:
                no_trace = "no trace %s was written: %s, the first being step %d"
                notify(logging.WARNING, no_trace, self.name, reason, self.first)

    @contextlib.contextmanager
    def _guarded(self, training_failed: bool = False) -> Iterator[None]:
        """Turn a failure of the tracer into a warning, unless it is strict and the training is fine."""
        try:
            yield
        except Exception as error:
            if not self.finished:
                self._give_up(error)
            if self.strict and not training_failed:
                raise
            goes_on = "" if training_failed else "; training goes on"
            notify(logging.WARNING, "trace %s rank %d: %s%s", self.name, self.rank, error, goes_on)

    def _give_up(self, error: Exception) -> None:
        """End the capture before anything was written, and report why to rank 0."""
        self._end_watching()

        def report() -> None:
            record = self._record(str(error), PairReport(), {})
            if self.rank:
                self._mailbox.send(record)
            else:
                self._write_manifest({0: record})

        for clean_up in (self._recorder.abandon, self.files.discard, report):
            # None of these may hide the failure itself, or end the training.
            with contextlib.suppress(Exception):
                clean_up()

    def _end_watching(self) -> None:
        self.finished = True
        atexit.unregister(self.__exit__)
        self._groups_named.close()

    def _finish(self, reason: str | None, held: list[int]) -> None:
        """Stop recording and write this rank's files; on rank 0 also the manifest of all ranks."""
        began = time.monotonic()
        report, entries, failure = PairReport(), {}, None
        self._stop()
        try:
            report = self._export()
            entries = self.files.publish()
            self.written = True
        except Exception as error:
            failure = _explained(f"the traces can't be written to {self.folder}", error)
            reason = str(failure)
        finally:
            self.files.discard()
        record = self._record(reason, report, entries)
        if self.rank:
            self._mailbox.send(record)
        else:
            try:
                # First with this rank alone, in case the process is ended while it waits.
                self._records = {0: record}
                self._manifest = self._write_manifest(self._records)
                # A dead rank never answers, and one that is later may be waiting for this one.
                seconds = min(5 + 2 * (time.monotonic() - began), self.patience)
                self._collect(seconds, held, last=bool(reason or held))
                if self._awaits:
                    atexit.register(self.__exit__, None, None, None)
            except OSError as error:
                failure = failure or _explained(f"the manifest can't be written to {self.folder}", error)
        if failure is not None:
            raise failure

    def _collect(self, seconds: float, held: Sequence[int] = (), last: bool = False) -> None:
        """On rank 0: wait for the records of other ranks, and add those that came to the manifest."""
        known = len(self._records)
        self._mailbox.collect(self._records, lambda: min(seconds, 2) if held else seconds)
        if len(self._records) > known:
            self._manifest = self._write_manifest(self._records)
        self._awaits = not last and self._mailbox.store is not None and len(self._records) < self.world_size
        if not self._awaits:
            summarise(self._manifest, self.folder)

    def _stop(self) -> None:
        self._recorder.stop()
        self._end_watching()
        # Includes groups created since the start; none are listed once the process group is destroyed.
        self._groups = trace_manifest.process_groups() or self._groups
        self._group_threads = trace_manifest.gloo_threads(self._groups, self.rank)
        self._groups += [each for each in self._called.values() if each and each not in self._groups]

    def _export(self) -> PairReport:
        host, device = self.files.unfinished("host"), self.files.unfinished("device")
        self._recorder.export(device)
        annotated = min(self.steps_done, self.end - 1) - self.first + 1
        report = inspect_pair(host, device, annotated)
        if report.truncated:
            # Neither writer reports a failed write.
            free = shutil.disk_usage(self.folder).free / 1e6
            raise OSError(
                f"the {' and '.join(report.truncated)} trace is cut off, as by a full disk or a quota "
                f"({free:.0f} MB are free); make room or choose another folder"
            )
        if self.rank == 0:
            self.files.remove_foreign(self.world_size)
        return report

    def _record(self, reason: str | None, report: PairReport, entries: dict[str, Any]) -> dict[str, Any]:
        whole = range(self.first, min(self.steps_done, self.end))
        untraced = enumerate(self._recorder.untraced)
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
            "structure_step": self._recorder.structure,
            "step_times_us": {str(number): report.steps[number] for number in sorted(report.steps)},
            "untraced_step_times_us": {str(number): round(wall * 1e6, 3) for number, (wall, _) in untraced},
            "check": {
                "linkable": bool(entries) and not report.problems,
                **{name: value for name, value in vars(report).items() if name not in ("steps", "truncated")},
            },
            "process_groups": self._groups,
            "group_threads": self._group_threads,
            "ddp_buckets": {} if self._recorder.structure else trace_manifest.ddp_buckets(),
        }

    def _write_manifest(self, records: dict[int, dict[str, Any]]) -> dict[str, Any]:
        facts = {"run": self.run_info, "schedule": self.schedule, "backend": self._backend}
        manifest = trace_manifest.build_manifest(records, self.world_size, trace_name=self.name, **facts)
        path = self.files.run.manifest_file
        if trace_manifest.write_json(path, manifest) and len(records) == 1:  # the first of several writes
            notify(logging.WARNING, "%s: secrets were left out, by their names or forms", path)
        return manifest


@contextlib.contextmanager
def hold_signals() -> Iterator[list[int]]:
    """Delay SIGINT and SIGTERM until the end of the block; yields the list of signals received so far.

    After Ctrl-C torchrun sends a second signal, which would interrupt the clean-up started by the first. Does
    nothing outside the main thread, where Python runs no handlers.
    """
    held: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    handlers = {}
    for watched in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(watched) is not None:  # None: by C code, which can't be restored
            handlers[int(watched)] = signal.signal(watched, lambda number, frame: held.append(number))
    try:
        yield held
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(held):
            handler = handlers[number]
            # Called rather than raised again: a wake-up descriptor has received the signal already.
            if callable(handler):
                handler(number, None)
            elif handler == signal.SIG_DFL:
                signal.raise_signal(number)


def _place() -> tuple[int, int] | None:
    """This process's rank and the number of ranks, as torch.distributed has them."""
    initialized = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if initialized else None


def _place_by_launcher() -> tuple[int, int]:
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size > 1:
        missing = "torch.distributed is not initialised, so the trace has no process groups"
        notify(logging.WARNING, "rank %d: %s; create the tracer after init_process_group", rank, missing)
    return rank, size


def _explained(what: str, error: Exception) -> Exception:
    """An OSError with the sentence ``what`` before its reason; any other error as it is."""
    return OSError(f"{what}: {error.strerror or error}") if isinstance(error, OSError) else error
