"""What the published tool computes of candidates: bandwidths, partition, memory, schedule.

Rules: FASOP (HPDC 2024), as its published tool applies them. The rows of an array are candidates; what is
done to a row never depends on another. Rank = t + tp·d + tp·dp·stage, its node = rank // GPUs a node.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from fasop.inputs.models import Model

f32 = np.float32
GIB = 2**30
MARGIN = 1.10  # of memory


class Links(NamedTuple):
    """Of all placements (R, nodes) of one cluster, for one (tp, dp), bit/s in float32.

    stage_type, cap_type (R, pp): GPU type of each stage, and that whose memory the tool compares it with;
    boundary (R, pp−1): for a message; data_parallel (R, pp): for each stage's gradients; embedding (R):
    between the first and the last stage.
    """

    stage_type: np.ndarray
    cap_type: np.ndarray
    boundary: np.ndarray
    data_parallel: np.ndarray
    embedding: np.ndarray


def links(types: np.ndarray, inter: np.ndarray, intra: np.ndarray, gpus: int, tp: int, dp: int) -> Links:
    """types (R, nodes): GPU type of each node, 1 the slow one, which shares the bus of its node; inter,
    intra: bit/s of each type; gpus: in a node."""
    nodes = types.shape[1]
    pp = nodes * gpus // (tp * dp)
    node = (np.arange(pp * dp * tp) // gpus).reshape(pp, dp, tp)

    def across(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        return np.minimum(inter[types[:, u]], inter[types[:, v]])

    def between(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        return np.where(u == v, intra[types[:, u]], across(u, v))

    if pp >= nodes:
        stage_type = types[:, (np.arange(pp) / (pp / nodes)).astype(int)]
        cap_type = types[:, np.minimum(np.arange(pp) // (pp // nodes), nodes - 1)]
    else:
        each = nodes // pp
        # The slow type where a stage has it among its nodes; a single stage has all of them.
        of_stage = types[:, : pp * each].reshape(-1, pp, each) if pp > 1 else types[:, None]
        stage_type = np.where((of_stage == 1).any(axis=2), 1, of_stage[:, :, 0])
        cap_type = types[:, (np.arange(pp) + 1) * each - 2]
    u, v = node[:-1], node[1:]
    outside = across(u, v).astype(f32) / f32(dp) / f32(tp) / f32(1.05)
    inside = intra[types[:, u]].astype(f32) / f32(3.5)
    boundary = np.where(u == v, inside, outside).min(axis=(2, 3), initial=np.inf)
    # Gradients go around the ring of stage 0, last tp index.
    ring = node[0, :, tp - 1]
    data_parallel = np.repeat(between(ring, np.roll(ring, -1)).min(axis=1)[:, None], pp, axis=1)
    if dp > 1 and tp * dp >= gpus:
        data_parallel = data_parallel / tp
    elif dp > 1 and tp > 1:
        data_parallel = np.where(stage_type == 1, data_parallel / (gpus / dp), data_parallel)
    embedding = between(node[0, dp - 1], node[-1, dp - 1]).min(axis=1) / min(dp, gpus)
    return Links(stage_type, cap_type, boundary, data_parallel, embedding)


def even_split(units: int, stages: int) -> np.ndarray:
    """units // stages everywhere; what is left goes to the last stage, then the first, the second, …"""
    partition = np.full(stages, units // stages, dtype=np.int64)
    partition[np.arange(units % stages) - 1] += 1
    return partition


def incoming(boundary: np.ndarray) -> np.ndarray:
    """Seconds of the boundary before each stage (K, P), none for the first and last. boundary: (K, P - 1)."""
    return np.pad(boundary[:, :-1], ((0, 0), (1, 1)))


def minmax(
    sums: np.ndarray, table: np.ndarray, stage_type: np.ndarray, incoming: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Partition the units of each row: move one unit at a time from the slowest stage to the fastest.

    sums[c, g, a, b]: seconds of units a..b−1 in cost set c on GPU type g; table (K): each row's cost set;
    stage_type (K, P): GPU type of each stage; incoming (K, P): seconds of the boundary before a stage, 0
    for the first and last. Returns partitions (K, P) and the stage seconds that the tool goes on with,
    without the boundaries (K, P): stale ones where it leaves them stale.
    """
    rows, stages = stage_type.shape
    partition = np.repeat(even_split(sums.shape[-1] - 1, stages)[None], rows, axis=0)

    def stage_times(parts: np.ndarray, of: np.ndarray) -> np.ndarray:
        ends = np.cumsum(parts, axis=1)
        return sums[table[of, None], stage_type[of], ends - parts, ends]

    everything = np.arange(rows)
    compute = stage_times(partition, everything)
    active = everything if stages > 1 else everything[:0]
    history = [partition.copy()]
    while active.size:
        parts, times = partition[active], compute[active] + incoming[active]
        slow, fast = times.argmax(axis=1), times.argmin(axis=1)
        size = parts[np.arange(active.size), slow]
        edge = ((slow == 0) | (slow == stages - 1)) & (size == 2)
        if len(history) > 1 and edge.any():
            # Units go back, the times stay what they were.
            partition[active[edge], slow[edge]] += 1
            partition[active[edge], fast[edge]] -= 1
        go = ~edge & (size != 1)
        active, slow, fast, old = active[go], slow[go], fast[go], times[go].max(axis=1)
        if not active.size:
            break
        new = partition[active]
        line = np.arange(active.size)
        new[line, slow] -= 1
        new[line, fast] += 1
        new_compute = stage_times(new, active)
        top = (new_compute + incoming[active]).max(axis=1)
        stop = top > old
        for k in np.flatnonzero(top == old):
            stop[k] = any(np.array_equal(past[active[k]], new[k]) for past in history)
        # A row that stops here keeps the partition and the times from before the move.
        partition[active[~stop]] = new[~stop]
        compute[active[~stop]] = new_compute[~stop]
        active = active[~stop]
        history.append(partition.copy())
    return partition, compute


Check = tuple[np.ndarray, np.ndarray, np.ndarray]


def check_memory(
    model: Model, partition: np.ndarray, tp: np.ndarray, dp: np.ndarray, mbs: np.ndarray, caps: np.ndarray
) -> tuple[Check, Check]:
    """Without and with a sharded optimizer: whether some stage does not fit (K), the GiB that the tool
    reports (K), and those of each stage (K, P). partition, caps: (K, P); the rest (K).
    """
    stages = partition.shape[1]
    s, h, vocab, heads = model.seq, model.hidden, model.vocab, model.heads
    ends = np.cumsum(partition, axis=1)
    units = np.array(list(model.units))
    counts = {kind: np.concatenate([[0], np.cumsum(units == kind)]) for kind in "ETP"}
    held = (counts[kind][ends] - counts[kind][ends - partition] for kind in "ETP")
    embeddings, layers, heads_out = (each.astype(float) for each in held)
    in_flight = np.minimum(stages, model.global_batch // (dp * mbs))[:, None]
    tp, dp, b = tp[:, None], dp[:, None], mbs[:, None]
    params = (embeddings + heads_out) * (h * vocab / tp) + layers * (12 * h * h / tp)
    activations = (
        embeddings * (s * b * h * stages * in_flight / tp)
        + layers * (s * b * in_flight * h * (10 + 24 / tp + 5 * heads * s / (h * tp)))
        + heads_out * ((4 * s * b * h + 4 * s * b * vocab) / tp)
    )
    checks = []
    for memory, margin in (
        ((18 * params + activations) / GIB, MARGIN),
        (((6 + 12 // dp) * params + activations) / GIB, 1.0),
    ):
        over = memory * margin > caps
        last_over = stages - 1 - over[:, ::-1].argmax(axis=1)
        is_oom = np.asarray(over.any(axis=1))
        at_last = memory[np.arange(len(memory)), last_over] * MARGIN
        checks.append((is_oom, np.where(is_oom, at_last, memory.max(axis=1)), memory))
    return checks[0], checks[1]


def simulate(compute: np.ndarray, first: np.ndarray, last: np.ndarray, micro_batches: int) -> np.ndarray:
    """When each stage ends, seconds (K, P), in a 1F1B schedule with blocking sends that take time at the two
    ends of the pipeline only.

    compute (K, P): seconds of a stage's forward and backward; first, last (K): seconds of a message over
    the first and the last boundary.
    """
    rows, stages = compute.shape
    m = micro_batches
    forward = np.ascontiguousarray((compute / 3).T)
    backward = np.ascontiguousarray((2 * compute / 3).T)
    warm = [min(stages - 1 - i, m) for i in range(stages)]

    def before(i: int, j: int) -> Any:
        """The end of what stage i computes before its B_j."""
        ahead = j + warm[i]
        return end("F", i, min(ahead, m - 1)) if ahead < m or not j else end("B", i, j - 1)

    @functools.cache
    def end(kind: str, i: int, j: int) -> Any:
        """When stage i has ended forward F or backward B of micro-batch j, or its send f or b."""
        if kind == "F":
            start = np.zeros(rows)
            if j:
                start = end("b", i, j - warm[i] - 1) if j > warm[i] else end("f", i, j - 1)
            return (np.maximum(start, end("f", i - 1, j)) if i else start) + forward[i]
        if kind == "f":
            done = end("F", i, j)
            if i + 1 < stages and 1 <= j < warm[i + 1]:
                done = np.maximum(done, end("F", i + 1, j - 1))
            return done + first if i == 0 else done
        if kind == "B":
            start = before(i, j)
            if i and j + warm[i] < m:
                start = end("f", i, j + warm[i])
            elif i and j:
                start = np.maximum(start, end("b", i, j - 1))
            if i + 1 < stages:
                start = np.maximum(start, end("b", i + 1, j))
            return start + backward[i]
        if i == 0:
            return end("B", i, j)
        done = np.maximum(end("B", i, j), before(i - 1, j))
        return done + last if i + 1 == stages else done

    # In this order few calls wait for each other.
    for j in range(m):
        for i in range(stages):
            end("F", i, j)
    return np.stack([end("B", i, m - 1) for i in range(stages)], axis=1)
