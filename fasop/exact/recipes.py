"""What a training run takes on GPUs of one type, as the recipes of today's frameworks set it up.

FP8 and its kinds, context parallelism, sharded parameters, experts, CUDA graphs and recomputed modules: the
time of a rank's step is put together from its parts, each times a constant of the software that runs it. The
constants (``data/recipes.json``) were fitted to published runs by ``benchmarks/planner_accuracy.py``, which
also states the error on models that a fit never saw.

    found = step(Recipe(model, "H100", gpus=64, mbs=1, tp=4, pp=8, precision="fp8"))
    found.seconds, found.parts["attention"], found.guessed
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from chakra_et.cost import gpus, networks
from chakra_et.cost.kernel_times import kernel_times
from fasop.errors import PlanError
from fasop.exact.computed_times import SETS, UPDATE_BYTES
from fasop.exact.kernels import Kernel, Matmul, Moved, latent_products, unit_work
from fasop.exact.memory import parameters
from fasop.inputs.models import Model
from fasop.plans.options import Attention

Precision = Literal["fp32", "bf16", "fp8", "fp8 rows", "mxfp8", "nvfp4"]
Software = Literal["megatron", "mlperf", "torchtitan", "mpt", "eager"]
Passes = Literal["step", "forward and backward", "backward"]
Again = Literal["all", "operators", "experts", "latent", "elementwise"]

FILE = Path(__file__).parents[1] / "data" / "recipes.json"
KERNELS = ("products", "products8", "experts", "attention", "windows", "memory", "casts", "head")
# What a constant is before any run was seen, and the standard deviation of its logarithm. Hosts: seconds per
# layer, forward and backward.
PRIORS = {
    **{"products": (1.0, 0.15), "products8": (1.0, 0.2), "experts": (1.0, 0.25), "attention": (1.0, 0.4)},
    **{"memory": (1.0, 0.5), "casts": (1.0, 0.25), "head": (1.0, 0.1), "host": (2e-3, 0.5)},
    **{"tensor": (1.0, 0.3), "tokens": (1.0, 0.5), "shards": (1.0, 0.5), "reduction": (0.3, 0.5)},
    **{"optimizer": (1.0, 0.3), "expert host": (6e-3, 0.3), "windows": (1.0, 1.0)},
}
_SHARP = 4  # how sharply the slower of two things that run at once decides
_HOP = 1e-5  # seconds of a collective among a few GPUs that no byte takes
_NEAR_NODES = 4  # to which a token goes at most, where experts are chosen by groups (DeepSeek-V3, 2024)
_CAST_BYTES = 4  # per number of an operand: read in 16 bits, written in 8, along both sides


@dataclass(frozen=True)
class Recipe:
    """mbs: sequences of a micro-batch; shards: GPUs among which parameters are spread (0: each holds all);
    gathers: times that these are gathered per micro-batch; adapters: only LoRA's are trained; again: what the
    backward pass computes again; graph: the whole step is one CUDA graph; overlaps: what communication runs
    beside computation that otherwise wouldn't (tensor, tokens); mtp: modules that predict further tokens;
    passes: what is timed; fused_attention: no scores are stored;
    fast_dispatch: tokens go to experts by kernels made for it (DeepEP, HybridEP).
    """

    model: Model
    gpu: str
    gpus: int
    mbs: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    virtual_stages: int = 1
    ep: int = 1
    shards: int = 0
    gathers: int = 2
    precision: Precision = "bf16"
    software: Software = "megatron"
    adapters: bool = False
    again: frozenset[Again] = frozenset()
    graph: bool = False
    overlaps: frozenset[str] = frozenset()
    fast_dispatch: bool = False
    mtp: int = 0
    passes: Passes = "step"
    fused_attention: bool = True

    def __post_init__(self) -> None:
        sets = self.tp * self.pp * self.cp
        if self.gpus % sets:
            raise PlanError(f"{self.gpus} GPUs are no multiple of tp × pp × cp = {sets}.")
        if self.model.global_batch % (self.dp * self.mbs):
            raise PlanError(
                f"a batch of {self.model.global_batch} can't be split among {self.dp} replicas with "
                f"micro-batches of {self.mbs}."
            )
        if self.model.experts % self.ep or self.gpus // self.pp % self.ep:
            experts, stage = self.model.experts, self.gpus // self.pp
            raise PlanError(f"ep {self.ep} doesn't divide {experts} experts and {stage} GPUs of a stage.")

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def micro_batches(self) -> int:
        return self.model.global_batch // (self.dp * self.mbs)


class Step(NamedTuple):
    """seconds of a step; parts: of them, by name, before what overlaps is taken off; guessed: constants that
    no published run has set.
    """

    seconds: float
    parts: dict[str, float]
    guessed: tuple[str, ...]


def step(recipe: Recipe) -> Step:
    """What a step takes by the published constants. Raises ``PlanError`` for a GPU that isn't known."""
    found, names, known = parts(recipe), constants_of(recipe), published()
    values = {name: known.get(name, PRIORS[part][0]) for part, name in names.items()}
    seconds = total({part: np.array([each]) for part, each in found.items()}, names_of([names]), values)
    used = {part: each * values[names[part]] for part, each in found.items() if each}
    guessed = tuple(names[part] for part in used if names[part] not in known)
    return Step(float(seconds[0]), used, guessed)


@functools.cache
def published() -> Mapping[str, float]:
    """The fitted constants."""
    loaded: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))["constants"]
    return loaded


def constants_of(recipe: Recipe) -> dict[str, str]:
    """For each part the name of its constant: few, shared by all runs that should be alike."""
    gpu = gpus.gpu(recipe.gpu)
    number, eager = recipe.precision, recipe.software == "mpt"
    family = "AMD" if gpu.vendor == "amd" else "before FP8" if "8 bit" not in gpu.peaks else "Hopper"
    if gpu.peaks.get("8 bit", 0) > 4e15:
        family = "Blackwell"
    number_of = ", fp32" * (number == "fp32")
    software = (
        recipe.software
        if recipe.software in ("mpt", "eager")
        else "compiled"
        if recipe.software == "torchtitan"
        else "fused"
    )
    kind = {"fp8 rows": ", by rows", "mxfp8": ", by blocks", "nvfp4": ", 4 bit"}.get(number, "")
    of_experts = "16 bit" if number in ("bf16", "fp32") else "8 bit"
    dispatch = "fast" if recipe.fast_dispatch else "plain"
    named = {
        "products": f"{family}{', mpt' * eager}{number_of}",
        "products8": f"{family}{kind}{', mpt' * eager}",
        "experts": of_experts,
        "attention": f"{family}{', mpt' * eager}",
        "memory": software,
        "tensor": "overlapped" if "tensor" in recipe.overlaps else software,
        "tokens": "overlapped" if "tokens" in recipe.overlaps else "exposed",
        "shards": software,
        "host": recipe.software,
        "expert host": dispatch,
    }
    return {part: f"{part}: {named[part]}" if part in named else part for part in PRIORS}


def names_of(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    """The constants of each row, by part."""
    return {part: [row[part] for row in rows] for part in PRIORS}


def total(
    found: Mapping[str, np.ndarray], names: Mapping[str, list[str]], values: Mapping[str, float]
) -> np.ndarray:
    """Seconds of steps [row] from their parts [row]: host and kernels run at once, and so do computation and
    sharded parameters; the rest comes after one another.
    """
    of = {part: found[part] * np.array([values[name] for name in names[part]]) for part in PRIORS}
    kernels = sum(of[part] for part in KERNELS)
    busy = _slower(kernels, of["host"] + of["expert host"]) + of["tensor"] + of["tokens"]
    seconds: np.ndarray = _slower(busy, of["shards"]) + of["reduction"] + of["optimizer"]
    return seconds


def _slower(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    bound: np.ndarray = (one**_SHARP + two**_SHARP) ** (1 / _SHARP)
    return bound


def parts(recipe: Recipe) -> dict[str, float]:
    """Seconds per step of each part on the busiest rank, by the models of kernels and links alone."""
    gpu, model = gpus.gpu(recipe.gpu), recipe.model
    tp, again, narrow = recipe.tp, recipe.again, recipe.precision not in ("bf16", "fp32")
    sixteen = "float" if recipe.precision == "fp32" else "16 bit"
    width = 4 if recipe.precision == "fp32" else 2
    layers, heads = model.layers + recipe.mtp, 1 + recipe.mtp
    of_rank = replace(model, seq=model.seq // recipe.cp)
    scores: Attention = "flash" if recipe.fused_attention else "unfused"
    layer = unit_work(of_rank, "T", tp, recipe.mbs, scores, tp > 1, recipe.ep)
    head = unit_work(of_rank, "P", tp, recipe.mbs, scores, tp > 1)
    ahead = float(recipe.passes != "backward")
    tokens = recipe.mbs * of_rank.seq

    def products(kernels: Sequence[Kernel], number: str, experts: bool) -> float:
        chosen = [k for k in kernels if isinstance(k, Matmul) and k.experts == experts]
        if recipe.adapters:
            chosen = [k for k in chosen if not k.gradient]
        points = [(k.copies, k.m, k.n, k.k, SETS) for k in chosen]
        return float(kernel_times(gpu).micros(number, points).sum()) / 1e6 if points else 0.0

    repeated = 1.0 if "all" in again else 0.5 if "operators" in again else 0.0
    number = "8 bit alone" if narrow else sixteen
    dense = products(layer.forward, number, False) * (ahead + repeated)
    dense += products(layer.backward, number, False)
    if "latent" in again:
        dense += products(latent_products(model, tp, tokens)[1:3], number, False)
    more = max(repeated, float("experts" in again))
    routed = products(layer.forward, number, True) * (ahead + more) + products(layer.backward, number, True)
    once_more = 1.0 if repeated else 0.5 if "elementwise" in again else 0.0
    moved = _numbers(layer.forward) * (ahead + once_more) + _numbers(layer.backward)
    at_head = _numbers(head.forward) * ahead + _numbers(head.backward)
    operands = [k for k in (*layer.forward, *layer.backward) if isinstance(k, Matmul)]
    cast = sum(k.copies * k.m * k.k for k in operands) * narrow * _CAST_BYTES

    none = networks.LinkedGpu(recipe.gpu, "", math.inf, 0, gpu.memory, 0, "")
    link = networks.gpu(recipe.gpu) if recipe.gpus > 1 else none
    layer_bytes = tokens * model.hidden * width
    summed = (2 * layer_bytes * (tp - 1) / tp / link.bandwidth + 4 * _HOP) * (4.5 + 2 * ("all" in again))
    attention = _attention(recipe) * layers if recipe.fused_attention else 0.0
    of = {
        "products": 0.0 if narrow else dense * layers,
        "products8": dense * layers if narrow else 0.0,
        "experts": routed * layers,
        "attention": 0.0 if model.window else attention,
        "windows": attention if model.window else 0.0,
        "memory": (moved * layers + at_head * heads) * width / gpu.memory,
        "casts": cast * layers / gpu.memory,
        "head": (products(head.forward, sixteen, False) * ahead + products(head.backward, sixteen, False))
        * heads,
        "tensor": summed * layers if tp > 1 else 0.0,
        "tokens": _exchange(recipe, layer_bytes, link) * layers,
        "host": float(layers) if not model.experts and not recipe.graph else 0.0,
        "expert host": float(layers) if model.experts and not recipe.graph else 0.0,
    }
    # Ranks of a pipeline idle while it fills; stages are taken to be balanced.
    passes = (recipe.micro_batches + (recipe.pp - 1) / recipe.virtual_stages) / recipe.pp
    of = {part: each * passes for part, each in of.items()}
    return of | _once(recipe, gpu.memory, link)


def _numbers(kernels: Sequence[Kernel]) -> float:
    return sum(k.numbers for k in kernels if isinstance(k, Moved))


def _attention(recipe: Recipe) -> float:
    """Seconds of a layer's attention, forward and backward."""
    model = recipe.model
    heads, shared = max(model.heads // recipe.tp, 1), max((model.kv_heads or model.heads) // recipe.tp, 1)
    size = (model.head_width + (model.v_width or model.head_width)) / 2
    point = [recipe.mbs, heads, shared, model.seq, model.seq, size, model.causal]
    both = kernel_times(gpus.gpu(recipe.gpu)).micros("attention", [[*point, 0], [*point, 1]]) / 1e6
    once = float(both[0]) * (1 + ("all" in recipe.again)) + float(both[1])
    if 0 < model.window < model.seq:  # every second layer sees a window
        once *= 0.5 + min(model.window / model.seq, 0.5)
    return once / recipe.cp


def _exchange(recipe: Recipe, layer_bytes: float, link: networks.LinkedGpu) -> float:
    """Seconds in which a layer's tokens go to their experts and come back, forward and backward."""
    model, ep = recipe.model, recipe.ep
    if not model.experts or ep == 1:
        return 0.0
    routed = layer_bytes * model.top_k * (ep - 1) / ep / link.bandwidth
    if ep > link.domain:
        nodes = ep // link.domain
        routed = max(routed, layer_bytes * min(nodes - 1, _NEAR_NODES) / link.network)
    return 4 * routed


def _once(recipe: Recipe, memory: float, link: networks.LinkedGpu) -> dict[str, float]:
    """Seconds per step of what parameters take: optimizer, reduction of gradients, gathering."""
    held, of_experts = (
        each.sum() / recipe.pp for each in parameters(recipe.model, recipe.tp, max(recipe.ep, 1))
    )
    dense, copies = max(float(held - of_experts), 0.0), recipe.dp * recipe.cp
    ranks = recipe.shards or copies
    rate = link.bandwidth if ranks * recipe.tp <= link.domain else link.network
    if not rate:
        raise PlanError(
            f"{recipe.gpu}: no network between its nodes is known: plan one node, or use --cluster."
        )
    part = (ranks - 1) / ranks / rate
    of = {"shards": 0.0, "reduction": 0.0, "optimizer": 0.0}
    if recipe.passes != "step":
        return of
    full = recipe.precision == "fp32"
    if recipe.shards:
        exchanged = 2.0 * recipe.gathers + 2.0 * (not recipe.adapters)
        of["shards"] = dense * exchanged * part * (recipe.micro_batches if recipe.software == "mpt" else 1)
    if not recipe.adapters:
        beside = max(copies * recipe.tp // recipe.ep, 1)
        own = dense / ranks + float(of_experts) / beside
        of["optimizer"] = own * UPDATE_BYTES["fp32" if full else "mixed"] / memory
        if not recipe.shards:  # parameters gathered and gradients reduced, or all-reduced in fp32
            of["reduction"] = dense * (8 if full else 6) * part
    return of
