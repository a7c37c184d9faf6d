"""From the environment to a world, and from a failure to an exit status."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from utils import distributed
from utils import watch as watching
from utils.distributed import World, read_world, run, set_threads, setup_logging
from utils.watch import PeerFailure, Watch


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch):
    """Handlers, log levels and threads as they were, and no watch that would end this process later."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root, threads = logging.getLogger(), torch.get_num_threads()
    state = root.handlers[:], root.level
    levels = {
        name: logging.getLogger(name).level for name in ("chakra_et", "utils", "gpt2", "bert", "__main__")
    }
    monkeypatch.setattr(watching, "forget_signals_in_children", lambda: None)
    watches: list[Watch] = []

    def make_watch(*arguments: Any) -> Watch:
        watches.append(Watch(*arguments))
        return watches[-1]

    monkeypatch.setattr(distributed, "Watch", make_watch)
    yield
    for watch in watches:
        watch._closing = True
        if watch._thread.is_alive():
            watch._writer.send(b"\0")
            watch._thread.join()
    root.handlers[:], root.level = state
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)
    torch.set_num_threads(threads)


def test_a_process_without_a_launcher_is_alone() -> None:
    world = read_world()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert world.is_main
    assert world.sum(1, torch.tensor(2.5)) == [1.0, 2.5]
    assert world.agree(3)


def test_the_world_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    world = read_world()
    assert world == World(5, 8, 1, 4, torch.device("cpu"))
    assert (world.is_main, world.backend) == (False, "gloo")


def test_fewer_gpus_than_processes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    variables = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert read_world().backend == "nccl"
    assert chosen == [torch.device("cuda", 1)]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"this node has 4 processes but 2 GPU\(s\)"):
        read_world()


@pytest.mark.parametrize(("rank", "expected"), [(0, "INFO"), (1, "WARNING")])
def test_other_ranks_log_warnings_only(rank: int, expected: str) -> None:
    setup_logging(rank)
    assert logging.getLevelName(logging.getLogger("utils.training.trainer").getEffectiveLevel()) == expected


@pytest.mark.parametrize(
    ("chosen", "torchrun", "local_size", "share"),
    [
        (None, False, 1, 8),
        (None, True, 1, 8),
        ("1", True, 4, 2),
        ("1", True, 16, 1),
        ("1", False, 1, None),
        ("3", True, 2, None),
    ],
)
def test_threads(chosen, torchrun, local_size, share, monkeypatch: pytest.MonkeyPatch) -> None:
    """``share`` None: what OMP_NUM_THREADS has set is left alone."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    set_threads(local_size)
    assert set_to == ([] if share is None else [share])
    monkeypatch.undo()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []

    def leave(code: int, sentence: str | None = None) -> None:
        codes.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(watching, "leave", leave)
    return codes


def fail_with(error: BaseException):
    def main(world: World, watch: Watch) -> int:
        raise error

    return main


def test_the_status_of_main_is_the_exit_status(left: list[int]) -> None:
    for status in (0, 143):
        with pytest.raises(SystemExit) as end:
            run(lambda world, watch, status=status: status, 30)
        assert end.value.code == status
    assert left == []


@pytest.mark.parametrize(
    ("error", "status", "sentence", "traceback"),
    [
        (ValueError("--x is bad\nmore"), 1, "rank 0: --x is bad", False),
        (OSError("no such file"), 1, "rank 0: no such file", False),
        (RuntimeError("shapes differ"), 1, "rank 0: RuntimeError: shapes differ", True),
        (PeerFailure("rank 3 is dead"), 1, "rank 0 stops: rank 3 is dead", False),
        (KeyboardInterrupt(), 130, "rank 0: ended by SIGINT", False),
        (SystemExit(143), 143, "rank 0: ended by SIGTERM", False),
    ],
)
def test_failures_are_one_sentence(error, status, sentence, traceback, left, monkeypatch, capsys) -> None:
    monkeypatch.setattr("utils.watch.SILENCE_SECONDS", -2)
    with pytest.raises(SystemExit):
        run(fail_with(error), 30)
    assert left == [status]
    written = capsys.readouterr().err
    assert sentence + "\n" in written
    assert ("Traceback" in written) == traceback


def test_an_error_that_a_signal_causes_in_an_import_is_the_signal(left, capsys) -> None:
    """pydantic's import turns the SystemExit into an error of its own."""

    def main(world: World, watch: Watch) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except SystemExit as error:
            raise RuntimeError("SchemaError") from error
        return 0

    with pytest.raises(SystemExit):
        run(main, 30)
    written = capsys.readouterr().err
    assert left == [143] and "rank 0: ended by SIGTERM\n" in written and "SchemaError" not in written


def test_a_world_of_one_under_a_launcher_has_a_process_group(left, monkeypatch, free_port) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = []

    def main(world: World, watch: Watch) -> int:
        seen.append((dist.get_backend(), dist.get_world_size()))
        return 0

    with pytest.raises(SystemExit) as end:
        run(main, 30)
    assert end.value.code == 0
    assert seen == [("gloo", 1)]
    assert not dist.is_initialized()
