"""Properties of every conversion, for any program and layout."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chakra_et.convert.pair import Converted, PairOptions, convert_pair
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.edges import topological_order
from chakra_et.simulate.replays import longest_path
from chakra_et.traces.sets import Pair
from chakra_et.validate import check as validate
from tests.generator import Features, Generated, Layout, generate
from tests.generator.parts import COLLECTIVES
from tests.simulate.replay_traces import replay_device

NCCL = sorted(COLLECTIVES)
GLOO = sorted(set(COLLECTIVES) - {"allreduce_coalesced"})


@st.composite
def programs(draw: st.DrawFn) -> Features:
    """Any mix of features, small."""
    flags = ("step_annotations", "side_streams", "graphs", "overlap", "autograd_thread", "accumulate_on_main",
             "late", "orphans", "worker_thread")  # fmt: skip
    latencies = {
        name: draw(st.sampled_from((0, 3_000))) for name in ("latency", "tail", "wake_up", "pick_up")
    }
    return Features(
        seed=draw(st.integers(0, 10**6)),
        steps=draw(st.integers(1, 3)),
        operators=draw(st.integers(1, 8)),
        depth=draw(st.integers(1, 4)),
        devices=draw(st.integers(0, 2)),
        waits=tuple(
            draw(st.lists(st.sampled_from(("item", "copy", "device", "event", "stream")), max_size=4))
        ),
        nccl=tuple(draw(st.lists(st.sampled_from(NCCL), max_size=3))),
        nccl_kernels=draw(st.sampled_from(("old", "dev", "rccl"))),
        gloo=tuple(draw(st.lists(st.sampled_from(GLOO), max_size=3))),
        groups=draw(st.integers(1, 3)),
        world_size=draw(st.integers(2, 4)),
        rank=draw(st.integers(0, 1)),
        resolution=1_000,
        **{name: draw(st.booleans()) for name in flags},
        **latencies,
    )


layouts = st.builds(
    Layout,
    host=st.sampled_from(("1.0.1", "1.0.2", "1.0.3", "1.1.0", "1.1.1", "9.9.9")),
    time=st.sampled_from(("relative", "absolute", "absolute decimals")),
    sync_events=st.booleans(),
    comm_args=st.booleans(),
    comm_attrs=st.booleans(),
    flows=st.booleans(),
    distributed=st.booleans(),
    string_ids=st.booleans(),
    text=st.sampled_from(("profiler", "line")),
    order=st.sampled_from(("time", "shuffled", "by category")),
    original_stream=st.booleans(),
    extras=st.booleans(),
    gz=st.booleans(),
)


def examples(fast: int, slow: int):
    """Run a test with few examples by default, and with many under --slow."""

    def decorate(test):
        given_both = given(programs(), layouts)
        options = {"deadline": None, "suppress_health_check": list(HealthCheck)}

        def few() -> None:
            settings(max_examples=fast, derandomize=True, **options)(given_both(test))()

        @pytest.mark.slow
        def many() -> None:
            settings(max_examples=slow, **options)(given_both(test))()

        few.__name__, many.__name__ = test.__name__, test.__name__ + "_slow"
        globals()[many.__name__] = many
        few.__doc__ = many.__doc__ = test.__doc__
        return few

    return decorate


def convert(generated: Generated, folder: Path, **options) -> Converted:
    host, device = generated.write(folder)
    return convert_pair(Pair(-1, host, device), PairOptions(**options))


@examples(fast=12, slow=120)
def test_invariants_of_every_conversion(program: Features, layout: Layout) -> None:
    """Events are conserved; the graph is acyclic, in time order, valid; two conversions give equal bytes."""
    with tempfile.TemporaryDirectory() as folder:
        generated = generate(program, layout)
        converted = convert(generated, Path(folder))
        check_conserved(generated, converted)
        check_structure(converted.trace)
        check_replay(converted)
        check_bytes(generated, converted, Path(folder))
        groups = {str(number): list(ranks) for number, (_, _, ranks) in converted.groups.items() if ranks}
        errors = [p for p in validate.check(converted.trace, groups) if p.severity == "error"]
        assert errors == []


def check_conserved(generated: Generated, converted: Converted) -> None:
    report, recorded = converted.report, generated.run.events
    assert report.conserved()
    written = [event for event in generated.device["traceEvents"] if event["ph"] == "X"]
    assert report.events_in == len(written)
    # Python frames and the like are in the extras; every event of the machine is kept, each under its name.
    assert report.events_kept == len(recorded)
    names = converted.trace.names
    first = np.setdiff1d(np.arange(len(names.index)), further_nodes(converted.trace))
    kept = sorted(names[row] for row in first if names[row] not in ("host-overhead", "device-overhead"))
    assert kept == sorted(event.name for event in recorded)
    assert report.losses.get("unknown-category:news_of_2031", 0) == generated.layout.extras


def further_nodes(trace: ExecutionTrace) -> np.ndarray:
    segments = trace.attributes.get("segment")
    return np.zeros(0, np.int64) if segments is None else segments.rows


def check_structure(trace: ExecutionTrace) -> None:
    nodes = len(trace)
    assert (trace.ids == np.arange(1, nodes + 1)).all()
    assert (np.diff(trace.start_micros.astype(np.int64)) >= 0).all(), "ids follow start times"
    assert len(trace.ctrl_deps.values) == 0
    target = np.repeat(np.arange(1, nodes + 1), np.diff(trace.data_deps.offsets))
    source = trace.data_deps.values.astype(np.int64)
    assert ((source >= 1) & (source < target)).all()
    in_list = np.diff(source)[target[1:] == target[:-1]]
    assert (in_list > 0).all(), "dependencies of a node ascend, none twice"
    assert len(topological_order(nodes, source - 1, target - 1)) == nodes


def check_replay(converted: Converted) -> None:
    """The replay reproduces the start times in the file; each change of lane can round by 1 µs."""
    trace = converted.trace
    lane = trace.column("lane")
    target = np.repeat(np.arange(len(trace)), np.diff(trace.data_deps.offsets))
    source = trace.data_deps.values.astype(np.int64) - 1
    changes = int((lane[source] != lane[target]).sum())
    result = replay_device(trace)
    off = np.abs(
        result.start_ns[0] // 1000 - (trace.start_micros - trace.start_micros.min()).astype(np.int64)
    )
    assert off.max() <= changes + 1
    end = int(trace.metadata["measured_end_micros"]) - int(trace.start_micros.min())
    assert longest_path(trace) / 1000 <= end + changes + 1


def check_bytes(generated: Generated, converted: Converted, folder: Path) -> None:
    et_file.write(folder / "one.et", converted.trace)
    et_file.write(folder / "two.et", convert(generated, folder).trace)
    assert (folder / "one.et").read_bytes() == (folder / "two.et").read_bytes()


@examples(fast=6, slow=120)
def test_one_step_is_a_part_of_all(program: Features, layout: Layout) -> None:
    """Events outside the step are counted losses."""
    with tempfile.TemporaryDirectory() as folder:
        generated = generate(program, layout)
        steps = [e.name[13:] for e in generated.run.events if e.name.startswith("ProfilerStep#")]
        for step in steps:
            one = convert(generated, Path(folder), step=step)
            check_structure(one.trace)
            assert one.report.conserved()
            assert list(one.report.steps_us) == [step]
            left_out = one.report.losses.get(f"outside-step:{step}", 0)
            assert left_out >= len(steps) - 1 + program.devices, "the other steps and what follows the last"
