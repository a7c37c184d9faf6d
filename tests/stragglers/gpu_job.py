"""Data-parallel training on made-up GPUs, written as Kineto traces: the time of every kernel is known.

Each step of a rank is a forward kernel, a backward kernel, and an all-reduce that begins when the rank's
backward ends, and ends on all ranks ``TRANSFER`` after the last one began.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chakra_et.__main__ import main
from tests.generator.hand_made import PID, annotation, call, kernel, op, write_kineto

TRANSFER = 400.0
# From a step's start to its forward kernel; from the end of the all-reduce to the next step's start.
LAUNCH, AFTER = 10.0, 5.0
FIRST_STEP = 4
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"


def write_job(folder: Path, forward: np.ndarray, backward: np.ndarray) -> str:
    """Traces of ranks × steps with these times in µs, converted; the NAME of the run."""
    ranks, steps = forward.shape
    start = 100.0
    events: list[list[dict]] = [[] for _ in range(ranks)]
    for step in range(steps):
        ready = LAUNCH + forward[:, step] + backward[:, step] + 2
        end = float(ready.max()) + TRANSFER
        for rank in range(ranks):
            number, begins = 10 * step + 1, start + LAUNCH
            events[rank] += [
                annotation(f"ProfilerStep#{FIRST_STEP + step}", start, end + 4),
                op("aten::mm", start, 8), call("cudaLaunchKernel", start + 1, 3, number),
                kernel("gemm", begins, forward[rank, step], number),
                op("autograd::engine::evaluate_function: MmBackward0", start + 9, 8),
                op("aten::mm", start + 10, 6), call("cudaLaunchKernel", start + 11, 3, number + 1),
                kernel("gemm", begins + forward[rank, step], backward[rank, step], number + 1),
                annotation("nccl:all_reduce", start + 20, 8),
                call("cudaStreamWaitEvent", start + 21, 1, number + 2),
                call("cudaLaunchKernel", start + 23, 3, number + 3),
                kernel(
                    NCCL, start + ready[rank], end - ready[rank], number + 3, 20,
                    **{
                        "Collective name": "allreduce", "In msg nelems": 4096, "dtype": "Float",
                        "Process Group Name": "0", "Group size": ranks,
                    },
                ),
                call("cudaDeviceSynchronize", start + 30, end + 3 - 30, number + 4),
            ]  # fmt: skip
        start += end + AFTER
    for rank in range(ranks):
        of_host = [
            each | {"pid": each["pid"] + rank} if each["pid"] == PID else each for each in events[rank]
        ]
        write_kineto(
            folder / f"job_rank{rank}.json",
            of_host,
            rank,
            ranks,
            baseTimeNanoseconds=10**18,
            traceName=str(rank),
        )
    assert main(["convert", str(folder)]) == 0
    return str(folder / "job")


def step_s(forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """The step times of that job, float64[steps] in s."""
    return ((forward + backward).max(axis=0) + LAUNCH + 2 + TRANSFER + AFTER) * 1e-6
