"""The published tool's memory estimate, GiB a stage, with and without a sharded optimizer.

Formulas: FASOP (HPDC 2024), as its published tool applies them. Rows are candidates of one depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fasop.inputs.models import Model

GIB = 2**30
MARGIN = 1.10


@dataclass
class Check:
    """Rows: whether some stage does not fit, and the GiB that the tool reports."""

    is_oom: np.ndarray
    reported: np.ndarray
    stages: np.ndarray  # GiB of each stage (K, P)


def check_memory(
    model: Model, partition: np.ndarray, tp: np.ndarray, dp: np.ndarray, mbs: np.ndarray, caps: np.ndarray
) -> tuple[Check, Check]:
    """The check as it is, then with a sharded optimizer. partition, caps: (K, P); the rest (K)."""
    stages = partition.shape[1]
    s, h, vocab, heads = model.seq, model.hidden, model.vocab, model.heads
    ends = np.cumsum(partition, axis=1)
    units = np.array(list(model.units))
    counts = {kind: np.concatenate([[0], np.cumsum(units == kind)]) for kind in "ETP"}
    embeddings, layers, heads_out = (
        (counts[kind][ends] - counts[kind][ends - partition]).astype(float) for kind in "ETP"
    )
    micro_batches = model.global_batch // (dp * mbs)
    in_flight = np.minimum(stages, micro_batches)[:, None]
    tp, dp, b = tp[:, None], dp[:, None], mbs[:, None]
    params = (embeddings + heads_out) * (h * vocab / tp) + layers * (12 * h * h / tp)
    activations = (
        embeddings * (s * b * h * stages * in_flight / tp)
        + layers * (s * b * in_flight * h * (10 + 24 / tp + 5 * heads * s / (h * tp)))
        + heads_out * ((4 * s * b * h + 4 * s * b * vocab) / tp)
    )
    plain: np.ndarray = (18 * params + activations) / GIB
    sharded: np.ndarray = ((6 + 12 // dp) * params + activations) / GIB
    return _check(plain, np.asarray(plain * MARGIN > caps)), _check(sharded, np.asarray(sharded > caps))


def _check(memory: np.ndarray, over: np.ndarray) -> Check:
    stages = memory.shape[1]
    last_over = stages - 1 - over[:, ::-1].argmax(axis=1)
    is_oom = np.asarray(over.any(axis=1))
    at_last = memory[np.arange(len(memory)), last_over] * MARGIN
    return Check(is_oom, np.where(is_oom, at_last, memory.max(axis=1)), memory)
