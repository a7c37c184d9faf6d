"""Real runs for ``scale_benchmark.py``: other layers, batch and sequence on two gloo ranks, one rank scaled
to
two, and tiny Megatron models with more tensor-parallel ranks or pipeline stages."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORKLOAD = Path(__file__).with_name("predict_workload.py")
SIZES = {"batch": 10, "sequence": 72, "hidden": 256, "layers": 4, "heads": 4, "vocabulary": 1500}
"""A small GPT whose sizes can be told apart."""
CASES: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "layers": ({"layers": 8}, ("--layers", "2x")),
    "batch": ({"batch": 20}, ("--batch", "2x")),
    "sequence": ({"sequence": 144}, ("--seq", "2x")),
}
"""What a case changes in the model, and the flags that predict it."""
StepMs = Callable[..., float]
Command = Callable[..., None]


def launch(plan: Mapping[str, Any], path: Path, ranks: int) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of a plan of ``predict_workload.py``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    whole = {"world_size": ranks, "init": f"tcp://127.0.0.1:{port}", **plan}
    path.write_text(json.dumps(whole))
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(WORKLOAD), str(path)]
    return [
        subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]


def wait(running: list[subprocess.Popen[bytes]]) -> None:
    for one in running:
        _, said = one.communicate(timeout=900)
        if one.returncode:
            raise SystemExit(f"error: a run failed: {said.decode()[-800:]}")


def models(folder: Path, rounds: int, step_ms: StepMs, quietly: Command) -> dict[str, tuple[float, ...]]:
    """Case → (predicted, real, captured) ms per step, medians over rounds. The cases and what they are
    predicted from run in turns, in the same two processes."""
    cases = [{"name": "base", "model": SIZES}]
    cases += [{"name": name, "model": SIZES | changes} for name, (changes, _) in CASES.items()]
    plan = {"output": str(folder), "rounds": rounds, "warmup": 1, "plain": 1, "active": 5, "cases": cases}
    wait(launch(plan, folder / "plan.json", 2))
    quietly("convert", "--dir", str(folder))
    found = {}
    for name, (_, flags) in CASES.items():
        rows = []
        for number in range(rounds):
            base = folder / f"base_r{number}"
            target = f"{base}-{name}"
            quietly("scale", str(base), *flags, "-o", target)
            real = step_ms(str(folder / f"{name}_r{number}"), True, 1)
            rows.append((step_ms(target, first=1), real, step_ms(str(base), True, 1)))
        found[name] = tuple(statistics.median(column) for column in zip(*rows, strict=True))
    return found


def from_one(folder: Path, rounds: int, step_ms: StepMs, quietly: Command) -> dict[str, tuple[float, ...]]:
    """One rank scaled to two: with DistributedDataParallel of one process, and without it. Both, the two
    ranks that they are compared with, and the measurement of the network run at the same time, so that each
    has as much of the machine."""
    rows: dict[str, list[tuple[float, ...]]] = {"one rank under DDP": [], "one rank without DDP": []}
    for number in range(rounds):
        here = folder / f"turn{number}"
        running = []
        for name, ranks, wrapper in (("ddp", 1, "ddp"), ("bare", 1, "none"), ("two", 2, "ddp")):
            case = {"name": name, "model": SIZES, "wrapper": wrapper}
            plan = {"rounds": 1, "warmup": 2, "plain": 1, "active": 8, "output": str(here), "cases": [case]}
            running += launch(plan, here / name / "plan.json", ranks)
        network = here / "network.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        measure = [
            *torchrun,
            "-m",
            "chakra_et",
            "measure-network",
            "--output",
            str(network),
            "--repeats",
            "5",
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        running.append(
            subprocess.Popen(measure, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        )
        wait(running)
        quietly("convert", "--dir", str(here))
        real = step_ms(str(here / "two_r0"), True, 1)
        for name, base in (
            ("one rank under DDP", here / "ddp_r0"),
            ("one rank without DDP", here / "bare_r0"),
        ):
            target = f"{base}-two"
            quietly("scale", str(base), "--dp", "2", "-o", target, "--network", str(network))
            rows[name].append((step_ms(target, first=1), real, step_ms(str(base), True, 1)))
    return {
        name: tuple(statistics.median(column) for column in zip(*each, strict=True))
        for name, each in rows.items()
    }


def megatron(folder: Path, rounds: int, step_ms: StepMs, quietly: Command) -> dict[str, tuple[float, ...]]:
    """A tiny GPT on megatron-core: 2 tensor-parallel ranks or 2 pipeline stages scaled to 4, and compared
    with 4 that run at the same time."""
    from tests.megatron_lm.training_runs import PRETRAIN, TINY, environment, layout
    from tests.ports import free_port

    layouts = {
        "tp": {2: layout("4", tensor=2), 4: layout("4", tensor=4)},
        "pp": {2: layout("2-2"), 4: layout("1-1-1-1")},
    }
    found = {}
    for axis, of_ranks in layouts.items():
        rows = []
        for number in range(rounds):
            here = folder / axis / f"turn{number}"
            running = []
            for ranks, settings in of_ranks.items():
                where = here / str(ranks)
                where.mkdir(parents=True)
                more = {"TRAIN_ITERS": "8", "PROFILE_CHAKRA": "true", "GLOBAL_BATCH_SIZE": "4"}
                whole = TINY | settings | more | {"TRACE_OUTPUT_DIR": str(where)}
                launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
                command = [sys.executable, *launcher, "--master-port", str(free_port()), str(PRETRAIN)]
                env = os.environ | environment(whole) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
                running.append(
                    subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                )
            wait(running)
            for ranks in of_ranks:
                quietly("convert", "--dir", str(here / str(ranks)))
            base, real = (here / str(ranks) / f"megatron_tiny_{ranks}gpu" for ranks in of_ranks)
            quietly("scale", str(base), f"--{axis}", "4", "-o", str(here / "four"))
            rows.append((step_ms(str(here / "four")), step_ms(str(real), True), step_ms(str(base), True)))
        found[f"Megatron {axis} 2 → 4"] = tuple(statistics.median(one) for one in zip(*rows, strict=True))
    return found
