"""Bandwidths between the ranks of a candidate, as the published tool sees them: bit/s, in float32.

Formulas: FASOP (HPDC 2024), as its published tool applies them. Rank = t + tp·d + tp·dp·stage, its node =
rank // GPUs a node.
"""

from __future__ import annotations

import numpy as np

f32 = np.float32


class Bandwidths:
    """The links of all placements (R, nodes) of one cluster, for one (tp, dp)."""

    def __init__(self, types: np.ndarray, inter: np.ndarray, intra: np.ndarray, gpus: int, tp: int, dp: int):
        """types (R, nodes): GPU type of each node; inter, intra: bit/s of each type; gpus: in a node."""
        self.types, self.inter, self.intra, self.gpus, self.tp, self.dp = types, inter, intra, gpus, tp, dp
        self.pp = types.shape[1] * gpus // (tp * dp)
        self.node = (np.arange(self.pp * dp * tp) // gpus).reshape(self.pp, dp, tp)

    def _between(self, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        type_u, type_v = self.types[:, u], self.types[:, v]
        across = np.minimum(self.inter[type_u], self.inter[type_v])
        slowest: np.ndarray = np.where(u == v, self.intra[type_u], across)
        return slowest

    def boundaries(self) -> np.ndarray:
        """bit/s of each boundary for a point-to-point message (R, pp−1)."""
        u, v = self.node[:-1], self.node[1:]
        type_u, type_v = self.types[:, u], self.types[:, v]
        across = np.minimum(self.inter[type_u], self.inter[type_v]).astype(f32)
        across = across / f32(self.dp) / f32(self.tp) / f32(1.05)
        inside = self.intra[type_u].astype(f32) / f32(3.5)
        slowest: np.ndarray = np.where(u == v, inside, across).min(axis=(2, 3), initial=np.inf)
        return slowest

    def data_parallel(self, slow_bus: np.ndarray) -> np.ndarray:
        """bit/s of each stage's gradient all-reduce (R, pp): the ring of stage 0, last tp index.

        slow_bus (R, pp): the stage's own GPU shares the bus of its node.
        """
        ring = self.node[0, :, self.tp - 1]
        slowest: np.ndarray = self._between(ring, np.roll(ring, -1)).min(axis=1)[:, None]
        if self.dp == 1:
            return np.repeat(slowest, self.pp, axis=1)
        if self.tp * self.dp >= self.gpus:
            return np.repeat(slowest / self.tp, self.pp, axis=1)
        if self.tp > 1:
            return np.where(slow_bus, slowest / (self.gpus / self.dp), slowest)
        return np.repeat(slowest, self.pp, axis=1)

    def embedding(self) -> np.ndarray:
        """bit/s between the first and the last stage (R), last dp index."""
        u, v = self.node[0, self.dp - 1], self.node[-1, self.dp - 1]
        slowest: np.ndarray = self._between(u, v).min(axis=1)
        return slowest / min(self.dp, self.gpus)

    def stage_types(self, slow: int) -> np.ndarray:
        """GPU type of each stage (R, pp); ``slow`` where a stage has that type among its nodes."""
        nodes, pp = self.types.shape[1], self.pp
        found: np.ndarray
        if pp == 1:
            found = np.where((self.types == slow).any(axis=1), slow, self.types[:, 0])[:, None]
        elif pp >= nodes:
            found = self.types[:, (np.arange(pp) / (pp / nodes)).astype(int)]
        else:
            each = nodes // pp
            of_stage = self.types[:, : pp * each].reshape(-1, pp, each)
            found = np.where((of_stage == slow).any(axis=2), slow, of_stage[:, :, 0])
        return found

    def cap_types(self) -> np.ndarray:
        """The GPU type whose memory the tool compares each stage with (R, pp)."""
        nodes, pp = self.types.shape[1], self.pp
        if pp >= nodes:
            at = np.minimum(np.arange(pp) // (pp // nodes), nodes - 1)
        else:
            at = (np.arange(pp) + 1) * (nodes // pp) - 2
        found: np.ndarray = self.types[:, at]
        return found
