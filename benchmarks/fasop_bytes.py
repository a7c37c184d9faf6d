#!/usr/bin/env python3
"""Whether a change of the code changes an output of the planner: digests of everything that it writes.

    python benchmarks/fasop_bytes.py --save before.json         on the old commit
    python benchmarks/fasop_bytes.py --compare before.json      on the new one

Plans every preset with both cost models (text, JSON, and CSV with every row), then simulates and exports
plans of three of them: pictures, .et files and communication groups of both schedules, launch settings.
The exit status is 1 where an output differs, is missing or is new.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import fasop_benchmark
from benchmarks.digests import Config, saved_or_compared
from chakra_et import cli

PRESETS = [
    *fasop_benchmark.PRESETS,
    ("gpt2-345m", "seed-345m"),
    ("gpt2-xl", "seed-1.5b"),
]
GRID = ("gpt2-xl", "paper-pareto", "--objective", "pareto")
# Launch settings exist for GPT-2 only.
SIMULATED = [("bert-large", "paper-bert-het"), ("gpt2-xl", "paper-gpt2xl-het"), ("t5", "paper-t5-het")]


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    return saved_or_compared(config, digests())


def digests() -> dict[str, str]:
    """Output → SHA-256 of its bytes."""
    found: dict[str, str] = {}

    def note(name: str, data: bytes) -> None:
        found[name] = hashlib.sha256(data).hexdigest()

    for cost_model in ("exact", "hpdc24"):
        for model, cluster, *flags in [*PRESETS, GRID]:
            wanted = ["plan", "--model", model, "--cluster", cluster, *flags, "--cost-model", cost_model]
            # A search that its time ends, as on a busy machine, gives what it has by then.
            wanted += ["--time-limit", "0"] if cost_model == "exact" else []
            name = f"{cost_model}/{model}-{cluster}"
            note(f"{name}.txt", fasop(*wanted))
            note(f"{name}.json", fasop(*wanted, "--json"))
            if cluster != "paper-pareto" or cost_model == "hpdc24":
                note(f"{name}.csv", fasop(*wanted, "--all", "--csv", "-"))
    with tempfile.TemporaryDirectory() as scratch:
        for model, cluster in SIMULATED:
            plans = Path(scratch) / "plans.json"
            for schedule in ("1f1b", "interleaved"):
                more = ["--interleave"] if schedule == "interleaved" else []
                plans.write_bytes(fasop("plan", "--model", model, "--cluster", cluster, *more, "--json"))
                folder = Path(scratch) / cluster / schedule
                folder.mkdir(parents=True)
                ask = ["simulate", str(plans), "--output", str(folder), "--et"]
                note(f"{cluster}/{schedule}.txt", fasop(*ask, "--picture", str(folder / "plan.html")))
                for path in sorted(folder.iterdir()):
                    note(f"{cluster}/{schedule}/{path.name}", path.read_bytes())
            if model == "gpt2-xl":
                note(f"{cluster}/_00_conf.sh", fasop("export", str(plans)))
    return found


def fasop(*arguments: str) -> bytes:
    """What a command printed, its scratch folder's name left out; a refusal counts as its sentence."""
    command = [sys.executable, "-m", "fasop", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    text = done.stdout if done.returncode == 0 else done.stderr
    return text.replace(tempfile.gettempdir().encode(), b"").split(b"picture: ")[0]


if __name__ == "__main__":
    sys.exit(main())
