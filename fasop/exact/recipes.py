"""Seconds of a unit that was not measured: those of its kernels, or of its host where that is slower.

The kernels' own times are those of ``chakra_et.cost``, fitted to public tables of measured kernels. What they
take within a run depends on the software that runs them, the type of number and what recipes set (FP8 and its
kinds, CUDA graphs, recomputed modules): each part is multiplied by a constant. The constants
(``data/recipes.json``) were fitted to published runs by ``benchmarks/recipe_accuracy.py``, which also states
the error on models that a fit never saw. Plans and published runs are estimated by the same.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from chakra_et.cost import gpus
from chakra_et.cost.gpus import Gpu
from fasop.exact.kernels import (
    Kernel,
    Matmul,
    Moved,
    attention,
    feed_forward,
    tensor_sums,
    turned_numbers,
    unit_work,
)
from fasop.exact.memory import parameters
from fasop.inputs.clusters import PRESETS
from fasop.inputs.models import LAYERS, Model
from fasop.inputs.read_files import read_yaml
from fasop.plans.options import NARROW, Options

FILE = Path(__file__).parents[1] / "data" / "recipes.json"
PRIORS: dict[str, list[float]] = json.loads(FILE.with_name("priors.json").read_text("utf-8"))["priors"]
CALLED = read_yaml(PRESETS, "called")  # GPUs as cluster files call them
TILE = 128  # tokens of the tiles in which fused attention computes its scores
SETS = 6  # of operands that take turns in the cache: a layer's products each have their own
# Numbers that Adam with fp32 master weights touches per parameter, in bytes: gradient copied, unscaled and
# its norm taken (4 + 8 + 4), gradient, weight and two moments read (16), three written (12), 16-bit weight
# written (2); and the part of the datasheet's memory bandwidth that it reaches.
UPDATE_BYTES = {False: 46, True: 28}
MEMORY_SHARE = 0.67
# Bytes per second that are assumed, as no published run has set them: of copies between a GPU and its host, a
# direction (PCIe 4.0 × 16), and of the memory of a host with two sockets.
HOST_LINK, HOST_MEMORY = 25e9, 250e9
# Exponents by which kernels and host are joined: the larger, the nearer to the slower of the two. With
# experts the host waits in each layer for the counts of their tokens, so that it can't run far ahead.
_SHARP = {False: 4, True: 2}
_NARROWER = 0.6  # exponent of a peak: at twice that of 16 bits, products in 8 bits reach 0.76 of its share
_CAST_BYTES = 4  # per number of an operand: read in 16 bits, written in 8, along both sides


@functools.cache
def hardware(name: str) -> Gpu | None:
    """The GPU that cluster files call so, or of a datasheet's file; None for one that is in no table."""
    called, memory = CALLED.get(name, (name, 0.0))
    if called not in gpus.names() and not name.endswith(gpus.SUFFIXES):
        return None
    found = gpus.gpu(called)
    return replace(found, memory=memory) if memory else found


@functools.cache
def _file() -> dict[str, dict[str, float]]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def published() -> Mapping[str, float]:
    """The fitted constants."""
    return _file()["constants"]


def kind_of_plan(gpu: str, model: Model, options: Options) -> str:
    """What plans whose errors are alike are called."""
    kind = "experts" if model.experts else "sharded parameters" if options.zero == 3 else "dense"
    return f"{gpu}, {kind}{', fp32' * (options.precision == 'fp32')}"


def mean_error(name: str, model: Model, options: Options) -> float | None:
    """Of plans of this kind that others have measured, on models that the fit hadn't seen; None for none."""
    gpu = hardware(name)
    return _file()["errors"].get(kind_of_plan(gpu.name, model, options)) if gpu else None


def prior(name: str) -> tuple[float, float]:
    """A constant's value and width before any run was seen."""
    value, width = PRIORS.get(name) or PRIORS[name.split(":")[0]]
    return value, width


def constant(name: str) -> float:
    return published().get(name, prior(name)[0])


def constant_name(part: str, gpu: Gpu | None, options: Options) -> str:
    """The name of a part's constant: few, shared by all runs that should be alike."""
    engine, precision = options.engine, options.precision
    rate = gpu.peaks.get("8 bit", 0) if gpu else 0
    family = "Blackwell" if rate > 4e15 else "Hopper" if rate else "before FP8"
    if gpu and gpu.vendor == "amd":
        family = "AMD"
    shared = {"mlperf": "megatron"}.get(engine, engine)
    # On A100 no run of the fit has Megatron's fused kernels.
    of_memory = "deepspeed" if family == "before FP8" and shared == "megatron" else shared
    tensor = "megatron" * (engine != "eager")  # links' own
    kind = {"fp8 blocks": "by blocks", "mxfp8": "by blocks", "nvfp4": "4 bit"}
    # FlashAttention-2 on Hopper: PyTorch's own.
    attention = "torchtitan" if options.attention == "flash2" and family == "Hopper" else engine
    named = {
        "products": f"{family}{', fp32' * (precision == 'fp32')}",
        "products8": f"{family}, {kind[precision]}" if precision in kind else family,
        "experts": "16 bit" if precision in ("mixed", "fp32") else "8 bit",
        "attention": f"{family}{f', {attention}' * (attention in ('mpt', 'torchtitan'))}",
        "memory": f"{of_memory}{', fp32' * (engine == 'eager' and precision == 'fp32')}",
        "tensor": "overlapped, megatron" if options.overlap_tensor and shared == "megatron" else tensor,
        "tokens": "overlapped" if options.overlap_tokens else "exposed",
    }
    return f"{part}: {named[part]}" if named.get(part) else part


def kernel_seconds(gpu: Gpu, model: Model, tp: int, mbs: int, options: Options, ep: int = 1) -> np.ndarray:
    """Seconds of the kernels of each unit's forward and backward pass, and of the part of the forward that
    selective recomputation runs again [3, unit]; without collectives.
    """
    each = {}
    for kind in set(model.kinds):
        parts = unit_parts(gpu, model, kind, tp, mbs, options, ep)
        each[kind] = sum(constant(constant_name(part, gpu, options)) * parts[part] for part in parts)
    return np.array([each[kind] for kind in model.kinds]).T


def weight_share(gpu: Gpu, model: Model, tp: int, mbs: int, options: Options, ep: int = 1) -> np.ndarray:
    """The part of the kernels of each unit's backward pass that computes gradients of weights [unit]: one
    product for each product of the forward pass but those of attention.
    """
    shares = dict.fromkeys(model.kinds, 0.0)
    plain = replace(model, mtp=0)
    for kind in set(model.kinds) - {"E"} if not options.adapters else ():
        work = unit_work(plain, kind, tp, mbs, options, ep)
        products = [k for k in work.forward if isinstance(k, Matmul) and k not in work.scores]
        of_weights = _parts([k._replace(m=k.k, k=k.m) for k in products], gpu, kind, options)
        parts = unit_parts(gpu, plain, kind, tp, mbs, options, ep)
        factors = {part: constant(constant_name(part, gpu, options)) for part in parts}
        whole = sum(factor * parts[part][1] for part, factor in factors.items())
        shares[kind] = sum(factors[part] * of_weights[part] for part in of_weights) / float(whole)
    return np.array([shares[kind] for kind in model.kinds])


def guessed(gpu: Gpu, model: Model, options: Options) -> dict[str, float]:
    """Constants of a model's layers that no published run has set: what each is of, and its value."""
    parts = unit_parts(gpu, model, "T", 1, 1, options)
    names = {part: constant_name(part, gpu, options) for part, seconds in parts.items() if seconds.any()}
    words = {"products8": "products in fewer bits", "memory": "elementwise kernels"}
    return {words.get(part, part): constant(at) for part, at in names.items() if at not in published()}


def host_seconds(model: Model, tp: int, mbs: int, options: Options, ep: int = 1) -> np.ndarray:
    """Seconds in which a host starts the kernels of each unit's forward and backward pass [2, unit], of
    tensor-parallel sums and of each expert of this rank too.
    """
    if options.cuda_graphs is True:
        return np.zeros((2, len(model.kinds)))
    work = {kind: unit_work(model, kind, tp, mbs, options, ep) for kind in set(model.kinds)}
    kernels = np.array([[len(passes) for passes in work[kind][:2]] for kind in model.kinds]).T
    is_layer, is_routed = (np.array([kind in kinds for kind in model.kinds]) for kinds in (LAYERS, "TD"))
    if options.cuda_graphs == "attention":
        kernels -= np.outer([len(each) - 1 for each in attention(model, tp, mbs, options)[:2]], is_layer)
    elif options.cuda_graphs == "layer":
        kernels = np.where(is_layer, 1, kernels)
    collectives = tensor_sums(model) * (tp > 1 and options.engine != "eager")
    collectives = collectives + 2 * (ep > 1) * is_routed  # tokens to their experts, and back
    seconds = constant("host") * (kernels + collectives)
    if model.experts and options.cuda_graphs != "layer":
        modules = np.array([model.mtp if kind == "P" else kind in "TD" for kind in model.kinds])
        held = max(model.experts // ep, 1) * modules
        seconds = seconds + np.outer((1 / 3, 2 / 3), constant("expert host") * held)
    return seconds


def with_host(seconds: np.ndarray, hosts: np.ndarray, waits: bool = False) -> np.ndarray:
    """Seconds of kernels that a host starts while those before them run; waits: for the GPU in each layer."""
    if not hosts.any():
        return seconds
    return (seconds ** _SHARP[waits] + hosts ** _SHARP[waits]) ** (1 / _SHARP[waits])


def update_seconds(gpu: Gpu, options: Options, gpus: int) -> float:
    """Seconds of the optimizer's step for each parameter; on the host of ``gpus`` GPUs, for each of one of
    them: gradient and weight go over the link to it in 16 bits, then weight, gradient and moments are read,
    and three of them written.
    """
    if options.offload:
        return 4 / HOST_LINK + UPDATE_BYTES[True] * gpus / HOST_MEMORY
    is_fused = options.precision == "fp32" or options.engine == "eager"
    return UPDATE_BYTES[is_fused] / (gpu.memory * MEMORY_SHARE)


@functools.lru_cache(maxsize=65536)
def unit_parts(
    gpu: Gpu, model: Model, kind: str, tp: int, mbs: int, options: Options, ep: int = 1
) -> dict[str, np.ndarray]:
    """Seconds [forward, backward, again by selective recomputation] of a unit's parts, by kernels' models."""
    if kind == "P" and model.mtp:
        # Modules that predict further tokens: a layer and a head each.
        plain = replace(model, mtp=0)
        head, layer = (unit_parts(gpu, plain, each, tp, mbs, options, ep) for each in "PT")
        return {part: (1 + model.mtp) * head.get(part, 0.0) + model.mtp * layer[part] for part in layer}
    if kind == "F":
        return unit_parts(gpu, model.plain, "T", tp, mbs, options)
    work = unit_work(model, kind, tp, mbs, options, ep)
    ways = [_parts(kernels, gpu, kind, options) for kernels in (work.forward, work.backward, work.scores)]
    found = {part: np.array([way[part] for way in ways]) for part in ways[0]}
    # In NeuSight's steps gradients are added to those of the step before.
    if options.engine == "eager" and options.precision == "fp32":
        added = 3 * parameters(model, tp, ep)[0][model.kinds.index(kind)] * options.activation_bytes
        found["memory"][1] += added / gpu.memory
    if kind not in "TD":
        return found
    forward = {part: seconds[0] for part, seconds in found.items()}
    again = options.again
    for part in ("products", "products8", "experts"):
        found[part][1] += 0.5 * forward[part] * ("operators" in again)
    once_more = 1.0 if "operators" in again else 0.5 if "elementwise" in again else 0.0
    found["memory"][1] += once_more * forward["memory"]
    run: list[Kernel] = []
    if ("experts" if model.experts else "dense") in again:
        run += feed_forward(model, tp, mbs, options, ep).forward[:3]
    if "latent" in again:  # and positions, which turn what these give
        tokens = mbs * model.seq
        run += [Matmul(tokens, n, k) for n, k in model.projections(tp)[1:3]]
        run.append(Moved(tokens * turned_numbers(model, options)[0] / tp))
    for part, seconds in _parts(run, gpu, kind, options).items():
        found[part][1] += seconds
    if options.attention != "unfused":
        found["attention"] = _attention(gpu, model, tp, mbs) * (2 if kind == "D" else 1)
        found["attention"][1] += found["attention"][0] * ("attention" in again)
    return found


def _parts(kernels: Sequence[Kernel], gpu: Gpu, kind: str, options: Options) -> dict[str, float]:
    width = options.activation_bytes
    narrow = options.precision in NARROW and kind != "P"
    number = "8 bit alone" if narrow else "16 bit"
    if options.precision == "nvfp4":  # as in 8 bits, but faster
        rate = gpu.peaks["8 bit"] * (gpu.peaks["4 bit"] / gpu.peaks["8 bit"]) ** _NARROWER
        gpu = replace(gpu, peaks={**gpu.peaks, "8 bit": rate})
    if width == 4:
        # In fp32 PyTorch trains with TF32 where the GPU has it and it is allowed.
        number = "tf32" if "tf32" in gpu.peaks and options.engine != "eager" else "float"
    products = [k for k in kernels if isinstance(k, Matmul)]
    routed = [k for k in products if k.experts]
    unaligned = [k for k in products if k.unaligned and width == 2]
    dense = _products(gpu, number, tuple(k for k in products if k not in routed + unaligned))
    operands = sum(k.copies * k.m * k.k for k in products if not k.is_cast) * narrow
    moved = sum(k.numbers for k in kernels if isinstance(k, Moved))
    return {
        "products": 0.0 if narrow else dense,
        "products8": dense if narrow else 0.0,
        "experts": _products(gpu, number, tuple(routed)),
        "unaligned": _products(gpu, number, tuple(unaligned)),
        "memory": moved * width / gpu.memory,
        "row casts" if options.precision == "fp8 rows" else "casts": operands * _CAST_BYTES / gpu.memory,
    }


@functools.lru_cache(maxsize=65536)
def _products(gpu: Gpu, number: str, products: tuple[Matmul, ...]) -> float:
    from chakra_et.cost.kernel_times import kernel_times  # whose tables measured plans don't need

    shapes = [(k.copies, k.m, k.n, k.k, SETS) for k in products]
    return float(kernel_times(gpu).micros(number, shapes).sum()) / 1e6 if shapes else 0.0


def _attention(gpu: Gpu, model: Model, tp: int, mbs: int) -> np.ndarray:
    """Seconds of a layer's fused attention, as ``unit_parts``."""
    from chakra_et.cost.kernel_times import kernel_times

    heads, shared = max(model.heads // tp, 1), max((model.kv_heads or model.heads) // tp, 1)
    size, seq = (model.head_width + (model.v_width or model.head_width)) / 2, model.seq * model.cp
    point = [mbs, heads, shared, seq, seq, size, model.causal]
    forward, backward = kernel_times(gpu).micros("attention", [[*point, 0], [*point, 1]]) / 1e6 / model.cp
    # Of tiles of a causal layer, those that hold a part of each token's window.
    tiles, before = math.ceil(seq / TILE), math.ceil((model.window - 1) / TILE)
    before = min(before, tiles - 1) if model.window else tiles - 1
    seen = (before + 1) * (2 * tiles - before) / (tiles * (tiles + 1))
    share = 1 - (1 - seen) * (model.windowed / model.layers or 0.5)
    return share * np.array([forward, backward, forward])
