"""The published tool's partition: move one unit at a time from the slowest stage to the fastest.

Many candidates are done at once, one row of an array each; what is done to a row never depends on
another. Rules: FASOP (HPDC 2024), as its published tool applies them.
"""

from __future__ import annotations

import numpy as np


def even_split(units: int, stages: int) -> np.ndarray:
    """units // stages everywhere; what is left goes to the last stage, then the first, the second, …"""
    partition = np.full(stages, units // stages, dtype=np.int64)
    for k in range(units % stages):
        partition[k - 1] += 1
    return partition


def minmax(
    sums: np.ndarray, table: np.ndarray, stage_type: np.ndarray, incoming: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Partition the units of each row.

    sums[c, g, a, b]: seconds of units a..b−1 in cost set c on GPU type g; table (K): each row's cost set;
    stage_type (K, P): GPU type of each stage; incoming (K, P): seconds of the boundary before a stage, 0
    for the first and last. Returns partitions (K, P) and the stage seconds that the tool goes on with,
    without the boundaries (K, P): stale ones where it leaves them stale.
    """
    rows, stages = stage_type.shape
    units = sums.shape[-1] - 1
    partition = np.repeat(even_split(units, stages)[None], rows, axis=0)

    def stage_times(parts: np.ndarray, of: np.ndarray) -> np.ndarray:
        ends = np.cumsum(parts, axis=1)
        seconds: np.ndarray = sums[table[of, None], stage_type[of], ends - parts, ends]
        return seconds

    everything = np.arange(rows)
    compute = stage_times(partition, everything)
    active = everything if stages > 1 else everything[:0]
    history = [partition.copy()]
    moved = False
    while active.size:
        parts, times = partition[active], compute[active] + incoming[active]
        slow, fast = times.argmax(axis=1), times.argmin(axis=1)
        line = np.arange(active.size)
        size = parts[line, slow]
        edge = ((slow == 0) | (slow == stages - 1)) & (size == 2)
        if moved and edge.any():
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
        moved = True
    return partition, compute
