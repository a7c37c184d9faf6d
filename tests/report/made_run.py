"""A run of two ranks with times that can be added up by hand, and a large one.

Each rank runs one step of 160 µs: host work, a kernel, an all-reduce, host work beside a copy. The kernel of
rank 1 takes 40 µs longer, and rank 0 waits for it in the all-reduce.

    µs         0    10   30              80        120   140   150   160
    rank 0     step mm   gemm            wait......all-reduce  copy
               .............................................. optimizer..
    rank 1     step mm   gemm......................all-reduce  copy
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from chakra_et.convert.inputs import find_run
from chakra_et.et import file as et_file
from chakra_et.et.columns import Attribute, ExecutionTrace, NodeType, Ragged, Strings
from chakra_et.names import RunFiles
from chakra_et.report.run import ReportRun, load
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace

HOSTILE = '</script><img src=x onerror="document.title=1">&amp;'


# Rank 1 holds 5 MB, allocates 4 and frees 1 in aten::mm, and frees 2 in Optimizer.step.
ALLOCATES = {
    "gpu0_allocated_bytes": 8_000_000,
    "gpu0_allocated_bytes_peak": 9_000_000,
    "gpu0_reserved_bytes": 16_000_000,
    "gpu0_allocations": 2,
    "gpu0_frees": 1,
    "gpu0_allocated_bytes_in_node": 4_000_000,
    "gpu0_freed_bytes_in_node": 1_000_000,
}
FREES = {
    "gpu0_allocated_bytes": 6_000_000,
    "gpu0_allocated_bytes_peak": 8_000_000,
    "gpu0_reserved_bytes": 16_000_000,
    "gpu0_allocations": 0,
    "gpu0_frees": 2,
    "gpu0_allocated_bytes_in_node": 0,
    "gpu0_freed_bytes_in_node": 2_000_000,
}


def rank_trace(rank: int, gemm: int, gemm_name: str = "gemm", memory: bool = False) -> ExecutionTrace:
    arrives = 30 + gemm
    allocates, frees = (ALLOCATES, FREES) if memory else ({}, {})
    return make_trace(
        cpu(1, 10, start=0, name="ProfilerStep#5", kind="annotation"),
        cpu(2, 20, (1,), start=10, name="aten::mm", kind="operator", dep_kinds="P", phase="forward",
            module="Net_0/Linear_0", **allocates),
        kernel(3, gemm, (2,), start=30, name=gemm_name, kind="kernel", dep_kinds="L", parent=2,
               phase="forward", module="Net_0/Linear_0", num_ops=5_000_000, tensor_size=100_000),
        cpu(4, 10, (2,), start=30, name="c10d::allreduce_", kind="operator", dep_kinds="P"),
        collective(5, 140 - arrives, (3, 4), start=arrives, name="ncclAllReduce", kind="collective", stream=9,
                   comm_size=1000, dep_kinds="CL", transfer_micros=20, wait_micros=120 - arrives),
        cpu(6, 20, (5,), start=140, name="Optimizer.step", kind="operator", dep_kinds="Y", phase="optimizer",
            **frees),
        kernel(7, 10, (5,), start=140, name="Memcpy HtoD", type=NodeType.MEM_LOAD, kind="memcpy",
               dep_kinds="Y", stream=7),
        rank=rank, world_size=2, trace_start_ns=1000, clock_offset_ns=0,
    )  # fmt: skip


def write_run(
    folder: Path, name: str = "made", gemm_name: str = "gemm", slow: int = 90, memory: bool = False
) -> RunFiles:
    """``NAME.0.et`` and ``NAME.1.et``, and their groups file; with ``memory``, that of rank 1's GPU."""
    files = RunFiles(folder, name)
    for rank, gemm in ((0, 50), (1, slow)):
        et_file.write(files.et_file(rank), rank_trace(rank, gemm, gemm_name, memory and rank == 1))
    files.groups_file.write_text('{"1": [0, 1]}')
    return files


def made_run(folder: Path) -> ReportRun:
    write_run(folder)
    return load(find_run([str(folder / "made")]))


BETWEEN = 100


def large_trace(rank: int, nodes: int) -> ExecutionTrace:
    """``nodes`` nodes: for every three an operator, a launch and a kernel; times are random. Every
    ``BETWEEN``th kernel is an all-reduce."""
    groups = nodes // 3
    index = np.arange(groups * 3)
    group, part = index // 3, index % 3
    table = [
        f"{what}_{number}".encode() for what in ("aten::op", "launch", "kernel") for number in range(200)
    ]
    random = np.random.default_rng(rank)
    begin = 20 + np.cumsum(random.integers(13, 40, groups))
    start = begin[group] + np.select([part == 0, part == 1], [0, 4], 9)
    length = np.select([part == 0, part == 1], [3, 4], random.integers(2, 13, len(index)))
    rows = np.arange(len(index))
    reduces = np.flatnonzero((part == 2) & (group % BETWEEN == BETWEEN - 1))
    types = np.full(len(index), NodeType.COMP, np.uint8)
    types[reduces] = NodeType.COMM_COLL
    ones = np.ones(len(reduces), np.int32)
    on_device = np.flatnonzero(part == 2)
    # Every node follows the one before on its thread, and every kernel its launch and the kernel before.
    deps = [[] if at == 0 else [at] if part[at] else [at - 1] for at in range(len(index))]

    def integers(values: np.ndarray, at: np.ndarray = rows) -> Attribute:
        return Attribute("int64", at, values.astype(np.int64))

    kinds = [b"operator", b"runtime", b"kernel"]
    return ExecutionTrace(
        ids=(index + 1).astype(np.uint64),
        names=Strings(table, (part * 200 + group % 200).astype(np.int32)),
        types=types,
        start_micros=start.astype(np.uint64),
        duration_micros=length.astype(np.uint64),
        data_deps=Ragged(
            np.concatenate(([0], np.cumsum([len(each) for each in deps]))).astype(np.int64),
            np.array([each for some in deps for each in some], np.uint64),
        ),
        ctrl_deps=Ragged(np.zeros(len(index) + 1, np.int64), np.zeros(0, np.uint64)),
        attributes={
            "is_cpu_op": Attribute("bool", rows, (part < 2).astype(np.int64)),
            "kind": Attribute("string", rows, Strings(kinds, part.astype(np.int32))),
            "tid": integers(np.ones(int((part < 2).sum())), np.flatnonzero(part < 2)),
            "stream": integers(np.full(len(on_device), 7), on_device),
            "comm_type": integers(0 * ones, reduces),
            "comm_size": integers(4096 * ones, reduces),
            "pg_name": Attribute("string", reduces, Strings([b"0", b"1"], ones)),
        },
        metadata={"rank": rank, "trace_start_ns": 1000, "clock_offset_ns": 0},
    )


def write_large(folder: Path, ranks: int, nodes: int, name: str = "large") -> RunFiles:
    files = RunFiles(folder, name)
    for rank in range(ranks):
        et_file.write(files.et_file(rank), large_trace(rank, nodes))
    files.groups_file.write_text(json.dumps({"1": list(range(ranks))}))
    return files
