"""The verdict on runs that no rule of the diagnosis was made for: other sizes, ranks and mixtures than in
test_machines, and all that a proposal promises computed again by ``predict``."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from chakra_et.diagnose.verdict import diagnose
from chakra_et.simulate.run import make_run
from tests.diagnose.machines import (
    GATHER,
    GEMM,
    HIP,
    SCATTER,
    Machines,
    Rank,
    Work,
    as_recorded,
    check_verdict,
    machine,
    one_f_one_b,
    steady,
)

RCCL = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
# As DLRM's trace has them, their arguments cut; fbgemm's operators have no formula for operations.
FBGEMM = (
    "void split_embedding_codegen_forward_unweighted_kernel<float, float, float, false, long, 1ul, 8ul>("
    "at::GenericPackedTensorAccessor<float, 1ul, at::RestrictPtrTraits, long>, fbgemm_gpu::FixedDivisor)",
    "void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_cta_per_row_1<c10::Half, float, "
    "c10::Half, 2ul, 32>(at::GenericPackedTensorAccessor<float, 2ul, at::RestrictPtrTraits, long>, "
    "fbgemm_gpu::FixedDivisor)",
    "void fbgemm_gpu::permute_2D_data_kernel<false, int, int, decltype(nullptr)>(int, int, int, int const*)",
)
DOT = "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*, void*, void*)"
CAST = "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int, unsigned int)"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)


def slower(slow: int, part: float, length: int = 240, reduce: int = 180, times: int = 9) -> Work:
    """Products with a jitter of 1%, on rank ``slow`` longer by ``part``, and an all-reduce."""

    def work(rank: Rank, number: int, step: int) -> None:
        jitter = random.Random(f"{number} {step} {part}")
        for _ in range(times):
            mean = length * (1 + part * (number == slow))
            rank.kernel(GEMM, round(mean * jitter.uniform(0.995, 1.005)))
        rank.collective(reduce)

    return work


def loader_in_every_second_step(rank: Rank, number: int, step: int) -> None:
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    rank.annotation(name, 5000 if number == 1 and step % 2 else 60)
    for _ in range(8):
        rank.kernel(GEMM, 260)
    rank.collective(150)


def slow_in_turn(rank: Rank, number: int, step: int) -> None:
    for _ in range(10):
        rank.kernel(GEMM, 480 if step % 4 == number else 300)
    rank.collective(120)


def small_batch(rank: Rank, number: int, step: int) -> None:
    for _ in range(60):
        rank.host("aten::addmm", 9)
        rank.kernel("Cijk_Alik_Bljk_HHS_BH_MT32x32x64_MI16x16x4x1_SN", 4)


ELEMENTWISE = ("triton_poi_fused_add_mul_silu_7", 130), ("triton_red_fused__to_copy_mean_2", 90)


def fsdp_without_prefetch(rank: Rank, number: int, step: int) -> None:
    for _ in range(6):
        rank.kernel(GEMM, 170, [rank.collective(260, name=GATHER, comm_type=2)])
    for _ in range(6):
        gathered = rank.collective(260, name=GATHER, comm_type=2)
        rank.kernel(GEMM, 340, [gathered])
        rank.collective(280, name=SCATTER, comm_type=7)


def balanced_experts(rank: Rank, number: int, step: int) -> None:
    for _ in range(5):
        rank.kernel("flash_fwd_kernel", 90)
        rank.collective(310, stream=7, name="ncclDevKernel_SendRecv", comm_type=6)
        rank.kernel("fused_moe_kernel", 210)
        rank.collective(330, stream=7, name="ncclDevKernel_SendRecv", comm_type=6)


def tensor_parallel(rank: Rank, number: int, step: int) -> None:
    """Small all-reduces in each layer, on the same stream."""
    for _ in range(24):
        rank.kernel(GEMM, 22)
        rank.collective(34, stream=7)


def recompiles_once(rank: Rank, number: int, step: int) -> None:
    if step == 2:
        rank.annotation("_compile.compile_inner (dynamo_timed)", 14_000)


def empties_the_cache(rank: Rank, number: int, step: int) -> None:
    for _ in range(6):
        rank.host("cudaFree", 420, "runtime")
    for _ in range(6):
        rank.host("cudaMalloc", 240, "runtime")
        rank.kernel(GEMM, 170)
    rank.wait()


def hip_allocates(rank: Rank, number: int, step: int) -> None:
    for _ in range(7):
        rank.host("hipFree", 310, "runtime")
        rank.host("hipMalloc", 160, "runtime")
        rank.kernel("Cijk_Ailk_Bljk_SB_MT64x64x16", 240)
        rank.wait()


def on_threads(slow: int, compute: int, reduce: int) -> Work:
    """Operators and gloo's all-reduce on the CPU; rank ``slow`` takes half as long again."""

    def work(rank: Rank, number: int, step: int) -> None:
        for name in ("aten::mm", "aten::gelu", "aten::mm", "aten::add_") * 3:
            rank.host(name, compute * (3 if number == slow else 2) // 2)
        reduced = rank.gloo(reduce)
        rank.host("aten::mul_", 20, after=[reduced])

    return work


def rccl_half(rank: Rank, number: int, step: int) -> None:
    for _ in range(10):
        rank.kernel("Cijk_Alik_Bljk_BBS_BH_MT256x256x32", 140)
        rank.collective(230, stream=7, name=RCCL)


def loads(rank: Rank, number: int, step: int) -> None:
    rank.annotation("[pl][profile][_TrainingEpochLoop].train_dataloader_next", 4200)


def contended_cpu(rank: Rank, number: int, step: int) -> None:
    for _ in range(40):
        rank.host("aten::linear", 70 if number == 5 else 6)
        rank.kernel(GEMM, 30)
    rank.collective(100)


def reads_logits(rank: Rank, number: int, step: int) -> None:
    for _ in range(5):
        rank.kernel(GEMM, 230)
    rank.kernel("Memcpy DtoH (Device -> Pageable)", 1500, kind="memcpy")
    rank.wait()


def decodes(rank: Rank, number: int, step: int) -> None:
    """Products of one token: two operations per weight of two bytes."""
    for _ in range(30):
        rank.kernel("nvjet_tst_64x8_64x16", 45, num_ops=64_000_000, tensor_size=64_000_000)
        rank.kernel("void vllm::rms_norm_kernel<c10::BFloat16>(x)", 4, num_ops=8_000, tensor_size=16_000)


def graph_replays(rank: Rank, number: int, step: int) -> None:
    launch = rank.host("cudaGraphLaunch", 60, "runtime")
    for _ in range(50):
        rank.after(launch, GEMM, 70)


def python_between(rank: Rank, number: int, step: int) -> None:
    for _ in range(3):
        rank.host("host-overhead", 2500, "host-overhead")
        for _ in range(4):
            rank.kernel(GEMM, 120)
        rank.wait()


def saves_once(rank: Rank, number: int, step: int) -> None:
    for _ in range(8):
        rank.kernel(GEMM, 250)
    rank.wait()
    if step == 3:
        rank.kernel("Memcpy DtoH (Device -> Pinned)", 900, kind="memcpy")
        rank.wait()
        rank.host("host-overhead", 21_000, "host-overhead")


MACHINES: Machines = {
    "rank 4 of 6 takes 5% longer: named only": (lambda: machine(6, 4, slower(4, 0.05)), "compute", 4),
    "rank 0 of 5 takes 10% longer: named only": (lambda: machine(5, 3, slower(0, 0.1)), "compute", 0),
    "rank 9 of 12 takes 30% longer": (lambda: machine(12, 3, slower(9, 0.3)), "rank", 9),
    "rank 1 of 4 waits for its loader in every second step": (
        lambda: machine(4, 6, loader_in_every_second_step), "rank", 1,
    ),
    "each rank of 4 is slow in every fourth step: nobody is to blame": (
        lambda: machine(4, 8, slow_in_turn), "imbalance", None,
    ),
    "inference on an AMD GPU, 23 µs of host for kernels of 4": (
        lambda: machine(1, 5, small_batch, call="hipLaunchKernel", launch=14), "host", None,
    ),
    "compiled elementwise kernels and reductions": (
        lambda: machine(1, 3, steady(*ELEMENTWISE, ("nvjet_tst_64x8", 40), times=14)), "memory", None,
    ),
    "embeddings of fbgemm, looked up and updated: no products, though gemm is in their names": (
        lambda: machine(1, 3, steady(*((name, 90) for name in FBGEMM), ("nvjet_tst_64x64", 40), times=6)),
        "memory", None,
    ),
    "what attention's backward pass does beside its products": (
        lambda: machine(1, 3, steady((DOT, 60), (CAST, 60), times=8)), "memory", None,
    ),
    "eight ranks reduce for longer than they compute": (
        lambda: machine(8, 3, steady((GEMM, 150), times=12, reduce=2100)), "communication", None,
    ),
    "FSDP on four ranks, nothing prefetched": (
        lambda: machine(4, 2, fsdp_without_prefetch), "communication", None,
    ),
    "experts of six ranks, balanced: all-to-alls": (
        lambda: machine(6, 3, balanced_experts), "communication", None,
    ),
    "tensor parallelism on four ranks: small all-reduces": (
        lambda: machine(4, 3, tensor_parallel), "communication", None,
    ),
    "1F1B, six stages, four micro-batches: 5/9 of bubble": (lambda: one_f_one_b(6, 4), "bubble", None),
    "1F1B, three stages, 48 micro-batches: 1/25 of bubble": (lambda: one_f_one_b(3, 48), "compute", None),
    "1F1B, 24 micro-batches: the last of four stages takes 1.6 times as long, as with a large head": (
        lambda: one_f_one_b(4, 24, 3, by=1.6), "rank", 3,
    ),
    "one of five steps compiles, for longer than all steps compute": (
        lambda: machine(1, 5, steady(("triton_tem_fused_mm_0", 310), times=8, before=recompiles_once)),
        "compilation", None,
    ),
    "empty_cache in each step": (lambda: machine(1, 4, empties_the_cache), "memory allocation", None),
    "each kernel of an AMD GPU gets its memory by hipMalloc": (
        lambda: machine(1, 3, hip_allocates, **HIP), "memory allocation", None,
    ),
    "five ranks add, and start at different times": (
        lambda: machine(5, 2, steady((ADD, 210), times=9, reduce=160), [7000, 0, 2500, 400, 5200]),
        "skew", None,
    ),
    "kernels of NCCL spin while rank 3 of 4 takes 40% longer": (
        lambda: as_recorded(machine(4, 4, slower(3, 0.4, reduce=60))), "rank", 3,
    ),
    "of these, the file of rank 0 alone: it shows no culprit": (
        lambda: as_recorded(machine(4, 4, slower(3, 1.5, reduce=60)), 0), "communication", None,
    ),
    "gloo on four CPUs reduces for longer than they compute": (
        lambda: machine(4, 3, on_threads(-1, 200, 4200)), "communication", None,
    ),
    "gloo on five CPUs, rank 2 takes half as long again": (
        lambda: machine(5, 3, on_threads(2, 400, 120)), "rank", 2,
    ),
    "gloo on two CPUs that mostly compute": (lambda: machine(2, 4, on_threads(-1, 400, 300)), "cpu", None),
    "RCCL takes more than the products of eight AMD GPUs": (
        lambda: machine(8, 3, rccl_half, **HIP), "communication", None,
    ),
    "rank 2 of 4 takes 35% longer, and starts are apart by a part of a step": (
        lambda: machine(4, 10, slower(2, 0.35), [900, 0, 200, 1300]), "rank", 2,
    ),
    "six ranks wait for batches for longer than they compute and reduce": (
        lambda: machine(6, 3, steady((GEMM, 230), times=8, before=loads, reduce=900)), "data loading", None,
    ),
    "rank 5 of 8 has a contended CPU": (lambda: machine(8, 3, contended_cpu), "rank", 5),
    "logits go to pageable memory in each step": (lambda: machine(1, 4, reads_logits), "host copies", None),
    "decoding: products of one operation per byte": (lambda: machine(1, 3, decodes), "memory", None),
    "one launch of a graph of 50 products": (lambda: machine(1, 4, graph_replays), "compute", None),
    "2.5 ms of Python before each few kernels": (lambda: machine(1, 3, python_between), "python", None),
    "one of six steps saves a checkpoint, for longer than all compute": (
        lambda: machine(1, 6, saves_once), "python", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_held_out_machines(name: str) -> None:
    check_verdict(MACHINES, name)


@pytest.mark.parametrize("planned", [False, True])
def test_a_plan_has_no_start_skew(planned: bool) -> None:
    """Its stages begin when their first message comes; the replay waits for that."""
    run = one_f_one_b(3, 4)
    more = {"planned_step_micros": 1} if planned else {}
    traces = [replace(trace, metadata=trace.metadata | more) for trace in run.graph.traces]
    for trace, begin in zip(traces, (0, 4000, 9000), strict=True):
        trace.start_micros += np.uint64(begin)
    found = diagnose(make_run("plan", traces, range(3), run.comm_groups))
    assert (found.skew_ms == 0) == planned == ("start up to" not in " ".join(found.lines()))
