"""Gloo's threads end an operation after the caller went on: what they use must not go away before that.

Both failures ended real runs: "terminate called without an active exception" at the exit of a program with
DDP, and a crash in ``onFunctionExit`` when the tracer removed its observer. Gloo's delay can't be made to
order, so a thread with the name of gloo's stands in.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from chakra_et.capture import gloo
from chakra_et.capture.tracer import ChakraTracer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")


class LateThread(threading.Thread):
    """Works for ``seconds`` or until ``ready`` under gloo's name, then sleeps as gloo's threads do."""

    def __init__(
        self, seconds: float, at_end: Callable[[], None] = lambda: None, kind: str = "pt_gloo_runloop"
    ):
        super().__init__(daemon=True)
        self.seconds, self.at_end, self.kind = seconds, at_end, kind
        self.begun, self.ready = threading.Event(), threading.Event()
        self.ended, self.leave = threading.Event(), threading.Event()

    def run(self) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(self.kind)
        self.begun.set()
        end = time.monotonic() + self.seconds
        while time.monotonic() < end and not self.ready.is_set():
            pass
        self.at_end()
        self.ended.set()
        self.leave.wait()

    def __enter__(self) -> LateThread:
        self.start()
        self.begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.ready.set()
        self.leave.set()
        self.join()


def test_the_wait_ends_when_the_thread_sleeps() -> None:
    with LateThread(600) as thread:
        assert gloo.threads() == [thread.native_id]
        assert not gloo.wait_until_idle(0.1) and not thread.ended.is_set()
        thread.ready.set()
        assert gloo.wait_until_idle(20) and thread.ended.is_set()


def test_without_gloo_nothing_is_waited_for() -> None:
    began = time.monotonic()
    assert gloo.wait_until_idle(20) and time.monotonic() - began < 10


def test_idle_threads_of_a_real_group_are_found_and_not_waited_for() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(500):  # a thread takes its name when it first runs
            if len(gloo.threads()) == 2:
                break
            time.sleep(0.01)
        assert len(gloo.threads()) == 2
        assert gloo.wait_until_idle(20)
    finally:
        dist.destroy_process_group()
    assert gloo.threads() == []


def test_the_observer_stays_until_gloo_has_ended_its_records(tmp_path: Path) -> None:
    with ChakraTracer(tmp_path, "t", 0, 1, 1) as tracer:
        tracer.step()
        with LateThread(0.5) as thread:
            tracer.step()
            assert tracer.finished and thread.ended.is_set()


def test_cpu_time_of_a_thread_that_polls_for_messages_is_not_that_of_the_step(tmp_path: Path) -> None:
    """Interleaved 1F1B: 8 to 19 ms per step in one process, 8 to 9 without gloo's thread."""
    for kind, counts in (("gloo_tcp_loop", False), ("another", True)):
        with LateThread(600, kind=kind) as thread, ChakraTracer(tmp_path, "t", 2, 1, 1) as tracer:
            clock = ~int(thread.native_id or 0) << 3 | 6
            end = time.clock_gettime(clock) + 0.3
            while time.clock_gettime(clock) < end:
                time.sleep(0.02)
            tracer.step()
            ((_, cpu),) = tracer._recorder.steps
            thread.ready.set()
        assert (cpu > 0.25) is counts


TRACED = """
with ChakraTracer(sys.argv[1], "t", 0, 1, 1) as tracer:
    tracer.step()
    tracer.step()
start()
"""
LAUNCHED = """
def main(world, watch):
    start()
    return 0
distributed.run(main, 60)
"""


@pytest.mark.parametrize("program", [TRACED, LAUNCHED], ids=["traced", "launched"])
def test_the_interpreter_waits_for_gloo_at_exit(program: str, tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from chakra_et import ChakraTracer
from tests.tracing.test_gloo_threads import LateThread
from utils import distributed
start = LateThread(0.5, Path(sys.argv[1], "ended").touch).__enter__
"""
    command = [sys.executable, "-c", code + program, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ended").exists()
