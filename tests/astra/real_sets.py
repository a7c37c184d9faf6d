"""The sets of the contract with ASTRA-sim: what each is, and the functions that make it.

``SETS`` has them all. tests/astra/test_real_astra.py and benchmarks/astra_agreement.py ``measure`` them.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.__main__ import main as chakra_et
from chakra_et.astra.command import check_log
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace
from chakra_et.et.node_attributes import with_metadata
from fasop.__main__ import main as fasop
from tests.astra.sets import MESH, run_astra, step, write_set
from tests.ports import free_port
from tests.shared import shared_path
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace, recv, send

ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.ALL_TO_ALL,
    CollectiveType.REDUCE_SCATTER,
)
ROOT = Path(__file__).resolve().parents[2]
SPEEDS = (0.1, 1, 10, 100, 1000)
"""Gbit/s of the outermost links at which each set runs."""
PERCENT = 1.0
"""How far each rank may be from expected.json."""


@dataclass(frozen=True)
class RealSet:
    """``make``: writes the set into a folder and returns its NAME. ``ranks``, ``flags`` of `chakra-et astra`.
    ``fast``: in the fast lane."""

    ranks: int
    make: Callable[[Path], str]
    flags: tuple[str, ...] = ()
    fast: bool = False


class _Tape:
    """The nodes of one rank: what the CPU does, and streams that each run one thing after the other."""

    def __init__(self, rank: int, seed: int = 1) -> None:
        self.rank, self.nodes = rank, [cpu(1, 20)]
        self.last: dict[object, int] = {}
        self.generator = np.random.default_rng(1000 * seed + rank)

    def add(
        self, make: Callable[..., dict], *values: object, stream: object, after: tuple = (), **more: object
    ) -> int:
        """A node behind the last one of its stream, those of ``after``, and the CPU's first."""
        at = len(self.nodes) + 1
        before = {1, *after} | ({self.last[stream]} if stream in self.last else set())
        attributes = {"stream": stream} if isinstance(stream, int) else {}
        self.nodes.append(make(at, *values, tuple(sorted(before)), is_cpu_op=0, **attributes, **more))
        self.last[stream] = at
        return at

    def work(self, micros: int, *after: int) -> int:
        return self.add(kernel, int(micros * self.generator.uniform(0.9, 1.1)), stream=7, after=after)

    def talk(self, kind: CollectiveType, size: int, group: str, *after: int, stream: int = 7) -> int:
        more = {"comm_type": int(kind), "comm_size": size}
        return self.add(collective, 50, stream=stream, after=after, group=group, **more)

    def send(self, peer: int, tag: int, size: int, *after: int) -> int:
        more = {"comm_src": self.rank, "comm_tag": tag, "comm_size": size}
        return self.add(send, 50, peer, stream=("to", peer), after=after, **more)

    def receive(self, peer: int, tag: int, size: int) -> int:
        more = {"comm_dst": self.rank, "comm_tag": tag, "comm_size": size}
        return self.add(recv, 50, peer, stream=("from", peer), **more)

    def trace(self, world: int) -> ExecutionTrace:
        return make_trace(*self.nodes, rank=self.rank, world_size=world)


def pipeline(stages: int, size: int, chunks: int = 1, dp: int = 1, micro: int = 0) -> Callable[[Path], str]:
    """1F1B on ``stages`` × ``dp`` ranks, or all passes forward and then all back with ``chunks`` per stage;
    gradients are reduced among replicas."""
    world, count = stages * dp, micro or 2 * stages
    groups = {"1": list(range(world))} | {str(2 + s): [s * dp + d for d in range(dp)] for s in range(stages)}

    def order(stage: int) -> list[tuple[str, int, int]]:
        forward = [
            ("F", m, c) for g in range(0, count, stages) for c in range(chunks) for m in range(g, g + stages)
        ]
        back = [("B", m, chunks - 1 - c) for _, m, c in forward]
        if chunks > 1:
            return forward + back
        ahead = min(stages - stage, count)
        pairs = [
            each for pair in zip(forward[ahead:], back[: count - ahead], strict=True) for each in pair[::-1]
        ]
        return [*forward[:ahead], *pairs, *back[count - ahead :]]

    def rank(number: int) -> ExecutionTrace:
        stage, replica = divmod(number, dp)
        tape = _Tape(number)
        for way, micro_batch, chunk in order(stage):
            virtual, last = chunk * stages + stage, chunks * stages - 1
            step = 1 if way == "F" else -1
            tag = 2 * micro_batch + (way == "B")
            before, after = virtual - step, virtual + step
            got = ()
            if 0 <= before <= last:
                got = (tape.receive(before % stages * dp + replica, 100 * max(before, virtual) + tag, size),)
            done = tape.work(400 if way == "F" else 800, *got)
            if 0 <= after <= last:
                tape.send(after % stages * dp + replica, 100 * max(virtual, after) + tag, size, done)
        if dp > 1:
            tape.talk(ALL_REDUCE, 8 << 20, str(2 + stage), tape.last[7], stream=8)
        tape.talk(ALL_REDUCE, 4, "1", tape.last[7], stream=9)
        return tape.trace(world)

    return lambda folder: write_set(folder, {r: rank(r) for r in range(world)}, groups)


def tensor_and_data(tp: int, dp: int, size: int) -> Callable[[Path], str]:
    """Tensor-parallel all-reduces among the kernels, gradients of replicas in a stream of their own."""
    world = tp * dp
    groups = {str(1 + d): [d * tp + t for t in range(tp)] for d in range(dp)}
    groups |= {str(1 + dp + t): [d * tp + t for d in range(dp)] for t in range(tp)}

    def rank(number: int) -> ExecutionTrace:
        d, t = divmod(number, tp)
        tape = _Tape(number)
        for _ in range(4):
            tape.talk(ALL_REDUCE, size, str(1 + d), tape.work(300))
        for _ in range(4):
            done = tape.work(600)
            tape.talk(ALL_REDUCE, size, str(1 + d), done)
            tape.talk(ALL_REDUCE, 4 * size, str(1 + dp + t), done, stream=8)
        tape.work(100, tape.last[8])
        return tape.trace(world)

    return lambda folder: write_set(folder, {r: rank(r) for r in range(world)}, groups)


def experts(ep: int, dp: int, size: int) -> Callable[[Path], str]:
    """Tokens to experts and back, gradients of experts among replicas and of the rest among all."""
    world = ep * dp
    groups = {"1": list(range(world))} | {str(2 + d): [d * ep + e for e in range(ep)] for d in range(dp)}
    groups |= {str(2 + dp + e): [d * ep + e for d in range(dp)] for e in range(ep)}

    def rank(number: int) -> ExecutionTrace:
        d, e = divmod(number, ep)
        tape = _Tape(number)
        for _ in range(6):
            for micros in (200, 400):
                tape.talk(ALL_TO_ALL, size, str(2 + d), tape.work(micros))
            tape.talk(ALL_REDUCE, 2 * size, str(2 + dp + e), tape.last[7], stream=8)
            tape.talk(ALL_REDUCE, size, "1", tape.last[7], stream=9)
        tape.work(100, tape.last[8], tape.last[9])
        return tape.trace(world)

    return lambda folder: write_set(folder, {r: rank(r) for r in range(world)}, groups)


def sharded(world: int, size: int) -> Callable[[Path], str]:
    """FSDP: gathers one layer ahead of its kernel, gradients scattered behind it, each in its stream."""

    def rank(number: int) -> ExecutionTrace:
        tape = _Tape(number)
        for way in (300, 600):
            for _ in range(6):
                done = tape.work(way, tape.talk(ALL_GATHER, size // world, "1", stream=9))
                if way == 600:
                    tape.talk(REDUCE_SCATTER, size, "2", done, stream=10)
        tape.work(100, tape.last[10])
        return tape.trace(world)

    everyone = list(range(world))
    return lambda folder: write_set(folder, {r: rank(r) for r in everyone}, {"1": everyone, "2": everyone})


def mesh(folder: Path) -> str:
    return write_set(folder, {rank: step(rank) for rank in range(8)}, MESH)


def example(folder: Path, name: str) -> str:
    assert chakra_et(["fetch-example", name, "-o", str(folder)]) == 0
    return str(folder / name / json.loads((folder / name / "expected.json").read_text())["name"])


def scaled(folder: Path, name: str, flags: tuple[str, ...]) -> str:
    assert chakra_et(["scale", example(folder, name), *flags, "-o", str(folder / "scaled")]) == 0
    return str(folder / "scaled")


A100 = {"memory_gib": 80, "price_per_hour": 8, "intra_bandwidth": 600e9}


def planned(folder: Path, model: str, on: Mapping[str, object], flags: tuple[str, ...]) -> str:
    """A planned set; its network is the plan's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cluster.yaml").write_text(json.dumps({"clusters": {"it": on}}))
    words = [
        "plan",
        "--model",
        model,
        "--cluster",
        f"{folder / 'cluster.yaml'}:it",
        "--oom",
        "--json",
        *flags,
    ]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert fasop(words) == 0
    (folder / "plan.json").write_text(said.getvalue())
    simulate = ["simulate", str(folder / "plan.json"), "--et", "--output", str(folder), "--name", "planned"]
    assert fasop(simulate) == 0
    return str(folder / "planned")


def cluster(gpu: str, nodes: int, per_node: int, between: float, **more: object) -> dict[str, object]:
    return {
        "gpus_per_node": per_node,
        "gpus": {gpu: A100 | {"nodes": nodes, "inter_bandwidth": between} | more},
    }


def captured(folder: Path, source: str, name: str, ranks: tuple[int, ...] = (), world: int = 0) -> str:
    """Shared captures of these ``ranks`` (default: all), converted, as those of a run of ``world`` ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    path = shared_path(f"data/traces/{source}")
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not ranks or any(f"rank{rank}_" in file.name for rank in ranks):
            shutil.copy(file, folder)
    assert chakra_et(["convert", "--dir", str(folder), "--allow-missing-ranks"]) == 0
    if world:
        # What says how many ranks there were.
        for left in (f"{name}.et", f"{name}_conversion.json"):
            (folder / left).unlink()
        for path in folder.glob(f"{name}.*.et"):
            trace = et_file.read(path)
            et_file.write(path, with_metadata(trace, world_size=world, process_groups=None))
        file = folder / f"{name}_comm_groups.json"
        groups = {group: list(range(world)) for group in json.loads(file.read_text())}
        file.write_text(json.dumps(groups))
    return str(folder / name)


def traced(folder: Path, name: str, ranks: int, scripts: str = "examples") -> str:
    """One of the scripts in this folder, run on gloo and converted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(free_port()), str(ROOT / scripts / f"{name}.py")]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        command, cwd=folder, env=os.environ | settings, capture_output=True, timeout=300, check=True
    )
    assert chakra_et(["convert", "--dir", str(folder / "outputs")]) == 0
    return str(folder / "outputs" / name)


def without(make: Callable[[Path], str], *ranks: int) -> Callable[[Path], str]:
    """A set without the files of these ranks."""

    def made(folder: Path) -> str:
        name = make(folder)
        for rank in ranks:
            Path(f"{name}.{rank}.et").unlink()
        return name

    return made


MIB = 1 << 20
GPT2, MEGATRON, PLANNED = "gpt2-gloo", "megatron-pp2-dp2", "gpt2-xl-planned"
DLRM = partial(captured, source="dlrm_8gpu", name="dlrm_8gpu")
SAMPLED = partial(captured, source="public/sampled_rank0_of_128.json.gz", name="sampled_of_128", world=8)
RESNET = partial(captured, source="public/mi300_resnet_rank0.json.gz", name="mi300_resnet")
A10 = cluster("A10", 8, 1, 25e9)
SETS: dict[str, RealSet] = {
    "all collectives on a mesh": RealSet(8, mesh, fast=True),
    "pipeline of 2": RealSet(2, pipeline(2, MIB), fast=True),
    "pipeline of 4": RealSet(4, pipeline(4, MIB), fast=True),
    "pipeline of 8": RealSet(8, pipeline(8, MIB), fast=True),
    "pipeline of 16": RealSet(16, pipeline(16, MIB)),
    "pipeline of 4, 1 KiB": RealSet(4, pipeline(4, 1024), fast=True),
    "interleaved, 4 × 2 chunks": RealSet(4, pipeline(4, MIB, 2), fast=True),
    "interleaved, 4 × 3 chunks, dp 2": RealSet(8, pipeline(4, MIB, 3, dp=2)),
    "pipeline of 4, dp 2": RealSet(8, pipeline(4, MIB, dp=2), fast=True),
    "tp 2 × dp 2": RealSet(4, tensor_and_data(2, 2, MIB), fast=True),
    "tp 4 × dp 4": RealSet(16, tensor_and_data(4, 4, MIB)),
    "tp 4 × dp 2, 4 KiB": RealSet(8, tensor_and_data(4, 2, 4096)),
    "experts, ep 4 × dp 2": RealSet(8, experts(4, 2, MIB), fast=True),
    "fsdp in streams, 8 ranks": RealSet(8, sharded(8, 4 * MIB), fast=True),
    "fsdp in streams, 3 ranks": RealSet(3, sharded(3, 4 * MIB)),
    "mesh, communication alone": RealSet(8, mesh, ("--comm-only",)),
    "mesh, device alone": RealSet(8, mesh, ("--gpu-only",)),
    "mesh, 3 of 8 ranks left out": RealSet(5, without(mesh, 1, 6, 7), ("--trim",)),
    "mesh, 3 of 8 ranks filled": RealSet(8, without(mesh, 1, 6, 7), ("--fill",)),
    "example gpt2-gloo": RealSet(2, partial(example, name=GPT2)),
    "example megatron-pp2-dp2": RealSet(4, partial(example, name=MEGATRON)),
    "example gpt2-xl-planned": RealSet(8, partial(example, name=PLANNED), fast=True),
    "gpt2-gloo scaled to dp 8": RealSet(8, partial(scaled, name=GPT2, flags=("--dp", "8"))),
    "gpt2-gloo, layers × 2, dp 4": RealSet(
        4, partial(scaled, name=GPT2, flags=("--layers", "2x", "--dp", "4"))
    ),
    "megatron scaled to dp 4": RealSet(8, partial(scaled, name=MEGATRON, flags=("--dp", "4"))),
    "plan: gpt2-xl, pp 4": RealSet(8, partial(planned, model="gpt2-xl", on=A10, flags=("--pp", "4"))),
    "plan: bert-large": RealSet(8, partial(planned, model="bert-large", on=A10, flags=("--dp", "8"))),
    "DLRM": RealSet(8, DLRM),
    "DLRM, 4 of 8 ranks left out": RealSet(4, partial(DLRM, ranks=(0, 1, 2, 3)), ("--trim",)),
    "DLRM, 4 of 8 ranks filled": RealSet(8, partial(DLRM, ranks=(0, 1, 2, 3)), ("--fill", "--mesh", "dp8")),
    "sampled rank, 7 of 8 filled": RealSet(8, SAMPLED, ("--fill", "--mesh", "dp8")),
    "mi300_resnet, 7 of 8 filled": RealSet(8, RESNET, ("--fill",)),
    "scatter, gather, reduce, barrier": RealSet(
        4, partial(traced, name="scatter_gather", ranks=4, scripts="tests/astra")
    ),
    **{
        f"examples/{name}.py": RealSet(ranks, partial(traced, name=name, ranks=ranks))
        for name, ranks in (
            ("ddp", 2),
            ("fsdp2", 4),
            ("pipeline", 4),
            ("tensor_parallel", 2),
            ("hf_trainer", 2),
        )
    },
}


def networks(ranks: int, speed: float) -> dict[str, str]:
    """Networks of one, two and three dimensions, as far as the number of ranks factors; ``speed``: Gbit/s of
    the outermost links."""

    def dimensions(*sizes: int) -> str:
        return "; ".join(
            f"{size} ranks, {speed * 4 ** (len(sizes) - at - 1)} Gbit/s, {1 + 2 * at} us"
            for at, size in enumerate(sizes)
        )

    found = {"1-D": f"{ranks} ranks, {speed} Gbit/s, 5 us"}
    factor = next((size for size in range(2, ranks) if ranks % size == 0), 0)
    if factor:
        found["2-D"] = dimensions(ranks // factor, factor)
    if ranks % 8 == 0:
        found["3-D"] = dimensions(ranks // 4, 2, 2)
    return found


def measure(name: str, scratch: Path, quick: bool = False) -> dict[str, Any]:
    """The runs of one set in ASTRA-sim, at each speed on all its networks (``quick``: on one of them): how
    many runs, how many ranks did not finish, the worst rank's error in percent and its network, seconds."""
    about, begin = SETS[name], time.monotonic()
    found: dict[str, Any] = {"ranks": about.ranks, "runs": 0, "unfinished": 0, "worst": 0.0, "where": ""}
    made, folder = about.make(scratch / "set"), scratch / "bundle"
    for at, speed in enumerate(SPEEDS):
        of_kind = networks(about.ranks, speed)
        chosen = [list(of_kind)[at % len(of_kind)]] if quick else list(of_kind)
        for kind in chosen:
            assert (
                chakra_et(["astra", made, "-o", str(folder), "--topology", of_kind[kind], *about.flags]) == 0
            )
            run_astra(folder)
            checked = check_log(folder / "astra.log", folder)
            worst = checked.worst_percent()
            found["runs"] += 1
            found["unfinished"] += len(checked.unfinished)
            if worst is None or abs(worst) >= abs(found["worst"]):
                found |= {
                    "worst": math.inf if worst is None else worst,
                    "where": f"{kind}, {speed:,g} Gbit/s",
                }
    return found | {"seconds": time.monotonic() - begin}
