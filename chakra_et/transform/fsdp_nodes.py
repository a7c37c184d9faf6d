"""The nodes of FSDP2's communication: an all-gather before each forward and backward pass of a block, and a
reduce-scatter after the backward pass.

On CPU ranks with gloo each collective is awaited where it is called: FSDP2 prefetches in the backward pass,
which changes their order, but nothing runs beside them. gloo gathers into one buffer and copies each rank's
piece out of it; it has no reduce-scatter, and reduces the whole of a copy, divides it, and keeps a piece
(ProcessGroupGloo.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from chakra_et.et.columns import CollectiveType, ExecutionTrace
from chakra_et.et.rearrange import New
from chakra_et.transform.changes import CollectiveTimes
from chakra_et.transform.elementwise_rate import Elementwise
from chakra_et.transform.fsdp_units import ShardedStep, Unit
from chakra_et.transform.operator_times import VIEWS

_CALLS = 85.0, 13.0
"""Work of fully_shard beside its copies, Python included, for each collective and for each parameter in it,
in times of ``call_micros``: benchmarks/fsdp_overhead.py, torch 2.13."""
COPY_IN, COPY_OUT = "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"
CHUNK_CAT, KEEP_PIECE = "fsdp::chunk_cat", "FSDP::post_backward_reduce"
GATHER, SCATTER = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"
WAIT = "FSDP::backward_prefetch"
WORK = (COPY_IN, COPY_OUT, CHUNK_CAT, KEEP_PIECE, GATHER, SCATTER, WAIT)
"""The names of all operators that are put in."""


def call_micros(trace: ExecutionTrace) -> float:
    """What an operator that returns a view takes on average, the measure of the CPU's own speed; µs."""
    of_views = np.array(
        [bool(VIEWS.fullmatch(name.decode("utf-8", "replace"))) for name in trace.names.table]
    )
    chosen = of_views[trace.names.index] & (trace.column("is_cpu_op") != 0)
    return float(trace.duration_micros[chosen].mean()) if chosen.any() else 0.0


@dataclass(frozen=True)
class Nodes:
    """Makes the nodes of one rank's steps. ``call``: its ``call_micros``; ``launch``: µs of a collective's
    call. ``collective``: a row of a measured all-reduce, which lends attributes to the new ones; ``lane``:
    theirs."""

    rate: Elementwise
    call: float
    launch: float
    times: CollectiveTimes
    ranks: int
    collective: int
    lane: int

    def step(self, step: ShardedStep) -> list[New]:
        """New nodes of one step, in execution order."""
        found: list[New] = []
        for unit in step.units:
            found += self._gather(unit, unit.forward)
            found.append(self._copy_out(unit, unit.forward, found[-1]))
        order = step.blocks[::-1]
        gathered: dict[int, New] = {}
        if step.root:
            # Where the root's backward pass begins it fetches the last block, each block the one before it.
            found += self._prefetch(order[0], step.root.backward, gathered)
        for unit, following in zip(order, [*order[1:], None], strict=True):
            if unit.block not in gathered:
                found += self._gather(unit, unit.backward)
                gathered[unit.block] = found[-1]
            found.append(self._copy_out(unit, unit.backward, gathered[unit.block]))
            if following:
                found += self._prefetch(following, unit.backward, gathered)
            if not (step.late and unit.block == 0):
                found += self._reduce(unit)
        for unit in [*([step.root] if step.root else []), *(step.blocks[:1] if step.late else [])]:
            found += self._reduce(unit)
        return found

    def _prefetch(self, unit: Unit, row: int, gathered: dict[int, New]) -> Iterator[New]:
        nodes = self._gather(unit, row)
        gathered[unit.block] = nodes[-1]
        yield from nodes
        yield self._work(WAIT, row, 1, 0, [nodes[-1]])

    def _gather(self, unit: Unit, row: int) -> list[New]:
        size = unit.shard_bytes(self.ranks)
        copy = self._work(COPY_IN, row, self._calls(unit), 2 * size)
        call = self._work(GATHER, row, 0, 0)
        micros = self.times.micros(CollectiveType.ALL_GATHER, size, self.ranks)
        if not self.times.model.was_measured(CollectiveType.ALL_GATHER, self.ranks):
            # gloo's copies out of its own buffer, which a measured one has in it.
            micros += self.rate.micros(2 * size * self.ranks, self.ranks)
        return [copy, call, self._collective(row, CollectiveType.ALL_GATHER, size, micros, call)]

    def _copy_out(self, unit: Unit, row: int, gather: New) -> New:
        moved = 2 * unit.shard_bytes(self.ranks) * self.ranks
        return self._work(COPY_OUT, row, 1, moved, [gather])

    def _reduce(self, unit: Unit) -> list[New]:
        piece, row = unit.shard_bytes(self.ranks), unit.reduced
        size = piece * self.ranks
        copy = self._work(CHUNK_CAT, row, self._calls(unit), 2 * size)
        call = self._work(SCATTER, row, 0, 2 * size)
        micros = self.times.micros(CollectiveType.ALL_REDUCE, size, self.ranks) + self.rate.micros(
            2 * size, 1
        )
        reduce = self._collective(row, CollectiveType.REDUCE_SCATTER, size, micros, call)
        return [copy, call, reduce, self._work(KEEP_PIECE, row, 1, 2 * piece, [reduce])]

    def _calls(self, unit: Unit) -> float:
        return _CALLS[0] + _CALLS[1] * len(unit.gradients)

    def _work(self, name: str, row: int, calls: float, moved: int, needs: list[New] | None = None) -> New:
        """An operator of as many ``calls`` that reads and writes ``moved`` bytes, in front of ``row``."""
        micros = self.rate.micros(moved, 0) + calls * self.call
        micros += self.launch if name in (GATHER, SCATTER) else 0.0
        node = New(row - 1, row, micros, name)
        node.needs, node.texts = [*(needs or [])], {"kind": "operator"}
        return node

    def _collective(self, row: int, kind: CollectiveType, size: int, micros: float, call: New) -> New:
        name = "gloo:all_gather" if kind is CollectiveType.ALL_GATHER else "gloo:all_reduce"
        node = New(row - 1, self.collective, micros, name, [call], collective=size, kind=kind)
        node.lane, node.texts = self.lane, {"kind": "collective"}
        return node
