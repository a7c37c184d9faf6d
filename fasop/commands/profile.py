"""``python -m fasop profile``: layer costs of a model, measured here or taken from .et traces.

python -m fasop profile --model gpt2-xl --tp 1 2 4 --mbs 1 2 --gpu-name H100 --output costs.json
python -m fasop profile --models-file quick.yaml --model gpt2-quick --mbs 2 \\
    --from-et outputs/gpt2_1gpu_quick_trace.0.et --output costs.json

A traced model is given as it was traced; quick.yaml for ``./run_gpt2_quick.sh`` without a GPU:

models:
  gpt2-quick: {hidden: 768, seq: 128, layers: 12, vocab: 50257, heads: 12, global_batch: 2}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chakra_et import cli, files
from fasop.errors import PlanError
from fasop.inputs.costs import write_costs
from fasop.inputs.models import find_model
from fasop.profiling.from_traces import from_traces
from fasop.profiling.measure import Runs, measured


@dataclass
class Config:
    """What is measured, and where."""

    model: str = field(metadata={"help": "a preset, or a name in --models-file"})
    models_file: str = field(default="", metadata={"help": "YAML file of models"})
    tp: tuple[int, ...] = field(default=(1,), metadata={"help": "tensor-parallel degrees"})
    mbs: tuple[int, ...] = field(default=(1,), metadata={"help": "micro-batches, sequences"})
    device: str = field(default="", metadata={"help": "cuda or cpu (default: cuda where there is one)"})
    gpu_name: str = field(default="", metadata={"help": "its name in cluster files (default: its own)"})
    precision: str = field(default="", metadata={"help": "float16 (default on a GPU), bfloat16 or float32"})
    warmup: int = field(default=3, metadata={"help": "runs before the measured ones"})
    repeat: int = field(default=10, metadata={"help": "measured runs, whose median counts"})
    from_et: tuple[str, ...] = field(
        default=(), metadata={"help": "take the costs from these .et files, ranks of one run"}
    )
    output: str = field(default="costs.json", metadata={"help": "cost file to write"})

    def __post_init__(self) -> None:
        if min((*self.tp, *self.mbs, self.repeat)) < 1 or self.warmup < 0:
            raise ValueError("--tp, --mbs and --repeat must be at least 1, --warmup 0")
        if self.precision not in ("", "float16", "bfloat16", "float32"):
            raise ValueError(f"--precision {self.precision}: choose float16, bfloat16 or float32")
        if self.device not in ("", "cuda", "cpu"):
            raise ValueError(f"--device {self.device}: choose cuda or cpu")
        if not self.tp or not self.mbs:
            raise ValueError("--tp and --mbs need at least one number each")
        if self.from_et and (len(self.tp) > 1 or len(self.mbs) > 1):
            raise ValueError("--from-et takes one --tp and one --mbs: those of the traced run")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(Config, argv, prog="python -m fasop profile", description="Measure layer costs.")
    model = find_model(config.model, config.models_file)
    _check_output(Path(config.output))
    notes: tuple[str, ...] = ()
    if config.from_et:
        paths = [Path(name) for name in config.from_et]
        costs, notes = from_traces(model, paths, config.gpu_name, config.tp[0], config.mbs[0])
    else:
        costs = measured(model, config.tp, config.mbs, _runs(config), config.gpu_name)
    write_costs(config.output, costs)
    for entry in costs.entries:
        total = sum(entry.forward) + sum(entry.backward or ())
        print(f"{entry.model} on {entry.gpu}, tp {entry.tp}, mbs {entry.mbs}: {total:.6f} s per micro-batch")
    print("\n".join(f"note: {note}" for note in notes), end="\n" if notes else "")
    print(f"costs: {config.output}")
    return 0


def _check_output(path: Path) -> None:
    """Before minutes of measuring: raises ``PlanError`` where the file can't be written."""
    if path.is_dir():
        raise PlanError(f"--output {path}: it is a folder: give a file.")
    try:
        with files.temporary_file(path):
            pass
    except OSError as error:
        raise PlanError(f"--output {path}: can't be written: {error.strerror or error}.") from None


def _runs(config: Config) -> Runs:
    import torch

    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = config.precision or ("float16" if device == "cuda" else "float32")
    return Runs(device, dtype, config.warmup, config.repeat)
