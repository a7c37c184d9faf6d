"""``python -m fasop profile``: layer costs of a model, measured here, taken from .et traces, or learned from
the steps of measured runs.

python -m fasop profile --model gpt2-xl --tp 1 2 4 --mbs 1 2 --gpu-name H100 --output costs.json
python -m fasop profile --models-file quick.yaml --model gpt2-quick --mbs 2 \\
    --from-et outputs/gpt2_1gpu_quick_trace.0.et --output costs.json
python -m fasop profile --from-runs layouts.yaml --output costs.json

Runs are layouts with the seconds of their steps (``measured``), or a table as of ``evaluate --rows``.
A traced model is given as it was traced; quick.yaml for ``./run_gpt2_quick.sh`` without a GPU:

models:
  gpt2-quick: {hidden: 768, seq: 128, layers: 12, vocab: 50257, heads: 12, global_batch: 2}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chakra_et import cli, files
from fasop.errors import PlanError
from fasop.exact.training_runs import Run, usable
from fasop.inputs.costs import write_costs
from fasop.inputs.models import find_model
from fasop.plans.layout import Layout, read_layouts
from fasop.profiling.from_traces import from_traces
from fasop.profiling.measure import Runs, measured


@dataclass
class Config:
    model: str = cli.option("a preset, or a name in --models-file", "")
    models_file: str = cli.option("YAML file of models", "")
    tp: tuple[int, ...] = cli.option("tensor-parallel degrees", (1,), least=1)
    mbs: tuple[int, ...] = cli.option("micro-batches, sequences", (1,), least=1)
    device: Literal["", "cuda", "cpu"] = cli.option("default: cuda where there is one", "")
    gpu_name: str = cli.option("the GPU's name in cluster files (default: PyTorch's name of it)", "")
    precision: Literal["", "float16", "bfloat16", "float32"] = cli.option("default: float16 on a GPU", "")
    warmup: int = cli.option("runs before the measured ones", 3, least=0)
    repeat: int = cli.option("measured runs, whose median counts", 10, least=1)
    from_et: tuple[str, ...] = cli.option("take the costs from these .et files, ranks of one run", ())
    from_runs: str = cli.option("learn the costs from measured steps: layouts as YAML, or a CSV of runs", "")
    output: str = cli.option("cost file to write", "costs.json")

    def __post_init__(self) -> None:
        if self.from_et and (len(self.tp) > 1 or len(self.mbs) > 1):
            raise ValueError("--from-et takes one --tp and one --mbs: those of the traced run")
        if bool(self.model) == bool(self.from_runs):
            raise ValueError("give either --model, or --from-runs with runs that name theirs")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(Config, argv, description="Measure layer costs.")
    # Before minutes of measuring: whether the file can be written.
    if Path(config.output).is_dir():
        raise PlanError(f"--output {config.output}: it is a folder: give a file.")
    with files.scratch_folder(Path(config.output)):
        pass
    if config.from_runs:
        return _learned(config)
    model = find_model(config.model, config.models_file)
    if config.from_et:
        paths = [Path(name) for name in config.from_et]
        costs, notes = from_traces(model, paths, config.gpu_name, config.tp[0], config.mbs[0])
    else:
        import torch

        device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = config.precision or ("float16" if device == "cuda" else "float32")
        runs = Runs(device, dtype, config.warmup, config.repeat)
        costs, notes = measured(model, config.tp, config.mbs, runs, config.gpu_name), ()
    write_costs(config.output, costs)
    for entry in costs.entries:
        total = sum(entry.forward) + sum(entry.backward or ())
        alone = f", {sum(map(sum, entry.kernels)):.6f} s in a CUDA graph" if entry.kernels else ""
        took = f"{total:.6f} s per micro-batch{alone}"
        print(f"{entry.model} on {entry.gpu}, tp {entry.tp}, mbs {entry.mbs}: {took}")
    print("\n".join(f"note: {note}" for note in notes), end="\n" if notes else "")
    print(f"costs: {config.output}")
    return 0


def _learned(config: Config) -> int:
    """Write costs learned from runs, and say how well they explain these."""
    from fasop.profiling.from_runs import from_runs

    path, models = config.from_runs, config.models_file
    costs, lines = from_runs(usable(path, models) if path.endswith(".csv") else _layouts(path, models), path)
    write_costs(config.output, costs)
    print("\n".join([*lines, f"costs: {config.output}"]))
    return 0


def _layouts(path: str, models: str) -> list[tuple[Run, Layout]]:
    runs = []
    for each in read_layouts(path, [], models):
        if isinstance(each, PlanError):
            raise each
        if not each.measured:
            raise PlanError(f"{path}: layout {each.name} has no 'measured': give the seconds of its step.")
        runs.append((Run(each.name, "", each.layout, each.options, each.measured, (), {}), each.layout))
    return runs
