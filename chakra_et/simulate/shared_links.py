"""Transfers that share links: each gets an equal part of the link while they overlap."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

_DONE = 1e-3
"""ns on the wire that count as nothing."""


def share(begin_ns: np.ndarray, wire_ns: np.ndarray, users: Sequence[Sequence[int]]) -> np.ndarray:
    """When each of K transfers is done, float64[K].

    ``begin_ns[K]``: when each is ready; ``wire_ns[K]``: its time on links that nothing else uses; ``users``:
    the ranks whose links each of them occupies. A transfer goes on at the rate of its most crowded link,
    where n transfers get 1/n each (processor sharing, as TCP flows on one bottleneck do).
    """
    end = begin_ns.astype(np.float64)
    left = wire_ns.astype(np.float64)
    arrivals = [(float(begin_ns[at]), at) for at in range(len(begin_ns)) if wire_ns[at] > 0]
    heapq.heapify(arrivals)
    active: list[int] = []
    crowd: dict[int, int] = {}
    now = 0.0
    while active or arrivals:
        rates = [1.0 / max(crowd[rank] for rank in users[at]) for at in active]
        until = min((left[at] / rate for at, rate in zip(active, rates, strict=True)), default=np.inf)
        arriving = bool(arrivals) and arrivals[0][0] <= now + until
        step = max(arrivals[0][0] - now, 0.0) if arriving else until
        now += step
        for at, rate in zip(active, rates, strict=True):
            left[at] -= step * rate
        if arriving:
            at = heapq.heappop(arrivals)[1]
            active.append(at)
            for rank in users[at]:
                crowd[rank] = crowd.get(rank, 0) + 1
            continue
        for at in [at for at in active if left[at] <= _DONE]:
            end[at] = now
            active.remove(at)
            for rank in users[at]:
                crowd[rank] -= 1
    return end
