"""Damaged runs of .et files, each read by one of the commands in this process.

    python -m tests.fuzz.readers --inputs 500

Prints how many ended with which exit status; exits with 1 if one raised, or read changed files without
a word.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from chakra_et import cli
from chakra_et.__main__ import main as chakra_et
from tests.fuzz import mutations
from tests.generator import Features, generate

COMMANDS = (
    "replay RUN", "predict RUN --scale mm=2", "report RUN", "validate RUN", "stragglers RUN",
    "export RUN --format csv", "scale RUN --dp 4 -o OUT/s", "astra RUN -o OUT/b --topology dgx-h100",
    "compare RUN BASE",
)  # fmt: skip


@dataclass
class ReadersConfig:
    """The arguments."""

    inputs: int = field(default=500, metadata={"help": "how many runs are damaged"})
    seed: int = field(default=0, metadata={"help": "number of the first"})


def quietly(words: list[str]) -> tuple[object, str]:
    """(exit status or traceback, what was printed) of one command."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            return chakra_et(words), printed.getvalue()
        except SystemExit as stop:
            return stop.code, printed.getvalue()
        except Exception:
            return traceback.format_exc(limit=-4), printed.getvalue()


def judge(random: Random, base: Path, work: Path) -> tuple[object, str]:
    """(exit status, what is wrong, "" for nothing) of one command on a run with one damaged file."""
    run = Path(shutil.copytree(base, work / "run")) / "run"
    name = random.choice(("run.0.et", "run.1.et", "run_comm_groups.json"))
    before = (run.parent / name).read_bytes()
    after = random.choice(mutations.BYTES)(random, before) if name.endswith("json") else _cut(random, before)
    (run.parent / name).write_bytes(after)
    allow = ["--allow-missing-ranks"] * (random.random() < 0.7)
    place = {"RUN": str(run), "OUT": str(work), "BASE": str(base / "run")}
    words = random.choice(COMMANDS).split()
    for key, value in place.items():
        words = [word.replace(key, value) for word in words]
    status, said = quietly(words + allow)
    silent = status == 0 and after != before and "isn't the file that the conversion wrote" not in said
    wrong = str(status) if status not in (0, 1, 2) else "changed files, and nobody said so" if silent else ""
    return status, f"{words[0]}, {name}: {wrong}" if wrong else ""


def _cut(random: Random, text: bytes) -> bytes:
    changes = (mutations.cut_end, mutations.cut_out, mutations.repeat, mutations.flip, mutations.zero_block)
    return random.choice(changes)(random, text)


def main() -> int:
    config = cli.parse(ReadersConfig, description="Damaged runs of .et files, read by each command.")
    outcomes: Counter[str] = Counter()
    wrongs = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        base.mkdir()
        for rank in (0, 1):
            nccl = ("allreduce", "_allgather_base")
            features = Features(seed=3, rank=rank, world_size=2, operators=2, depth=2, nccl=nccl, devices=1)
            generate(features).write(base)
        quietly(["convert", str(base)])
        for number in range(config.seed, config.seed + config.inputs):
            with tempfile.TemporaryDirectory(dir=folder) as work:
                status, wrong = judge(Random(number), base, Path(work))
            outcomes[f"exit status {status}" if status in (0, 1, 2) else "raised"] += 1
            wrongs += [f"{number}: {wrong}"] if wrong else []
    print("\n".join([*wrongs, *(f"{count:6} {outcome}" for outcome, count in sorted(outcomes.items()))]))
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main())
