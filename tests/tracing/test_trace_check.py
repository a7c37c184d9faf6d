"""inspect_pair names what keeps a pair from being linked; groups in forms that no CPU run has."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from trace_reading import load, train

from chakra_et.capture.check import inspect_pair
from chakra_et.capture.recorder import experimental_config
from chakra_et.capture.tracer import ChakraTracer
from chakra_et.convert.pair import convert_pair
from chakra_et.simulate.measured_steps import step_rows
from chakra_et.traces.sets import Pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    with ChakraTracer(folder, "t", 0, 1, 2, 0) as tracer:
        train(tracer, 3)
    return load(folder / "t_host.json"), load(folder / "t_device.json")


@pytest.fixture
def altered(pair, tmp_path):
    """Check the pair after changing deep copies of its traces: ``altered(change_host, change_device)``."""

    def check(change_host=None, change_device=None):
        paths = tmp_path / "host.json", tmp_path / "device.json"
        for path, trace, change in zip(paths, pair, (change_host, change_device), strict=True):
            copy = json.loads(json.dumps(trace))
            if change:
                change(copy)
            path.write_text(json.dumps(copy))
        return inspect_pair(*paths, 2).problems

    return check


def keep(trace, key, wanted):
    trace[key] = [record for record in trace[key] if wanted(record)]


def operators(trace):
    return [record for record in trace["nodes"] if record["name"].startswith("aten::")]


def test_untouched_pair_has_no_problem(altered):
    assert altered() == []


def test_operators_that_had_not_ended_when_the_recording_stopped_are_no_problem(altered):
    """Found in small DDP captures on a busy machine: all-reduces of the last step."""

    def unfinished(device):
        for number in range(len(device["traceEvents"])):
            args = {"Record function id": 1_000_000 + number, "finished": False}
            device["traceEvents"].append({"ph": "X", "name": "gloo:all_reduce", "tid": 1, "args": args})

    assert altered(None, unfinished) == []


def test_host_without_ids(altered):
    def strip(host):
        for node in host["nodes"]:
            keep(node, "attrs", lambda attr: attr["name"] != "rf_id")

    assert altered(strip) == ["the host trace has no record-function ids"]


def test_device_without_ids(altered):
    def strip(device):
        for event in device["traceEvents"]:
            event.get("args", {}).pop("Record function id", None)

    assert altered(None, strip) == ["the device trace has no record-function ids"]


def test_ids_of_another_run(altered):
    def shift(host):
        for node in host["nodes"]:
            for attr in node["attrs"]:
                if attr["name"] == "rf_id" and attr["value"]:
                    attr["value"] += 10_000

    (problem,) = altered(shift)
    assert problem.startswith("only 0 record-function ids are in both traces")


def test_operator_of_the_training_thread_in_one_trace_only(altered):
    def drop_addmm(host):  # aten::linear around it is there, so no exception has ended it
        host["nodes"].remove(next(node for node in host["nodes"] if node["name"] == "aten::addmm"))

    assert altered(drop_addmm) == ["1 operators of the training thread are in one trace only: aten::addmm ×1"]

    def drop_relu(device):
        dropped = next(event for event in device["traceEvents"] if event["name"] == "aten::relu")
        device["traceEvents"].remove(dropped)

    assert altered(None, drop_relu) == [
        "1 operators of the training thread are in one trace only: aten::relu ×1"
    ]


def test_operator_of_an_unwatched_thread_is_no_problem(altered):
    def add(host):
        node = json.loads(json.dumps(operators(host)[0]))
        for attr in node["attrs"]:
            attr["value"] = {"rf_id": 999_999, "tid": 7}.get(attr["name"], attr["value"])
        host["nodes"].append(node)

    assert altered(add) == []


def test_steps_that_differ(altered):
    problems = altered(None, lambda d: keep(d, "traceEvents", lambda e: e["name"] != "ProfilerStep#1"))
    assert problems == ["2 active step(s) in a row were requested, but [0, 2] are annotated"]
    problems = altered(None, lambda d: keep(d, "traceEvents", lambda e: e["name"] != "ProfilerStep#0"))
    assert "the host trace covers the steps [0], the device trace [1, 2]" in problems


def test_steps_that_are_not_consecutive(altered):
    def rename(trace):
        for record in trace.get("nodes") or trace["traceEvents"]:
            if record["name"] == "ProfilerStep#2":
                record["name"] = "ProfilerStep#5"

    assert altered(rename, rename) == ["2 active step(s) in a row were requested, but [1, 5] are annotated"]


def test_annotations_that_only_look_like_steps_and_those_on_a_stream_do_not_count(altered):
    def add(device):
        event = next(e for e in device["traceEvents"] if e["name"] == "ProfilerStep#1")
        device["traceEvents"].append({**event, "cat": "gpu_user_annotation", "tid": 7, "args": {}})
        device["traceEvents"].append({**event, "name": "ProfilerStep#later", "args": {}})

    assert altered(None, add) == []


def test_traces_of_two_processes(altered):
    (problem,) = altered(lambda host: host.update(pid=host["pid"] + 1))
    assert problem.startswith("the host trace is of process ")


def test_group_record_that_is_absent(altered):
    assert altered(None, lambda device: device.update(distributedInfo={"backend": "gloo"})) == [
        "the host trace has no record of the process groups"
    ]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "damage", ["cut", "cut number", "empty", "absent", "two objects", "cut gzip", "not UTF-8"]
)
def test_file_that_is_not_one_whole_object(pair, tmp_path, which, damage):
    paths = [tmp_path / "host.json", tmp_path / "device.json"]
    for path, trace in zip(paths, pair, strict=True):
        path.write_text(json.dumps(trace))
    path = paths[which]
    content = path.read_bytes()
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(
            {
                "cut": content[: len(content) // 2],
                "cut number": content[: content.rindex(b".") + 1],
                "empty": b"",
                "two objects": content + content,
                "cut gzip": gzip.compress(content)[:-100],
                "not UTF-8": content.replace(b"aten::relu", b"aten::\xb0elu"),
            }[damage]
        )
    report = inspect_pair(*paths, 2)
    (problem,) = report.problems
    assert problem.startswith(f"the {('host', 'device')[which]} trace is not one complete JSON object")
    assert bool(report.truncated) == (damage in ("cut", "cut number", "empty", "absent", "cut gzip"))


def test_options_that_the_build_lacks_are_left_out():
    from torch._C._profiler import _ExperimentalConfig

    config = experimental_config({"enable_cuda_sync_events": True, "no_such_option": True})
    assert isinstance(config, _ExperimentalConfig)


CAPTURES = sorted((Path(__file__).parents[1] / "fixtures" / "captures").glob("*/*_manifest.json"))


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_committed_captures_are_whole_and_can_be_linked(path):
    manifest = load(path)
    assert manifest["complete"] and len(manifest["ranks"]) == manifest["world_size"]
    for record in manifest["ranks"]:
        files = record["files"]
        for entry in files.values():
            content = (path.parent / entry["name"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        assert (
            inspect_pair(
                path.parent / files["host"]["name"], path.parent / files["device"]["name"], 2
            ).problems
            == []
        )


def test_captures_are_committed():
    assert len(CAPTURES) == 4


def test_operators_that_activation_checkpointing_ends_early_are_counted_and_no_problem(tmp_path):
    """The forward pass that is repeated ends by an exception within its last operator."""
    blocks = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)) for _ in range(3)
    )
    with ChakraTracer(tmp_path, "t", 0, 1, 1) as tracer:
        for _ in range(2):
            values = torch.ones(4, 8, requires_grad=True)
            for block in blocks:
                values = checkpoint(block, values, use_reentrant=False)
            values.sum().backward()
            tracer.step()
    report = inspect_pair(tmp_path / "t_host.json", tmp_path / "t_device.json", 1)
    assert report.problems == []
    assert report.ended_early == 3 * len(["aten::linear", "aten::addmm"])


def test_operators_that_an_exception_of_the_program_ends_are_counted_and_no_problem(tmp_path):
    values = torch.ones(4, 8)
    with ChakraTracer(tmp_path, "t", 0, 1, 1) as tracer:
        for _ in range(2):
            (values @ torch.ones(8, 8)).sum()
            for _ in range(3):
                with contextlib.suppress(RuntimeError):  # aten::linear, aten::matmul, aten::mm
                    torch.nn.functional.linear(values, torch.ones(3, 3))
            tracer.step()
    report = inspect_pair(tmp_path / "t_host.json", tmp_path / "t_device.json", 1)
    assert (report.problems, report.ended_early, report.unlinked) == ([], 9, 9)


def test_annotations_of_the_program_that_are_named_like_steps_are_no_steps(tmp_path):
    """A program with its own ProfilerStep#N in each step had three times as many steps."""
    with ChakraTracer(tmp_path, "t", 1, 1, 3) as tracer:
        for number in range(5):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                torch.ones(4).sum()
            with torch.profiler.record_function(f"ProfilerStep#{number + 7}"):
                torch.ones(4).sum()
            tracer.step()
    report = inspect_pair(tmp_path / "t_host.json", tmp_path / "t_device.json", 3)
    assert not report.problems and sorted(report.steps) == [2, 3, 4]
    converted = convert_pair(Pair(0, tmp_path / "t_host.json", tmp_path / "t_device.json"))
    assert step_rows(converted.trace)[0] == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    assert b"nested ProfilerStep#9" in converted.trace.names.table
