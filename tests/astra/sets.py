"""Sets of .et files for tests: a step of several ranks with groups and messages, written as a converter
does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np

from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace
from tests.shared import shared_path
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace, recv, send

BINARY = "AstraSim_Analytical_Congestion_Unaware"
MESH = {"1": list(range(8)), "2": [0, 1], "3": [2, 3], "4": [4, 5], "5": [6, 7]}
MESH |= {"6": [0, 2], "7": [1, 3], "8": [4, 6], "9": [5, 7]}
"""Eight ranks: pairs of tensor parallelism, pairs of data parallelism, two pipeline stages of four ranks."""


def step(rank: int, seed: int = 1) -> ExecutionTrace:
    """One step of rank ``rank`` of ``MESH``: operators, kernels, every collective that ASTRA-sim has, a
    message."""
    generator = np.random.default_rng(seed * 100 + rank)

    def duration() -> int:
        return int(generator.integers(50, 500))

    def talk(node: int, kind: CollectiveType, size: int, group: str) -> dict:
        more = {"comm_type": int(kind), "comm_size": size, "is_cpu_op": 0, "stream": 9}
        return collective(node, duration(), (node - 1,), group, **more)

    tensor, data = str(2 + rank // 2), str(6 + (rank % 2) + 2 * (rank // 4))
    peer = rank + 4 if rank < 4 else rank - 4
    message = (
        send(6, duration(), peer, (5,), comm_src=rank, comm_size=1 << 20, is_cpu_op=0)
        if rank < 4
        else recv(6, duration(), peer, (5,), comm_dst=rank, comm_size=1 << 20, is_cpu_op=0)
    )
    return make_trace(
        cpu(1, duration()),
        kernel(2, duration(), (1,), is_cpu_op=0),
        talk(3, CollectiveType.ALL_GATHER, 3 << 16, tensor),
        kernel(4, duration(), (3,), is_cpu_op=0),
        talk(5, CollectiveType.REDUCE_SCATTER, 5 << 16, tensor),
        message,
        kernel(7, duration(), (6,), is_cpu_op=0),
        talk(8, CollectiveType.ALL_REDUCE, 9 << 20, data),
        talk(9, CollectiveType.ALL_REDUCE, 4, "1"),
        talk(10, CollectiveType.ALL_TO_ALL, 1 << 18, "1"),
        talk(11, CollectiveType.ALL_REDUCE, 7 << 20, "1"),
        talk(12, CollectiveType.BROADCAST, 64, "1"),
        talk(13, CollectiveType.ALL_TO_ALL, 1 << 14, tensor),
        cpu(14, duration(), (1,)),
        kernel(15, duration(), (13, 14), is_cpu_op=0),
        rank=rank,
        world_size=8,
    )


def write_set(
    folder: Path, traces: dict[int, ExecutionTrace], groups: dict[str, list[int]], name: str = "run"
) -> str:
    """Write the set and return its NAME."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, trace in traces.items():
        et_file.write(folder / f"{name}.{rank}.et", trace)
    if groups:
        (folder / f"{name}_comm_groups.json").write_text(json.dumps(groups))
    return str(folder / name)


def astra_sim() -> Path:
    """The congestion-unaware ASTRA-sim: that of ``ASTRA_SIM``, or the shared one; else the test skips."""
    named = os.environ.get("ASTRA_SIM")
    return Path(named) if named else shared_path(f"tools/astra-sim/{BINARY}")


def run_astra(folder: Path) -> subprocess.CompletedProcess[str]:
    """``run.sh`` of a bundle with the real ASTRA-sim."""
    return subprocess.run(
        [folder / "run.sh", astra_sim()], capture_output=True, text=True, timeout=300, check=False
    )
