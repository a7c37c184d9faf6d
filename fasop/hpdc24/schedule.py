"""The published tool's 1F1B schedule: blocking sends that take time at the two ends of the pipeline only.

Rules: FASOP (HPDC 2024), as its published tool applies them. The rows of an array are candidates of one
pipeline depth and one number of micro-batches.
"""

from __future__ import annotations

import numpy as np


def simulate(compute: np.ndarray, first: np.ndarray, last: np.ndarray, micro_batches: int) -> np.ndarray:
    """When each stage ends, seconds (K, P).

    compute (K, P): seconds of a stage's forward and backward; first, last (K): seconds of a message over
    the first and the last boundary.
    """
    rows, stages = compute.shape
    m = micro_batches
    forward = np.ascontiguousarray((compute / 3).T)
    backward = np.ascontiguousarray((2 * compute / 3).T)
    warm = [min(stages - 1 - i, m) for i in range(stages)]
    zero: np.ndarray = np.zeros(rows)
    # [stage][micro-batch] → the ends of forwards, of their sends, of backwards and of their sends.
    table: list[list[list[np.ndarray]]] = [[[zero] * m for _ in range(stages)] for _ in range(4)]
    f_end, f_sent, b_end, b_sent = table

    def before(i: int, j: int) -> np.ndarray:
        """The end of what stage i computes before its B_j."""
        ahead = j + warm[i]
        end: np.ndarray = f_end[i][min(ahead, m - 1)] if ahead < m or not j else b_end[i][j - 1]
        return end

    for kind, i, j in _order(stages, m, warm):
        if kind == "F":
            pair = j - warm[i]
            own = f_sent[i][j - 1] if j else zero
            start = b_sent[i][pair - 1] if pair > 0 else own
            if i:
                start = np.maximum(start, f_sent[i - 1][j])
            end = f_end[i][j] = start + forward[i]
            if i + 1 < stages and 1 <= j < warm[i + 1]:
                end = np.maximum(end, f_end[i + 1][j - 1])
            f_sent[i][j] = end + first if i == 0 else end
        elif kind == "B":
            start = before(i, j)
            if i:
                pair = j + warm[i]
                if pair < m:
                    start = f_sent[i][pair]
                elif j:
                    start = np.maximum(start, b_sent[i][j - 1])
            if i + 1 < stages:
                start = np.maximum(start, b_sent[i + 1][j])
            b_end[i][j] = b_sent[i][j] = start + backward[i]
        else:
            end = np.maximum(b_end[i][j], before(i - 1, j))
            b_sent[i][j] = end + last if i + 1 == stages else end
    return np.stack([b_end[i][m - 1] for i in range(stages)], axis=1)


def _order(stages: int, m: int, warm: list[int]) -> list[tuple[str, int, int]]:
    """Forwards F, backwards B and the backwards' sends S, each after all that it waits for."""
    programs = []
    for i in range(stages):
        program = [("F", i, j) for j in range(warm[i])]
        for j in range(m):
            if j + warm[i] < m:
                program.append(("F", i, j + warm[i]))
            program.append(("B", i, j))
            if i:
                program.append(("S", i, j))
        programs.append(program)
    forwards, backwards, sends = [0] * stages, [0] * stages, [0] * stages
    position = [0] * stages
    order: list[tuple[str, int, int]] = []
    total = sum(map(len, programs))
    while len(order) < total:
        for i, program in enumerate(programs):
            while position[i] < len(program):
                kind, _, j = program[position[i]]
                if kind == "F":
                    if i and forwards[i - 1] <= j:
                        break
                    if i + 1 < stages and 1 <= j < warm[i + 1] and forwards[i + 1] < j:
                        break
                    forwards[i] += 1
                elif kind == "B":
                    if i + 1 < stages and sends[i + 1] <= j:
                        break
                    backwards[i] += 1
                else:
                    if forwards[i - 1] < min(j + warm[i - 1] + 1, m) or (
                        j + warm[i - 1] >= m and backwards[i - 1] < j
                    ):
                        break
                    sends[i] += 1
                order.append(program[position[i]])
                position[i] += 1
    return order
