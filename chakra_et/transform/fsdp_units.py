"""What FSDP2 gathers and reduces together in a captured DDP step: each repeated block, and the rest (root).

As ``fully_shard`` called on each block and on the model, with its defaults: a parameter is cut along
dimension 0 into one piece per rank, padded to equal pieces (torch/distributed/fsdp/_fully_shard).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.job.blocks import Blocks
from chakra_et.job.operators import Operators
from chakra_et.transform.ddp import Backward, ReadyGradient


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together. ``block``: number of its block, -1: the root. Rows in front of
    which it is gathered: ``forward``, and ``backward`` (of the root: where the backward pass begins);
    ``reduced``: the row in front of which its gradients are reduced."""

    block: int
    gradients: list[ReadyGradient]
    forward: int
    backward: int
    reduced: int

    def shard_bytes(self, ranks: int) -> int:
        """Bytes of one rank's piece, with padding."""
        return sum(
            -(-each.shape[0] // ranks) * math.prod(each.shape[1:]) * (each.size // math.prod(each.shape))
            for each in self.gradients
        )


@dataclass(frozen=True)
class ShardedStep:
    """``root`` is None where blocks hold all parameters; ``blocks`` in order of the layers. ``late``: the
    first block's input needs no gradient, so that its gradients are reduced last."""

    root: Unit | None
    blocks: list[Unit]
    late: bool

    @property
    def units(self) -> list[Unit]:
        return [*([self.root] if self.root else []), *self.blocks]


def find_units(operators: Operators, blocks: Blocks, step: Backward, where: str) -> ShardedStep:
    """The units of one step. Raises ``TraceError``, which begins with ``where``."""
    inside = np.arange(step.begin, step.end)
    on_cpu = inside[np.isin(operators.lane[inside], list(operators.tops)) & (blocks.block[inside] >= 0)]
    backward = np.array(blocks.is_backward)[blocks.group[on_cpu]]
    passes = len(np.unique(blocks.group[on_cpu]))
    if passes != 2:
        raise TraceError(
            f"{where}: a step has {passes} passes through its blocks, not one forward and one backward"
        )
    end = step.finish if step.finish >= 0 else step.end
    held: list[list[ReadyGradient]] = [[] for _ in range(blocks.held + 1)]
    for gradient in step.gradients:
        held[blocks.block[gradient.rows[0]]].append(gradient)
    units = []
    for block, gradients in enumerate(held[:-1]):
        mine = blocks.block[on_cpu] == block
        there, back = on_cpu[mine & ~backward], on_cpu[mine & backward]
        if not gradients or not len(there) or not len(back):
            raise TraceError(
                f"{where}: block {block} of {blocks.held} has no gradients: only blocks that are trained are "
                "known"
            )
        units.append(Unit(block, gradients, int(there[0]), int(back[0]), int(back[-1]) + 1))
    for one, two in zip(units, units[1:], strict=False):
        if one.forward > two.forward or one.backward < two.reduced:
            raise TraceError(f"{where}: blocks {one.block} and {two.block} don't run one behind the other")
    rest = held[-1]
    # The root is gathered in front of the model's first operator, and its first gradient begins the
    # backward pass.
    phases = [(row, operators.phase[row]) for row in inside.tolist() if operators.top[row] == row]
    first = {phase: next((row for row, of in phases if of == phase), -1) for phase in ("forward", "backward")}
    root = Unit(-1, rest, first["forward"], first["backward"], end) if rest else None
    late = not any(each.rows[0] >= units[0].reduced for each in rest)
    if late:
        units[0] = Unit(0, units[0].gradients, units[0].forward, units[0].backward, end)
    found = ShardedStep(root, units, late)
    _check(found, where)
    return found


def _check(step: ShardedStep, where: str) -> None:
    """What ``fully_shard`` refuses."""
    for unit in step.units:
        of = "the root" if unit.block < 0 else f"block {unit.block}"
        if any(not each.shape for each in unit.gradients):
            raise TraceError(f"{where}: {of} has a parameter without dimensions, which can't be sharded")
        types = sorted({each.type for each in unit.gradients})
        if len(types) > 1:
            raise TraceError(f"{where}: {of} has parameters of {' and '.join(types)}: FSDP2 needs one type")


def described(steps: Sequence[ShardedStep], ranks: int) -> list[tuple[int, ...]]:
    """The bytes of the units of each step, by which ranks are compared."""
    return [tuple(unit.shard_bytes(ranks) for unit in step.units) for step in steps]
