"""The verdict on runs of which the answer is known: made ones by construction, public ones for a reason."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from chakra_et.convert.inputs import load_run
from chakra_et.diagnose.verdict import BOUND_BY, Diagnosis, diagnose
from chakra_et.simulate.run import Run
from tests.diagnose.made_steps import ADD, GEMM, Step, made_run, pipeline
from tests.shared import shared_path

MEMORY = {"name": ADD, "num_ops": 1_000, "tensor_size": 12_000}


def on_cpu() -> Run:
    return pipeline(1, 8)


MADE = {
    "kernels of 100 µs, launched in 10: products": (made_run(Step()), "compute", None),
    "kernels of 100 µs that move 12 bytes per operation": (made_run(Step(**MEMORY)), "memory", None),
    "kernels of 5 µs, launched in 40": (made_run(Step(launch=40, kernel=5)), "host", None),
    "2 ms of transfer after 2 ms of kernels of 4 ms": (
        made_run(*[Step(kernel=50, reduce=2000)] * 4), "communication", None,
    ),
    "all-reduce of a tenth of the step": (made_run(*[Step(reduce=200)] * 4), "compute", None),
    "rank 2 computes twice as long": (
        made_run(Step(reduce=50), Step(reduce=50), Step(kernel=200, reduce=50), Step(reduce=50)), "rank", 2,
    ),
    "rank 1 launches slowly, where nobody else is bound by launches": (
        made_run(Step(reduce=50), Step(launch=200, reduce=50), Step(reduce=50)), "rank", 1,
    ),
    "rank 3 takes 5% longer: named, but not what bounds the step": (
        made_run(*[Step(reduce=50)] * 3, Step(kernel=105, reduce=50)), "compute", 3,
    ),
    "rank 0 begins 4 ms before the others, which is no rank's fault": (
        made_run(*[Step(reduce=50)] * 3, begins=[0, 4000, 4000]), "skew", None,
    ),
    "input data take as long as the kernels": (made_run(Step(loading=2500)), "data loading", None),
    "each step compiles for 2 ms": (made_run(Step(compiling=2000)), "compilation", None),
    "each step allocates memory for 2 ms": (made_run(Step(allocating=2000)), "memory allocation", None),
    "four stages, four micro-batches: 3/7 of bubble": (pipeline(4, 4), "bubble", None),
    "two stages, 32 micro-batches: 1/33 of bubble": (pipeline(2, 32), "cpu", None),
    "operators on the CPU alone": (on_cpu(), "cpu", None),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_made_runs(name: str) -> None:
    run, bound, slow = MADE[name]
    found = diagnose(run)
    assert (found.bound, found.slow_rank) == (bound, slow), found.lines()


# Trace → (what bounds it, why): judged by the utilisation of the device, which needs no graph.
PUBLIC = {
    "torch_compile_triton.json.gz": (
        "compute",
        "kernels cover 97% of the trace, most of it products",
    ),
    "sglang_qwen3_prefilldecode.json.gz": ("compute", "prefill: 84% of the device's time is three products"),
    "mi250_minitoy.json.gz": ("host", "the device is busy for 2% of the trace"),
    "b200_eager_rank0.json.gz": ("host", "eager decoding: the device is busy for 13%"),
    "a100_nccl_rank0.json.gz": ("host", "the device is idle for three quarters of each step"),
    "mi300_resnet_rank0.json.gz": ("communication", "RCCL alone runs for 64% of the steps"),
    "pairs/h100_owlv2-large-patch14-ensemble.json.gz": (
        "data loading",
        "the DataLoader takes 619 of 1,211 ms",
    ),
    "pairs/h100_bert-small-uncased.json.gz": ("host", "a small model: the device is busy for 7%"),
    "pairs/mi300_bert-small-uncased.json.gz": ("host", "a small model: the device is busy for 10%"),
    "pairs/mi300_owlv2-large-patch14-ensemble.json.gz": (
        "data loading",
        "the DataLoader is what takes most of the 1,096 ms",
    ),
    "pairs/h100_timesformer-base-finetuned-k400.json.gz": (
        "python",
        "215 of 383 ms are one stretch before the first operator, which no graph of launches shortens",
    ),
    "pairs/mi300_timesformer-base-finetuned-k400.json.gz": ("python", "as on the H100: 246 of 391 ms"),
    "a100_alexnet_cuda_sync.json.gz": (
        "start-up",
        "the first call of the runtime takes 30 s, cudaFree 6 s: the context; kernels are 0.1% of the trace",
    ),
    "linear_2080ti": (
        "start-up",
        "two calls of cudaFree before the first kernel, 981 of 2,004 ms: the context",
    ),
    "sampled_rank0_of_128.json.gz": ("host", "the device is idle for 55% of the steps, NCCL takes 27%"),
    "vllm_decode_full/graph_execution.json.gz": (
        "memory",
        "decoding: its annotation says 32 tokens: 4 for each expert, 16 operations per byte of its weights",
    ),
}


def convert(source: Path, target: Path) -> str:
    command = [sys.executable, "-m", "chakra_et", "convert", str(source), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True)
    file = sorted(target.glob("*.et"))[0]
    return str(file if file.stem.count(".") == 0 else file.with_suffix("").with_suffix(""))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_traces(name: str, tmp_path: Path) -> None:
    trace = shared_path("data/traces/public", name) / name
    bound, why = PUBLIC[name]
    found = diagnose(load_run(convert(trace, tmp_path)))
    assert found.bound == bound, (why, found.lines())


def test_dlrm_names_one_rank_and_takes_start_skew_out(tmp_path: Path) -> None:
    folder = shared_path("data/traces/dlrm_8gpu", "dlrm_8gpu_rank0_device.json.gz")
    found = diagnose(load_run(convert(folder, tmp_path)))
    # Devices are idle for most of a step of small kernels; the ranks' recordings begin 7.5 ms apart.
    assert found.bound == "host" and 7 < found.skew_ms < 8
    assert found.slow_rank == 3 and found.slow_rank_gain < 0.1


def test_gains_are_those_of_predict(tmp_path: Path) -> None:
    """What a proposal's flags give in ``chakra-et predict`` is what the proposal says."""
    from chakra_et.et import file as et_file

    run, _, _ = MADE["rank 2 computes twice as long"]
    for rank, trace in enumerate(run.graph.traces):
        et_file.write(tmp_path / f"made.{rank}.et", trace)
    base = [sys.executable, "-m", "chakra_et"]
    command = [*base, "diagnose", str(tmp_path / "made"), "--json"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    flagged = [each for each in told["proposals"] if each["flags"]]
    assert len(flagged) >= 2
    for each in flagged:
        command = [*base, "predict", str(tmp_path / "made"), *shlex.split(each["flags"]), "--json"]
        step = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[
            "step_us"
        ]
        assert 1 - step["after"] / step["before"] == pytest.approx(each["gain"], abs=1e-3), each


def test_contradictions_are_findings() -> None:
    alone = made_run(Step())
    for trace in alone.graph.traces:
        trace.metadata["world_size"] = 8
    assert "no-communication" in diagnose(alone).contradictions
    whole = diagnose(made_run(*[Step(reduce=200)] * 2))
    assert not whole.contradictions


def test_every_bound_has_words() -> None:
    assert {bound for _, bound, _ in MADE.values()} | {
        "host",
        "python",
        "host copies",
        "imbalance",
        "start-up",
        "unknown",
    } == set(BOUND_BY)
    found = diagnose(made_run(Step()))
    assert isinstance(found, Diagnosis) and json.loads(json.dumps(found.as_json()))["bound"] == "compute"
    assert found.kernels[0].name == GEMM and found.lines()[0].startswith("Bound by arithmetic on the device")
