"""What predict refuses or notes: one test for each thing that it once got wrong, on small runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chakra_et.__main__ import main
from chakra_et.convert.inputs import load_run
from chakra_et.cost.gpus import by_driver
from chakra_et.cost.network_fit import read_model
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace
from chakra_et.predict.command import lines
from chakra_et.predict.predict import predict
from chakra_et.simulate.run import Run, make_run
from chakra_et.transform.accumulation import Accumulate
from chakra_et.transform.durations import Scale
from chakra_et.transform.gpu import OtherGpu
from chakra_et.transform.network import Network
from chakra_et.transform.scale import Scaling
from tests.predict.test_ddp import Step, ddp
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace, recv, send


def pipeline() -> Run:
    """Two stages that exchange a message: each calls its send, then its receive, and then waits for both."""
    traces = []
    for rank in range(2):
        other = 1 - rank
        gloo = {"comm_size": 8192, "is_cpu_op": 0}
        traces.append(
            make_trace(
                cpu(1, 10, name="c10d::send"),
                send(2, 30, other, (1,), name="gloo:send", lane=4, transfer_micros=30, **gloo),
                cpu(3, 10, (1,), name="c10d::recv_"),
                recv(4, 30, other, (3,), name="gloo:recv", lane=5, transfer_micros=30, **gloo),
                cpu(5, 10, (2, 3, 4), name="aten::mm"),
                rank=rank,
                world_size=2,
            )
        )
    return make_run("pipeline", traces, [0, 1])


def running_ahead(drain: int) -> Run:
    """Three steps of 10 µs on the host; the device works on through ``drain`` µs of communication."""
    nodes: list[dict[str, Any]] = []
    for step in range(3):
        at = 2 * step + 1
        deps = (at - 2,) if step else ()
        nodes.append(cpu(at, 10, deps, name=f"ProfilerStep#{step}", start=10 * step + 1))
        nodes.append(kernel(at + 1, drain, (at,), name="nccl", kind="kernel", start=drain * step + 11))
    return make_run("ahead", [make_trace(*nodes)], [0])


def saved(run: Run, folder: Path) -> str:
    for rank, trace in zip(run.graph.ranks, run.graph.traces, strict=True):
        et_file.write(folder / f"{run.name}.{rank}.et", trace)
    return str(folder / run.name)


def test_ranks_without_files_are_named() -> None:
    trace = make_trace(cpu(1, 10), collective(2, 30, (1,)), rank=0, world_size=4)
    with pytest.raises(TraceError, match="3 of 4 ranks have no file, rank 1 for one"):
        predict(make_run("one", [trace], [0], {"1": [0, 1, 2, 3]}), [Scaling(dp=8, spread=0.0)])


def test_a_network_is_fitted_to_messages_where_there_are_no_collectives() -> None:
    run = pipeline()
    prediction = predict(run, [Network(bandwidth=8192 / 100e-6, latency_ns=5000.0)])
    assert prediction.after_ms > run.end_ns.max() / 1e6 + 0.05  # messages take 105 µs or more in place of 30


def test_resizing_says_what_else_changes() -> None:
    step = Step()
    step.step(1, [4], [])
    trace = step.trace()
    other = make_trace(*step.nodes, collective(90, 10, (1,), start=90), rank=0, world_size=2)
    run = make_run("run", [ExecutionTrace(**{**vars(other), "inputs": trace.inputs})], [0])
    made = Scaling(resize={4: 8}, spread=0.0).rebuild(run)
    assert made.measured.notes[-1] == (
        "0 collectives of gradients changed with the parameters, and 0 other collectives and messages with "
        "the tensors that they carry; what has no recorded shape stays"
    )


def test_accumulating_refuses_communication_that_is_not_ddp_s() -> None:
    traces = []
    for _ in range(2):
        step = Step()
        step.step(1, [4, 4], [[0, 1]])
        # fully_shard gathers a block in front of its forward pass.
        forward = next(n for n in step.nodes if n["name"] == "forward")
        forward["name"] = "c10d::_allgather_base_"
        step.nodes.append(
            collective(99, 10, (forward["id"],), name="gloo:all_gather", parent=forward["id"], start=99,
                       lane=9, is_cpu_op=0, comm_type=2)
        )  # fmt: skip
        traces.append(step.trace())
    run = make_run("fsdp", traces, [0, 1])
    with pytest.raises(TraceError, match="1 of 2 .* aren't DDP's all-reduces of gradients, gloo:all_gather"):
        predict(run, [Accumulate(2)])
    assert predict(ddp([4, 4], [[0, 1]]), [Accumulate(2)]).after_ms > 0


def test_work_that_runs_over_the_end_of_its_step_counts() -> None:
    prediction = predict(running_ahead(20), [Scale("nccl", 100)])
    (rank,) = prediction.ranks
    assert [step.after_ns for step in rank.steps] == [2_010_000, 2_000_000, 2_000_000]
    # The first step's 10 µs of host are there once in a recording; in a long run every step takes 100 times.
    assert (rank.before_ns, rank.after_ns) == (70_000 / 3, pytest.approx(7_000_000 / 3))
    assert rank.median_ns("after_ns") == 2_000_000
    shown = "\n".join(lines(prediction))
    assert "mean of 3 steps" in shown and "+9900.0%" in shown


def test_one_step_tells_nothing_of_how_steps_differ(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    trace = make_trace(
        cpu(1, 10, name="ProfilerStep#1", start=1), cpu(2, 10, (1,), name="aten::mm", start=11)
    )
    et_file.write(tmp_path / "run.0.et", trace)
    assert main(["predict", str(tmp_path / "run"), "--scale", "mm=2"]) == 0
    shown = capsys.readouterr().out
    assert "mean of 1 step;" in shown and "  –  +50.0%" in shown and "± isn't known" in shown
    assert main(["predict", str(tmp_path / "run"), "--scale", "mm=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["uncertainty_us"] is None


def test_measured_files_are_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    name = saved(running_ahead(20), tmp_path)
    before = (tmp_path / "ahead.0.et").read_bytes()
    assert main(["predict", name, "--scale", "nccl=2", "--output", name]) == 2
    assert f"{name}.0.et: is there already" in capsys.readouterr().err
    assert (tmp_path / "ahead.0.et").read_bytes() == before
    # A single file without a rank in its name would get one beside it.
    (tmp_path / "single.et").write_bytes(before)
    assert main(["predict", f"{tmp_path}/single.et", "--scale", "nccl=2", "-o", f"{tmp_path}/single"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ahead.0.et", "single.et"]


def test_files_are_all_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, written = saved(pipeline(), tmp_path), []

    def full(path: Path, trace: ExecutionTrace) -> None:
        written.append(path)
        if len(written) == 2:
            raise OSError(28, "No space left on device", str(path))
        original(path, trace)

    original = et_file.write
    monkeypatch.setattr("chakra_et.et.record.et_file.write", full)
    assert main(["predict", name, "--scale", "mm=2", "-o", f"{tmp_path}/new"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipeline.0.et", "pipeline.1.et"]


def test_a_prediction_is_not_called_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    name, made = saved(running_ahead(20), tmp_path), str(tmp_path / "made")
    assert main(["predict", name, "--scale", "nccl=2", "-o", made]) == 0
    capsys.readouterr()
    assert main(["predict", made, "--scale", "nccl=1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ranks"][0]["measured_us"] is None and answer["step_us"]["before"] == pytest.approx(130 / 3)
    assert (
        "the run is itself a prediction of chakra-et predict: its times weren't measured" in answer["notes"]
    )
    assert main(["report", made]) == 0
    assert "per step as predicted" in capsys.readouterr().out


def launched(call: str, **metadata: str) -> Run:
    nodes = (cpu(1, 10, name=call, kind="runtime"), kernel(2, 20, (1,), name="gemm", kind="kernel"))
    return make_run("gpu", [make_trace(*nodes, **metadata)], [0])


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            launched("x", device_name="AMD Instinct MI300X"),
            "rank 0 ran on 'AMD Instinct MI300X', not on A100",
        ),
        (
            launched("x", device_name="AMD Radeon Graphics"),
            "'AMD Radeon Graphics', not on A100, which is not",
        ),
        (
            launched("cudaLaunchKernel", device_name="NVIDIA A10"),
            "'NVIDIA A10', not on A100: write --gpu A10:TO",
        ),
    ],
)
def test_a_gpu_that_the_run_was_not_on_is_refused(run: Run, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        predict(run, [OtherGpu("A100", "H100")])


@pytest.mark.parametrize(
    ("metadata", "note"),
    [
        ({}, "the files don't name the run's GPU: that it is A100 is taken from --gpu"),
        ({"device_name": "NVIDIA A800"}, "the run's GPU is called 'NVIDIA A800': that it is A100 is taken"),
        ({"device_name": "NVIDIA A100-PG509-200"}, ""),
    ],
)
def test_a_gpu_that_may_be_another_is_a_note(metadata: dict[str, str], note: str) -> None:
    notes = predict(launched("cudaLaunchKernel", **metadata), [OtherGpu("A100", "H100")]).notes
    assert [each for each in notes if "taken from --gpu" in each and note in each] == (
        [each for each in notes if note and note in each]
    )
    assert any("taken from --gpu" in each for each in notes) == bool(note)


def test_the_manifest_names_the_gpu(tmp_path: Path) -> None:
    name = saved(launched("cudaLaunchKernel"), tmp_path)
    entry = {"rank": 0, "device": "cuda:0 NVIDIA H200"}
    (tmp_path / "gpu_manifest.json").write_text(json.dumps({"ranks": [entry]}))
    with pytest.raises(
        TraceError, match="rank 0 ran on 'cuda:0 NVIDIA H200', not on A100: write --gpu H200:TO"
    ):
        predict(load_run(name), [OtherGpu("A100", "H100")])
    (tmp_path / "gpu_manifest.json").write_text("[]")
    assert predict(load_run(name), [OtherGpu("A100", "H100")]).ranks


def test_names_of_gpus() -> None:
    assert by_driver("NVIDIA GeForce RTX 3090") == "RTX3090" and by_driver("Tesla V100-SXM2-16GB") == "V100"
    assert by_driver("NVIDIA A100-SXM4-80GB") == "A100" and by_driver("NVIDIA GB200") == "GB200"


def test_a_network_file_that_is_no_model_gets_no_words_of_python(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nosuch.json: No such file or directory: check the path, or"):
        read_model("nosuch.json")
    for content in ("{", "[]", "{}"):
        (tmp_path / "net.json").write_text(content)
        with pytest.raises(TraceError, match=r"isn't a network model: write one with .* --output FILE"):
            read_model(tmp_path / "net.json")


def test_the_name_may_come_after_the_flags(capsys: pytest.CaptureFixture) -> None:
    """It had to come first: --scale and --resize take several values."""
    for flags in (["--scale", "aten=2", "mm=3"], ["--resize", "3=4"], ["--dp", "2"]):
        assert main(["predict", *flags, "no/gpt2"]) == 2
        assert "no/gpt2: neither a file nor the NAME of NAME.0.et" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["predict", "--scale", "aten=2"])
    assert "name the run to predict" in capsys.readouterr().err


def test_files_of_measurements_have_the_short_flag(capsys: pytest.CaptureFixture) -> None:
    for command in ("measure-network", "measure-gpu", "predict"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "-o, --output" in capsys.readouterr().out
