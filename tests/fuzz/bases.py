"""The good traces that are mutated: file name → text, for each run."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.generator import Features, generate
from tests.generator.fixtures import FOLDER

CAPTURES = FOLDER.parent / "captures"
Run = dict[str, bytes]


@cache
def bases() -> list[tuple[str, Run]]:
    """(name, files), the same in each process. Real captures are last: they are a hundred times larger."""
    runs = [
        (folder.name, {path.name: path.read_bytes() for path in sorted(folder.glob("run_*.json"))})
        for folder in sorted(FOLDER.iterdir())
    ]
    for name, kinds in {
        "two_nccl_ranks": {"nccl": ("allreduce", "_allgather_base"), "devices": 1},
        "two_gloo_ranks": {"gloo": ("allreduce", "broadcast"), "devices": 0},
    }.items():
        with TemporaryDirectory() as folder:
            for rank in (0, 1):
                features = Features(seed=3, rank=rank, world_size=2, operators=2, depth=2, **kinds)
                generate(features).write(Path(folder))
            runs.append((name, {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}))
    for folder in sorted(path for path in CAPTURES.iterdir() if path.is_dir()):
        for name in ("tiny_1gpu", "tiny_2gpu"):
            files = sorted(folder.glob(f"{name}*.gz"))
            run = {path.stem: gzip.decompress(path.read_bytes()) for path in files}
            manifest = folder / f"{name}_manifest.json"
            run |= {manifest.name: manifest.read_bytes()} if manifest.exists() else {}
            runs.append((f"{folder.name}/{name}", run))
    return runs


def choose(random) -> tuple[str, Run]:
    """One run; a real capture in one case of twenty."""
    runs = bases()
    real = [run for run in runs if "/" in run[0]]
    made = [run for run in runs if "/" not in run[0]]
    return random.choice(real if random.random() < 0.05 else made)
