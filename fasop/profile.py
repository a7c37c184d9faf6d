"""``python -m fasop profile``: layer costs of a model, measured here or taken from .et traces.

python -m fasop profile --model gpt2-xl --tp 1 2 4 --mbs 1 2 --gpu-name H100 --output costs.json
python -m fasop profile --model gpt2-345m --from-et outputs/gpt2_1gpu_quick_trace.0.et --output costs.json

Measured are an embedding, one transformer layer (its share of a tensor-parallel rank: heads and feed-forward
width divided by tp, without the all-reduces) and the head with its loss, forward and backward apart, as the
median of ``--repeat`` runs after ``--warmup``.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from chakra_et import cli
from fasop.costs import FORMAT, CostFile, Entry, write_costs
from fasop.errors import PlanError
from fasop.models import Model, find_model

COMPUTE = ("operator", "runtime")
DEVICE = ("kernel", "memcpy", "memset")
BACKWARD_FUNCTION = 1  # RecordScope of autograd's nodes


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
    from_et: tuple[str, ...] = field(default=(), metadata={"help": ".et files of ranks of one run instead"})
    output: str = field(default="costs.json", metadata={"help": "cost file to write"})

    def __post_init__(self) -> None:
        if min(*self.tp, *self.mbs, self.repeat) < 1 or self.warmup < 0:
            raise ValueError("--tp, --mbs and --repeat must be at least 1, --warmup 0")
        if self.precision not in ("", "float16", "bfloat16", "float32"):
            raise ValueError(f"--precision {self.precision}: choose float16, bfloat16 or float32")
        if self.device not in ("", "cuda", "cpu"):
            raise ValueError(f"--device {self.device}: choose cuda or cpu")


class Units(NamedTuple):
    """Seconds of an embedding, a layer and a head."""

    embedding: float
    layer: float
    head: float


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(Config, argv, prog="python -m fasop profile", description="Measure layer costs.")
    model = find_model(config.model, config.models_file)
    if config.from_et:
        costs = from_traces(model, [Path(name) for name in config.from_et], config)
    else:
        costs = measured(model, config)
    write_costs(config.output, costs)
    for entry in costs.entries:
        total = sum(entry.forward) + sum(entry.backward or ())
        print(f"{entry.model} on {entry.gpu}, tp {entry.tp}, mbs {entry.mbs}: {total:.6f} s a micro-batch")
    print(f"costs: {config.output}")
    return 0


def measured(model: Model, config: Config) -> CostFile:
    """Costs of this machine. Raises ``PlanError`` where the model can't be split so."""
    import torch

    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise PlanError("--device cuda: PyTorch sees no GPU here; give --device cpu.")
    if model.encoder_layers is not None:
        raise PlanError(f"model {model.name}: only decoder-only and encoder-only models are measured.")
    for degree in config.tp:
        if model.heads % degree:
            fit = ", ".join(str(n) for n in range(1, model.heads + 1) if model.heads % n == 0)
            raise PlanError(f"--tp {degree}: {model.heads} heads can't be shared by so many; {fit} fit.")
    dtype = getattr(torch, config.precision or ("float16" if device == "cuda" else "float32"))
    name = config.gpu_name or (torch.cuda.get_device_name() if device == "cuda" else "CPU")
    entries = []
    for degree in config.tp:
        for size in config.mbs:
            forward, backward = _measure(model, degree, size, device, dtype, config)
            entries.append(
                Entry(model.name, name, degree, size, _spread(model, forward), _spread(model, backward))
            )
    source = f"Measured by fasop profile on {name} with torch {torch.__version__}, {dtype}."
    return CostFile(FORMAT, source, {model.name: model}, tuple(entries))


def _spread(model: Model, units: Units) -> tuple[float, ...]:
    seconds = {"E": units.embedding, "T": units.layer, "P": units.head}
    return tuple(seconds[unit] for unit in model.units)


def _measure(model: Model, tp: int, mbs: int, device: str, dtype, config: Config) -> tuple[Units, Units]:
    """(forward, backward) seconds of each unit."""
    import torch
    from torch import nn

    h, width = model.hidden, (model.d_kv or model.hidden // model.heads) * model.heads // tp
    factory = {"device": device, "dtype": dtype}

    class Layer(nn.Module):
        """One rank's share of a pre-norm transformer layer."""

        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(h, **factory), nn.LayerNorm(h, **factory)
            self.qkv, self.out = nn.Linear(h, 3 * width, **factory), nn.Linear(width, h, **factory)
            self.up, self.down = nn.Linear(h, 4 * h // tp, **factory), nn.Linear(4 * h // tp, h, **factory)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shape = (*x.shape[:2], model.heads // tp, -1)
            q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], width))
            return x + self.down(nn.functional.gelu(self.up(self.between(x)), approximate="tanh"))

    vocab = -(-model.vocab // tp)
    tokens = torch.randint(0, vocab, (mbs, model.seq), device=device)
    words, places = nn.Embedding(vocab, h, **factory), nn.Embedding(model.seq, h, **factory)
    norm, head = nn.LayerNorm(h, **factory), nn.Linear(h, vocab, bias=False, **factory)
    layer = Layer()
    x = torch.randn(mbs, model.seq, h, **factory, requires_grad=True)
    at = torch.arange(model.seq, device=device)
    runs: list[Callable[[], torch.Tensor]] = [
        lambda: words(tokens) + places(at),
        lambda: layer(x),
        lambda: nn.functional.cross_entropy(head(norm(x)).float().view(-1, vocab), tokens.view(-1)),
    ]
    times = [_median(run, device, config) for run in runs]
    return Units(*(forward for forward, _ in times)), Units(*(backward for _, backward in times))


def _median(run: Callable, device: str, config: Config) -> tuple[float, float]:
    """Median seconds of a forward and of its backward pass."""
    import torch

    def settled() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    forward, backward = [], []
    for number in range(config.warmup + config.repeat):
        began = settled()
        output = run()
        ended = settled()
        output.backward(torch.ones_like(output))
        done = settled()
        if number >= config.warmup:
            forward.append(ended - began)
            backward.append(done - ended)
    return statistics.median(forward), statistics.median(backward)


class Attributed(NamedTuple):
    """Seconds a step, the mean of all ranks: forward and backward of embeddings, layers and head; and what
    belongs to none of them (data loading, the optimizer, Python). ``total`` is the sum of all."""

    forward: Units
    backward: Units
    unattributed: float
    total: float


def attribute(model: Model, paths: Sequence[Path]) -> Attributed:
    """Divide the compute time of .et files of our converter among the units.

    Compute time is that of kernels where there are any, else that of operators; communication is left out.
    A node belongs to the backward pass if it begins between autograd's first node of the step and the
    optimizer; to the head if a shape of its operator has the vocabulary's size, to the embedding if it is
    named so, else to the layers. Fused or compiled graphs hide the operators and can't be divided so.
    Raises ``PlanError``.
    """
    from chakra_et.errors import TraceError
    from chakra_et.et import file as et_file

    sums = np.zeros((2, 3))
    unattributed = total = 0.0
    for path in paths:
        try:
            trace = et_file.read(path)
        except TraceError as error:
            raise PlanError(str(error)) from None
        if "kind" not in trace.attributes or trace.inputs is None:
            raise PlanError(f"{path}: not written by this project's converter: convert the traces again.")
        kinds = _texts(trace, "kind")
        names = np.array([trace.names[row] for row in range(len(trace))])
        start, length = trace.start_micros.astype(np.int64), trace.duration_micros.astype(np.int64)
        begins = np.sort(start[(kinds == "annotation") & np.char.startswith(names, "ProfilerStep#")])
        if not len(begins) or not start.any():
            raise PlanError(
                f"{path}: no ProfilerStep or no start times in it: convert without --no-timestamps."
            )
        on_device = np.isin(kinds, DEVICE)
        counts = on_device if on_device.any() else np.isin(kinds, COMPUTE)
        step = np.searchsorted(begins, start, side="right") - 1
        backward = np.zeros(len(trace), dtype=bool)
        other = step < 0
        autograd = trace.column("scope") == BACKWARD_FUNCTION
        optimizer = np.char.startswith(names, "Optimizer.step")
        never = np.iinfo(np.int64).max
        for number, begin in enumerate(begins):
            within = step == number
            first = start[within & autograd].min(initial=never)
            last = start[within & optimizer].min(initial=never)
            backward |= within & (start >= first) & (start < last)
            other |= within & ((start >= last) | (start < begin))
        unit = _unit(trace, names, model)
        seconds = length / 1e6 / len(begins) / len(paths)
        for phase in (0, 1):
            for kind in (0, 1, 2):
                chosen = counts & ~other & (backward == bool(phase)) & (unit == kind)
                sums[phase, kind] += seconds[chosen].sum()
        unattributed += seconds[counts & other].sum()
        total += seconds[counts].sum()
    return Attributed(Units(*sums[0].tolist()), Units(*sums[1].tolist()), float(unattributed), float(total))


def _texts(trace, name: str) -> np.ndarray:
    attribute = trace.attributes[name]
    values = np.full(len(trace), "", dtype=object)
    values[attribute.rows] = [attribute.values[at] for at in range(len(attribute.rows))]
    return values.astype(str)


def _unit(trace, names: np.ndarray, model: Model) -> np.ndarray:
    """0 embedding, 1 layer, 2 head for each node; stretches of one operator are alike."""
    vocabulary = re.compile(rb"(?<!\d)%d(?!\d)" % model.vocab)
    unit = np.ones(len(trace), dtype=np.int64)
    named = np.char.find(np.char.lower(names), "embedding") >= 0
    wide = np.zeros(len(trace), dtype=bool)
    wide[trace.inputs.rows] = [bool(vocabulary.search(shapes)) for shapes in trace.inputs.shapes]
    operator = trace.column("rf_id")
    unit[np.isin(operator, operator[wide & (operator > 0)]) | wide] = 2
    unit[named] = 0
    return unit


def from_traces(model: Model, paths: list[Path], config: Config) -> CostFile:
    """Costs as ``attribute`` divides them, for the first of --tp and --mbs."""
    found = attribute(model, paths)
    if not found.forward.layer or not found.backward.layer:
        raise PlanError(
            f"{paths[0]}: no forward and backward pass found in it: is it a training step's trace?"
        )
    print(
        f"{found.total:.6f} s a step: embedding {found.forward.embedding + found.backward.embedding:.6f}, "
        f"layers {found.forward.layer + found.backward.layer:.6f}, "
        f"head {found.forward.head + found.backward.head:.6f}, none of them {found.unattributed:.6f}",
        file=sys.stderr,
    )
    each = [units._replace(layer=units.layer / model.layers) for units in (found.forward, found.backward)]
    name = config.gpu_name or "traced"
    entry = Entry(model.name, name, config.tp[0], config.mbs[0], *(_spread(model, units) for units in each))
    source = (
        f"From {', '.join(path.name for path in paths)}, operators divided among embedding, layers and head."
    )
    return CostFile(FORMAT, source, {model.name: model}, (entry,))
