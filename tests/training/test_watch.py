"""The heartbeats and signals of ranks, with several ranks in this process and a real store."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from utils import watch as watching
from utils.watch import PeerFailure, Watch, blames_others, describe, is_expected

Make = Callable[..., Watch]
# How the stand-in for the process's end ends a thread.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str | None]]:
    """What ``leave`` was called with; the thread that called it ends."""
    calls: list[tuple[int, str | None]] = []

    def leave(code: int, sentence: str | None = None) -> None:
        calls.append((code, sentence))
        raise SystemExit

    monkeypatch.setattr(watching, "leave", leave)
    return calls


@pytest.fixture
def make_watch(monkeypatch: pytest.MonkeyPatch, free_port: int, left: list) -> Iterator[Make]:
    """``make_watch(rank, size, timeout)``: a watch whose thread runs, twenty times as fast as in earnest."""
    monkeypatch.setattr(watching, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(watching, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(watching, "GRACE_SECONDS", 0.5)
    server = dist.TCPStore("127.0.0.1", free_port, is_master=True, wait_for_workers=False)
    watches: list[Watch] = []

    def make(rank: int, size: int = 2, timeout: float = 30, started: bool = True) -> Watch:
        watch = Watch(rank, size, timeout, dist.TCPStore("127.0.0.1", free_port, is_master=False))
        if started:
            watch._thread.start()
        watches.append(watch)
        return watch

    yield make
    for watch in watches:
        silence(watch)
    del server


def silence(watch: Watch) -> None:
    """End its thread, as a kill would."""
    watch._closing = True
    if watch._thread.is_alive():
        watch._thread.join()


def verdict(watch: Watch, timeout: float = 10) -> str:
    deadline = time.monotonic() + timeout
    while watch.verdict is None:
        assert time.monotonic() < deadline, "no verdict"
        time.sleep(0.01)
    return watch.verdict


def test_a_barrier_waits_for_every_rank(make_watch: Make) -> None:
    passed: list[int] = []
    threads = []
    for rank in range(3):
        watch = make_watch(rank, 3)
        threads.append(
            threading.Thread(target=lambda w: (w.barrier("x"), passed.append(w.rank)), args=(watch,))
        )
    threads[0].start()
    threads[1].start()
    time.sleep(0.2)
    assert passed == []
    threads[2].start()
    for thread in threads:
        thread.join(10)
    assert sorted(passed) == [0, 1, 2]


def test_a_barrier_names_the_ranks_that_never_came(make_watch: Make) -> None:
    first, _ = make_watch(0, 4), make_watch(2, 4)
    with pytest.raises(PeerFailure, match=r"rank 1, 3 did not appear within 0.4 s \(--dist-timeout\)"):
        first.barrier("start", timeout=0.4)


def test_a_silent_rank_is_dead_after_the_timeout(make_watch: Make) -> None:
    first, second, third = (make_watch(rank, 3, timeout=1.0) for rank in range(3))
    third.mark(7, "backward")
    time.sleep(0.2)
    began = time.monotonic()
    silence(third)
    expected = (
        rf"rank 2 \(.*, pid {os.getpid()}, last seen at step 7, backward\) is dead or stopped: .* for 1 s"
    )
    for watch in (first, second):
        with pytest.raises(PeerFailure, match=expected):
            while True:
                watch.mark(7, "backward")
                time.sleep(0.01)
    assert 0.7 < time.monotonic() - began < 5


def test_after_a_failed_collective_silence_counts_sooner(make_watch: Make) -> None:
    first, second = make_watch(0), make_watch(1)
    time.sleep(0.2)
    silence(second)
    assert "rank 1 (" in (first.wait_for_verdict() or "")
    assert "no sign of life for 0.5 s" in first.verdict


def test_a_rank_that_saves_is_not_thought_dead(make_watch: Make) -> None:
    """Writing a large checkpoint may hold the interpreter, heartbeat and all."""
    first, second = make_watch(0), make_watch(1)
    second.mark(3, "saving")
    silence(second)
    time.sleep(0.1)
    first._alarmed = True
    time.sleep(1)
    assert first.verdict is None


def test_a_rank_that_lives_but_is_behind_hangs(make_watch: Make) -> None:
    first, second = make_watch(0, timeout=0.5), make_watch(1, timeout=0.5)
    with first.training(), second.training():
        second.mark(4, "loading data")
        first.mark(4, "backward")
        expected = "last seen at step 4, loading data) hangs: waited 0.5 s for it (--dist-timeout)"
        assert expected in verdict(first)
        # The one at fault hears it too, and all say the same.
        assert verdict(second) == first.verdict


def test_ranks_at_the_same_place_are_only_slow(make_watch: Make) -> None:
    first, second = make_watch(0, timeout=0.3), make_watch(1, timeout=0.3)
    with first.training(), second.training():
        for watch in (first, second):
            watch.mark(4, "backward", 1)
        time.sleep(1)
        assert first.verdict is second.verdict is None


def test_places_are_in_the_order_of_a_step() -> None:
    marks = [
        (0, 0, "set-up"),
        *((1, micro, phase) for micro in (0, 1) for phase in watching.PHASES[:3]),
        *((1, 0, phase) for phase in watching.PHASES[3:]),
        (2, 0, "loading data"),
    ]
    assert sorted(marks, key=watching._order) == marks


def test_an_error_reaches_the_others_before_its_rank_is_gone(make_watch: Make) -> None:
    first, second = make_watch(0), make_watch(1)
    with pytest.raises(OSError, match="fire"), second.training():
        raise OSError("the data is on fire")
    assert verdict(first) == "rank 1 failed: the data is on fire"
    with pytest.raises(PeerFailure), first.training():
        first.check()
    assert first._error is None, "it was not its own"


def test_the_same_failure_is_known_as_such(make_watch: Make) -> None:
    first, second = make_watch(0, started=False), make_watch(1, started=False)
    assert not first.fail("no such file")
    assert second.fail("no such file")
    assert not second.fail("another")
    assert not Watch(0, 1, 1.0).fail("alone")


def test_a_process_that_was_stopped_does_not_blame_the_others(make_watch: Make) -> None:
    """After a SIGCONT the last heartbeats of all others are old."""
    first, second = make_watch(0, timeout=0.5), make_watch(1, timeout=30)
    time.sleep(0.2)
    listen = second._listen
    first_listen = first._listen

    def stall(now: float) -> None:
        first._listen = first_listen
        time.sleep(1)
        first_listen(now)

    first._listen = stall
    second._listen = listen
    time.sleep(1.6)
    assert first.verdict is None


def test_a_main_thread_that_does_not_notice_is_ended(make_watch: Make, left: list) -> None:
    first, second = make_watch(0), make_watch(1)
    second._error = "the disk is full"
    verdict(first)
    assert left == []
    first._thread.join(5)
    assert left == [(1, "rank 0 stops: rank 1 failed: the disk is full")]


def test_a_lost_store_ends_the_run(make_watch: Make) -> None:
    first = make_watch(0)

    class Gone:
        def set(self, *_: object) -> None:
            raise RuntimeError("Connection reset by peer")

    first.store = Gone()
    assert "the rendezvous store no longer answers" in verdict(first)


def test_a_lost_launcher_ends_the_run(monkeypatch: pytest.MonkeyPatch, left: list) -> None:
    monkeypatch.setattr(watching, "BEAT_SECONDS", 0.02)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    watch = Watch(0, 1, 30)
    watch._thread.start()
    time.sleep(0.1)
    assert watch.verdict is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert verdict(watch) == "the launcher (torchrun) is gone"
    silence(watch)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, left: list) -> Iterator[Watch]:
    """A started watch of a single process, with its signal handlers."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(watching, "SILENCE_SECONDS", 0.5)
    watch = Watch(0, 1, 30)
    watch.start()
    yield watch
    watch.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_set_up_at_once(number: signal.Signals, alone: Watch) -> None:
    with pytest.raises(SystemExit) as end:
        os.kill(os.getpid(), number)
        time.sleep(5)
    assert end.value.code == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_only_marks_the_training(number: signal.Signals, alone: Watch) -> None:
    with alone.training():
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 5
        while not alone.signal and time.monotonic() < deadline:
            time.sleep(0.01)
        assert alone.signal == number
        # torchrun passes a Ctrl-C on: a second one at once is the same one.
        os.kill(os.getpid(), number)
        time.sleep(0.2)
    assert alone.signal == number


def test_a_second_ctrl_c_ends_without_saving(alone: Watch, left: list) -> None:
    with alone.training():
        alone._first_signal = (signal.SIGINT, time.monotonic() - 3)
        os.kill(os.getpid(), signal.SIGINT)
        alone._thread.join(5)
    assert left == [(130, "rank 0: ended by SIGINT a second time, without saving")]


def test_a_set_up_that_does_not_end_by_itself_is_ended(alone: Watch, left: list) -> None:
    alone._first_signal = (signal.SIGTERM, time.monotonic())
    alone._thread.join(5)
    assert left == [(143, "rank 0: ended by SIGTERM")]


def test_children_take_signals_as_usual(alone: Watch) -> None:
    """Or a data loader that is terminated would look like a SIGTERM of this process."""
    watching.forget_signals_in_children()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.1)
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    time.sleep(0.2)
    assert alone._first_signal is None


def test_who_is_blamed() -> None:
    for error in (
        PeerFailure("x"),
        dist.DistBackendError("x"),
        RuntimeError("[third_party/gloo/x.cc:1] closed"),
    ):
        assert blames_others(error)
    for error in (ValueError("gloo"), RuntimeError("shapes differ"), KeyError("c10d")):
        assert not blames_others(error)


def test_descriptions_are_one_line() -> None:
    assert describe(ValueError("one\ntwo")) == "one"
    assert describe(KeyError()) == "KeyError: KeyError"
    assert describe(RuntimeError("shapes differ")) == "RuntimeError: shapes differ"
    for error in (
        torch.cuda.OutOfMemoryError("no"),
        RuntimeError("DefaultCPUAllocator: no"),
        MemoryError("no"),
    ):
        assert describe(error).startswith("out of memory: lower --batch-size")
        assert is_expected(error)
    assert describe(OSError(28, "No space left on device")) == "[Errno 28] No space left on device"
