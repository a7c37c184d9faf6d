"""Layer costs measured with PyTorch on this machine.

Measured are an embedding, one transformer layer (the share of one tensor-parallel rank: heads and
feed-forward width divided by tp, without the collectives) and the head with its loss, forward and backward
apart, and AdamW's step, each as the median of several runs.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasop.errors import PlanError
from fasop.inputs.costs import FORMAT, CostFile, Entry
from fasop.inputs.models import Model
from fasop.plans.options import Precision
from fasop.plans.shapes import divisors

if TYPE_CHECKING:
    import torch


class KindSeconds(NamedTuple):
    """Seconds of the embedding, one transformer layer and the head."""

    embedding: float
    layer: float
    head: float

    def of_model(self, model: Model) -> tuple[float, ...]:
        """Seconds of every unit of the model, as ``Model.units`` orders them."""
        seconds = {"E": self.embedding, "T": self.layer, "P": self.head}
        return tuple(seconds[unit] for unit in model.units)


@dataclass(frozen=True)
class Runs:
    """How each unit is run. device: cuda or cpu; dtype: name of a torch type; repeat: measured runs."""

    device: str
    dtype: str
    warmup: int = 3
    repeat: int = 10


def measured(
    model: Model, degrees: tuple[int, ...], micro_batches: tuple[int, ...], runs: Runs, gpu_name: str = ""
) -> CostFile:
    """Costs of this machine for each tensor-parallel degree and micro-batch.

    gpu_name: the GPU's name in cluster files ("": the one that PyTorch reports). Raises ``PlanError`` where
    the model can't be split by a degree.
    """
    import torch

    if runs.device == "cuda" and not torch.cuda.is_available():
        raise PlanError("--device cuda: PyTorch sees no GPU here; give --device cpu.")
    if model.encoder_layers is not None:
        raise PlanError(f"model {model.name}: only decoder-only and encoder-only models can be measured.")
    for degree in degrees:
        if model.heads % degree:
            fit = ", ".join(map(str, divisors(model.heads)))
            raise PlanError(f"--tp {degree}: {model.heads} heads can't be shared by so many; {fit} fit.")
    name = gpu_name or (torch.cuda.get_device_name() if runs.device == "cuda" else "CPU")
    entries = []
    for degree, size in itertools.product(degrees, micro_batches):
        passes = [units.of_model(model) for units in _measure(model, degree, size, runs)]
        entries.append(Entry(model.name, name, degree, size, *passes))
    source = f"Measured by fasop profile on {name} with torch {torch.__version__}, {runs.dtype}."
    precision: Precision = "fp32" if runs.dtype == "float32" else "mixed"
    # Attention is scaled_dot_product_attention: fused.
    return CostFile(
        FORMAT, source, {model.name: model}, tuple(entries), precision=precision, attention="flash"
    )


def _measure(model: Model, tp: int, mbs: int, runs: Runs) -> tuple[KindSeconds, KindSeconds, KindSeconds]:
    """Seconds of each kind of unit: forward, backward, and the optimizer's update once per step."""
    import torch
    from torch import nn

    h, width = model.hidden, (model.d_kv or model.hidden // model.heads) * model.heads // tp
    device, dtype = torch.device(runs.device), getattr(torch, runs.dtype)

    norm = functools.partial(nn.LayerNorm, h, device=device, dtype=dtype)
    linear = functools.partial(nn.Linear, device=device, dtype=dtype)

    class Layer(nn.Module):
        """One rank's share of a pre-norm transformer layer."""

        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = norm(), norm()
            self.qkv, self.out = linear(h, 3 * width), linear(width, h)
            self.up, self.down = linear(h, 4 * h // tp), linear(4 * h // tp, h)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shape = (*x.shape[:2], model.heads // tp, -1)
            q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], width))
            x = x + self.down(nn.functional.gelu(self.up(self.between(x)), approximate="tanh"))
            return x

    vocab = -(-model.vocab // tp)
    tokens = torch.randint(0, vocab, (mbs, model.seq), device=device)
    words = nn.Embedding(vocab, h, device=device, dtype=dtype)
    places = nn.Embedding(model.seq, h, device=device, dtype=dtype)
    layer, last_norm, head = Layer(), norm(), linear(h, vocab, bias=False)
    x = torch.randn(mbs, model.seq, h, device=device, dtype=dtype, requires_grad=True)
    at = torch.arange(model.seq, device=device)

    def loss() -> torch.Tensor:
        logits = head(last_norm(x)).float().view(-1, vocab)
        entropy: torch.Tensor = nn.functional.cross_entropy(logits, tokens.view(-1))
        return entropy

    times = [_median(run, runs) for run in (lambda: words(tokens) + places(at), lambda: layer(x), loss)]
    passes = KindSeconds(*(each[0] for each in times)), KindSeconds(*(each[1] for each in times))
    held = [sum(p.numel() for p in each.parameters()) for each in (words, places, layer, last_norm, head)]
    fixed, each = _update([p.shape for p in layer.parameters()], runs)
    of_head = held[3] + (0 if model.tied else held[4])
    return *passes, KindSeconds(fixed + each * sum(held[:2]), each * held[2], each * of_head)


def _update(shapes: list[torch.Size], runs: Runs) -> tuple[float, float]:
    """Seconds of AdamW's step in fp32: what no parameter takes, and each one (from one layer and three)."""
    import torch

    found = []
    for copies in (1, 3):
        weights = [torch.zeros(shape, device=runs.device, requires_grad=True) for shape in shapes * copies]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        adam = torch.optim.AdamW(weights)
        times = []
        for _ in range(runs.warmup + runs.repeat):
            begin = _now(runs)
            adam.step()
            times.append(_now(runs) - begin)
        found.append(statistics.median(times[runs.warmup :]))
    count = sum(shape.numel() for shape in shapes)
    each = max(found[1] - found[0], 0.0) / 2 / count
    return max(found[0] - each * count, 0.0), each


def _now(runs: Runs) -> float:
    import torch

    if runs.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _median(run: Callable[[], torch.Tensor], runs: Runs) -> tuple[float, float]:
    import torch

    times = []
    for _ in range(runs.warmup + runs.repeat):
        begin = _now(runs)
        output = run()
        middle = _now(runs)
        torch.autograd.backward(output, torch.ones_like(output))
        times.append((middle - begin, _now(runs) - middle))
    forward, backward = map(statistics.median, zip(*times[runs.warmup :], strict=True))
    return forward, backward


def fit_units(partitions: Sequence[Sequence[int]], times: Sequence[Sequence[float]]) -> KindSeconds:
    """Least squares of the relative errors, with no unit below 0.

    partitions: layers of each stage, of each run; times: seconds of its stages. Raises ``ValueError`` where
    no stage took any time.
    """
    matrix = np.array(
        [
            (float(stage == 0), float(count), float(stage == len(layers) - 1))
            for layers in partitions
            for stage, count in enumerate(layers)
        ]
    )
    seconds = np.array([value for of_run in times for value in of_run], dtype=float)
    # A stage without a measurable time has no relative error.
    known = seconds > 0
    if not known.any():
        raise ValueError("every stage took 0 seconds: nothing can be fitted")
    matrix, seconds = matrix[known], seconds[known]
    return KindSeconds(*_non_negative(matrix / seconds[:, None]).tolist())


def _non_negative(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x ≥ 0 for which |matrix · x − 1| is least, found by trying which of the three are 0."""
    best, least = np.zeros(matrix.shape[1]), np.inf
    columns = range(matrix.shape[1])
    for size in columns:
        for chosen in itertools.combinations(columns, size + 1):
            found = np.linalg.lstsq(matrix[:, chosen], np.ones(len(matrix)), rcond=None)[0]
            x = np.zeros(matrix.shape[1])
            x[list(chosen)] = found
            error = float(((matrix @ x - 1) ** 2).sum())
            if found.min() >= 0 and error < least - 1e-12:
                best, least = x, error
    return best
