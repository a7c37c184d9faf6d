"""The verdict on simulated machines of other sizes, vendors and frameworks than those of test_verdicts."""

from __future__ import annotations

import random

import pytest

from chakra_et.diagnose.verdict import diagnose
from tests.diagnose.machines import (
    GATHER,
    GEMM,
    HIP,
    Machines,
    Rank,
    check_verdict,
    machine,
    one_f_one_b,
    steady,
)


def lightning_loads(rank: Rank, number: int, step: int) -> None:
    rank.annotation("[pl][profile][_TrainingEpochLoop].train_dataloader_next", 9000)


def torchrec_loads(rank: Rank, number: int, step: int) -> None:
    rank.annotation("## wait_for_batch ##", 5000)


def rank_3_loads(rank: Rank, number: int, step: int) -> None:
    rank.annotation(
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 8000 if number == 3 else 100
    )


def expandable_segments(rank: Rank, number: int, step: int) -> None:
    for call in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease") * 4:
        rank.host(call, 200, "runtime")


def loads_modules(rank: Rank, number: int, step: int) -> None:
    rank.host("cuModuleLoadData", 3000, "runtime")
    rank.host("cuLibraryLoadData", 1000, "runtime")


def inductor_compiles(rank: Rank, number: int, step: int) -> None:
    rank.annotation("inductor_compile (dynamo_timed)", 3000)
    rank.annotation("async_compile.wait (dynamo_timed)", 1000)


def copies_input(rank: Rank, number: int, step: int) -> None:
    rank.kernel("Memcpy HtoD (Pageable -> Device)", 6000, kind="memcpy")
    rank.wait()


def collects_garbage(rank: Rank, number: int, step: int) -> None:
    rank.host("host-overhead", 6000 if (number, step) == (5, 3) else 20, "host-overhead")


def throttled(rank: Rank, number: int, step: int) -> None:
    jitter = random.Random(100 * step + number)
    for _ in range(10):
        rank.kernel(GEMM, (420 if number == 11 else 300) + jitter.randint(0, 10))
    rank.collective(200)


def slow_node(rank: Rank, number: int, step: int) -> None:
    for _ in range(10):
        rank.kernel(GEMM, 450 if number >= 6 else 300)
    rank.collective(100)


def sharded(rank: Rank, number: int, step: int) -> None:
    for _ in range(8):
        rank.kernel(GEMM, 250, [rank.collective(600, name=GATHER, comm_type=2)])


def overlapped(rank: Rank, number: int, step: int) -> None:
    for _ in range(12):
        rank.kernel(GEMM, 400)
        rank.collective(350)


def experts(rank: Rank, number: int, step: int) -> None:
    for _ in range(6):
        rank.kernel("flash_fwd_kernel", 80)
        rank.collective(60, stream=7, name="ncclDevKernel_SendRecv", comm_type=6)
        rank.kernel("_ZN8deep_gemm16fp8_gemm_kernel", 400 if number == 2 else 200)
        rank.collective(60, stream=7, name="ncclDevKernel_SendRecv", comm_type=6)


def reads_each_result(rank: Rank, number: int, step: int) -> None:
    for _ in range(30):
        rank.host("aten::mm", 30)
        rank.kernel("ampere_sgemm_32x32", 10)
        rank.wait()


NVJET = ("nvjet_hsh_128x128", 300)
PRODUCT, NORM = ("sm80_xmma_fprop_implicit_gemm_f16", 300), ("void cudnn::bn_fw_tr_1C11_kernel_NCHW", 400)
CASTS = ("triton_poi_fused__to_copy_convert_element_type_3", 300)
AMD = ("miopenSp3AsmConv_v30_3_1_gfx9_fp16_dot2", 300), ("Cijk_Ailk_Bljk_BBS_BH", 300), ("elementwise", 100)
MACHINES: Machines = {
    "Lightning waits for a batch of twice the kernels' time": (
        lambda: machine(1, 4, steady(NVJET, before=lightning_loads)), "data loading", None,
    ),
    "TorchRec on four AMD GPUs waits for its batch": (
        lambda: machine(4, 4, steady(("Cijk_Ailk_Bljk", 300), before=torchrec_loads, reduce=200), **HIP),
        "data loading", None,
    ),
    "one of four ranks loads its data slowly: that rank, not the loading of all": (
        lambda: machine(4, 3, steady((GEMM, 300), before=rank_3_loads, reduce=100)), "rank", 3,
    ),
    "PyTorch's expandable segments map memory for as long as kernels run": (
        lambda: machine(1, 4, steady((GEMM, 200), before=expandable_segments)), "memory allocation", None,
    ),
    "modules are loaded in each step": (
        lambda: machine(1, 4, steady(("triton_poi_fused_add_mul_0", 200), before=loads_modules)),
        "compilation", None,
    ),
    "Inductor compiles in each step": (
        lambda: machine(1, 4, steady(("triton_tem_fused_mm_0", 200), before=inductor_compiles)),
        "compilation", None,
    ),
    "input from pageable memory takes twice the kernels' time": (
        lambda: machine(1, 3, steady((GEMM, 300), before=copies_input)), "host copies", None,
    ),
    "fused casts, which are no convolutions": (
        lambda: machine(1, 4, steady(CASTS, CASTS, PRODUCT)), "memory", None,
    ),
    "batch normalization before convolutions": (lambda: machine(1, 4, steady(NORM, PRODUCT)), "memory", None),
    "convolutions and products of AMD's libraries": (
        lambda: machine(1, 4, steady(*AMD), **HIP), "compute", None,
    ),
    "experts in one kernel of vLLM": (
        lambda: machine(1, 4, steady(("fused_moe_kernel", 400))), "compute", None,
    ),
    "rank 11 of 16 is throttled": (lambda: machine(16, 3, throttled), "rank", 11),
    "two of eight ranks, of one node, are slow: each hides the other": (
        lambda: machine(8, 3, slow_node), "rank", 6,
    ),
    "rank 5 of 8 collects garbage in one step of five": (
        lambda: machine(8, 5, steady((GEMM, 200), before=collects_garbage, reduce=100)), "rank", 5,
    ),
    "an expert of rank 2 gets twice the tokens": (lambda: machine(4, 3, experts), "rank", 2),
    "eight ranks gather each layer before it computes": (
        lambda: machine(8, 3, sharded), "communication", None,
    ),
    "eight ranks reduce behind computation": (lambda: machine(8, 3, overlapped), "compute", None),
    "each product is waited for": (lambda: machine(1, 3, reads_each_result), "host", None),
    "eight ranks start at different times": (
        lambda: machine(8, 2, steady((GEMM, 200), reduce=100), [0, 900, 2500, 6000, 100, 4000, 1200, 300]),
        "skew", None,
    ),
    "1F1B, eight stages and micro-batches: 7/15 of bubble": (lambda: one_f_one_b(8, 8), "bubble", None),
    "1F1B, four stages, 64 micro-batches: receives are posted early, which is no bubble": (
        lambda: one_f_one_b(4, 64), "compute", None,
    ),
    "1F1B, 32 micro-batches: stage 2 takes twice as long": (lambda: one_f_one_b(4, 32, 2), "rank", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_machines(name: str) -> None:
    check_verdict(MACHINES, name)


def test_slow_ranks_are_named_together() -> None:
    found = diagnose(machine(8, 3, slow_node))
    assert set(found.slow_ranks) == {6, 7} and found.slow_in == "compute"
    assert "Ranks 6 and 7 are slow, mostly in compute" in " ".join(found.lines())
    assert found.slow_rank_gain == pytest.approx(1 - (10 * 300 + 100) / (10 * 450 + 100), abs=0.02)
