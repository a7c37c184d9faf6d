#!/usr/bin/env python3
"""What joint questions about very many ranks cost, by their skeletons.

    python benchmarks/cluster_benchmark.py                          64, 256, 1,024 and 4,096 ranks × 20 steps
    python benchmarks/cluster_benchmark.py --ranks 64 256 --steps 5

Each rank is made as a converted GPU rank would be, and contracted as ``convert`` does: 4 layers with tensor
parallelism over 8 ranks and data parallelism over the others, an operator, a call and a kernel for each of 8
pieces of work of a layer, forward and backward, all-reduces on streams of their own. Times vary from rank to
rank; one rank in 1,000 is slow. Beyond the first 64, a rank is one of these with groups and times of its own.
For each number of ranks: seconds and memory of a process that replays the job, predicts it on another
network, and finds its stragglers. The exit status is 1 if a target is missed: 60, 30 and 60 s of CPU and 8 GB
for 4,096 ranks, and growth from the first number of ranks to the last that is more than linear by a quarter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from chakra_et import text
from chakra_et.et import record
from chakra_et.et.columns import Attribute, CollectiveType, ExecutionTrace, NodeType, Ragged, Strings
from chakra_et.et.skeleton import read_skeleton, write_skeleton
from chakra_et.files import scratch_folder, write_json
from chakra_et.names import SKELETON, RunFiles
from chakra_et.ranks.contract import contract
from chakra_et.simulate.run import make_run

LAYERS, WORK, TP = 4, 8, 8
QUESTIONS = {
    "replay": (["replay", "--semantics", "device"], 60.0),
    "what-if": (["predict", "--bandwidth", "400Gbit/s"], 30.0),
    "stragglers": (["stragglers"], 60.0),
}
MOST_BYTES = 8e9
HOST, COMPUTE, TENSOR, DATA = range(4)
KINDS = ["operator", "runtime", "kernel", "collective"]


class Rank:
    """A rank's nodes in the order in which they were launched."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank, self.noise = rank, np.random.default_rng(seed)
        self.slow = 1.3 if rank % 1000 == 500 else 1.0
        self.rows: list[tuple[str, int, int, int, str, int]] = []
        self.deps: list[list[int]] = []
        self.last: dict[int, int] = {}

    def add(
        self, name: str, lane: int, micros: float, phase: str, after: int = -1, group: int = 0, size: int = 0
    ) -> int:
        if not size:
            micros *= self.slow * self.noise.lognormal(0, 0.1)
        before = {self.last.get(lane, -1), after} - {-1}
        self.deps.append(sorted(before))
        self.rows.append((name, lane, round(micros), group, phase, size))
        self.last[lane] = len(self.rows) - 1
        return self.last[lane]

    def step(self, number: int) -> None:
        self.add(f"ProfilerStep#{number}", HOST, 20, "")
        for phase, times in (("forward", 1.0), ("backward", 2.0)):
            for _ in range(LAYERS):
                for _ in range(WORK):
                    self.add("aten::linear", HOST, 12, phase)
                    call = self.add("cudaLaunchKernel", HOST, 4, phase)
                    kernel = self.add("sm90_gemm", COMPUTE, 60 * times, phase, call)
                reduced = self.add(
                    "ncclAllReduce_tp", TENSOR, 40, phase, kernel, 1 + self.rank // TP, 1 << 22
                )
                self.add("layer_norm", COMPUTE, 10, phase, reduced)
                if phase == "backward":
                    group = 1_000_000 + self.rank % TP
                    self.add("ncclAllReduce_dp", DATA, 150, phase, self.last[COMPUTE], group, 1 << 25)
        self.add("adam", COMPUTE, 200, "optimizer", self.last[DATA])
        self.add("cudaDeviceSynchronize", HOST, 5, "optimizer", self.last[COMPUTE])

    def trace(self, world: int) -> ExecutionTrace:
        names, lane, micros, group, phase, size = (np.array(each) for each in zip(*self.rows, strict=True))
        rows = np.arange(len(names))
        joint = np.flatnonzero(size > 0)
        kind = np.select([size > 0, lane == COMPUTE, np.char.startswith(names, "cuda")], [3, 2, 1], 0)

        def strings(values: np.ndarray, at: np.ndarray) -> Attribute:
            table, index = np.unique(values, return_inverse=True)
            return Attribute(
                "string", at, Strings([str(each).encode() for each in table], index.astype(np.int32))
            )

        def integers(values: np.ndarray, at: np.ndarray) -> Attribute:
            return Attribute("int64", at, values.astype(np.int64))

        on_device = np.flatnonzero(lane != HOST)
        known = np.flatnonzero(phase != "")
        attributes = {
            "is_cpu_op": Attribute("bool", rows, (lane == HOST).astype(np.int64)),
            "kind": strings(np.array(KINDS)[kind], rows),
            "lane": integers(lane, rows),
            "tid": integers(np.ones(len(rows)), rows),
            "stream": integers(lane[on_device], on_device),
            "device": integers(np.zeros(len(on_device)), on_device),
            "phase": strings(phase[known], known),
            "comm_type": integers(np.full(len(joint), CollectiveType.ALL_REDUCE), joint),
            "comm_size": integers(size[joint], joint),
            "pg_name": strings(group[joint].astype(str), joint),
            "transfer_micros": integers(micros[joint], joint),
            "wait_micros": integers(np.zeros(len(joint)), joint),
        }
        offsets = np.concatenate(([0], np.cumsum([len(each) for each in self.deps])))
        values = np.array([dep + 1 for each in self.deps for dep in each], np.uint64)
        table, index = np.unique(names, return_inverse=True)
        trace = ExecutionTrace(
            ids=(rows + 1).astype(np.uint64),
            names=Strings([str(each).encode() for each in table], index.astype(np.int32)),
            types=np.where(size > 0, NodeType.COMM_COLL, NodeType.COMP).astype(np.uint8),
            start_micros=np.ones(len(rows), np.uint64),
            duration_micros=micros.astype(np.uint64),
            data_deps=Ragged(offsets.astype(np.int64), values),
            ctrl_deps=Ragged(np.zeros(len(rows) + 1, np.int64), np.zeros(0, np.uint64)),
            attributes=attributes,
            metadata={
                "rank": self.rank,
                "world_size": world,
                "trace_start_ns": 10**18,
                "clock_domain": "one",
                "clock_offset_ns": 0,
            },
        )
        start = make_run("", [trace], [self.rank]).start_ns
        trace.start_micros = (start // 1000 + 1).astype(np.uint64)
        return trace


MADE = 64
"""So many ranks are made node by node."""


def make_rank(job: tuple[RunFiles, int, int, int]) -> tuple[int, int]:
    """Nodes of a rank and of its skeleton, which is written."""
    run, rank, world, steps = job
    path = run.et_file(rank).with_suffix(SKELETON)
    if rank >= MADE:
        return copy_rank(run, rank)
    made = Rank(rank, rank)
    for number in range(steps):
        made.step(number)
    trace = made.trace(world)
    skeleton = contract(trace)
    write_skeleton(path, skeleton)
    return len(trace), len(skeleton)


def copy_rank(run: RunFiles, rank: int) -> tuple[int, int]:
    """As ``make_rank``, from the skeleton of one of the first ranks."""
    like = read_skeleton(run.et_file(rank % MADE).with_suffix(SKELETON))
    work, noise = like.types < NodeType.COMM_SEND, np.random.default_rng(rank)
    micros = like.duration_micros.astype(float)
    micros[work] *= noise.lognormal(0, 0.03, int(work.sum())) * (1.3 if rank % 1000 == 500 else 1.0)
    group = like.attributes["pg_name"]
    names = [name if int(name) >= 1_000_000 else b"%d" % (1 + rank // TP) for name in group.values.table]
    renamed = Attribute("string", group.rows, Strings(names, group.values.index))
    made = replace(
        like,
        duration_micros=np.rint(micros).astype(np.uint64),
        attributes={**like.attributes, "pg_name": renamed},
        metadata={**like.metadata, "rank": rank},
    )
    write_skeleton(run.et_file(rank).with_suffix(SKELETON), made)
    return int(like.metadata["skeleton_of"]), len(made)


def make_job(folder: Path, world: int, steps: int) -> tuple[int, int]:
    """All skeletons of a job, committed as ``convert`` commits them; nodes before and after."""
    run = RunFiles(folder, f"job{world}")
    groups = {str(1 + at): list(range(at * TP, at * TP + TP)) for at in range(world // TP)}
    groups |= {str(1_000_000 + at): list(range(at, world, TP)) for at in range(TP)}
    with scratch_folder(folder / run.name) as scratch, Pool(len(os.sched_getaffinity(0))) as pool:
        inner = RunFiles(scratch, run.name)
        jobs = [(inner, rank, world, steps) for rank in range(world)]
        counts = pool.map(make_rank, jobs[:MADE], 1) + pool.map(make_rank, jobs[MADE:], 8)
        write_json(inner.groups_file, groups)
        record.commit(scratch, run, world, {})
    return sum(full for full, _ in counts), sum(kept for _, kept in counts)


def ask(arguments: list[str], name: str) -> tuple[float, float, int]:
    """Seconds by the clock and of CPU, and bytes of memory, of one question."""
    command = [sys.executable, "-m", "chakra_et", arguments[0], name, *arguments[1:], "--json"]
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        assert process.returncode == 0 and json.load(output), command
    return time.monotonic() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=QUESTIONS, nargs="+", default=list(QUESTIONS))
    parser.add_argument("--folder", type=Path, help="keep the jobs here, and use those that are there")
    config = parser.parse_args()
    missed, first = [], {}
    rows = [("ranks", "nodes", "of skeletons", "MB", "question", "s", "CPU s", "GB", "µs per rank and step")]
    with contextlib.ExitStack() as stack:
        folder = config.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for world in config.ranks:
            run = RunFiles(folder, f"job{world}")
            there = run.report_file.exists()
            full, kept = (0, 0) if there else make_job(folder, world, config.steps)
            size = sum(run.et_file(rank).with_suffix(SKELETON).stat().st_size for rank in range(world))
            for question in config.only:
                arguments, limit = QUESTIONS[question]
                wall, cpu, memory = ask(arguments, str(folder / run.name))
                each = cpu / world / config.steps * 1e6
                figures = (f"{wall:.1f}", f"{cpu:.1f}", f"{memory / 1e9:.2f}", f"{each:,.0f}")
                rows.append((f"{world:,}", f"{full:,}", f"{kept:,}", f"{size / 1e6:.0f}", question, *figures))
                print("  ".join(rows[-1]), file=sys.stderr, flush=True)
                if world == 4096 and (cpu > limit or memory > MOST_BYTES):
                    missed.append(
                        f"{question} of {world:,} ranks takes {cpu:.0f} s of CPU and {memory / 1e9:.1f} GB"
                    )
                # What starting a process takes isn't part of the growth.
                if each > 1.25 * first.setdefault(question, each):
                    missed.append(
                        f"{question} takes more per rank at {world:,} ranks than at {config.ranks[0]:,}"
                    )
    print("\n".join(text.table(rows, right=[0, 1, 2, 3, 5, 6, 7, 8])))
    for sentence in missed:
        print(f"missed: {sentence}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
