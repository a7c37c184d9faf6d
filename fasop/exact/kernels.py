"""The kernels of each unit of a model: shapes of matrix products, and bytes of everything else.

Counts are those of one tensor-parallel rank for one micro-batch. Elementwise work counts what an eager
framework reads and writes: a kernel for each normalization, bias with dropout and residual, activation,
transposition and, with unfused attention, softmax and dropout of the scores.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from fasop.inputs.models import Model
from fasop.plans.options import Options

# Numbers that are read and written, of an activation whose steps are kernels of their own, forward and
# backward. gelu_new (transformers): power, tanh, three products and three sums. GPT-OSS's clamped SwiGLU
# (Megatron-core, ``weighted_bias_quick_geglu_impl``): both halves clamped, joined, then one fused kernel.
STEPWISE = {False: (18, 28), True: (11, 22)}
# Of each kernel of softmax and dropout. Megatron's softmax is fused, but for heads of a micro-batch that are
# no multiple of 4 (``FusedScaleMaskSoftmax``): casts to fp32 and back, scale, mask, softmax. PyTorch's starts
# backward by a product of gradient and output. OPT (transformers) drops no scores, but clamps them by
# ``torch.max``, whose gradient compares twice, halves, chooses and fills.
# GPT-OSS's positions are scaled (YaRN), which no fused kernel does (Megatron-core, ``apply_rotary_pos_emb``):
# products with cosine and sine, halves swapped and joined, their sum, joined; backward also slices.
ROTARY = 12, 17
SOFTMAX = {
    "fused": ((2, 2.5), (3, 2.5)),
    "cast": ((3, 4, 4, 4, 3, 2.5), (3, 6, 4, 4, 3, 2.5)),
    "eager": ((2, 2, 2, 2.25), (2.25, 3, 3, 2, 2)),
    "clamped": ((2, 2, 2), (3, 3, 1.25, 1.25, 2, 3.25, 2.25)),
}
# Gemma's caps, ``cap * tanh(numbers / cap)`` in Megatron-Bridge and transformers: a kernel for each step.
CAP = ((2, 2, 2), (2, 3, 2))
# Where products of experts activate and cast what they give (Transformer Engine's ``grouped_gemm_glu``): its
# copies in 8 bits along both sides; backward the activation's inputs, too.
FUSED = 1, 3
LORA_RANK = 16  # MLPerf's
# Of the bias of GPT-OSS's second product, which is weighted by the router in fp32, expert by expert, and the
# sum brought back to 16 bits (``TEGroupedMLP._apply_bias``).
EXPERT_BIAS = 14, 20


# Small kernels, forward and backward: masks, positions and lookups of a micro-batch; maxima, sums and targets
# of the cross-entropy (Megatron-core, ``vocab_parallel_cross_entropy``).
TOKEN_KERNELS = {"E": (8, 4), "P": (8, 4)}
ALIGNED = 8  # Products in 16 bits load 16 bytes at once where rows are multiples of it.
# Sums over the tensor-parallel group in each unit's forward and backward pass: a layer's output after
# attention and after the feed-forward part, a decoder's after cross-attention too, and as many gradients of
# inputs; the embedding's output; the gradient of the head's input (Shoeybi et al. 2019, "Megatron-LM").
TENSOR_SUMS = {"E": (1, 0), "T": (2, 2), "F": (2, 2), "D": (3, 3), "P": (0, 1)}


class Matmul(NamedTuple):
    """``copies`` products of (m, k) with (k, n) matrices, in one kernel."""

    m: int
    n: int
    k: int
    copies: int = 1
    experts: bool = False
    unaligned: bool = False
    is_cast: bool = False  # by the product that gives its first operand


class Moved(NamedTuple):
    """Numbers that a kernel reads and writes, each as wide as an activation."""

    numbers: float


Kernel = Matmul | Moved


class Work(NamedTuple):
    """Kernels of a unit's forward and backward pass; ``scores``: those of the forward pass that selective
    recomputation runs again.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    scores: tuple[Kernel, ...] = ()


@functools.lru_cache(maxsize=512)
def unit_work(model: Model, kind: str, tp: int, mbs: int, options: Options, ep: int = 1) -> Work:
    """Work of one unit. kind: as in ``Model.kinds``."""
    if kind == "F":
        return unit_work(model.plain, "T", tp, mbs, options)
    tokens, h, wide = mbs * model.seq, model.hidden, 4 // options.activation_bytes
    whole = tokens // tp if options.sequence_parallel else tokens  # of what tensor parallelism leaves whole
    small, small_back = ([Moved(tokens)] * count for count in TOKEN_KERNELS.get(kind, (0, 0)))
    if kind == "E":
        return Work((Moved(2 * tokens * h), *small), (Moved(3 * tokens * h), *small_back))
    if kind == "P":
        vocab = math.ceil(model.vocab / tp)
        if tp > 1 or options.engine in ("megatron", "deepspeed", "mlperf"):  # make-vocab-size-divisible-by
            vocab = 128 * math.ceil(vocab / 128)
        head = Matmul(tokens, vocab, h, unaligned=vocab % ALIGNED > 0)
        # Cross-entropy reads the logits, and reads and writes them in fp32 twice. By steps backward zeros are
        # written for the targets, then the softmax's gradient, which is cast.
        read, steps = [7], [wide, 3 * wide, 1 + wide] if "loss" in options.unfused else [3]
        if options.fused_loss:  # logits read twice, gradients written in their place and multiplied later
            read, steps = [3], [2]
        if model.capped_logits:
            read, steps = [*CAP[0], *read], [*steps, *CAP[1]]
        loss, loss_back = ([Moved(each * tokens * vocab) for each in way] for way in (read, steps))
        return Work(
            (head, *_norm(model, whole * h, options)[0], *loss, *small),
            (*_gradients([head], options.adapters), *loss_back, *small_back),
        )
    parts = [attention(model, tp, mbs, options), feed_forward(model, tp, mbs, options, ep)]
    if kind == "D":
        parts.insert(1, parts[0])
    return Work(*(tuple(itertools.chain(*kernels)) for kernels in zip(*parts, strict=True)))


def tensor_sums(model: Model) -> np.ndarray:
    """Sums over the tensor-parallel group in each unit's forward and backward pass [2, unit]."""
    return np.array([TENSOR_SUMS[kind] for kind in model.kinds]).T


def attention(model: Model, tp: int, mbs: int, options: Options) -> Work:
    """A layer's part up to attention's output."""
    tokens, h, s = mbs * model.seq, model.hidden, model.seq
    whole = tokens // tp if options.sequence_parallel else tokens
    heads, size = max(model.heads // tp, 1), model.head_width
    batch = mbs * heads
    projections = [Matmul(tokens, n, k) for n, k in model.projections(tp)]
    gradients = _gradients(projections, options.adapters)
    # Normalization; bias, dropout and residual (with a mask of half an activation's width); transpositions.
    turned, turned_back = (Moved(tokens * each / tp) for each in turned_numbers(model, options))
    norm, norm_back = (each * (1 + model.post_norm) for each in _norm(model, whole * h, options))
    if model.qk_norm:
        for numbers in (model.width, model.kv_width):
            one, two = _norm(model, tokens * numbers / tp, options)
            norm, norm_back = norm + one, norm_back + two
    moved: list[Kernel] = [*norm, Moved(3.5 * whole * h), turned]
    back: list[Kernel] = [*norm_back, Moved(2.5 * whole * h), turned_back]
    if options.adapters:  # LoRA: two narrow products beside each of these, and the sum of both outputs
        for n, k in model.projections(tp):
            narrow = [Matmul(tokens, LORA_RANK, k), Matmul(tokens, n, LORA_RANK)]
            moved += [*narrow, Moved(3 * tokens * n)]
            back += [*_gradients(narrow), Moved(3 * tokens * n)]
    if options.attention != "unfused":  # a fused kernel, whose times are its own
        return Work((*projections, *moved), (*gradients, *back))
    whole_s = s * model.cp
    numbers = batch * s * whole_s
    products = Matmul(s, whole_s, size, batch), Matmul(s, size, whole_s, batch)
    kind = "cast" if batch % 4 and options.activation_bytes == 2 else "fused"
    if options.engine == "eager" and options.activation_bytes == 4:  # NeuSight's; vTrain's is Megatron's
        kind = "clamped" if model.clamped else "eager"
    steps = zip(SOFTMAX[kind], CAP if model.capped_scores else ((), ()), strict=True)
    softmax, softmax_back = ([Moved(each * numbers) for each in (*way, *cap)] for way, cap in steps)
    core: tuple[Kernel, ...] = (products[0], *softmax, products[1])
    core_back: tuple[Kernel, ...] = (*products, *products, *softmax_back)
    return Work((*projections, *moved, *core), (*gradients, *back, *core_back), core)


def turned_numbers(model: Model, options: Options) -> tuple[int, int]:
    """(forward, backward): numbers per token that transpositions and positions of queries, keys and values
    move."""
    query, key, part = model.width, model.kv_width, model.rope
    if not options.fused:
        # No compiler fuses complex numbers: torchtitan casts queries and keys to fp32, turns them and casts
        # them back, and repeats keys and values for each head.
        return ((16 if options.engine == "torchtitan" else 4) * (query + key),) * 2
    # Megatron-core's fused kernels (apply_rope_fusion) write what attention reads; its output stays as it is.
    # Of latent attention's queries a part is turned in place; keys and values are read and written.
    latent = model.heads * (3 * part + 2 * (model.head_width - part + model.v_width))
    if model.stepwise:
        forward, backward = (each * (query + key) + 2 * key for each in ROTARY)
        return forward, backward
    return (latent if model.kv_rank else 2 * (query + 2 * key),) * 2


def feed_forward(model: Model, tp: int, mbs: int, options: Options, ep: int) -> Work:
    """A layer's part after attention: the products, the activation, all else."""
    h, ffn, tokens = model.hidden, model.ffn_width // tp, mbs * model.seq
    whole = tokens // tp if options.sequence_parallel else tokens
    local = max(model.experts // ep, 1)  # experts that this rank holds
    routed = tokens * (model.top_k if model.experts else 1)  # tokens that pass through this rank's experts
    rows = math.ceil(routed / local)
    up = Matmul(rows, ffn * (2 if model.gated else 1), h, local, bool(model.experts))
    down = Matmul(rows, h, ffn, local, bool(model.experts))
    steps = STEPWISE[model.gated] if model.stepwise else (3, 5) if model.gated else (2, 4)
    bias = EXPERT_BIAS if model.stepwise and model.experts else (0, 0)
    gradients = _gradients([up, down], options.adapters)
    if model.experts and options.cuda_graphs is True and options.precision in ("mxfp8", "nvfp4"):
        # Graphs of whole iterations need a fixed capacity, and that needs Megatron-core's op fuser.
        steps, down = FUSED, down._replace(is_cast=True)
        gradients = [each._replace(is_cast=at in (0, 3)) for at, each in enumerate(gradients)]
    act, act_back = (Moved(routed * (n * ffn + more * h)) for n, more in zip(steps, bias, strict=True))
    norm, norm_back = (each * (1 + model.post_norm) for each in _norm(model, whole * h, options))
    moved: list[Kernel] = [*norm, Moved(3.5 * whole * h)]
    back: list[Kernel] = [*norm_back, Moved(2.5 * whole * h)]
    if model.experts:
        if shared := model.shared_ffn // tp:
            wide = [Matmul(tokens, shared * (2 if model.gated else 1), h), Matmul(tokens, h, shared)]
            moved += wide
            back += _gradients(wide, options.adapters)
        # Router; tokens permuted before and after the experts, and sorted by expert after NCCL's exchange.
        # DeepEP and HybridEP send a token to a rank once, where it is copied for each of its experts.
        sorts = 2 if 1 < ep < model.experts and not options.fast_dispatch else 1
        sent = tokens * model.receivers(ep) if ep > 1 and options.fast_dispatch else routed
        router, permuted = Matmul(tokens, model.experts, h), [Moved(sorts * (sent + routed) * h)] * 2
        moved += [router, *permuted]
        back += [*_gradients([router], options.adapters), *permuted]
    return Work((up, down, act, *moved), (*gradients, act_back, *back))


def _norm(model: Model, numbers: float, options: Options) -> tuple[list[Moved], list[Moved]]:
    """Normalization of so many numbers, forward and backward: a kernel each; or by steps, in fp32, those that
    PyTorch runs for transformers' ``LlamaRMSNorm``, and for a layer norm (models without gates) written so.
    """
    if "norm" not in options.unfused:
        return [Moved(2 * numbers)], [Moved(4 * numbers)]
    wide = 4 // options.activation_bytes
    cast = [1 + wide] * (wide > 1)  # to fp32, and back
    centers = not model.gated
    # Squares, their mean, product with its root, with the weights; a layer norm subtracts a mean before that,
    # and adds a bias.
    forward = [*cast, *[wide, 2 * wide] * centers, 2 * wide, wide, 2 * wide, *cast, 2, *[2] * centers]
    # Gradients of weights and their sum, of what they multiply; of the number and the root in that product,
    # its sum; of the square in three steps; the sum of both.
    product = [2 * wide, 3 * wide, wide, 2 * wide, 2 * wide, 2 * wide, 3 * wide]
    backward = [*[1] * centers, 3, 1, 2, *cast, *product, *[wide, 2 * wide] * centers, *cast]
    return [Moved(n * numbers) for n in forward], [Moved(n * numbers) for n in backward]


def _gradients(products: list[Matmul], frozen: bool = False) -> list[Matmul]:
    """The products of each one's backward pass: with respect to its input, and to its weights unless they
    are frozen.
    """
    of_inputs = [each._replace(n=each.k, k=each.n) for each in products]
    return of_inputs if frozen else of_inputs + [each._replace(m=each.k, k=each.m) for each in products]
