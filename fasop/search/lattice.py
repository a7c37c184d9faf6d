"""The states of the search for a placement: how many nodes of each GPU type are used so far."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fasop.inputs.clusters import Cluster
from fasop.plans.shapes import Block


class Lattice:
    """How many nodes of each type are used after each block: the states of the dynamic program.

    states[k]: node counts after k blocks; steps[k][b]: indices of the states before and after block b,
    placed after k others; possible: whether blocks can use up all nodes.
    """

    def __init__(self, cluster: Cluster, blocks: list[Block]) -> None:
        names = [gpu.name for gpu in cluster.gpus]
        self.blocks = blocks
        self.uses = [tuple(block.nodes.count(name) for name in names) for block in blocks]
        self.count = cluster.node_count // len(blocks[0].nodes) if blocks else 0
        limit = cluster.nodes
        # From the end, so that only states remain from which all nodes can be placed.
        layers = [{limit}]
        for _ in range(self.count):
            layers.append(
                {
                    left
                    for state in layers[-1]
                    for use in self.uses
                    if min(left := tuple(a - b for a, b in zip(state, use, strict=True))) >= 0
                }
            )
        layers.reverse()
        self.possible = bool(layers) and tuple([0] * len(limit)) in layers[0]
        self.states = [sorted(layer) for layer in layers]
        index = [{state: k for k, state in enumerate(layer)} for layer in self.states]
        zero = tuple([0] * len(limit))
        self.steps: list[list[tuple[np.ndarray, np.ndarray]]] = []
        for k in range(self.count):
            step = []
            for use in self.uses:
                pairs = []
                for state in [zero] if k == 0 else self.states[k]:
                    after = tuple(a + b for a, b in zip(state, use, strict=True))
                    if after in index[k + 1] and state in index[k]:
                        pairs.append((index[k][state], index[k + 1][after]))
                array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
                step.append((array[:, 0], array[:, 1]))
            self.steps.append(step)

    def sequences(self) -> Iterator[tuple[Block, ...]]:
        """All orders of blocks that use every node."""

        def extend(prefix: tuple[Block, ...], used: tuple[int, ...]) -> Iterator[tuple[Block, ...]]:
            if len(prefix) == self.count:
                yield prefix
                return
            for block, use in zip(self.blocks, self.uses, strict=True):
                after = tuple(a + b for a, b in zip(used, use, strict=True))
                if after in self.states[len(prefix) + 1]:
                    yield from extend((*prefix, block), after)

        yield from extend((), tuple([0] * len(self.states[-1][0])))
