"""What is left when a traced process is interrupted, killed, or has no room to write."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from trace_reading import device_ids, host_ids, load, steps_of, train

from chakra_et.capture.check import inspect_pair
from chakra_et.capture.tracer import ChakraTracer, hold_signals


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fail_at(step, error):
    def fault(number):
        if number == step:
            raise error

    return fault


def test_exception_in_an_active_step_keeps_what_was_recorded(tmp_path):
    with pytest.raises(ZeroDivisionError), ChakraTracer(tmp_path, "t", 1, 1, 3, 0) as tracer:
        train(tracer, 8, fail_at(3, ZeroDivisionError("by zero\nand more")))
    host, device = load(tmp_path / "t_host.json"), load(tmp_path / "t_device.json")
    assert steps_of(host["nodes"]) == ["ProfilerStep#1"]
    assert steps_of(device["traceEvents"]) == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
    assert host_ids(host) == device_ids(device)
    assert inspect_pair(tmp_path / "t_host.json", tmp_path / "t_device.json", 2).problems == []
    manifest = load(tmp_path / "t_manifest.json")
    assert not manifest["complete"]
    expected = "rank 0: training ended after 1 of 3 active steps (ZeroDivisionError: by zero)"
    assert manifest["reason"] == expected
    assert (manifest["ranks"][0]["steps"], manifest["ranks"][0]["unfinished_step"]) == ([2], 3)
    assert not list(tmp_path.glob(".*.tmp"))


def test_exception_in_the_first_active_step_still_gives_a_pair(tmp_path):
    def fault(step):
        if step == 2:
            torch.ones(3).exp()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ChakraTracer(tmp_path, "t", 1, 1, 3, 0) as tracer:
        train(tracer, 8, fault)
    assert load(tmp_path / "t_manifest.json")["ranks"][0]["steps"] == []
    assert inspect_pair(tmp_path / "t_host.json", tmp_path / "t_device.json", 1).problems == []


@pytest.mark.parametrize("step", [0, 1])
def test_exception_before_the_active_steps_leaves_nothing(tmp_path, caplog, step):
    (tmp_path / "t_host.json").write_text("an earlier capture")
    with pytest.raises(ValueError), ChakraTracer(tmp_path, "t", 1, 1, 3, 0) as tracer:
        train(tracer, 8, fail_at(step, ValueError("early")))
    assert names(tmp_path) == ["t_host.json"]
    assert (tmp_path / "t_host.json").read_text() == "an earlier capture"
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("chakra_et")]
    assert warning.startswith(
        "no trace t was written: training ended after 0 of 3 active steps (ValueError: early)"
    )


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_too_short_a_run_leaves_nothing_but_a_warning(tmp_path, caplog, steps):
    with ChakraTracer(tmp_path, "t", 1, 1, 2, 0) as tracer:
        train(tracer, steps)
    assert names(tmp_path) == []
    assert "no trace t was written: training ended after 0 of 2 active steps" in caplog.text


def test_run_that_ends_within_the_active_steps_is_told(tmp_path, caplog):
    with ChakraTracer(tmp_path, "t", 1, 1, 3, 0) as tracer:
        train(tracer, 4)
    manifest = load(tmp_path / "t_manifest.json")
    assert manifest["reason"] == "rank 0: training ended after 2 of 3 active steps"
    assert (manifest["ranks"][0]["steps"], manifest["ranks"][0]["unfinished_step"]) == ([2, 3], 4)
    assert manifest["ranks"][0]["check"]["linkable"]
    assert "training ended after 2 of 3 active steps" in caplog.text


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 1, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_signal_in_an_active_step(worker, tmp_path, number, code):
    process = worker("out", "t", "8", "--fault", "wait:3:0")
    wait_for(tmp_path / "out" / "waiting", process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode in (code, -number), output
    assert names(tmp_path / "out") == ["t_device.json", "t_host.json", "t_manifest.json", "waiting"]
    assert (
        inspect_pair(tmp_path / "out" / "t_host.json", tmp_path / "out" / "t_device.json", 2).problems == []
    )
    why = "KeyboardInterrupt" if number == signal.SIGINT else "SystemExit: 143"
    assert f"after 1 of 3 active steps ({why})" in load(tmp_path / "out" / "t_manifest.json")["reason"]


def test_killed_run_leaves_a_recognisable_rest_that_the_next_run_removes(worker, tmp_path):
    process = worker("out", "t", "8", "--fault", "kill:3:0")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    (rest,) = names(tmp_path / "out")
    assert re.fullmatch(r"\.t_host\.json\..*\.tmp", rest)
    process = worker("out", "t", "5")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert names(tmp_path / "out") == ["t_device.json", "t_host.json", "t_manifest.json"]
    assert (
        inspect_pair(tmp_path / "out" / "t_host.json", tmp_path / "out" / "t_device.json", 3).problems == []
    )


def test_forked_loader_workers_do_not_write_into_the_host_trace(worker, tmp_path):
    """Seen on torch 2.4 and 2.13: workers forked while recording wrote 50 MB into the parent's trace."""
    process = worker("out", "t", "6", "--fault", "fork:3:0")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    host = load(tmp_path / "out" / "t_host.json")
    assert host_ids(host) == device_ids(load(tmp_path / "out" / "t_device.json"))
    assert load(tmp_path / "out" / "t_manifest.json")["ranks"][0]["check"]["linkable"]


CUT_OFF = (
    r"the traces can't be written to \S+: the (host and )?device trace is cut off, as by a full disk or a "
    r"quota \(\d+ MB are free\); make room or choose another folder"
)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_file_size_limit_is_one_sentence_and_leaves_no_rest(worker, tmp_path, strict):
    process = worker("out", "t", "8", "--fault", "tiny-files:3:0", *(["--strict"] if strict else []))
    output, _ = process.communicate(timeout=120)
    last = [line for line in output.strip().splitlines() if "cut off" in line]
    if strict:
        assert process.returncode == 1 and re.fullmatch("OSError: " + CUT_OFF, last[0])
    else:
        assert process.returncode == 0 and '{"rank": 0, "steps": 8}' in output
        assert re.fullmatch(f"rank 0 WARNING trace t rank 0: {CUT_OFF}; training goes on", last[0])
        assert output.count("WARNING") == 1
    assert names(tmp_path / "out") == ["t_manifest.json"]
    manifest = load(tmp_path / "out" / "t_manifest.json")
    assert not manifest["complete"] and manifest["ranks"][0]["files"] == {}


def test_exception_of_the_loop_is_not_hidden_by_a_full_disk(tmp_path, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fault(step):
        if step == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        if step == 4:
            raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError), ChakraTracer(tmp_path, "t", 0, 1, 5, 0) as tracer:
            train(tracer, 8, fault)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "trace t rank 0: the traces can't be written" in caplog.text
    assert names(tmp_path) == ["t_manifest.json"]
    assert "cut off" in load(tmp_path / "t_manifest.json")["reason"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for 1.8 MB: a step of worker.py, uncompressed, but not 20."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1800k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command).returncode != 0:
        pytest.skip("mounting a small tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_full_disk_is_one_sentence_and_leaves_no_rest(worker, small_disk, strict):
    process = worker(str(small_disk), "t", "24", "--active", "20", *(["--strict"] if strict else []))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == strict
    assert output.count("make room or choose another folder") == 1
    assert output.count("WARNING") == (not strict)
    assert names(small_disk) in (["t_manifest.json"], [])


@pytest.mark.slow
def test_earlier_capture_outlives_one_that_finds_no_room(worker, small_disk):
    process = worker(str(small_disk), "t", "4", "--active", "1", "--gzip")
    process.communicate(timeout=120)
    assert process.returncode == 0
    before = {path.name: path.read_bytes() for path in small_disk.glob("t_*.gz")}
    assert len(before) == 2
    process = worker(str(small_disk), "t", "24", "--active", "20", "--gzip", "--strict")
    process.communicate(timeout=120)
    assert process.returncode == 1
    assert {path.name: path.read_bytes() for path in small_disk.glob("t_*.gz")} == before


def test_rename_that_fails_is_told_and_hides_no_exception(tmp_path, caplog):
    (tmp_path / "t_host.json").mkdir()
    why = r"the traces can't be written to .*: Is a directory"
    with pytest.raises(OSError, match=why), ChakraTracer(tmp_path, "t", 0, 1, 1, strict=True) as tracer:
        train(tracer, 3)
    with pytest.raises(ZeroDivisionError), ChakraTracer(tmp_path, "t", 0, 1, 2, 0) as tracer:
        train(tracer, 3, fail_at(2, ZeroDivisionError()))
    assert "trace t rank 0: the traces can't be written" in caplog.text
    assert not list(tmp_path.glob(".*.tmp"))


def test_manifest_that_finds_no_room_leaves_the_traces(tmp_path, monkeypatch):
    def fill_disk(source, target):
        if target.name == "t_manifest.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr(os, "replace", fill_disk)
    why = "the manifest can't be written to .*: No space left on device"
    with pytest.raises(OSError, match=why), ChakraTracer(tmp_path, "t", 0, 1, 1, strict=True) as tracer:
        train(tracer, 2)
    assert names(tmp_path) == ["t_device.json", "t_host.json"]


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_held_signals_arrive_afterwards_once(first):
    arrived, order = [], []
    previous = {
        n: signal.signal(n, lambda n, frame: arrived.append(n)) for n in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with hold_signals() as held:
            for _ in range(2):
                os.kill(os.getpid(), first)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            order.append((list(arrived), set(held)))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    assert order == [([], {first, signal.SIGTERM})]
    assert arrived == list(dict.fromkeys([first, signal.SIGTERM]))


def test_held_signal_that_nobody_handles_ends_the_process_afterwards(tmp_path, repo_root):
    code = """
import os, pathlib, signal
from chakra_et.capture.tracer import hold_signals
with hold_signals():
    os.kill(os.getpid(), signal.SIGTERM)
    pathlib.Path("done").touch()
pathlib.Path("more").touch()
"""
    environment = {**os.environ, "PYTHONPATH": str(repo_root)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    assert done.returncode == -signal.SIGTERM
    assert names(tmp_path) == ["done"]


def test_signals_are_left_alone_outside_the_main_thread():
    before = signal.getsignal(signal.SIGTERM)

    def work():
        with hold_signals() as held:
            seen.append((held, signal.getsignal(signal.SIGTERM) is before))

    seen = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [([], True)]


def wait_for(path, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
