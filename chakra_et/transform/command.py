"""``chakra-et scale outputs/NAME --dp 64 -o outputs/NAME-64``: a set of more or fewer data-parallel ranks, or
of a model with other layers, batch or sequence.

Each new rank is a copy of a captured one with the measured spread of compute times; groups, peers and sizes
of collectives are those of its place. Exit status: 0; 2 for arguments or files that can't be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chakra_et.cli import allow_missing_ranks, parse
from chakra_et.cost.network_fit import read_model
from chakra_et.job.sets import read_set
from chakra_et.names import run_at
from chakra_et.transform.remodel import ModelSize
from chakra_et.transform.scale import captured, write_scaled
from chakra_et.transform.scaled_ranks import Scaling


@dataclass
class ScaleConfig:
    """The command's arguments."""

    name: str = field(metadata={"positional": True, "help": "the captured set: outputs/NAME"})
    dp: int | None = field(
        default=None, metadata={"short": "--ranks", "help": "data-parallel ranks of the new set"}
    )
    layers: str = field(
        default="", metadata={"help": "repeated blocks of the new model: a number, or a factor as 2x"}
    )
    batch: str = field(default="", metadata={"help": "sequences of a rank in one pass: a number, or 2x"})
    seq: str = field(default="", metadata={"help": "tokens of a sequence: a number, or 2x"})
    output: str = field(
        default="", metadata={"short": "-o", "help": "the new set (as NAME-dp64 beside the captured one)"}
    )
    tp: int | None = field(default=None, metadata={"help": "tensor-parallel ranks: as captured"})
    pp: int | None = field(default=None, metadata={"help": "pipeline stages: as captured"})
    topology: str = field(
        default="",
        metadata={"help": "network whose times communication gets; default: as captured"},
    )
    network: str = field(
        default="",
        metadata={"help": "file of chakra-et measure-network, in place of a fit to the capture"},
    )
    mesh: str = field(
        default="", metadata={"help": "the captured mesh (tp2,dp4,pp2), where the groups don't show it"}
    )
    seed: int = field(default=0, metadata={"help": "of the spread of compute times"})
    spread: float | None = field(
        default=None,
        metadata={"help": "relative spread of compute times per step, 0 for none; default: as measured"},
    )
    variants: int = field(
        default=8, metadata={"help": "different draws per captured rank; ranks that are alike share a file"}
    )
    allow_missing_ranks: bool = allow_missing_ranks()

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "variants"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be 1 or more, not {value}")
        asked = (self.dp, self.tp, self.pp, self.layers, self.batch, self.seq)
        if not any(asked):
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
    found = read_set(config.name, config.allow_missing_ranks)
    run = run_at(config.output or str(found.run.folder / f"{found.name}{config.changes}"))
    wanted = Scaling(
        config.dp,
        config.topology,
        config.mesh,
        config.seed,
        config.spread,
        config.variants,
        config.tp,
        config.pp,
        ModelSize(config.layers, config.batch, config.seq),
        read_model(config.network) if config.network else None,
    )
    scaled = write_scaled(found, captured(found), wanted, run)
    for note in scaled.notes:
        print(f"note: {note}")
    prefix = run.folder / run.name
    print(
        f"{prefix}.0.et … {prefix}.{scaled.new.ranks - 1}.et: {scaled.files} different files, the rest hard "
        "links"
    )
    return 0
