"""Bytes of one GPU: parameters with their gradients and optimizer states, and activations.

Activations of a layer: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", with terms for grouped-query attention, gated feed-forward parts and experts; fused attention keeps
no scores (Dao et al. 2022, "FlashAttention").
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from fasop.inputs.models import Model
from fasop.plans.options import NARROW, Options, Recompute

GIB = 2**30
# Of the bytes that the formulas give, for buffers and fragmentation; the published tool's margin.
MEMORY_MARGIN = 1.10


def parameters(model: Model, tp: int, ep: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Parameters of one GPU [unit]: all, and those of its experts."""
    h, tables = model.hidden, model.hidden * model.vocab
    attention = model.attention_weights
    feed = (3 if model.gated else 2) * h
    dense: float = attention + 13 * h + feed * model.dense_ffn
    each: float = attention + 13 * h + feed * (model.shared_ffn if model.experts else model.ffn_width)
    of_experts: float = feed * model.ffn_width * model.experts
    kinds = model.kinds
    if model.parameters:
        # What these sizes don't count (or count too often), evenly over the layers: biases, positions, layers
        # of another kind.
        crossed = kinds.count("D") * attention
        rest = model.parameters - crossed - tables * (1 if model.tied else 2)
        whole = (rest - model.dense * dense) / (model.layers - model.dense) - h * model.experts
        each, of_experts = (each, whole - each) if model.experts else (whole, 0.0)
    layer, experts = each / tp + h * model.experts, of_experts / ep / tp
    held = {"E": tables / tp, "P": tables / tp, "T": layer + experts, "F": dense / tp}
    held["D"] = held["T"] + attention / tp
    found = np.array([held[kind] for kind in kinds])
    if model.encoder_layers is not None:
        found[-1] += held["P"]  # the head is no unit of its own there
    return found, np.array([experts if kind in "TD" else 0.0 for kind in kinds])


def held_parameters(
    model: Model, tp: int, ep: int, total: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Parameters of one GPU of a stage, and those of them that belong to experts.

    total: sums values of all units over the units of a stage, or of every stage that there could be.
    """
    each, of_experts = parameters(model, tp, ep)
    # A matrix of which several units of a stage have a copy is there once.
    copies = np.array([float(kind in "EP") for kind in model.kinds])
    copies[-1] = 1.0
    twice = np.maximum(total(copies) - 1, 0) * (model.tied * model.hidden * model.vocab / tp)
    return total(each) - twice, total(of_experts)


@functools.cache
def state_bytes(options: Options, dp: int) -> tuple[float, float, float]:
    """Bytes per parameter of weights, gradients and Adam's states, of which the data-parallel ranks share
    what ZeRO shares.
    """
    each = (4, 4, 8) if options.precision == "fp32" else (2, options.gradient_bytes, 12)
    if options.adapters:  # frozen weights are kept as products take them
        each = (1 if options.precision in NARROW else 2, 0, 0)
    if options.offload:
        each = (*each[:2], 0)
    shared, dp = [options.zero >= stage for stage in (3, 2, 1)], options.shared(dp)
    weights, gradients, states = (
        size / dp if is_shared else float(size) for size, is_shared in zip(each, shared, strict=True)
    )
    return weights, gradients, states


def activations(model: Model, tp: int, mbs: int, options: Options, recompute: Recompute) -> np.ndarray:
    """Activation bytes of one micro-batch [kept in flight; needed only while the unit runs, unit]."""
    s, b, h, a, again = model.seq, mbs, model.hidden, model.heads, options.again
    tokens, wide = s * b, options.activation_bytes / 2  # the formulas are for 16 bits
    whole = tokens / tp if options.sequence_parallel else tokens
    copies, part = (model.top_k, "experts") if model.experts else (1, "dense")
    # Bytes of each number that a product multiplies by its weights, which only their gradients need: 2, or
    # what Transformer Engine casts it to. Adapters have gradients beside attention only.
    narrow = options.engine in ("megatron", "mlperf") and options.precision in NARROW
    cast = NARROW[options.precision][0] if narrow else 2
    of_attention, of_feed = (2, 0) if options.adapters else (cast, cast)
    # Inputs of normalizations and projections, and dropout masks, which gated models don't have; queries,
    # keys, values and context, which attention's own gradient needs in 16 bits; activations. Normalization by
    # steps keeps its input in fp32 instead, and what its weights multiply.
    masked = 2 + (not model.gated) + 4 / wide * ("norm" in options.unfused)
    query, key = 2 * tokens * model.width / tp, 2 * tokens * model.kv_width / tp
    ffn = tokens * (copies * model.ffn_width + model.shared_ffn) / tp
    copy = cast / 2 * query if narrow and not options.adapters else 0  # of the context, as it was cast
    attention = (masked + of_attention) * h * whole + 2 * query + 2 * key + copy
    # MLPerf's LoRA keeps the activation's input so, too (FP8_ACTIVATION in its submitters' settings).
    input_bytes = cast if options.adapters and options.engine == "mlperf" else 2
    feed = (masked + of_feed) * h * whole + ((2 if model.gated else 1) * input_bytes + of_feed) * ffn
    feed += of_feed * h * tokens * copies if model.experts else 0
    attention += 2 * h * whole * model.post_norm
    feed += 2 * h * whole * model.post_norm
    stored = (5 + 2 * model.capped_scores) * s * model.cp  # unfused: per query
    scores = (4 if options.attention != "unfused" else stored) * a * s * b / tp
    in_layer = attention + feed
    held = {"T": in_layer, "D": in_layer + attention}
    ran = {"T": held["T"] + scores, "D": held["D"] + 2 * scores}
    kept = {"E": tokens * h, "P": 0.0, **ran}
    # Logits in fp32; where no compiler fuses the loss also in 16 bits, and softmax and gradients in fp32.
    logits = 14 if "loss" in options.unfused else 2 if options.fused_loss else 4
    logits += 2 * model.capped_logits
    # The head's normalization and input, and with sequence parallelism that input and its gradient gathered.
    head = 4 * tokens * h / tp + 4 * (tokens - whole) * h
    once = {"E": 0.0, "T": 0.0, "D": 0.0, "P": head + logits * tokens * model.vocab / tp}
    if recompute != "none" and options.attention == "unfused":
        kept |= held
    # What modules that are computed again don't keep: latent attention's queries, keys and values; outputs of
    # normalizations and activations; all of the feed-forward part but its input; or all but the layer's
    # input, the context and the outputs of every second product (torchtitan's selective checkpoints).
    spared = {
        "latent": query + 2 * key,
        "elementwise": of_attention * h * whole + of_feed * (h * whole + ffn * (part not in again)),
        part: feed - (masked + of_feed) * h * whole,
        "operators": in_layer - 4 * h * whole - 1.5 * query - key - (2 if model.gated else 1) * ffn,
    }
    less = sum(spared.get(module, 0.0) for module in again)
    kept |= {kind: (kept[kind] - less) * (1 - options.offloaded) for kind in ran}
    if recompute == "full":
        kept |= {kind: kept[kind] + options.recomputed * (2 * whole * h - kept[kind]) for kind in ran}
    if recompute == "full" or less:
        once |= ran
    if model.dense:
        plain = activations(model.plain, tp, mbs, options, recompute)[:, 1] / wide
        kept["F"], once["F"] = plain
    return wide * np.array([[each[kind] for kind in model.kinds] for each in (kept, once)])


def stage_gib(
    model: Model,
    options: Options,
    replica: tuple[int, int, int],
    held: tuple[np.ndarray, np.ndarray],
    kept: np.ndarray,
    once: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """GiB of one GPU of a stage, the margin included.

    replica: tp, ep and dp; held: parameters, and those of them that belong to experts; kept: activation bytes
    of all micro-batches in flight; once: bytes that the head needs, and the most that a layer needs, while it
    runs.
    """
    tp, ep, dp = replica
    whole, of_experts = held
    # An expert has as many copies as there are groups of ranks among which the experts are spread.
    size = sum(state_bytes(options, dp)) * (whole - of_experts)
    size = size + sum(state_bytes(options, dp // ep)) * of_experts + kept
    # The head's backward has ended before a layer's begins.
    size = size + np.maximum(once[0], once[1])
    if options.zero == 3 and dp > 1:
        # The unit that runs is whole; with overlap also the next layer, and the last one's gradients.
        units = parameters(model, tp, ep)[0]
        beside = options.overlap * (options.activation_bytes + options.gradient_bytes)
        size = size + float(units.max() * options.activation_bytes + units[1] * beside)
    return size * MEMORY_MARGIN / GIB
