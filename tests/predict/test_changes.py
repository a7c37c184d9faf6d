"""What-ifs on traces written down node by node, with times worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chakra_et.cost.network_fit import NetworkModel, Sample, fit_model, read_model, write_model
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, TensorInfo
from chakra_et.predict.command import PredictConfig
from chakra_et.predict.predict import Prediction, predict
from chakra_et.simulate.run import Run, make_run
from chakra_et.transform.durations import GpuKernels, Overlap, RankAs, Scale, parse_scale
from chakra_et.transform.flags import parse_sizes
from chakra_et.transform.gpu import OtherGpu, parse_gpu
from chakra_et.transform.network import TCP_PAYLOAD, Network, find_communication, gloo_segments
from chakra_et.transform.scale import Scaling
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace, recv, send


def launches(kernels: int, launch: int = 10, length: int = 4, **more: int) -> list[dict]:
    """A thread that launches kernels on one stream."""
    nodes = [cpu(1, 1, name="ProfilerStep#1", start=1)]
    for at in range(kernels):
        nodes.append(cpu(2 * at + 2, launch, (max(2 * at, 1),), name="cudaLaunchKernel", kind="runtime"))
        nodes.append(kernel(2 * at + 3, length, (2 * at + 2,), name="gemm", kind="kernel", **more))
    return nodes


def alone(*nodes: dict) -> Run:
    return make_run("alone", [make_trace(*nodes)], [0])


def us(prediction: Prediction) -> list[float]:
    return [rank.after_ns / 1e3 for rank in prediction.ranks]


def test_a_launch_bound_step_stays_launch_bound() -> None:
    run = alone(*launches(10))
    assert us(predict(run, [])) == [105]
    assert us(predict(run, [Scale("gemm", 0.5)])) == [103]  # only the last kernel shows
    assert us(predict(run, [Scale("gemm", 5)])) == [1 + 10 + 10 * 20]  # now the device decides
    slow = predict(run, [Scale("gemm", 5)]).ranks[0]
    assert max(slow.bound_before, key=slow.bound_before.__getitem__) == "runtime"
    assert slow.bound_after["kernel"] == pytest.approx(200 / 211)


def two_ranks(slow: int = 0, **more: Any) -> Run:
    """Two ranks that compute 100 µs, all-reduce 1 MB in 50 µs, compute 30 µs beside it and wait."""
    traces = []
    for rank in range(2):
        traces.append(
            make_trace(
                cpu(1, 100 + slow * rank, name="ProfilerStep#1", start=1),
                collective(
                    2,
                    50,
                    (1,),
                    start=101 + slow,
                    transfer_micros=50,
                    wait_micros=0,
                    **{"comm_size": 10**6, **more},
                ),
                cpu(3, 30, (1,), name="forward", start=101 + slow * rank),
                cpu(4, 10, (2, 3), name="optimizer", start=151 + slow),
                world_size=2,
            )
        )
    return make_run("two", traces, [0, 1])


def test_the_others_wait_for_a_slow_rank_and_no_longer_when_it_is_as_the_median() -> None:
    run = two_ranks(slow=40)
    assert us(predict(run, [])) == [200, 200]
    prediction = predict(run, [RankAs(1)])
    assert us(prediction) == [160, 160]
    assert "4 of its" not in prediction.notes[-1] and "3 of its 3 nodes" in prediction.notes[-1]


def test_what_a_rank_repeats_takes_in_sum_what_it_takes_on_the_others() -> None:
    def rank(repeats: int) -> list[dict]:
        step = [cpu(1, 1, name="ProfilerStep#1", start=1)]
        gelus = [cpu(2 + at, 10, (1 + at,), name="aten::gelu") for at in range(repeats)]
        return [*step, *gelus, cpu(2 + repeats, 100, (1 + repeats,), name="aten::mm")]

    run = make_run("both", [make_trace(*rank(2)), make_trace(*rank(8))], [0, 1])
    assert us(predict(run, [])) == [121, 181]
    assert us(predict(run, [RankAs(1)])) == pytest.approx([121, 121], abs=0.01)


def test_a_bandwidth_gives_transfers_their_time() -> None:
    # 1 MB through a ring of two: 2 steps of 5 µs, and 1 MB at 12.5 GB/s = 80 µs.
    run = two_ranks()
    assert us(predict(run, [Network(12.5e9, 5_000.0)])) == [100 + 10 + 80 + 10] * 2
    # A very fast network leaves the computation beside it.
    assert us(predict(run, [Network(1e15, 0.0)])) == [140, 140]


def test_gloo_takes_at_least_its_own_work() -> None:
    run = two_ranks(name="gloo:all_reduce")
    assert us(predict(run, [Network(1e15, 0.0)])) == [160, 160]
    slow = 1e6 / (1e9 * TCP_PAYLOAD) * 1e6
    assert us(predict(run, [Network(1e9, 0.0)])) == pytest.approx([110 + slow] * 2, abs=0.01)


def test_on_one_host_gloo_works_while_its_link_is_idle() -> None:
    # 1 MB takes 50 µs without a link, and 1 ms on one of 1 GB/s: with the last of two segments of work.
    run = two_ranks(name="gloo:all_reduce")
    for trace in run.graph.traces:
        trace.metadata["clock_domain"] = "host"
    wire = 1e6 / (1e9 * TCP_PAYLOAD) * 1e6
    assert us(predict(run, [Network(1e9, 0.0)])) == pytest.approx([110 + wire + 25] * 2, abs=0.01)
    # Of a run on a link of 40 GB/s, 25 µs and the headers were that link's.
    was = 1e6 / (40e9 * TCP_PAYLOAD) * 1e6
    slower = predict(run, [Network(1e9, 0.0, present=40e9)])
    assert us(slower) == pytest.approx([110 + wire + (50 - was) / 2] * 2, abs=0.01)
    # A link that is no obstacle leaves the work.
    assert us(predict(run, [Network(1e15, 0.0)])) == pytest.approx([160, 160], abs=0.01)
    assert [gloo_segments(size, 2) for size in (1, 4 << 20, 5 << 20)] == [2, 2, 3]


def test_a_latency_alone_changes_transfers_by_the_ratio_of_the_model() -> None:
    model = NetworkModel(0.0, 5_000.0, 1e6 / 40e-6, math.inf, 0.1, 3, "a file")  # 10 + 40 µs: as recorded
    assert us(predict(two_ranks(), [Network(latency_ns=15_000.0, model=model)])) == [100 + 70 + 10] * 2


def test_what_takes_no_time_by_the_model_keeps_its_time() -> None:
    model = NetworkModel(0.0, 0.0, 1e9, math.inf, 0.1, 3, "a file")
    run = two_ranks(comm_size=0, comm_type=CollectiveType.BARRIER)
    assert us(predict(run, [Network(latency_ns=15_000.0, model=model)])) == [160, 160]


@pytest.mark.parametrize("listed", [True, False])
def test_a_collective_without_the_other_ranks_files_has_the_network_of_its_group(listed: bool) -> None:
    """Of all ranks that the file tells of, where no file lists the members."""
    trace = make_trace(cpu(1, 100), collective(2, 50, (1,), comm_size=10**6), world_size=4)
    run = make_run("one", [trace], [0], {"1": [0, 1, 2, 3]} if listed else {})
    # 6 steps of 5 µs, and 1.5 MB at 12.5 GB/s.
    assert us(predict(run, [Network(12.5e9, 5_000.0)])) == [100 + 30 + 120]


def two_groups() -> Run:
    """Two all-reduces at the same time, of groups of their own."""
    traces = [
        make_trace(
            cpu(1, 100, name="ProfilerStep#1", start=1),
            collective(2, 50, (1,), "1", comm_size=10**6),
            collective(3, 50, (1,), "2", comm_size=10**6),
            cpu(4, 10, (2, 3)),
            world_size=2,
        )
        for _ in range(2)
    ]
    return make_run("two groups", traces, [0, 1])


def test_transfers_at_the_same_time_share_the_link() -> None:
    run = two_groups()
    assert us(predict(run, [Network(12.5e9, 0.0)])) == [100 + 160 + 10] * 2
    assert us(predict(run, [Network(12.5e9, 0.0, contention=False)])) == [100 + 80 + 10] * 2


def test_overlap() -> None:
    assert us(predict(two_ranks(), [Overlap()])) == [150, 150]  # the all-reduce ends the step
    device = alone(*launches(3), {**collective(8, 60, (2,), stream=9), "device": 0})
    assert us(predict(device, [])) == [71]


def test_overlap_leaves_messages_alone() -> None:
    """The second stage computes on what it receives; its all-reduce can run beside that."""
    first = make_trace(cpu(1, 50), send(2, 10, 1, (1,), tid=2), collective(3, 20, (1,), tid=3))
    second = make_trace(recv(1, 10, 0, tid=2), cpu(2, 50, (1,)), collective(3, 20, tid=3), cpu(4, 30, (2, 3)))
    run = make_run("stages", [first, second], [0, 1], {"1": [0, 1]})
    assert us(predict(run, [])) == us(predict(run, [Overlap()])) == [70, 140]


def test_a_model_is_found_again_from_its_times() -> None:
    known = NetworkModel(20_000.0, 3_000.0, 2e9, 5e9, 0.0, 0, "known")
    kinds = (CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER, CollectiveType.BROADCAST)
    samples = [
        Sample(kind, size, ranks, known.time(kind, size, ranks))
        for kind in kinds
        for size in (1 << 10, 1 << 16, 1 << 22)
        for ranks in (2, 4)
    ]
    found = fit_model(samples, "samples")
    assert found.error < 1e-6
    for name in ("call_ns", "latency_ns", "bandwidth", "reduce_bandwidth"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-6)


def test_measured_collectives_go_before_fitted_costs() -> None:
    reduce, gather = CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER
    samples = [
        (reduce, 1000, 2, 10.0),
        (reduce, 3000, 2, 50.0),
        (gather, 1000, 2, 90.0),
        (gather, 1000, 4, 7.0),
    ]
    fitted = NetworkModel(0.0, 100.0, 1e9, math.inf, 0.5, 4, "gloo")
    model = replace(fitted, measured=tuple(Sample(*each) for each in samples))
    # Below the smallest size, between two, and beyond the largest.
    assert [model.time(reduce, size, 2) for size in (10, 2000, 6000)] == [10, 30, 100]
    assert model.time(gather, 2000, 2) == 180 and model.time(gather, 2000, 4) == 14
    for kind, ranks in ((reduce, 4), (CollectiveType.BROADCAST, 2)):
        assert model.time(kind, 2000, ranks) == fitted.time(kind, 2000, ranks)
    # A ratio takes both from the same source.
    assert model.change(gather, (1000, 2), (1000, 4)) == pytest.approx(7 / 90)
    assert model.change(reduce, (1000, 2), (1000, 4)) == fitted.change(reduce, (1000, 2), (1000, 4))


def test_a_model_survives_its_file(tmp_path) -> None:
    measured = (Sample(CollectiveType.ALL_REDUCE, 1 << 20, 2, 5e5),)
    model = NetworkModel(20_000.0, 3_000.0, 2e9, math.inf, 0.05, 7, "gloo", measured)
    write_model(tmp_path / "net.json", model, backend="gloo")
    assert read_model(tmp_path / "net.json") == model
    entry = json.loads((tmp_path / "net.json").read_text())
    (tmp_path / "net.json").write_text(json.dumps({**entry, "measured": [{**entry["measured"][0], "ns": 0}]}))
    with pytest.raises(TraceError, match="isn't a network model .*measured in 0 ns"):
        read_model(tmp_path / "net.json")
    (tmp_path / "net.json").write_text("{}")
    with pytest.raises(TraceError, match="isn't a network model"):
        read_model(tmp_path / "net.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Scale("gem+n", 2), "no node's name matches 'gem[+]n'"),
        (Scale("(", 2), "is not a regular expression"),
        (RankAs(7), "the run has ranks 0"),
        (RankAs(0), "no other rank"),
        (Overlap(), "have no collectives"),
        (OtherGpu("H100", "H1000"), "GPU 'H1000' is unknown: use one of P100, V100"),
        (Network(1e9), "no communication between known ranks"),
    ],
)
def test_what_does_not_fit_is_refused(change, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        predict(alone(*launches(3)), [change])


@pytest.mark.parametrize("text", ["gemm", "=2", "gemm=fast", "gemm=-1", "gemm=inf", "gemm=nan"])
def test_a_bad_scale_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PATTERN=FACTOR"):
        parse_scale(text)


def test_a_scale_is_read() -> None:
    assert parse_scale("a=b|c=0.5") == Scale("a=b|c", 0.5)


@pytest.mark.parametrize("text", ["H100→MI300X", "H100->MI300X", "H100:MI300X", " H100 : MI300X"])
def test_gpus_are_read(text: str) -> None:
    assert parse_gpu(text) == OtherGpu("H100", "MI300X")
    with pytest.raises(ValueError, match="FROM→TO"):
        parse_gpu("H100")


def with_shapes(run_of: list[dict], shapes: dict[int, str]) -> Run:
    """The nodes as a run, with the shapes of the float tensors that operators (by id) are given."""
    trace = make_trace(*run_of)
    rows = [row for row, node in enumerate(run_of) if node["id"] in shapes]
    texts = [shapes[run_of[row]["id"]].encode() for row in rows]
    kinds = [b'["Tensor(float)","Tensor(float)"]'] * len(rows)
    tensors = TensorInfo(np.array(rows, np.int64), [b"[]"] * len(rows), texts, kinds)
    return make_run("shapes", [replace(trace, inputs=tensors)], [0])


def pipelined(host: int, device: int, steps: int = 3) -> Run:
    """Steps in which the host takes ``host`` µs, at the end of which it launches ``device`` µs."""
    nodes: list[dict[str, Any]] = []
    for step in range(steps):
        at, deps = 4 * step, ((4 * step - 1,) if step else ())
        nodes += [
            cpu(at + 1, 0, deps, name=f"ProfilerStep#{step}", start=1 + step * host),
            cpu(at + 2, host - 10, (at + 1,), name="aten::mm", start=1 + step * host),
            cpu(at + 3, 10, (at + 2,), name="cudaLaunchKernel", start=1 + (step + 1) * host - 10),
            kernel(
                at + 4, device, (at + 3,), parent=at + 2, name="gemm", kind="kernel",
                start=1 + (step + 1) * host,
            ),
        ]  # fmt: skip
    return make_run("run", [make_trace(*nodes)], [0])


@pytest.mark.parametrize(("factor", "expected"), ((1.0, 1.0), (2.0, 1.0), (3.0, 1.2), (5.0, 2.0)))
def test_the_end_of_the_recording_is_no_part_of_a_step(factor: float, expected: float) -> None:
    """The host takes 100 µs per step and the device 40, which shows only in the last step until it is more
    than the host's; from then on the device sets the pace."""
    prediction = predict(pipelined(100, 40), [GpuKernels(factor)])
    assert prediction.after_ms / prediction.before_ms == pytest.approx(expected)


def test_other_sizes_change_what_works_on_them() -> None:
    operator = {"kind": "operator", "lane": 0}
    run = with_shapes(
        [
            cpu(1, 1, name="ProfilerStep#1", kind="annotation"),
            cpu(2, 10, (1,), name="aten::linear", rf_id=1, **operator),
            cpu(3, 100, (2,), name="aten::mm", rf_id=2, parent=2, **operator),
            cpu(4, 2, (3,), name="aten::t", rf_id=3, parent=3, **operator),
            cpu(5, 50, (4,), name="aten::mm", rf_id=2, parent=2, segment=1, **operator),  # the rest of node 3
            cpu(6, 30, (5,), name="aten::add_", rf_id=4, **operator),  # parameters
            cpu(7, 3, (6,), name="aten::add", rf_id=5, **operator),
            kernel(8, 40, (7,), name="vectorized", kind="kernel", parent=7, lane=7),
        ],
        {
            2: "[[720,256],[512,256]]",
            3: "[[720,256],[256,512]]",
            4: "[[256,512]]",
            6: "[[512,256],[512,256]]",
            7: "[[10,72,512],[10,72,512]]",
        },
    )
    prediction = predict(run, [Scaling(resize={10: 20, 720: 1440}, spread=0.0)])
    # Of each node 2 µs, as aten::t takes, don't grow; nor does the call of the product within linear, nor
    # that of a kernel.
    grown = (2 + 98 * 2) + (2 + 48 * 2) + 3 + (2 + 38 * 2)
    assert us(prediction) == pytest.approx([1 + 10 + 2 + 30 + grown], abs=0.01)
    # The longer sequence is in the flattened dimension too.
    assert (
        us(predict(run, [Scaling(resize={72: 144}, spread=0.0)]))[0]
        < us(predict(run, [Scaling(resize={72: 144, 720: 1440}, spread=0.0)]))[0]
    )
    with pytest.raises(
        TraceError, match="no operator's work depends on a dimension of 11: the sizes are 256"
    ):
        predict(run, [Scaling(resize={11: 12}, spread=0.0)])


def test_sizes_are_read() -> None:
    assert parse_sizes(["10=20", "720=1440"]) == {10: 20, 720: 1440}
    for text in ("10", "10=0", "a=b", "0=1"):
        with pytest.raises(ValueError, match="OLD=NEW"):
            parse_sizes([text])


def test_flags_ask_for_a_scaling_and_name_it() -> None:
    config = PredictConfig("run", dp=4, layers="2x")
    assert config.sizes() == {"layers": "2x", "dp": 4} and PredictConfig("run").sizes() == {}
    assert config.scaling(None, spread=0.0) == Scaling(dp=4, layers="2x", spread=0.0)
    assert PredictConfig("run", mesh="dp2").scaling(None) is None


def test_gloo_reduces_the_whole_whatever_was_called() -> None:
    scatter = CollectiveType.REDUCE_SCATTER
    for name, kind in (("gloo:all_reduce", CollectiveType.ALL_REDUCE), ("nccl", scatter)):
        found = find_communication(two_ranks(name=name, comm_type=scatter))
        assert [each.kind for each in found] == [kind]


def test_a_rank_without_steps_begins_when_it_does() -> None:
    traces = [
        make_trace(cpu(1, 10, start=1), trace_start_ns=begin, clock_domain="host")
        for begin in (1_000_000, 1_040_000)
    ]
    assert [rank.before_ns for rank in predict(make_run("two", traces, [0, 1]), []).ranks] == [10_000, 10_000]
