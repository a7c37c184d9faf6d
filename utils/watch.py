"""Keep the ranks of a run together: either all continue or all end, and the rank at fault is named.

torchrun notices a process that died, but not one that hangs, and a collective that waits for it fails after
ten minutes or more without naming it. So each rank runs a thread that writes a heartbeat to the rendezvous
store twice per second and reads those of the other ranks. It uses no collective, so it works while one hangs,
and it adds nothing to a trace. The thread also receives signals, because Python runs no handler while the
main thread waits inside a collective: SIGINT and SIGTERM end set-up at once, and training at the next step
boundary.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
# Once something has gone wrong, a rank without a heartbeat for this long counts as dead.
SILENCE_SECONDS = 5.0
# In set-up, seconds after which a rank that is absent or silent is named.
PATIENCE_SECONDS = 30.0
# The main thread then has this long to leave its collective, and twice as long if it has a trace to finish:
# that is when torchrun kills it.
GRACE_SECONDS = 15.0

# In the order within a step: the rank with the smallest (step, phase) is the one the others wait for.
PHASES = ("loading data", "forward", "backward", "reducing", "optimizer step", "evaluating", "saving")


class PeerFailure(RuntimeError):
    """Another rank has died, hangs or has failed; the message names it."""


class Watch:
    """The heartbeat and the signals of one rank. Create and start it in the main thread.

    timeout: seconds that a rank may be silent, or keep the others waiting; store: a connection to the
    rendezvous store of its own, None for a single process; signal: number of the signal that asks training to
    stop, or 0; interrupted_by: number of the signal that ends set-up, or 0; verdict: why the run must end,
    once known; patience: in training, seconds without progress after which the log names the rank that is
    behind.
    """

    def __init__(self, rank: int, size: int, timeout: float, store: Any = None):
        self.rank, self.size, self.timeout, self.store = rank, size, timeout, store
        self.signal = self.interrupted_by = 0
        self.verdict: str | None = None
        self.patience = float("inf")
        self._stalled = False
        self._error: str | None = None
        self._mark: tuple[int, int, str] = (0, 0, "set-up")
        self._beats = 0
        self._peers: dict[int, dict[str, Any]] = {}
        self._heard_at: dict[int, float] = {}
        self._alarmed = self._graceful = self._in_loop = self._unwinding = self._closing = False
        self._marked_at = self._verdict_at = self._looked_at = time.monotonic()
        self._first_signal: tuple[int, float] | None = None
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread after a run that every rank completed."""
        self.barrier("end")
        self._closing = True
        self._writer.send(b"\0")
        self._thread.join()
        signal.set_wakeup_fd(-1)
        if self.store is None:
            return
        # Rank 0 may host the store, so it leaves last.
        deadline = time.monotonic() + SILENCE_SECONDS
        with contextlib.suppress(Exception):
            left = self.store.add("left", 1)
            while self.rank == 0 and left < self.size and time.monotonic() < deadline:
                time.sleep(0.02)
                left = self.store.add("left", 0)

    # Called by the main thread.

    def mark(self, step: int, phase: str, micro: int = 0) -> None:
        """Record that this rank is about to start ``phase`` of step ``step``. Raises PeerFailure."""
        self._mark, self._marked_at = (step, micro, phase), time.monotonic()
        self.check()
        if phase == "saving" and self.store is not None:
            # Writing may hold the interpreter lock for long, and then no heartbeat is sent.
            self._beat()

    def check(self) -> None:
        """Raise PeerFailure if the run must end because of another rank."""
        if self.verdict is not None:
            raise PeerFailure(self.verdict)

    def barrier(self, name: str, timeout: float | None = None) -> None:
        """Wait for every rank. Raises PeerFailure naming the ranks that died or are absent at the timeout."""
        if self.store is None:
            return
        self.store.add(f"barrier/{name}", 1)
        began = time.monotonic()
        while self.store.add(f"barrier/{name}", 0) < self.size:
            self.check()
            if timeout is not None and time.monotonic() - began > timeout:
                absent = ", ".join(str(rank) for rank in range(self.size) if rank not in self._peers)
                raise PeerFailure(f"rank {absent} did not appear within {timeout:g} s (--dist-timeout)")
            time.sleep(0.02)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """From here on signals only set ``signal``; inside the block, a rank that hangs ends the run.

        Enter it inside the tracer's context: other ranks must hear of a failure before the trace is closed.
        """
        self._marked_at = time.monotonic()
        self._graceful = self._in_loop = True
        try:
            yield
        except BaseException as error:
            self._unwinding = self._alarmed = True
            if not blames_others(error):
                self._error = describe(error)
            raise
        self._in_loop = False

    def fail(self, sentence: str) -> bool:
        """Report to the other ranks why this one ends.

        Returns whether a lower rank has reported the same failure, which need not be logged again.
        """
        self._error = sentence
        if self.store is not None:
            with contextlib.suppress(Exception):
                self._beat()
                for _ in range(20 if self.rank else 0):
                    self._listen(time.monotonic())
                    if any(self._peers[r]["error"] == sentence for r in range(self.rank) if r in self._peers):
                        return True
                    time.sleep(0.1)
        return False

    def wait_for_verdict(self) -> str | None:
        """After a failed collective: wait until the heartbeats show which rank is at fault."""
        self._alarmed = True
        began = time.monotonic()
        while self.verdict is None and time.monotonic() - began < SILENCE_SECONDS + 2:
            time.sleep(0.1)
        return self.verdict

    def _on_signal(self, number: int, _frame: object) -> None:
        if not self._graceful:
            self.interrupted_by = number
            raise SystemExit(128 + number)

    # Run by the thread.

    def _run(self) -> None:
        while not self._closing:
            readable, _, _ = select.select([self._reader], [], [], BEAT_SECONDS)
            now = time.monotonic()
            if readable:
                self._take_signals(self._reader.recv(64), now)
            if now - self._looked_at > 4 * BEAT_SECONDS:
                # This process itself was stopped or starved: what it knows about the others is stale.
                self._heard_at = dict.fromkeys(self._heard_at, now)
            self._looked_at = now
            if self.verdict is None:
                self.verdict = self._judge(now)
                self._verdict_at = now
                self._report_stall(now)
            else:
                with contextlib.suppress(Exception):
                    self._beat()
            limit = GRACE_SECONDS * (2 if self._unwinding else 1)
            if self.verdict is not None and now - self._verdict_at > limit:
                leave(1, f"rank {self.rank} stops: {self.verdict}")
            if self._first_signal and not self._graceful and now - self._first_signal[1] > SILENCE_SECONDS:
                leave(128 + self._first_signal[0], f"rank {self.rank}: {ended_by(self._first_signal[0])}")

    def _take_signals(self, received: bytes, now: float) -> None:
        for number in received:
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            if self._first_signal is None:
                self._first_signal = number, now
                self._alarmed = True
            elif number == signal.SIGINT and now - self._first_signal[1] > 2:
                # Two signals within 2 s are one Ctrl-C: the terminal sends it, and torchrun forwards it.
                leave(128 + number, f"rank {self.rank}: {ended_by(number)} a second time, without saving")
            if self._graceful:
                self.signal = self._first_signal[0]

    def _judge(self, now: float) -> str | None:
        if self._launcher is not None and os.getppid() != self._launcher:
            return "the launcher (torchrun) is gone"
        if self.store is None:
            return None
        try:
            self._beat()
            self._listen(now)
        except Exception as error:
            return f"the rendezvous store no longer answers, so node 0 or its launcher is gone ({error})"
        if self._error is not None:
            # This rank is ending already, and the others are about to end because of it.
            return None
        others = {rank: beat for rank, beat in self._peers.items() if rank != self.rank}
        for rank, beat in others.items():
            if beat["error"] or beat["verdict"]:
                return f"rank {rank} failed: {beat['error']}" if beat["error"] else str(beat["verdict"])
        for rank, beat in others.items():
            quick = self._alarmed and beat["mark"][2] != "saving"
            limit = SILENCE_SECONDS if quick else self.timeout
            if now - self._heard_at[rank] > limit:
                return f"{_who(rank, beat)} is dead or stopped: no sign of life for {limit:g} s"
        if self._in_loop and others and now - self._marked_at > self.timeout:
            last = min(others, key=lambda rank: _order(others[rank]["mark"]))
            if _order(others[last]["mark"]) < _order(self._mark):
                return f"{_who(last, others[last])} hangs: waited {self.timeout:g} s for it (--dist-timeout)"
        return None

    def _report_stall(self, now: float) -> None:
        """Log once who keeps the others waiting; that rank, if it can, writes its stack to stderr."""
        waited = now - self._marked_at
        if waited < (self.patience if self._in_loop else PATIENCE_SECONDS):
            if self._stalled:
                log.warning("rank %d: progress again", self.rank)
            self._stalled = False
            return
        if self._stalled or self.verdict or self.store is None or self._mark[2] == "saving":
            return
        late = self._late(now)
        if self.rank in late:
            self._stalled = True
            faulthandler.dump_traceback(sys.stderr)
        elif late and self.rank == min(set(self._peers) - late.keys(), default=self.rank):
            self._stalled = True
            log.warning("no progress for %.0f s: waiting for %s", waited, ", ".join(late.values()))

    def _late(self, now: float) -> dict[int, str]:
        """Rank → who it is, of those that the others wait for; empty where that can't be told."""
        absent = set(range(self.size)) - self._peers.keys()
        late = {rank: f"rank {rank}, which has not appeared" for rank in absent}
        for rank, beat in self._peers.items():
            if now - self._heard_at[rank] > SILENCE_SECONDS:
                late[rank] = f"{_who(rank, beat)}, which shows no sign of life"
        if late or not self._in_loop:
            return late
        # A rank that computes is waited for before one that may itself be waiting for a message.
        marks = {rank: beat["mark"] for rank, beat in self._peers.items()}
        busy = {rank: mark for rank, mark in marks.items() if mark[2] in PHASES[:2]} or marks
        last = min(busy, key=lambda rank: _order(busy[rank]))
        return {last: _who(last, self._peers[last])}

    def _beat(self) -> None:
        self._beats += 1
        known = {"mark": self._mark, "error": self._error, "verdict": self.verdict}
        here = {"beat": self._beats, "host": socket.gethostname(), "pid": os.getpid()}
        self.store.set(f"beat/{self.rank}", json.dumps(here | known))

    def _listen(self, now: float) -> None:
        # Reading an absent key blocks this connection.
        ranks = [r for r in range(self.size) if r in self._peers or self.store.check([f"beat/{r}"])]
        for rank, raw in zip(ranks, self.store.multi_get([f"beat/{r}" for r in ranks]), strict=True):
            beat = json.loads(raw)
            if beat != self._peers.get(rank):
                self._peers[rank], self._heard_at[rank] = beat, now


def _order(mark: Any) -> tuple[int, bool, int, int]:
    step, micro, phase = mark
    index = PHASES.index(phase) if phase in PHASES else -1
    return step, index > PHASES.index("backward"), micro, index


def _who(rank: int, beat: dict[str, Any]) -> str:
    step, _, phase = beat["mark"]
    place = phase if phase not in PHASES else f"step {step}, {phase}"
    return f"rank {rank} ({beat['host']}, pid {beat['pid']}, last seen at {place})"


def ended_by(number: int) -> str:
    """What happened to a process that signal ``number`` ended."""
    try:
        return f"ended by {signal.Signals(number).name}"
    except ValueError:
        return "ended itself"


def blames_others(error: BaseException) -> bool:
    """Whether ``error`` is a symptom of a failure on another rank."""
    if isinstance(error, (PeerFailure, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "c10d"))


def describe(error: BaseException) -> str:
    """``error`` in one line, with its type unless bad input explains it."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if _is_out_of_memory(error):
        return f"out of memory: lower --batch-size or --max-seq-length ({line})"
    return line if is_expected(error) else f"{type(error).__name__}: {line}"


def is_expected(error: BaseException) -> bool:
    """Whether bad input, the machine or the user caused ``error``, so that one sentence is enough."""
    return isinstance(error, (ValueError, OSError, PeerFailure)) or _is_out_of_memory(error)


def _is_out_of_memory(error: BaseException) -> bool:
    # On a CPU PyTorch raises a plain RuntimeError.
    kinds = (MemoryError, torch.cuda.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)


def forget_signals_in_children() -> None:
    """Let processes forked from now on (data loaders) die of SIGTERM as usual and ignore Ctrl-C."""

    def reset() -> None:
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    os.register_at_fork(after_in_child=reset)


def leave(code: int, sentence: str | None = None) -> NoReturn:
    """End this process and its worker processes now, whatever its threads are waiting for."""
    if sentence:
        log.error("%s", sentence)
    for name in ("multiprocessing", "multiprocess"):
        for child in getattr(sys.modules.get(name, multiprocessing), "active_children", list)():
            child.kill()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
