"""The traces of one program in the layouts of all versions give the same graph."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from chakra_et.convert.pair import Converted, convert_pair
from chakra_et.errors import TraceError
from chakra_et.traces import device as device_trace
from chakra_et.traces import host as host_trace
from chakra_et.traces.device_format import SYNC
from chakra_et.traces.sets import Pair
from tests.generator import Features, Generated, Layout, generate
from tests.generator.layouts import zero_ns

PROGRAM = Features(
    seed=4, steps=2, side_streams=True, waits=("item", "copy", "device", "event"),
    nccl=("allreduce", "broadcast"), gloo=("allreduce",), autograd_thread=True, graphs=True, resolution=1_000,
)  # fmt: skip
LAYOUTS = {
    "schema 1.0.1": Layout(host="1.0.1"),
    "schema 1.0.1 without record-function ids": Layout(host="1.0.1", ids=False, time="absolute"),
    "schema 1.0.2": Layout(host="1.0.2"),
    "schema 1.0.3": Layout(host="1.0.3", comm_attrs=False, time="absolute"),
    "schema 1.1.0": Layout(host="1.1.0"),
    "a schema of the future": Layout(host="9.9.9"),
    "absolute times": Layout(time="absolute"),
    "string pids and tids": Layout(string_ids=True),
    "streams rewritten, original_stream kept": Layout(original_stream=True),
    "one line, gzip": Layout(text="line", gz=True),
    "events in no order": Layout(order="shuffled"),
    "events by category": Layout(order="by category"),
    "no fwdbwd flows": Layout(flows=False),
    "no arguments on communication kernels": Layout(comm_args=False),
}


@cache
def generated(layout: Layout) -> Generated:
    # Host and device trace put gloo's operators on different threads: only their numbers tell which is which.
    return generate(PROGRAM if layout.ids else replace(PROGRAM, gloo=()), layout)


def convert(layout: Layout, folder: Path) -> Converted:
    host, device = generated(layout).write(folder)
    return convert_pair(Pair(-1, host, device))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_graph_from_every_layout(name: str, tmp_path: Path) -> None:
    usual = generate(generated(LAYOUTS[name]).program)
    expected = convert_pair(Pair(-1, *usual.write(tmp_path)))
    found = convert(LAYOUTS[name], tmp_path)
    assert found.report.link_rate == 1.0
    one, other = expected.trace, found.trace
    assert len(one) == len(other)
    for column in ("start_micros", "duration_micros", "types"):
        assert (getattr(one, column) == getattr(other, column)).all(), column
    assert [one.names[row] for row in range(len(one))] == [other.names[row] for row in range(len(one))]
    assert (one.data_deps.offsets == other.data_deps.offsets).all()
    assert (one.data_deps.values == other.data_deps.values).all()
    for attribute in ("lane", "is_cpu_op", "comm_type", "comm_size", "stream", "tid", "seq_id", "scope"):
        assert (one.column(attribute) == other.column(attribute)).all(), attribute
    assert one.inputs is not None and other.inputs is not None
    assert list(one.inputs.values) == list(other.inputs.values)
    assert found.report.edges_by_kind == expected.report.edges_by_kind


def test_absolute_times_with_fractions_lose_at_most_a_quarter_microsecond(tmp_path: Path) -> None:
    """A double holds a time of 1.7e15 µs to 0.25 µs: events may touch, but none is lost."""
    features = Features(seed=8, side_streams=True, nccl=("allreduce",), steps=2)
    exact = generate(features)
    blurred = generate(features, Layout(time="absolute decimals"))
    times = []
    for made in (exact, blurred):
        device = device_trace.load(made.write(tmp_path)[1])
        zero = device.origin_ns - zero_ns(made.layout)
        times.append(np.sort(device.start + zero))
    assert np.abs(times[0] - times[1]).max() <= 250
    host, device_path = blurred.write(tmp_path)
    report = convert_pair(Pair(-1, host, device_path)).report
    assert report.conserved() and report.link_rate == 1.0


def test_times_survive_to_the_nanosecond(tmp_path: Path) -> None:
    """Kineto writes 4365894270274.123: microseconds since the boot with three decimals."""
    made = generate(Features(seed=2))
    device = device_trace.load(made.write(tmp_path)[1])
    zero = zero_ns(made.layout) - device.origin_ns
    expected = sorted((event.start + zero, event.end + zero) for event in made.run.events)
    kept = device.select(np.flatnonzero(device.category != SYNC))
    assert sorted(zip(kept.start.tolist(), kept.end.tolist(), strict=True)) == expected


def test_the_origin_is_absolute(tmp_path: Path) -> None:
    made = generate(Features(seed=2))
    device = device_trace.load(made.write(tmp_path)[1])
    first = min(event.start for event in made.run.events)
    assert 0 <= zero_ns(made.layout) + first - device.origin_ns < 1_000
    assert device.host_name == "node0"


def test_host_trace_of_another_run_is_rejected(tmp_path: Path) -> None:
    host, _ = generated(Layout()).write(tmp_path, "one")
    other = generate(Features(seed=9, steps=1, devices=0))
    for event in other.device["traceEvents"]:
        if "Record function id" in event.get("args", {}):
            event["args"]["Record function id"] += 10**6
    _, device = other.write(tmp_path, "other")
    with pytest.raises(TraceError, match="the same run: only 0% of their operators match.*--allow-unl"):
        convert_pair(Pair(-1, host, device))


def test_the_generator_writes_what_the_profilers_write(tmp_path: Path) -> None:
    """The generated traces have the field names of real traces."""
    made = generated(Layout())
    host, device = made.write(tmp_path)
    node = json.loads(host.read_text())["nodes"][5]
    assert set(node) == {"id", "name", "ctrl_deps", "inputs", "outputs", "attrs"}
    assert set(node["inputs"]) == {"values", "shapes", "types", "strides"}
    names = [attr["name"] for attr in node["attrs"]]
    assert names == ["rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema", "kernel_backend",
                     "kernel_file", "tensor_range"]  # fmt: skip
    events = json.loads(device.read_text())["traceEvents"]
    kernel = next(event for event in events if event.get("cat") == "kernel")
    assert {"External id", "device", "context", "stream", "correlation"} <= set(kernel["args"])
    flat = generated(Layout(host="1.0.1", ids=False, time="absolute")).host["nodes"][5]
    fields = (
        "name id rf_id parent fw_parent seq_id scope tid fw_tid op_schema inputs input_shapes input_types"
    )
    assert set(flat) == {*fields.split(), "outputs", "output_shapes", "output_types"}
    assert len(host_trace.load(host)) == len(made.host["nodes"])
