"""``chakra-et scale outputs/NAME --dp 64 -o outputs/NAME-64``: a set of more or fewer data-parallel ranks, or
of a model with other layers, batch or sequence.

Each new rank is a copy of a captured one with the measured spread of compute times; groups, peers and sizes
of collectives are those of its place. Exit status: 0; 2 for arguments or files that can't be used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chakra_et.cli import allow_missing_ranks, parse
from chakra_et.cost.network_fit import read_model
from chakra_et.job.sets import read_set
from chakra_et.names import run_at
from chakra_et.transform.missing_ranks import filled
from chakra_et.transform.scale import Scaling
from chakra_et.transform.scaled_files import write_scaled


def _option(help: str, default: Any = "", **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class ScaleConfig:
    """The command's arguments."""

    name: str = field(metadata={"help": "the captured set: outputs/NAME", "positional": True})
    dp: int | None = _option("data-parallel ranks of the new set", None, short="--ranks")
    layers: str = _option("repeated blocks of the new model: a number, or a factor as 2x")
    batch: str = _option("sequences of a rank in one pass: a number, or 2x")
    seq: str = _option("tokens of a sequence: a number, or 2x")
    output: str = _option("the new set (as NAME-dp64 beside the captured one)", short="-o")
    tp: int | None = _option("tensor-parallel ranks: as captured", None)
    pp: int | None = _option("pipeline stages: as captured", None)
    topology: str = _option("network whose times communication gets; default: as captured")
    network: str = _option("file of chakra-et measure-network, in place of a fit to the capture")
    mesh: str = _option("the captured mesh (tp2,dp4,pp2), where the groups don't show it")
    seed: int = _option("of the spread of compute times", 0)
    spread: float | None = _option(
        "relative spread of compute times per step, 0 for none; default: as measured", None
    )
    variants: int = _option("different draws per captured rank; ranks that are alike share a file", 8)
    fill: bool = _option("make missing ranks from their like (same stage) first", False)
    allow_missing_ranks: bool = allow_missing_ranks()

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "variants"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be 1 or more, not {value}")
        if not self.changes:
            raise ValueError("give what is to change: --dp, --tp, --pp, --layers, --batch or --seq")
        if self.spread is not None and not 0 <= self.spread <= 1:
            raise ValueError(f"--spread must be from 0 to 1, not {self.spread}")

    @property
    def changes(self) -> str:
        """What is appended to the name: ``-dp64-layers2x``."""
        given = {name: getattr(self, name) for name in ("dp", "tp", "pp", "layers", "batch", "seq")}
        return "".join(f"-{name}{value}" for name, value in given.items() if value)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    config = parse(ScaleConfig, argv, description=__doc__)
    found = read_set(config.name, config.allow_missing_ranks or config.fill)
    run = run_at(config.output or str(found.run.folder / f"{found.name}{config.changes}"))
    known = {name: getattr(config, name) for name in Scaling.__dataclass_fields__ if hasattr(config, name)}
    known["network"] = read_model(config.network) if config.network else None
    with tempfile.TemporaryDirectory() as scratch:
        if config.fill and found.missing:
            found, made = filled(found, Path(scratch), config.mesh, config.seed)
            found = replace(found, notes=[*found.notes, made])
        scaling = Scaling(**known)
        ranks, files = write_scaled(found, scaling, run, lambda note: print(f"note: {note}", flush=True))
    prefix = run.folder / run.name
    print(f"{prefix}.0.et … {prefix}.{ranks - 1}.et: {files} different files, the rest hard links")
    return 0
