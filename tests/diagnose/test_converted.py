"""The verdict on traces of simulated programs that the converter has read, as a user's are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.convert.inputs import load_run
from chakra_et.diagnose.verdict import diagnose
from tests.generator import generate
from tests.generator.program import Block, Busy, Instruction, Launch, Op, Program

STREAM, GEMM = (0, 7), "ampere_bf16_s16816gemm_bf16_256x128"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, X>(int)"
Body = list[Instruction]


def call(name: str, *body: Instruction) -> Op:
    return Op(name, [Busy(2000), *body], "cuda_runtime")


def operator(kernel: str, length_us: int, host_us: int = 3) -> Op:
    """An operator that works on the host, and launches one kernel."""
    launch = Launch(kernel, 1000 * length_us, STREAM)
    return Op("aten::mm", [Busy(1000 * host_us), call("cudaLaunchKernel", launch)])


def synchronise() -> Op:
    return Op("cudaDeviceSynchronize", [Block("device", (0, -1)), Busy(500)], "cuda_runtime")


def loads(step: int) -> Body:
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    return [Op(name, [Busy(9_000_000)], "user_annotation"), *[operator(GEMM, 250) for _ in range(12)]]


def allocates(step: int) -> Body:
    memory = [call("cudaFree", Busy(300_000)), call("cudaMalloc", Busy(260_000))]
    return [
        each for _ in range(8) for each in (Op("aten::empty", memory), operator(GEMM, 200), synchronise())
    ]


def compiles_once(step: int) -> Body:
    compiling = Op("_compile.compile_inner (dynamo_timed)", [Busy(30_000_000)], "user_annotation")
    return [compiling] * (step == 1) + [operator("triton_tem_fused_mm_0", 300) for _ in range(10)]


def reads_each_result(step: int) -> Body:
    read = (operator("ampere_sgemm_64x64_tn", 8, host_us=9), synchronise(), Busy(3000))
    return [each for _ in range(30) for each in read]


FUSED = Op(
    "CompiledFunction",
    [Op("## Call CompiledFxGraph fu75 ##", [Busy(400_000), Op("aten::mm", [Busy(1000)])], "user_annotation")],
)
PROGRAMS: dict[str, Callable[[int], Body]] = {
    "host": lambda step: [operator("ampere_sgemm_64x64_tn", 4, host_us=20) for _ in range(40)],
    "host, each result read": reads_each_result,
    "data loading": loads,
    "memory": lambda step: [operator(ADD, 180) for _ in range(20)],
    "compute": lambda step: [operator(GEMM, 180) for _ in range(20)],
    "memory allocation": allocates,
    "compilation": compiles_once,
    "cpu": lambda step: [Op(name, [Busy(400_000)]) for name in ("aten::mm", "aten::gelu") * 6],
    "cpu, fused by a compiler": lambda step: [FUSED] * 6,
}


@pytest.mark.parametrize("bound", PROGRAMS)
def test_converted_programs(bound: str, tmp_path: Path) -> None:
    body: Body = []
    for step in range(4):
        ends = [] if bound.startswith("cpu") else [synchronise()]
        inside = [Busy(2000), *PROGRAMS[bound](step), *ends]
        body += [Op(f"ProfilerStep#{step + 2}", inside, "user_annotation"), Busy(2000)]
    generate(Program({"main": body}, latency=3000)).write(tmp_path)
    assert main(["convert", "--dir", str(tmp_path)]) == 0
    found = diagnose(load_run(str(tmp_path / "run")))
    assert found.bound == bound.partition(",")[0], found.lines()


@pytest.mark.parametrize("device", [False, True])
def test_a_last_step_that_lasts_longer_is_told(device: bool, tmp_path: Path) -> None:
    work = operator(GEMM, 100) if device else Op("aten::mm", [Busy(100_000)])
    ends = [synchronise()] if device else []
    body: Body = []
    for step, count in enumerate((4, 4, 4, 12)):
        body += [
            Op(f"ProfilerStep#{step}", [Busy(2000), *[work] * count, *ends], "user_annotation"),
            Busy(2000),
        ]
    generate(Program({"main": body}, latency=3000)).write(tmp_path)
    assert main(["convert", "--dir", str(tmp_path)]) == 0
    sentence = diagnose(load_run(str(tmp_path / "run"))).uneven_steps
    assert sentence.startswith("ProfilerStep#3 of rank 0 takes") and sentence.endswith("the median step.")
