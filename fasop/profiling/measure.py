"""Layer costs measured with PyTorch on this machine.

Measured are an embedding, transformer layers (the share of one tensor-parallel rank: heads and feed-forward
width divided by tp, without the collectives) and the head with its loss, forward and backward apart, and the
step of the optimizer: as they follow each other, where the host may be slower than the GPU, and their kernels
alone in a CUDA graph. In 16 bits gradients are summed in fp32, and weights have an fp32 copy, as in Megatron.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fasop.errors import PlanError
from fasop.inputs.costs import FORMAT, CostFile, Entry
from fasop.inputs.models import Model
from fasop.plans.options import Precision
from fasop.plans.shapes import divisors

if TYPE_CHECKING:
    import torch


LAYERS = 3
"""That run one after the other, each of which has to read its weights from memory."""


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
    if model.encoder_layers is not None or model.experts or model.kv_rank:
        which = "an encoder-decoder, or layers with experts or latent attention, can't be measured"
        raise PlanError(f"model {model.name}: {which}.")
    for degree in degrees:
        if model.heads % degree:
            fit = ", ".join(map(str, divisors(model.heads)))
            raise PlanError(f"--tp {degree}: {model.heads} heads can't be shared by so many; {fit} fit.")
    name = gpu_name or (torch.cuda.get_device_name() if runs.device == "cuda" else "CPU")
    entries = []
    for degree, size in itertools.product(degrees, micro_batches):
        found = _measure(model, degree, size, runs)
        forward, backward, update, *alone = (units.of_model(model) for units in found)
        kernels = (alone[0], alone[1]) if runs.device == "cuda" else None
        entries.append(Entry(model.name, name, degree, size, forward, backward, update, kernels=kernels))
    source = f"Measured by fasop profile on {name} with torch {torch.__version__}, {runs.dtype}."
    precision: Precision = "fp32" if runs.dtype == "float32" else "mixed"
    kept = {model.name: model}
    # Attention is scaled_dot_product_attention: fused.
    return CostFile(FORMAT, source, kept, tuple(entries), precision=precision, attention="flash")


def _measure(model: Model, tp: int, mbs: int, runs: Runs) -> list[KindSeconds]:
    """Seconds of each kind of unit: forward, backward, the optimizer's update once per step, and the kernels
    of forward and backward alone.
    """
    import torch
    from torch import nn

    h, size, ffn = model.hidden, model.head_width, model.ffn_width // tp
    heads, kv = model.heads // tp, max((model.kv_heads or model.heads) // tp, 1)
    device, dtype = torch.device(runs.device), getattr(torch, runs.dtype)

    norm = functools.partial(nn.LayerNorm, h, device=device, dtype=dtype)
    linear = functools.partial(nn.Linear, device=device, dtype=dtype)

    class Layer(nn.Module):
        """One rank's share of a pre-norm transformer layer."""

        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = norm(), norm()
            self.qkv, self.out = linear(h, (heads + 2 * kv) * size), linear(heads * size, h)
            self.up, self.down = linear(h, ffn * (2 if model.gated else 1)), linear(ffn, h)

        def forward(self, x: torch.Tensor) -> Any:
            each = self.qkv(self.before(x)).split((heads * size, kv * size, kv * size), -1)
            q, k, v = (of.unflatten(-1, (-1, size)).transpose(1, 2) for of in each)
            k, v = (each if kv == heads else each.repeat_interleave(heads // kv, 1) for each in (k, v))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=model.causal)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            up = self.up(self.between(x))
            if model.gated:
                up, gate = up.split(ffn, -1)
                return x + self.down(nn.functional.silu(gate) * up)
            return x + self.down(nn.functional.gelu(up, approximate="tanh"))

    vocab = -(-model.vocab // tp)
    tokens = torch.randint(0, vocab, (mbs, model.seq), device=device)
    words = nn.Embedding(vocab, h, device=device, dtype=dtype)
    places = nn.Embedding(model.seq, h, device=device, dtype=dtype)
    layer, last_norm, head = Layer(), norm(), linear(h, vocab, bias=False)
    layers = nn.Sequential(layer, *(Layer() for _ in range(LAYERS - 1)))
    x = torch.randn(mbs, model.seq, h, device=device, dtype=dtype, requires_grad=True)
    at = torch.arange(model.seq, device=device)

    def loss() -> torch.Tensor:
        logits = head(last_norm(x)).float().view(-1, vocab)
        return nn.functional.cross_entropy(logits, tokens.view(-1))

    if runs.dtype != "float32":
        for weight in nn.ModuleList((words, places, layers, last_norm, head)).parameters():
            main = torch.zeros_like(weight, dtype=torch.float)
            weight.register_post_accumulate_grad_hook(functools.partial(add_gradient, main))
    units: Sequence[Callable[[], Any]] = (lambda: words(tokens) + places(at), lambda: layers(x), loss)
    times = np.array([_passes(forward, x, runs) for forward in units])
    times[1] /= LAYERS
    (forward, backward), kernels = (
        [KindSeconds(*way) for way in each] for each in times.transpose(1, 2, 0).tolist()
    )
    held = [sum(p.numel() for p in each.parameters()) for each in (words, places, layer, last_norm, head)]
    counts = sum(held[:2]), held[2], held[3] + (0 if model.tied else held[4])
    each = _update([p.shape for p in layers.parameters()], runs) / (LAYERS * held[2])
    return [forward, backward, KindSeconds(*(each * count for count in counts)), *kernels]


def add_gradient(main: torch.Tensor, weight: torch.Tensor) -> None:
    """Add a weight's gradient to that in fp32."""
    assert weight.grad is not None
    main += weight.grad
    weight.grad = None


def _update(shapes: list[torch.Size], runs: Runs) -> float:
    """Seconds of the kernels of clipping, AdamW's step in fp32, 16-bit copies and empty gradients."""
    import torch

    from chakra_et.predict.measure_gpu import call_micros

    weights = [torch.zeros(shape, device=runs.device, requires_grad=True) for shape in shapes]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    adam = torch.optim.AdamW(weights, fused=True, capturable=runs.device == "cuda")
    main = [weight.detach() for weight in weights]
    narrow = [weight.to(getattr(torch, runs.dtype)) for weight in main]

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()
        if runs.dtype != "float32":
            torch._foreach_copy_(narrow, main)
        adam.zero_grad(set_to_none=False)

    return call_micros(step, runs.device, runs.repeat) / 1e6


def _passes(forward: Callable[[], Any], x: torch.Tensor, runs: Runs) -> np.ndarray:
    """Seconds of forward and backward as they follow each other, and of their kernels alone [2, pass]."""
    import torch

    from chakra_et.doctor.workload import step_ms
    from chakra_et.predict.measure_gpu import call_micros

    def both() -> None:
        output = forward()
        torch.autograd.backward(output, torch.ones_like(output))
        x.grad = None

    for _ in range(runs.warmup):
        both()
    pace = step_ms([both], runs.repeat, 3)[0] / 1e3
    first, whole = (call_micros(call, runs.device, runs.repeat) / 1e6 for call in (forward, both))
    kernels = np.array([first, max(whole - first, 0.1 * whole)])  # which a CPU may take longer for, at times
    return np.array([pace * kernels / kernels.sum(), kernels])


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
    matrix = matrix[known] / seconds[known, None]
    kept = np.ones(3, dtype=bool)
    while True:
        found = np.zeros(3)
        found[kept] = np.linalg.lstsq(matrix[:, kept], np.ones(len(matrix)), rcond=None)[0]
        if found.min() >= 0:
            return KindSeconds(*found.tolist())
        kept[found.argmin()] = False  # the others are fitted without it
