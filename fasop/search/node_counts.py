"""The states of the search for a placement: how many nodes of each GPU type are used so far."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

import numpy as np

from fasop.inputs.clusters import Cluster
from fasop.plans.shapes import BETWEEN, CROWDED, Block

State = tuple[int, ...]


class NodeCounts:
    """How many nodes of each type are used where a block begins: the states of the dynamic program.

    states[s]: node counts before stage s, where a block begins, or the pipeline ends; steps[s][b]:
    indices of the states before and after block b, placed at stage s; possible: whether there are enough
    nodes, and none is left over where none may be; between: what messages between blocks cross at least.
    """

    def __init__(self, cluster: Cluster, blocks: list[Block], stages: int, idle: bool = False) -> None:
        """stages: of the pipeline; ``idle``: nodes may be left over, and stages of the last block."""
        self.blocks, self.stages, self.idle = blocks, stages, idle
        self.sizes = {gpu.name: cluster.size(gpu) for gpu in cluster.gpus}
        lengths = [len(block.stages) for block in blocks]
        # With several stages in each of three nodes or more, every message between nodes meets another's.
        whole = blocks and all(len(block.nodes) == 1 for block in blocks) and min(lengths) > 1
        self.between = CROWDED if whole and -(-stages // max(lengths)) > 2 else BETWEEN
        self._uses = [
            [self._use(block, min(length, left)) for block, length in zip(blocks, lengths, strict=True)]
            for left in range(stages + 1)
        ]
        most = np.array(cluster.nodes)
        # One number for each state, that sorts as they do.
        weights = np.append(np.cumprod(most[:0:-1] + 1)[::-1], 1)
        reached = [[np.zeros((int(s == 0), len(most)), dtype=int)] for s in range(stages + 1)]
        layers: list[np.ndarray] = []
        for s in range(stages + 1):
            found = np.concatenate(reached[s])
            layers.append(found[distinct(found @ weights)[0]])
            for _, end, use in self._next(s) if len(found) else ():
                after = layers[s] + use
                reached[end].append(after[(after <= most).all(axis=1)])
        if not idle:
            layers[-1] = layers[-1][(layers[-1] == most).all(axis=1)]
        # From the end, so that only states remain from which all blocks can be placed.
        codes = [layer @ weights for layer in layers]
        begins = [s for s in range(stages) if len(layers[s])]
        for s in reversed(begins):
            kept = np.zeros(len(layers[s]), dtype=bool)
            for _, end, use in self._next(s):
                kept |= _among(codes[end], layers[s] + use, most, weights)[1]
            layers[s], codes[s] = layers[s][kept], codes[s][kept]
        self.possible = bool(len(layers[0]) and len(layers[-1]))
        self.states = layers
        nothing = np.zeros(0, dtype=np.int64)
        self.steps = [[(nothing, nothing)] * len(blocks) for _ in range(stages)]
        for s in begins:
            for b, end, use in self._next(s):
                at, is_there = _among(codes[end], layers[s] + use, most, weights)
                self.steps[s][b] = np.flatnonzero(is_there), at[is_there]

    def end(self, block: int, begin: int) -> int:
        """The stage after a block's last one, where it begins with stage ``begin``."""
        return min(begin + len(self.blocks[block].stages), self.stages)

    def _use(self, block: Block, stages: int) -> State | None:
        """Nodes of each type that the first stages of a block are on; None where a block can't end there."""
        group = sum(count for _, count in block.stages[0])
        ends = list(itertools.accumulate(self.sizes[name] for name in block.nodes))
        if (stages < len(block.stages) or ends[-1] > group * stages) and not self.idle:
            return None
        used = block.nodes[: bisect.bisect_left(ends, group * stages) + 1]
        return tuple(used.count(name) for name in self.sizes)

    def _next(self, stage: int) -> Iterator[tuple[int, int, State]]:
        """The blocks that can begin with a stage, the stage after each, and the nodes that it uses."""
        for b, use in enumerate(self._uses[self.stages - stage] if stage < self.stages else ()):
            end = self.end(b, stage)
            # A block that leaves GPUs of its last node over can only be the last.
            if use is not None and (end == self.stages or self.blocks[b].is_full):
                yield b, end, use

    def sequences(self) -> Iterator[tuple[Block, ...]]:
        """All orders of blocks."""
        known = [set(map(tuple, layer.tolist())) for layer in self.states]

        def extend(prefix: tuple[Block, ...], stage: int, used: State) -> Iterator[tuple[Block, ...]]:
            if stage == self.stages:
                yield prefix
                return
            for b, end, use in self._next(stage):
                after = tuple(a + b for a, b in zip(used, use, strict=True))
                if after in known[end]:
                    yield from extend((*prefix, self.blocks[b]), end, after)

        yield from extend((), 0, (0,) * len(self.sizes))


def _among(
    codes: np.ndarray, states: np.ndarray, most: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where each state would be in sorted codes, and whether it is there."""
    wanted = states @ weights
    at = codes.searchsorted(wanted)
    is_there = np.append(codes, -1)[at] == wanted
    return at, is_there & (states <= most).all(axis=1)


def distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each distinct value comes first, in ascending order of values; and which of them each one is."""
    _, first, which = np.unique(values, return_index=True, return_inverse=True)
    return first, which
