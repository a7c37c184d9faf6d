"""One process traced: the pair covers exactly the active steps and can be linked."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity
from trace_reading import device_ids, host_ids, load, steps_of, train

from chakra_et.capture import recorder
from chakra_et.capture.check import inspect_pair
from chakra_et.capture.tracer import ChakraTracer

NAME = "tiny 한글"


@pytest.fixture(scope="module", params=[1, 3])
def capture(request, tmp_path_factory):
    """A folder with the capture of 1 or 3 active steps, after 2 + 1, and the number of active steps."""
    folder = tmp_path_factory.mktemp("capture")
    with ChakraTracer(folder, NAME, 2, 1, request.param, 0, run_info={"model": "mlp", "lr": 0.1}) as tracer:
        train(tracer, 8)
    return folder, request.param


def test_files_are_those_and_no_others(capture):
    folder, _ = capture
    kinds = ("device.json", "host.json", "manifest.json")
    assert sorted(path.name for path in folder.iterdir()) == [f"{NAME}_{kind}" for kind in kinds]


def test_the_host_operators_are_all_in_the_device_trace(capture):
    folder, _ = capture
    host, device = load(folder / f"{NAME}_host.json"), load(folder / f"{NAME}_device.json")
    assert host_ids(host) == device_ids(device)
    assert len(host_ids(host)) > 50


def test_the_host_trace_covers_the_warm_up_and_the_device_trace_also_the_active_steps(capture):
    folder, active = capture
    host, device = load(folder / f"{NAME}_host.json"), load(folder / f"{NAME}_device.json")
    assert steps_of(host["nodes"]) == ["ProfilerStep#2"]
    assert steps_of(device["traceEvents"]) == [f"ProfilerStep#{step}" for step in range(2, 3 + active)]
    forwards = [node for node in host["nodes"] if node["name"] == "aten::relu"]
    assert len(forwards) == 1
    assert not any("Input Dims" in event.get("args", {}) for event in device["traceEvents"])
    assert inspect_pair(folder / f"{NAME}_host.json", folder / f"{NAME}_device.json", active).problems == []


def test_nothing_of_the_tracer_is_in_the_trace(capture):
    """The thread's top-level records are the steps, but for what opens before Kineto does."""
    folder, _ = capture
    nodes = load(folder / f"{NAME}_host.json")["nodes"]
    threads = {node["id"] for node in nodes if node["name"].endswith("|thread]")}
    top = [node["name"] for node in nodes if node["ctrl_deps"] in threads]
    assert top == ["ProfilerStep#2"]


def test_manifest_tells_what_was_captured(capture):
    folder, active = capture
    manifest = load(folder / f"{NAME}_manifest.json")
    assert manifest["complete"] and manifest["reason"] is None and manifest["missing_ranks"] == []
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["run"] == {"model": "mlp", "lr": 0.1}
    assert manifest["schedule"] == {"wait_steps": 2, "warmup_steps": 1, "active_steps": active}
    assert (manifest["world_size"], manifest["backend"], manifest["process_groups"]) == (1, None, [])
    (rank,) = manifest["ranks"]
    assert rank["check"]["linkable"] and rank["check"]["problems"] == []
    assert rank["steps"] == list(range(3, 3 + active)) and rank["unfinished_step"] is None
    assert set(rank["files"]) == {"host", "device"}
    for entry in rank["files"].values():
        content = (folder / entry["name"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["size"], entry["sha256"])


def test_step_times_are_those_of_the_device_trace(capture):
    folder, _ = capture
    (rank,) = load(folder / f"{NAME}_manifest.json")["ranks"]
    events = load(folder / f"{NAME}_device.json")["traceEvents"]
    durations = {
        e["name"].partition("#")[2]: e["dur"] for e in events if e["name"].startswith("ProfilerStep#")
    }
    assert durations.pop("2") > 0 and rank["structure_step"] == 2
    assert rank["step_times_us"] == pytest.approx(durations)
    assert set(rank["untraced_step_times_us"]) == {"0", "1"}
    assert all(time > 0 for time in rank["untraced_step_times_us"].values())


def test_gzip_holds_the_same_pair(tmp_path):
    with ChakraTracer(tmp_path, "plain", 0, 1, 1, 0) as tracer:
        train(tracer, 2)
    with ChakraTracer(tmp_path, "plain", 0, 1, 1, 0, gzip=True) as tracer:
        train(tracer, 2)
    host, device = tmp_path / "plain_host.json.gz", tmp_path / "plain_device.json.gz"
    assert host_ids(load(host)) == device_ids(load(device))
    assert inspect_pair(host, device, 1).problems == []
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {host.name, device.name, "plain_manifest.json"}, "the plain pair went"
    assert host.read_bytes()[3] == 0 and host.read_bytes()[4:8] == bytes(4), "no name, no time: same bytes"


def test_no_waiting_and_no_warmup(tmp_path, recwarn):
    with ChakraTracer(tmp_path, "t", 0, 0, 2, 0) as tracer:
        train(tracer, 4)
    assert load(tmp_path / "t_manifest.json")["ranks"][0]["steps"] == [0, 1]
    assert inspect_pair(tmp_path / "t_host.json", tmp_path / "t_device.json", 2).problems == []


def test_files_are_in_place_when_the_last_active_step_ends(tmp_path):
    with ChakraTracer(tmp_path, "t", 1, 1, 1, 0) as tracer:
        train(tracer, 3)
        assert load(tmp_path / "t_manifest.json")["complete"]
        written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        train(tracer, 2)
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_background_thread_is_in_both_traces_or_in_neither_way_a_problem(tmp_path):
    """torch 2.4's Kineto can't watch other threads; the pair can be linked all the same."""
    asked: queue.Queue[int] = queue.Queue()

    def work():
        while asked.get():
            torch.ones(4, 4).exp_()
            asked.task_done()

    def at_step(step):  # nothing of the thread runs while a step ends
        for _ in range(4):
            asked.put(1)
        asked.join()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with ChakraTracer(tmp_path, "t", 1, 1, 2, 0) as tracer:
            train(tracer, 4, at_step)
    finally:
        asked.put(0)
        thread.join()
    host, device = load(tmp_path / "t_host.json"), load(tmp_path / "t_device.json")
    assert sum(node["name"] == "aten::exp_" for node in host["nodes"]) > 3
    (rank,) = load(tmp_path / "t_manifest.json")["ranks"]
    assert rank["check"]["unlinked"] == len(host_ids(host) ^ device_ids(device))
    from torch._C._profiler import _ExperimentalConfig

    if "profile_all_threads" in _ExperimentalConfig.__init__.__doc__:
        assert any(event["name"] == "aten::exp_" for event in device["traceEvents"])
        assert rank["check"]["linkable"]


def test_log_has_one_line_for_the_rank(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="chakra_et"), ChakraTracer(tmp_path, "t", 1, 0, 1, 0) as tracer:
        train(tracer, 2)
    lines = [record.getMessage() for record in caplog.records if "rank 0" in record.getMessage()]
    assert len(lines) == 1
    assert re.fullmatch(r"trace t rank 0: steps 1, \d+ host nodes, \d+ of them in the device trace", lines[0])


def test_memory_events_are_recorded_if_asked_for(tmp_path):
    for memory in (False, True):
        with ChakraTracer(tmp_path, "t", 0, 1, 1, memory=memory) as tracer:
            train(tracer, 2)
        events = load(tmp_path / "t_device.json")["traceEvents"]
        sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
        assert bool(sizes) == memory
        assert inspect_pair(tmp_path / "t_host.json", tmp_path / "t_device.json", 1).problems == []
    assert min(sizes) < 0 < max(sizes), "frees and allocations"
    # The activations of a linear layer: 4 x 8 floats.
    assert 4 * 8 * 4 in sizes


UNCONFIGURED = """
import torch
from chakra_et import ChakraTracer
with ChakraTracer("my outputs", "my_run", 0, 1, 1) as tracer:
    for _ in range(3):
        torch.ones(4).exp()
        tracer.step()
"""


def test_without_logging_the_paths_the_check_and_the_next_command_are_printed(tmp_path, repo_root):
    environment = {**os.environ, "PYTHONPATH": str(repo_root), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", UNCONFIGURED], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "", done.stderr
    shown = [line for line in done.stderr.splitlines() if line.startswith("chakra-et: ")]
    assert re.fullmatch(
        r"chakra-et: trace my_run rank 0: steps 1, \d+ host nodes, \d+ of them in the device trace", shown[0]
    )
    assert shown[1:] == [
        "chakra-et: traces and manifest of 1 rank(s) are in my outputs",
        "chakra-et: next: python -m chakra_et convert 'my outputs' --name my_run",
    ]


def test_run_info_of_any_kind_is_kept_as_text(tmp_path):
    with ChakraTracer(
        tmp_path, "t", 0, 1, 1, 0, run_info={"path": tmp_path, "dtype": torch.bfloat16}
    ) as tracer:
        train(tracer, 2)
    run = json.loads((tmp_path / "t_manifest.json").read_text())["run"]
    assert run == {"path": str(tmp_path), "dtype": "torch.bfloat16"}


def test_gpu_is_idle_when_recording_begins_and_its_synchronisations_are_asked_for(tmp_path, monkeypatch):
    """Only the requests to torch are checked here: what a GPU then records needs a GPU."""
    asked, settled = {}, []

    def record_request(**options):
        asked.update(options)
        return real_profile(**{**options, "activities": [ProfilerActivity.CPU]})

    real_profile = recorder.profile
    monkeypatch.setattr(recorder, "profile", record_request)
    monkeypatch.setattr(recorder, "experimental_config", lambda wanted: asked.update(wanted))
    gpu = SimpleNamespace(is_available=lambda: True, synchronize=lambda: settled.append(tracer.steps_done))
    monkeypatch.setattr(recorder, "_pass_us", lambda: {"operators": 1.0})
    monkeypatch.setattr(recorder, "torch", SimpleNamespace(cuda=gpu, autograd=torch.autograd))
    tracer = ChakraTracer(tmp_path, "t", 1, 1, 3, 0)
    with tracer:
        train(tracer, 4)
    assert settled == [1, 2]
    assert asked["activities"] == [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    assert asked["enable_cuda_sync_events"] is True
