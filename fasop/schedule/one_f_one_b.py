"""The 1F1B schedule with every message simulated: when each stage computes, sends and ends.

Stage i runs w = min(stages − 1 − i, m) forwards ahead, then pairs of a forward and a backward, then the
remaining backwards, as Megatron-LM's schedule without interleaving does. A message starts once its sender
has the data and its receiver waits for it, takes the boundary's time, and holds both until it ends; where
a stage sends and receives at once (a forward out and a gradient in, or a gradient out and a forward in)
it goes on when both have ended. The order on each stage is fixed, so every end is a longest path and
never grows when a duration shrinks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

Time = Any  # a float, or an array with one value for each candidate
COMPUTE, MESSAGE = 0, 1


@dataclass
class Timeline:
    """[stage][micro-batch] → when a computation ends; [boundary][micro-batch] → when a message starts and
    ends (``up``: activations to the next stage, ``down``: gradients to the one before). Seconds. A
    computation starts its duration before its end, a message its duration after its start.
    """

    forward_end: list[list[Time]]
    backward_end: list[list[Time]]
    up_end: list[list[Time]]
    down_end: list[list[Time]]

    @property
    def stage_end(self) -> list[Time]:
        """When each stage has computed and sent all."""
        return [
            self.down_end[i - 1][-1] if i else self.backward_end[0][-1] for i in range(len(self.forward_end))
        ]

    @property
    def pipeline_time(self) -> Time:
        """When the first stage's last backward ends, which is the last of all."""
        return self.backward_end[0][-1]


def run(forward: list[Time], backward: list[Time], p2p: list[Time], micro_batches: int) -> Timeline:
    """The schedule of one pipeline (floats), or of many of one depth at once (arrays of one length), of
    which only the last two micro-batches are kept.

    forward, backward: seconds a micro-batch of each stage; p2p: seconds a message over each boundary.
    """
    stages, m = len(forward), micro_batches
    many = isinstance(forward[0], np.ndarray)
    later = np.maximum if many else max
    zero = np.zeros_like(forward[0]) if many else 0.0
    f, b = ([[zero] * m for _ in range(stages)] for _ in range(2))
    up, down = ([[zero] * m for _ in range(stages - 1)] for _ in range(2))
    warm = warm_up(stages, m)
    last = stages - 1
    for what, i, j, is_forward in order(stages, m):
        w = warm[i]
        if what == COMPUTE and is_forward:
            if i:
                start = up[i - 1][j]
                if j > w:
                    start = later(start, down[i - 1][j - 1 - w])
            elif j > w:
                start = b[0][j - 1 - w]
            else:
                start = up[0][j - 1] if j else zero
            of, end = f, start + forward[i]
        elif what == COMPUTE:
            if i == last:
                start = f[i][j]
            elif w + j < m:
                start = later(up[i][w + j], down[i][j])
            else:
                start = down[i][j]
            of, end = b, start + backward[i]
        elif is_forward:
            # Stage i sends; stage i + 1 waits for it since its computation or message before ended.
            ahead = warm[i + 1]
            sent = up[i + 1][j - 1] if j and j <= ahead else zero
            waits = b[i + 1][j - 1 - ahead] if j > ahead else sent
            of, end = up, later(f[i][j], waits)
            end += p2p[i]
        else:
            # Stage i + 1 sends; stage i waits.
            if w + j < m:
                waits = f[i][w + j]
            elif j == 0:
                waits = up[i][m - 1]
            else:
                waits = down[i - 1][j - 1] if i else b[0][j - 1]
            of, end = down, later(b[i + 1][j], waits)
            end += p2p[i]
        of[i][j] = end
        if many and j > 1:
            # Nobody waits for it any more: memory that is used again is faster memory.
            of[i][j - 2] = None
    return Timeline(f, b, up, down)


def warm_up(stages: int, micro_batches: int) -> list[int]:
    """Forwards that each stage runs before its first pair of a forward and a backward."""
    return [min(stages - 1 - i, micro_batches) for i in range(stages)]


@functools.lru_cache(maxsize=32)
def order(stages: int, m: int) -> list[tuple[int, int, int, bool]]:
    """(COMPUTE or MESSAGE, stage or boundary, micro-batch, is forward), each after all that it waits for.

    The key is the time at which each would happen if every computation took 1 and every message nothing;
    among the messages of one moment, those further down the pipeline free the ones before them.
    """
    items = []
    for i, w in enumerate(warm_up(stages, m)):
        for j in range(m):
            slot = i + j if j < w else 2 * stages - i + 2 * (j - w) - 2
            items.append((slot, COMPUTE, -i, j, True))
            if i + 1 < stages:
                items.append((slot, MESSAGE, -i, j, True))
                items.append((2 * stages - 2 - i + 2 * j, MESSAGE, -i, j, False))
            items.append((2 * stages - 1 - i + 2 * j, COMPUTE, -i, j, False))
    items.sort()
    return [(what, -i, j, is_forward) for _, what, i, j, is_forward in items]
