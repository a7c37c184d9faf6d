#!/usr/bin/env python3
"""Make the examples that `chakra-et fetch-example` unpacks, from real runs on this machine and a plan.

    python benchmarks/make_examples.py                 all three, some minutes on two cores
    python benchmarks/make_examples.py gpt2-gloo       one of them
    python benchmarks/make_examples.py --repack        new folders around the sets that are there

gpt2-gloo: GPT-2 (tiny) on two gloo processes. megatron-pp2-dp2: a tiny GPT in two pipeline stages and two
replicas, on megatron-core (the extra megatron). gpt2-xl-planned: a plan of the planner on eight GPUs.
Each becomes a folder for ASTRA-sim, packed into chakra_et/astra/data/; all together must stay below 2
MB.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from chakra_et import cli
from chakra_et.__main__ import main as chakra_et
from chakra_et.astra.bundle import EXPECTED_FILE
from chakra_et.astra.examples import FOLDER, fetch
from chakra_et.files import write_json

LARGEST = 2_000_000


class Example(NamedTuple):
    """``make``: writes a set into a folder and returns its NAME. ``topology``: "" for that of plan.json
    there."""

    about: str
    ranks: int
    topology: str
    make: Callable[[Path], str]


@dataclass
class Config:
    names: tuple[str, ...] = field(
        default=(), metadata={"positional": True, "help": "the examples to make (default: all)"}
    )

    repack: bool = field(
        default=False, metadata={"help": "write the folders anew around the captured sets in the archives"}
    )

    def __post_init__(self) -> None:
        unknown = set(self.names) - set(EXAMPLES)
        if unknown:
            raise ValueError(f"no example {min(unknown)!r}: use {', '.join(EXAMPLES)}")


def run(command: list[str], **settings: str) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command[:6])} …: {done.stderr[-1500:]}")


def torchrun(ranks: int, script: str, *flags: str, **settings: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run([sys.executable, *launcher, script, *flags], OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", **settings)


def convert(folder: Path, name: str) -> str:
    if chakra_et(["convert", "--dir", str(folder)]):
        raise SystemExit(f"error: the traces in {folder} can't be converted")
    return str(folder / name)


def gpt2_gloo(folder: Path) -> str:
    flags = ["--model-name", "tiny", "--dataset", "sample", "--max-seq-length", "64", "--batch-size", "2"]
    flags += ["--max-steps", "6", "--skip-eval", "--save-steps", "0", "--save-dir", str(folder / "save")]
    flags += ["--enable-tracing", "--trace-output-dir", str(folder), "--trace-name", "gpt2_gloo"]
    flags += ["--trace-wait-steps", "2", "--trace-warmup-steps", "1", "--trace-active-steps", "3"]
    torchrun(2, "gpt2/train.py", *flags)
    return convert(folder, "gpt2_gloo")


def megatron(folder: Path) -> str:
    from tests.megatron_lm.training_runs import layout, train

    settings = layout("3-1", data=2) | {"TRAIN_ITERS": "5", "PROFILE_CHAKRA": "true"}
    done = train(timeout=900, **settings, TRACE_OUTPUT_DIR=str(folder))
    if done.returncode:
        raise SystemExit(f"error: megatron-core: {done.stderr[-1500:]}")
    return convert(folder, "megatron_tiny_4gpu")


def planned(folder: Path) -> str:
    plan = [
        sys.executable,
        "-m",
        "fasop",
        "plan",
        "--model",
        "gpt2-xl",
        "--cluster",
        f"{folder / 'cluster.yaml'}:a10",
    ]
    gpu = {
        "nodes": 2,
        "memory_gib": 80,
        "price_per_hour": 8,
        "inter_bandwidth": 40e9,
        "intra_bandwidth": 128e9,
    }
    cluster = {"clusters": {"a10": {"gpus_per_node": 4, "gpus": {"A10": gpu}}}}
    (folder / "cluster.yaml").write_text(json.dumps(cluster))
    plan += ["--tp", "2", "--pp", "2", "--mbs", "1", "--global-batch", "16", "--oom", "--json"]
    done = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, check=True)
    (folder / "plan.json").write_text(done.stdout)
    simulate = [sys.executable, "-m", "fasop", "simulate", str(folder / "plan.json"), "--et"]
    run([*simulate, "--output", str(folder), "--name", "gpt2_xl_planned"])
    return str(folder / "gpt2_xl_planned")


EXAMPLES = {
    "gpt2-gloo": Example(
        "GPT-2 (tiny), data-parallel on two gloo processes, three steps",
        2,
        "2 ranks, 10 Gbit/s, 30 us",
        gpt2_gloo,
    ),
    "megatron-pp2-dp2": Example(
        "a tiny GPT on megatron-core, two pipeline stages × two replicas, on gloo",
        4,
        "4 ranks, 10 Gbit/s, 30 us",
        megatron,
    ),
    "gpt2-xl-planned": Example(
        "one planned step of GPT-2 XL on eight A10: tensor, pipeline and data parallel",
        8,
        "",
        planned,
    ),
}


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    FOLDER.mkdir(exist_ok=True)
    for name in config.names or EXAMPLES:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "set").mkdir()
            captured = bool(EXAMPLES[name].topology)
            made = (
                _packed(name, folder) if config.repack and captured else EXAMPLES[name].make(folder / "set")
            )
            bundle = folder / name
            topology = EXAMPLES[name].topology or str(folder / "set" / "plan.json")
            if chakra_et(["astra", made, "-o", str(bundle), "--topology", topology]):
                return 1
            pack(bundle, FOLDER / f"{name}.tar.xz")
    listed = {name: {"about": each.about, "ranks": each.ranks} for name, each in EXAMPLES.items()}
    write_json(FOLDER / "examples.json", listed)
    total = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"{FOLDER}: {total:,} bytes")
    return int(total > LARGEST)


def _packed(name: str, folder: Path) -> str:
    """The NAME of the set in the archive."""
    old = fetch(name, folder / "old")
    return str(old / json.loads((old / EXPECTED_FILE).read_text())["name"])


def pack(folder: Path, archive: Path) -> None:
    """The files of ``folder``, in order of name and without owner or time."""
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for path in sorted(folder.iterdir()):
            entry = tarfile.TarInfo(path.name)
            entry.size, entry.mode = path.stat().st_size, 0o755 if path.suffix == ".sh" else 0o644
            packed.addfile(entry, io.BytesIO(path.read_bytes()))


if __name__ == "__main__":
    sys.exit(main())
