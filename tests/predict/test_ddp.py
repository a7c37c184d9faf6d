"""What-ifs that change which nodes a run has: hand-made DDP steps with times worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chakra_et.convert.inputs import load_run
from chakra_et.cost.network_fit import NetworkModel
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType, TensorInfo
from chakra_et.job.operators import GRADIENT
from chakra_et.predict.predict import Prediction, predict, predicted_traces, write_traces
from chakra_et.simulate.run import Run, make_run
from chakra_et.transform.accumulation import Accumulate
from chakra_et.transform.ddp import BACK, INTO_BUCKET, BucketSize, find_backward
from chakra_et.transform.durations import Scale
from chakra_et.transform.network import Network
from chakra_et.transform.scale import Scaling
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace

MB = 1 << 20
BEFORE = "autograd::engine::evaluate_function: MmBackward0"
AROUND = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
RATE = NetworkModel(0.0, 0.0, MB / 10e-6, float("inf"), 0.0, 1, "a file")
"""10 µs per MiB between two ranks; a ring of four takes 1.5 times as long."""


class Step:
    """The nodes of DDP steps, one behind the other on a thread."""

    def __init__(self) -> None:
        self.nodes: list[dict] = []
        self.shapes: dict[int, str] = {}
        self.reduces = 0

    def add(self, name: str, length: int, shape: str = "", **more) -> int:
        at = len(self.nodes) + 1
        waits = more.pop("waits", ())
        before = tuple(n["id"] for n in self.nodes if n["is_cpu_op"])[-1:]
        self.nodes.append(
            cpu(at, length, (*before, *waits), name=name, start=at, kind="operator", lane=0, **more)
        )
        if shape:
            self.shapes[at - 1] = shape
        return at

    def reduce(self, size: int, parent: int) -> int:
        launch = self.add("c10d::allreduce_", 2, parent=parent)
        at = len(self.nodes) + 1
        taken = size // MB * 10
        more = {
            "comm_size": size,
            "is_cpu_op": 0,
            "kind": "collective",
            "transfer_micros": taken,
            "wait_micros": 0,
        }
        self.nodes.append(
            collective(at, taken, (launch,), name="gloo:all_reduce", parent=launch, start=at, lane=9, **more)
        )
        return at

    def step(self, number: int, gradients: list[int], buckets: list[list[int]]) -> None:
        """Forward 100 µs; for each gradient, in MiB, 20 µs of backward, 1 µs to accumulate it and 3 to copy
        it; 4 µs to copy each back; optimizer 50 µs."""
        self.add(f"ProfilerStep#{number}", 0)
        self.add("forward", 100, phase="forward")
        reduced = {}
        for at, size in enumerate(gradients):
            shape = f"[[{size},{MB // 4}]]"
            self.add(BEFORE, 20, phase="backward", seq_id=len(gradients) - at)
            around = self.add(AROUND, 0)
            self.add(GRADIENT, 1, shape, parent=around)
            if buckets:
                self.add(INTO_BUCKET, 3, shape, parent=around)
            for bucket in buckets:
                if bucket[-1] == at:
                    reduced[bucket[0]] = self.reduce(sum(gradients[n] for n in bucket) * MB, around)
        for at in range(len(gradients)):
            if buckets:
                self.add(BACK, 4, "[[1]]", waits=(reduced[at],) if at in reduced else ())
        self.add("Optimizer.step", 50, phase="optimizer")

    def trace(self, ranks: int = 2) -> ExecutionTrace:
        rows = sorted(self.shapes)
        kinds = [b'["Tensor(float)"]'] * len(rows)
        tensors = TensorInfo(
            np.array(rows, np.int64), [b"[]"] * len(rows), [self.shapes[row].encode() for row in rows], kinds
        )
        return replace(make_trace(*self.nodes, world_size=ranks), inputs=tensors)


def ddp(gradients: list[int], buckets: list[list[int]], ranks: int = 2, steps: int = 2) -> Run:
    made = []
    for _ in range(ranks):
        step = Step()
        for number in range(1, steps + 1):
            step.step(number, gradients, buckets)
        made.append(step.trace(ranks))
    return make_run("ddp", made, range(ranks))


def us(prediction: Prediction) -> list[float]:
    return [rank.after_ns / 1e3 for rank in prediction.ranks]


def test_the_backward_pass_is_found() -> None:
    run = ddp([2, 1, 4], [[0, 1], [2]])
    first, second = find_backward(run.graph.traces[0], 0, "--flag")
    assert [(b.first, b.last) for b in first.buckets] == [(0, 2), (2, 3)]
    assert [g.size // MB for g in second.gradients] == [2, 1, 4]
    names = run.graph.traces[0].names
    assert {names[row] for b in first.buckets for row in b.launch} == {"c10d::allreduce_"}
    assert all(names[g.back] == BACK for g in first.gradients)


def test_the_measured_buckets_change_nothing() -> None:
    run = ddp([4, 4, 4], [[0], [1], [2]])
    # A gradient takes 24 µs and a launch 2; the all-reduces follow on one another; the last copy waits.
    measured = 100 + 24 + 2 + 3 * 40 + 4 + 50
    assert us(predict(run, [])) == [measured] * 2
    assert us(predict(run, [BucketSize(4)])) == [measured] * 2


def test_merged_buckets_start_when_their_last_gradient_is_there() -> None:
    run = ddp([4, 4, 4], [[0], [1], [2]])
    # One bucket of 12 MiB: launched behind the last gradient, waited for in front of the first copy.
    assert us(predict(run, [BucketSize(100)])) == [100 + 3 * 24 + 2 + 120 + 3 * 4 + 50] * 2
    # The first bucket holds two, the second is the last one.
    two = predict(run, [BucketSize(5)])
    assert us(two) == [100 + 2 * 24 + 2 + 80 + 40 + 4 + 50] * 2
    assert "2 buckets per step in place of 3" in two.notes[-1]


def test_the_last_bucket_takes_what_last_ones_took() -> None:
    """Those before share the cores with the backward pass: here they take 40 µs each, and the last 10."""
    run = ddp([4, 4, 4], [[0], [1], [2]])
    for trace in run.graph.traces:
        last = np.flatnonzero(trace.types == NodeType.COMM_COLL)[2::3]
        trace.duration_micros[last] = 10
        trace.attributes["transfer_micros"].values[2::3] = 10
    made = predict(make_run("ddp", list(run.graph.traces), range(2)), [BucketSize(4)]).changed.graph.traces[0]
    assert made.duration_micros[made.types == NodeType.COMM_COLL].tolist() == [40, 40, 10] * 2


def test_split_buckets_start_earlier() -> None:
    run = ddp([4, 4, 4], [[0, 1, 2]])
    assert us(predict(run, [])) == [100 + 3 * 24 + 2 + 120 + 12 + 50] * 2
    # All-reduces of 40 µs follow on one another from the first gradient on.
    assert us(predict(run, [BucketSize(4)])) == [100 + 24 + 2 + 3 * 40 + 4 + 50] * 2


def test_accumulated_passes_are_reduced_once() -> None:
    run = ddp([4, 4, 4], [[0], [1], [2]])
    prediction = predict(run, [Accumulate(3)])
    passed = 100 + 3 * 21
    last = 100 + 24 + 2 + 3 * 40 + 4 + 50
    # An addition takes 3 µs, the median node. In the last pass the all-reduces hide all but the first.
    assert us(prediction) == [2 * passed + last + 4 * 3] * 2
    assert "24 additions" in prediction.notes[-1]
    trace = prediction.changed.graph.traces[0]
    assert (trace.types == NodeType.COMM_COLL).sum() == 2 * 3


def test_more_ranks_take_longer_for_their_all_reduces() -> None:
    run = ddp([4, 4, 4], [[0], [1], [2]])
    prediction = predict(run, [Scaling(dp=4, spread=0.0)])
    # 40 µs become 60: 2 * 3/4 in place of 2 * 1/2 of the bytes. They follow on one another.
    assert us(prediction) == [100 + 24 + 2 + 3 * 60 + 4 + 50] * 4
    assert len(prediction.changed.members) == 2 * 3 and len(prediction.changed.members[0]) == 4
    assert [rank.rank for rank in prediction.ranks] == [0, 1, 2, 3]
    assert "the 2 new ranks have the mean times of captured ones" in prediction.notes[-1]
    # Changes of time come on top.
    assert us(predict(run, [Scaling(dp=4, spread=0.0), Scale("forward", 2.0)])) == [
        time + 100 for time in us(prediction)
    ]


def test_one_rank_gets_ddp() -> None:
    run = ddp([1, 8, 30], [], ranks=1)
    assert us(predict(run, [])) == [100 + 3 * 21 + 50]
    prediction = predict(run, [Scaling(dp=2, spread=0.0, network=RATE)])
    trace = prediction.changed.graph.traces[1]
    # Buckets of 1 MiB and then 25: the second holds 38.
    sizes = trace.column("comm_size")[trace.types == NodeType.COMM_COLL]
    assert (sizes // MB).tolist() == [1, 38] * 2
    own = trace.duration_micros[[trace.names[row] in (INTO_BUCKET, BACK) for row in range(len(trace))]]
    assert len(own) == 2 * 2 * 3 and trace.metadata["world_size"] == 2
    assert us(prediction)[0] > 100 + 3 * 21 + 380 + 50
    assert any("4 all-reduces were put in" in note for note in prediction.notes)
    with pytest.raises(TraceError, match="no communication between ranks"):
        predict(run, [Scaling(dp=2, spread=0.0)])


@pytest.mark.parametrize("stream", [0, 7], ids=["HIP's default stream", "CUDA's"])
def test_one_rank_with_a_gpu_gets_no_copies_into_buckets(stream: int) -> None:
    step = Step()
    step.step(1, [1, 8, 30], [])
    count = len(step.nodes)
    launch = next(node["id"] for node in step.nodes if node["name"] == BEFORE)
    more = {"kind": "kernel", "lane": 5, "stream": stream}
    step.nodes.append(kernel(count + 1, 100, (launch,), name="gemm", parent=launch, start=count + 1, **more))
    step.nodes.append(kernel(count + 2, 9, (count,), name="adam", parent=count, start=count + 2, **more))
    prediction = predict(make_run("gpu", [step.trace(1)], [0]), [Scaling(dp=2, spread=0.0, network=RATE)])
    trace = prediction.changed.graph.traces[0]
    sizes = trace.column("comm_size")[trace.types == NodeType.COMM_COLL]
    assert (sizes // MB).tolist() == [1, 38]
    assert not {INTO_BUCKET, BACK} & {trace.names[row] for row in range(len(trace))}


def test_wider_layers_have_larger_gradients() -> None:
    run = ddp([4, 4, 4], [[0], [1], [2]])
    prediction = predict(run, [Scaling(resize={4: 8}, spread=0.0)])
    trace = prediction.changed.graph.traces[0]
    assert (trace.column("comm_size")[trace.types == NodeType.COMM_COLL] // MB).tolist() == [8] * 6
    assert us(prediction)[0] >= 100 + 24 + 2 + 3 * 80 + 4 + 50


def test_changes_of_nodes_combine_and_are_written(tmp_path: Path) -> None:
    run = ddp([4, 4, 4], [[0], [1], [2]])
    changes = [
        Scaling(resize={4: 8}, spread=0.0),
        Scaling(dp=4, spread=0.0),
        BucketSize(100),
        Accumulate(2),
        Network(1e9, 1000.0),
    ]
    prediction = predict(run, changes)
    run = prediction.changed
    traces = predicted_traces(prediction)
    paths = write_traces(traces, run, tmp_path / "predicted")
    assert len(paths) == 4 and et_file.read(paths[3]).metadata["rank"] == 3
    again = predict(load_run(str(tmp_path / "predicted")), [])
    assert again.after_ms == pytest.approx(prediction.after_ms, rel=0.01)


def sharded() -> Run:
    traces = [
        make_trace(cpu(1, 10), collective(2, 5, (1,), comm_type=int(CollectiveType.ALL_GATHER)), world_size=2)
        for _ in range(2)
    ]
    return make_run("sharded", traces, [0, 1])


@pytest.mark.parametrize(
    ("run", "change", "message"),
    [
        (sharded(), BucketSize(4), "no attribute lane, from which operators are told"),
        (ddp([4], [], ranks=1), BucketSize(4), "has no all-reduce of gradients: use --dp"),
    ],
)
def test_what_is_not_ddp_is_refused(run: Run, change, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        predict(run, [change])


def test_all_reduces_of_something_else_are_refused() -> None:
    step = Step()
    step.step(1, [4, 4], [[0], [1]])
    trace = step.trace()
    trace.attributes["comm_size"].values[:] = 5 * MB
    with pytest.raises(TraceError, match="which are not those of successive gradients"):
        find_backward(trace, 0, "--bucket-mb")


def on_device(copy: bool = False) -> Run:
    """Two gradients of 4 MiB, each from a kernel of 100 µs, all-reduced on a stream of their own in 40 µs;
    the optimizer's kernel waits for both."""
    around, operator = {"name": AROUND, "kind": "operator", "seq_id": 1}, {"kind": "operator"}
    reduce = {
        "name": "ncclDevKernel_AllReduce",
        "kind": "collective",
        "comm_size": 4 * MB,
        "transfer_micros": 40,
    }
    nodes: list[dict] = [cpu(1, 1, name="ProfilerStep#1", start=1, **operator)]
    shapes = {}
    for at in range(2):
        n = 10 * at + 2
        before = nodes[-1]["id"] if at == 0 else n - 3
        nodes += [
            cpu(n, 1, (before,), name="cudaLaunchKernel", kind="runtime"),
            kernel(n + 1, 100, (n,), kind="kernel", parent=n),
            cpu(n + 2, 1, (n,), **around),
            cpu(n + 3, 1, (n + 2,), name=GRADIENT, parent=n + 2, **operator),
            cpu(n + 4, 2, (n + 3,), name="c10d::allreduce_", parent=n + 2, **operator),
            cpu(n + 5, 1, (n + 4,), name="cudaLaunchKernel", kind="runtime", parent=n + 4),
            collective(n + 6, 40, (n + 5, n + 1), stream=20, parent=n + 5, **reduce),
        ]
        shapes[len(nodes) - 4] = f"[[4,{MB // 4}]]".encode()
        nodes.append(cpu(n + 7, 1, (n + 5,), name="overhead", **operator))
    last = nodes[-1]["id"]
    nodes += [
        cpu(30, 1, (last,), name="cudaLaunchKernel", kind="runtime"),
        kernel(31, 10, (30, 8, 18), kind="kernel"),
    ]
    if copy:  # the optimizer's kernel waits for it, too
        nodes[-1]["deps"] += (32,)
        nodes.append(kernel(32, 5000, (1,), stream=9, kind="copy", name="copy"))
    tensors = TensorInfo(
        np.array(sorted(shapes), np.int64),
        [b"[]"] * 2,
        [shapes[row] for row in sorted(shapes)],
        [b'["Tensor(float)"]'] * 2,
    )
    placed = [{**node, "lane": node.get("stream", 0)} for node in nodes]
    traces = [replace(make_trace(*placed, world_size=2), inputs=tensors) for _ in range(2)]
    return make_run("device", traces, [0, 1])


def test_buckets_on_a_device_wait_for_their_gradients_kernels() -> None:
    run = on_device()
    # Kernels of 100 µs follow on one another from 2 µs on; the second all-reduce is behind the second.
    assert us(predict(run, [])) == [2 + 200 + 40 + 10] * 2
    assert us(predict(run, [BucketSize(4)])) == [2 + 200 + 40 + 10] * 2
    merged = predict(run, [BucketSize(8)])
    assert us(merged) == [2 + 200 + 80 + 10] * 2
    trace = merged.changed.graph.traces[0]
    assert trace.column("comm_size")[trace.types == NodeType.COMM_COLL].tolist() == [8 * MB]


def test_buckets_on_a_device_do_not_wait_for_streams_that_none_waited_for() -> None:
    """A copy of 5 ms on a stream of its own, launched before the gradients are ready."""
    merged = predict(on_device(copy=True), [BucketSize(8)]).changed.graph.traces[0]
    (reduce,) = np.flatnonzero(merged.types == NodeType.COMM_COLL)
    sources = merged.data_deps.values[slice(*merged.data_deps.offsets[reduce : reduce + 2].tolist())]
    assert "copy" not in {merged.names[at - 1] for at in sources.tolist()}


COUNT = """
import sys
from pathlib import Path
import chakra_et
root = str(Path(chakra_et.__file__).parent)
entered = {chakra_et.__file__}
sys.setprofile(lambda frame, *_: entered.add(frame.f_code.co_filename))
from chakra_et.__main__ import main
status = main(sys.argv[1:])
sys.setprofile(None)
print(status, sum(name.startswith(root) for name in entered))
"""


def test_a_prediction_enters_few_files(tmp_path: Path) -> None:
    """What-ifs that aren't asked for aren't imported: 125 files were entered once."""
    for rank, trace in enumerate(ddp([4, 4, 4, 4], [[3], [1, 2], [0]]).graph.traces):
        et_file.write(tmp_path / f"step.{rank}.et", trace)
    command = [sys.executable, "-c", COUNT, "predict", str(tmp_path / "step"), "--bucket-mb", "1"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    status, entered = ran.stdout.splitlines()[-1].split()
    assert status == "0" and 20 < int(entered) <= 45
