"""The verdict on 22 machines whose answers were written down before the diagnosis was asked. 20 were right at
first: not the slow node of a pipeline, nor the rank that compiles."""

from __future__ import annotations

import pytest

from tests.diagnose.machines import (
    GATHER,
    GEMM,
    SCATTER,
    Machines,
    Rank,
    Work,
    check_verdict,
    machine,
    one_f_one_b,
)
from tests.simulate.replay_traces import recv, send

TO_DEVICE, TO_HOST = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"
ATTENTION, SENDRECV = "flash_fwd_kernel", "ncclDevKernel_SendRecv"


def prefetches(copy: int) -> Work:
    """Products, beside which the next step's input is copied on a stream of its own."""

    def work(rank: Rank, number: int, step: int) -> None:
        for at in range(10):
            rank.kernel(GEMM, 300, rank.streams.get(30, ()) if at == 0 else ())
            if at == 0:
                rank.kernel(TO_DEVICE, copy, stream=30, kind="memcpy")

    return work


def tensor_parallel(rank: Rank, number: int, step: int) -> None:
    for _ in range(16):
        rank.kernel(GEMM, 310)
        rank.collective(140, stream=7)


def tensor_parallel_decoding(rank: Rank, number: int, step: int) -> None:
    """A graph's kernels for one token, and all-reduces that take their latency."""
    for _ in range(24):
        launch = rank.host("cudaGraphLaunch", 2, "runtime")
        rank.after(launch, "nvjet_tst_64x8_64x16", 12)
        rank.collective(26, stream=7)


def ring_attention(message: int, units: bool = False) -> Work:
    """Context parallelism: keys and values go round four ranks beside attention; ``units``: causal, each
    rank has as many blocks to compute as ranks stand before it."""

    def work(rank: Rank, number: int, step: int) -> None:
        for layer in range(3):
            got: list[int] = []
            for turn in range(4):
                arrived = got
                if turn < 3:
                    tag = (step * 3 + layer) * 3 + turn
                    got = [rank.message(recv, (number - 1) % 4, tag, message)]
                    rank.message(send, (number + 1) % 4, tag, message)
                if not units or turn <= number:
                    rank.kernel(ATTENTION, 320, arrived)

    return work


def accumulates(reduce_each: int, reduce_last: int) -> Work:
    """Eight micro-batches."""

    def work(rank: Rank, number: int, step: int) -> None:
        for batch in range(8):
            for _ in range(4):
                rank.kernel(GEMM, 240)
            if length := reduce_last if batch == 7 else reduce_each:
                rank.collective(length)

    return work


def fsdp_prefetches(rank: Rank, number: int, step: int) -> None:
    """The next layer's weights are gathered beside this layer's products."""
    gathered = rank.collective(240, name=GATHER, comm_type=2)
    for _ in range(10):
        following = rank.collective(240, name=GATHER, comm_type=2)
        rank.kernel(GEMM, 420, [gathered])
        rank.collective(120, name=SCATTER, comm_type=7)
        gathered = following


def schedules_decoding(rank: Rank, number: int, step: int) -> None:
    """A scheduler in Python between the graphs of two tokens, which reads each token."""
    rank.host("host-overhead", 3200, "host-overhead")
    launch = rank.host("cudaGraphLaunch", 40, "runtime")
    for _ in range(30):
        rank.after(launch, "nvjet_tst_64x8_64x16", 60)
    rank.kernel(TO_HOST, 2, kind="memcpy")
    rank.wait()


def python_on_the_cpu(rank: Rank, number: int, step: int) -> None:
    for _ in range(20):
        rank.host("host-overhead", 420, "host-overhead")
        rank.host("aten::add", 50)


def throttles_late(rank: Rank, number: int, step: int) -> None:
    for _ in range(8):
        rank.kernel(GEMM, 450 if number == 3 and step >= 5 else 300)
    rank.collective(150)


def all_throttle_late(rank: Rank, number: int, step: int) -> None:
    for _ in range(8):
        rank.kernel(GEMM, 420 if step >= 5 else 300)
    rank.collective(150)


def collects_in_turn(rank: Rank, number: int, step: int) -> None:
    rank.host("host-overhead", 5000 if step == number else 20, "host-overhead")
    for _ in range(8):
        rank.kernel(GEMM, 300)
    rank.collective(100)
    rank.wait()


def all_collect_at_once(rank: Rank, number: int, step: int) -> None:
    rank.host("host-overhead", 20_000 if step == 2 else 20, "host-overhead")
    for _ in range(8):
        rank.kernel(GEMM, 300)
    rank.collective(100)
    rank.wait()


def one_compiles(rank: Rank, number: int, step: int) -> None:
    if (number, step) == (2, 0):
        rank.annotation("_compile.compile_inner (dynamo_timed)", 9000)
    for _ in range(8):
        rank.kernel(GEMM, 300)
    rank.collective(100)
    rank.wait()


def hot_expert_moves(rank: Rank, number: int, step: int) -> None:
    """In each layer another rank's expert gets most tokens."""
    for layer in range(8):
        rank.kernel(ATTENTION, 60)
        rank.collective(40, stream=7, name=SENDRECV, comm_type=6)
        rank.kernel("fused_moe_kernel", 640 if (layer + step) % 4 == number else 200)
        rank.collective(40, stream=7, name=SENDRECV, comm_type=6)


def saves_beside(rank: Rank, number: int, step: int) -> None:
    """A checkpoint is copied to the host on a stream of its own, while kernels run."""
    rank.kernel(TO_HOST, 2600, stream=31, kind="memcpy")
    for _ in range(10):
        rank.kernel(GEMM, 300)


def optimizer_on_the_cpu(rank: Rank, number: int, step: int) -> None:
    for _ in range(10):
        rank.kernel(GEMM, 350)
    rank.kernel(TO_HOST, 1500, kind="memcpy")
    rank.wait()
    rank.host("DeepSpeedCPUAdam.step", 10_000)
    rank.kernel(TO_DEVICE, 1500, kind="memcpy")


MACHINES: Machines = {
    "input copies of half the step, hidden": (lambda: machine(1, 5, prefetches(1600)), "compute", None),
    "input copies of twice the kernels' time, prefetched": (
        lambda: machine(1, 6, prefetches(6500)), "host copies", None,
    ),
    "1F1B, eight stages, 40 micro-batches: the node of stages 4 and 5 takes 1.7 times as long": (
        lambda: one_f_one_b(8, 40, 4, 5, by=1.7), "rank", 4,
    ),
    "1F1B, four stages and micro-batches: the last stage takes 1.2 times as long, more is bubble": (
        lambda: one_f_one_b(4, 4, 3, by=1.2), "bubble", 3,
    ),
    "tensor parallelism with large products: all-reduces are a third of the step": (
        lambda: machine(4, 3, tensor_parallel), "compute", None,
    ),
    "tensor-parallel decoding by graphs: latency of all-reduces": (
        lambda: machine(8, 3, tensor_parallel_decoding), "communication", None,
    ),
    "context parallelism, keys and values hidden": (
        lambda: machine(4, 3, ring_attention(180)), "compute", None,
    ),
    "context parallelism, keys and values take twice as long as attention": (
        lambda: machine(4, 3, ring_attention(680)), "communication", None,
    ),
    "causal context parallelism without balancing: the last rank computes most": (
        lambda: machine(4, 3, ring_attention(60, units=True)), "rank", 3,
    ),
    "gradients accumulate, one all-reduce": (lambda: machine(8, 3, accumulates(0, 2500)), "compute", None),
    "gradients accumulate, but are reduced after each micro-batch": (
        lambda: machine(8, 3, accumulates(1700, 1700)), "communication", None,
    ),
    "FSDP with prefetching": (lambda: machine(4, 3, fsdp_prefetches), "compute", None),
    "decoding with a scheduler in Python between graphs": (
        lambda: machine(1, 6, schedules_decoding), "python", None,
    ),
    "eager Python on a CPU, operators take a ninth": (
        lambda: machine(1, 4, python_on_the_cpu), "python", None,
    ),
    "rank 3 of 8 throttles in the second half": (lambda: machine(8, 10, throttles_late), "rank", 3),
    "all ranks throttle in the second half": (lambda: machine(4, 10, all_throttle_late), "compute", None),
    "each of eight ranks collects garbage in one step of eight": (
        lambda: machine(8, 8, collects_in_turn), "imbalance", None,
    ),
    "all ranks collect garbage in the same step of four": (
        lambda: machine(4, 4, all_collect_at_once), "python", None,
    ),
    "rank 2 of 4 compiles in the first step": (lambda: machine(4, 4, one_compiles), "rank", 2),
    "the hot expert moves from rank to rank": (lambda: machine(4, 4, hot_expert_moves), "imbalance", None),
    "a checkpoint is copied beside the kernels": (lambda: machine(1, 4, saves_beside), "compute", None),
    "the optimizer runs on the CPU": (lambda: machine(1, 4, optimizer_on_the_cpu), "host", None),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_blind_machines(name: str) -> None:
    check_verdict(MACHINES, name)
