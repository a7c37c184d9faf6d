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

from fasop.inputs.models import Model
from fasop.plans.options import Attention

# Numbers of an activation that isn't fused: clamping both halves, scaling, sigmoid, products, sum and the
# router's weight, each read and written; and their gradients.
STEPWISE = 25, 50


class Matmul(NamedTuple):
    """``copies`` products of (m, k) with (k, n) matrices, in one kernel. gradient: of a weight's gradient."""

    m: int
    n: int
    k: int
    copies: int = 1
    experts: bool = False
    gradient: bool = False


class Moved(NamedTuple):
    """Numbers that a kernel reads and writes, each as wide as an activation. stepwise: each step of an
    activation is a kernel of its own.
    """

    numbers: float
    stepwise: bool = False


Kernel = Matmul | Moved


class Work(NamedTuple):
    """Kernels of a unit's forward and backward pass; ``scores``: those of the forward pass that selective
    recomputation runs again.
    """

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    scores: tuple[Kernel, ...] = ()


@functools.lru_cache(maxsize=512)
def unit_work(
    model: Model, kind: str, tp: int, mbs: int, attention: Attention, sequence_parallel: bool, ep: int = 1
) -> Work:
    """Work of one unit. kind: E, T, D or P, as in ``Model.kinds``."""
    tokens, h = mbs * model.seq, model.hidden
    whole = tokens // tp if sequence_parallel else tokens  # tokens of what tensor parallelism does not split
    if kind == "E":
        return Work((Moved(2 * tokens * h),), (Moved(3 * tokens * h),))
    if kind == "P":
        vocab = math.ceil(model.vocab / tp)
        # Cross-entropy reads the logits, and reads and writes them in fp32 twice.
        return Work(
            (Matmul(tokens, vocab, h), Moved(2 * whole * h), Moved(7 * tokens * vocab)),
            (Matmul(tokens, h, vocab), Matmul(vocab, h, tokens), Moved(3 * tokens * vocab)),
        )
    parts = [_attention(model, tp, mbs, attention, whole), _feed_forward(model, tp, tokens, whole, ep)]
    if kind == "D":
        parts.insert(1, _attention(model, tp, mbs, attention, whole))
    return Work(*(tuple(itertools.chain(*kernels)) for kernels in zip(*parts, strict=True)))


def _attention(model: Model, tp: int, mbs: int, attention: Attention, whole: int) -> Work:
    tokens, h, s = mbs * model.seq, model.hidden, model.seq
    heads, size = max(model.heads // tp, 1), model.head_width
    width, qkv = model.width // tp, (model.width + 2 * model.kv_width) // tp
    batch = mbs * heads
    projections = latent_products(model, tp, tokens) or [Matmul(tokens, qkv, h), Matmul(tokens, h, width)]
    # Normalization; bias, dropout and residual (with a mask of half an activation's width); transpositions.
    moved = [Moved(2 * whole * h), Moved(3.5 * whole * h), Moved(2 * tokens * (qkv + width))]
    back = [Moved(4 * whole * h), Moved(2.5 * whole * h), Moved(2 * tokens * (qkv + width))]
    core: list[Kernel] = []  # of a fused kernel: its times are its own
    core_back: list[Kernel] = []
    if attention == "unfused":
        numbers = batch * s * s * model.cp
        # Softmax with scale and mask, then dropout with its mask.
        whole_s = s * model.cp
        products = Matmul(s, whole_s, size, batch), Matmul(s, size, whole_s, batch)
        core = [products[0], Moved(2 * numbers), Moved(2.5 * numbers), products[1]]
        core_back = [*products, *products, Moved(3 * numbers), Moved(2.5 * numbers)]
    return Work((*projections, *moved, *core), (*_gradients(projections), *back, *core_back), tuple(core))


def latent_products(model: Model, tp: int, tokens: int) -> list[Matmul]:
    """Latent attention's products (DeepSeek-V2): down, queries up, keys and values up, output; else none."""
    if not model.kv_rank:
        return []
    h, heads, keys = model.hidden, model.heads // tp, model.head_width - model.rope
    queries = model.q_rank or h
    return [
        Matmul(tokens, model.q_rank + model.kv_rank + model.rope, h),
        Matmul(tokens, heads * model.head_width, queries),
        Matmul(tokens, heads * (keys + model.v_width), model.kv_rank),
        Matmul(tokens, h, heads * model.v_width),
    ]


def _feed_forward(model: Model, tp: int, tokens: int, whole: int, ep: int) -> Work:
    h, ffn = model.hidden, model.ffn_width // tp
    local = max(model.experts // ep, 1)  # experts that this rank holds
    routed = tokens * (model.top_k if model.experts else 1)  # tokens that pass through this rank's experts
    rows = math.ceil(routed / local)
    up = Matmul(rows, ffn * (2 if model.gated else 1), h, local, bool(model.experts))
    down = Matmul(rows, h, ffn, local, bool(model.experts))
    act = Moved((3 if model.gated else 2) * routed * ffn)
    act_back = Moved((5 if model.gated else 4) * routed * ffn)
    if model.stepwise:
        act, act_back = Moved(STEPWISE[0] * routed * ffn, True), Moved(STEPWISE[1] * routed * ffn, True)
    moved: list[Kernel] = [Moved(2 * whole * h), Moved(3.5 * whole * h)]
    back: list[Kernel] = [Moved(4 * whole * h), Moved(2.5 * whole * h)]
    if model.experts:
        if shared := model.shared_ffn // tp:
            wide = [Matmul(tokens, shared * (2 if model.gated else 1), h), Matmul(tokens, h, shared)]
            moved += wide
            back += _gradients(wide)
        # Router, and the permutation of the tokens before and after the experts.
        router, permuted = Matmul(tokens, model.experts, h), [Moved(2 * routed * h)] * 2
        moved += [router, *permuted]
        back += [*_gradients([router]), *permuted]
    return Work((up, down, act, *moved), (*_gradients([up, down]), act_back, *back))


def _gradients(products: list[Matmul]) -> list[Matmul]:
    """The two products of each one's backward pass: with respect to its input, and to its weights."""
    found = []
    for m, n, k, copies, experts, _ in products:
        found += [Matmul(m, k, n, copies, experts), Matmul(k, n, m, copies, experts, True)]
    return found
