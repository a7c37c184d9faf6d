"""The states of the search for a placement: how many nodes of each GPU type are used so far."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fasop.inputs.clusters import Cluster
from fasop.plans.shapes import BETWEEN, CROWDED, Block

State = tuple[int, ...]


class Lattice:
    """How many nodes of each type are used after each block: the states of the dynamic program.

    states[k]: node counts after k blocks; steps[k][b]: indices of the states before and after block b, placed
    after k others; possible: whether there are enough nodes, and none is left over where none may be;
    between: what messages between blocks cross at least.
    """

    def __init__(self, cluster: Cluster, blocks: list[Block], stages: int, idle: bool = False) -> None:
        """stages: of the pipeline; ``idle``: nodes may be left over, and stages of the last block."""
        names = [gpu.name for gpu in cluster.gpus]
        self.blocks = blocks
        self.uses = [tuple(block.nodes.count(name) for name in names) for block in blocks]
        each = len(blocks[0].stages) if blocks else 1
        self.count = -(-stages // each)
        # With several stages in each of three nodes or more, every message between nodes meets another's.
        whole = blocks and all(len(block.nodes) == 1 for block in blocks)
        self.between = CROWDED if whole and each > 1 and self.count > 2 else BETWEEN
        zero: State = (0,) * len(names)
        layers: list[set[State]] = [{zero}]
        for _ in range(self.count):
            layers.append({after for state in layers[-1] for after in self._after(state, cluster.nodes)})
        if not idle:
            layers[-1] &= {cluster.nodes}
        # From the end, so that only states remain from which all blocks can be placed.
        for k in range(self.count - 1, -1, -1):
            layers[k] = {
                state
                for state in layers[k]
                if any(after in layers[k + 1] for after in self._after(state, cluster.nodes))
            }
        self.possible = bool(blocks) and (idle or stages % each == 0) and all(layers)
        self.states = [sorted(layer) for layer in layers]
        index = [{state: k for k, state in enumerate(layer)} for layer in self.states]
        self.steps: list[list[tuple[np.ndarray, np.ndarray]]] = []
        for k in range(self.count):
            step = []
            for use in self.uses:
                pairs = [
                    (at, index[k + 1][after])
                    for at, state in enumerate(self.states[k])
                    if (after := _sum(state, use)) in index[k + 1]
                ]
                array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
                step.append((array[:, 0], array[:, 1]))
            self.steps.append(step)

    def _after(self, state: State, limit: State) -> Iterator[State]:
        for use in self.uses:
            after = _sum(state, use)
            if all(used <= most for used, most in zip(after, limit, strict=True)):
                yield after

    def sequences(self) -> Iterator[tuple[Block, ...]]:
        """All orders of so many blocks."""
        known = [set(layer) for layer in self.states]

        def extend(prefix: tuple[Block, ...], used: State) -> Iterator[tuple[Block, ...]]:
            if len(prefix) == self.count:
                yield prefix
                return
            for block, use in zip(self.blocks, self.uses, strict=True):
                after = _sum(used, use)
                if after in known[len(prefix) + 1]:
                    yield from extend((*prefix, block), after)

        yield from extend((), (0,) * len(self.states[0][0]))


def _sum(state: State, use: State) -> State:
    return tuple(a + b for a, b in zip(state, use, strict=True))
