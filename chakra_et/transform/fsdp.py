"""Another way to shard: a run of DistributedDataParallel as FSDP2 (``fully_shard``) would run it.

As ``fully_shard`` called on each block and on the model, with its defaults: a parameter is cut along
dimension 0 into one piece per rank, padded to equal pieces (torch/distributed/fsdp/_fully_shard).

On CPU ranks with gloo each collective is awaited where it is called: FSDP2 prefetches in the backward pass,
which changes their order, but nothing runs beside them. gloo gathers into one buffer and copies each rank's
piece out of it; it has no reduce-scatter, and reduces the whole of a copy, divides it, and keeps a piece
(ProcessGroupGloo.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.cost.network_fit import NetworkModel
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace
from chakra_et.et.node_attributes import lanes
from chakra_et.et.rearrange import New, insert
from chakra_et.job.blocks import Blocks, find_blocks
from chakra_et.job.operators import Operators, Shape, operators_of, with_shapes
from chakra_et.simulate.run import Run
from chakra_et.transform.changes import CollectiveTimes, as_run, with_transfers
from chakra_et.transform.ddp import Backward, ReadyGradient, awaited, find_backward, reduction, refuse_others
from chakra_et.transform.operator_times import VIEWS, Elementwise, resized

FLAG = "--shard fsdp2"
_DOUBT = 0.25
"""Of the time of fully_shard's own work: one standard deviation. benchmarks/fsdp_overhead.py is off by 7%,
and the rate of copies is that of other operators."""
_CALLS = 85.0, 13.0
"""Work of fully_shard beside its copies, Python included, for each collective and for each parameter in it,
in times of ``view_micros``: benchmarks/fsdp_overhead.py, torch 2.13."""
_COPY_IN, _COPY_OUT = "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"
_CHUNK_CAT, _KEEP_PIECE = "fsdp::chunk_cat", "FSDP::post_backward_reduce"
_GATHER, _SCATTER = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"
_WAIT = "FSDP::backward_prefetch"
_WORK = (_COPY_IN, _COPY_OUT, _CHUNK_CAT, _KEEP_PIECE, _GATHER, _SCATTER, _WAIT)
"""The names of all operators that are put in."""


@dataclass(frozen=True)
class Shard:
    """DDP's run as that of FSDP2: ``fully_shard`` on each repeated block and on the model, with its defaults.

    Blocks are gathered in front of their forward and of their backward pass (the root once), gradients
    reduce-scattered behind the latter, and the optimizer works on one piece of each parameter. ``model``: of
    the network, None: fitted to the run. CPU ranks alone.
    """

    model: NetworkModel | None = None

    def rebuild(self, run: Run) -> Run:
        ranks, where = len(run.graph.ranks), f"{FLAG}: {run.name}"
        traces = dict(zip(run.graph.ranks, with_transfers(run), strict=True))
        for rank, trace in traces.items():
            if (trace.column("stream", -1) >= 0).any():
                raise TraceError(
                    f"{FLAG}: rank {rank} ran on a GPU: only CPU ranks are known, whose thread awaits gloo"
                )
        backward = {rank: _backward(trace, rank) for rank, trace in traces.items()}
        operators = {rank: operators_of(trace, f"{where}.{rank}") for rank, trace in traces.items()}
        blocks = find_blocks(operators, where)
        times = CollectiveTimes(run, self.model, awaited(run, list(backward.values())))
        made, counts, planned = [], [], []
        of_rank = {
            rank: [find_units(each, blocks[rank], step, f"{where}.{rank}") for step in backward[rank]]
            for rank, each in operators.items()
        }
        for place, (rank, steps) in enumerate(of_rank.items()):
            planned.append([[unit.shard_bytes(ranks) for unit in step.units] for step in steps])
            if planned[-1] != planned[0]:
                raise TraceError(
                    f"{where}: rank {rank} has other parameters in its blocks than rank {run.graph.ranks[0]}"
                )
            trace, count = _sharded(traces[rank], backward[rank], steps, times, place, ranks)
            made.append(trace)
            counts.append(count)
        first, known = of_rank[run.graph.ranks[0]][0], backward[run.graph.ranks[0]]
        changed = as_run(run, made, [])
        setting, kinds = changed.measured, changed.graph.attribute("comm_type", -1)
        assumed = changed.named(_WORK.__contains__)
        buckets = sum(len(step.buckets) for step in known) / len(known)
        sources = " and ".join(sorted({each.source for each in blocks.values()}))
        nodes, before, after = np.sum(counts, axis=0).tolist()
        notes = [
            f"{FLAG}: {len(first.blocks)} blocks recognised by {sources}, and "
            f"{len(first.root.gradients) if first.root else 0} other parameters in the root: "
            f"{len(first.units) + len(first.blocks)} all-gathers and {len(first.units)} reduce-scatters per "
            f"step in place of {buckets:g} all-reduces of DDP; their times by the network that fits each "
            f"step's last all-reduce, which nothing runs beside: {times.model.describe()}; a reduce-scatter "
            "of gloo's takes what an all-reduce does",
            f"{FLAG}: {int(assumed.sum()):,} operators of fully_shard are assumed, at the rate of "
            "elementwise operators",
            f"{FLAG}: {nodes:,} operators of the optimizer work on pieces: {before / 1e3:,.3f} ms become "
            f"{after / 1e3:,.3f} ms",
        ]
        setting = replace(setting, notes=(*setting.notes, *notes))
        setting = setting.doubting(own_ns=np.where(assumed, _DOUBT * setting.own_ns, 0))
        moved = np.isin(kinds, [CollectiveType.ALL_GATHER, CollectiveType.REDUCE_SCATTER])
        off = np.where(moved, max(times.model.error, times.scatter) * setting.lasting_ns, 0)
        return replace(changed, measured=setting.doubting(lasting_ns=off))


def _backward(trace: ExecutionTrace, rank: int) -> list[Backward]:
    """The steps of DDP. Raises ``TraceError`` for any other communication."""
    steps = find_backward(trace, rank, FLAG)
    refuse_others(trace, rank, steps, np.arange(len(trace)), FLAG)
    bare = sum(not step.buckets for step in steps)
    if bare:
        raise TraceError(
            f"{FLAG}: {bare} of {len(steps)} steps of rank {rank} have no all-reduce of gradients"
        )
    return steps


def ddp_rows(trace: ExecutionTrace, steps: Sequence[Backward]) -> np.ndarray:
    """bool[N]: what DDP does for the reduction, to the last copy back behind the last gradient."""
    found, lane = reduction(trace, steps), lanes(trace)
    for step in steps:
        last = max(gradient.back for gradient in step.gradients)
        if last >= 0:
            rows = np.arange(step.finish, last + 1)
            found[rows[lane[rows] == lane[step.finish]]] = True
    return found


def _sharded(
    trace: ExecutionTrace,
    backward: Sequence[Backward],
    steps: Sequence[ShardedStep],
    times: CollectiveTimes,
    place: int,
    ranks: int,
) -> tuple[ExecutionTrace, np.ndarray]:
    """One rank's trace with what FSDP2 does in place of DDP, and (nodes, µs before, after) of the optimizer
    on its piece of each tensor with a parameter's shape."""
    collective = backward[0].buckets[0].collective
    # What a call does behind the launch, it does beside the collective.
    launches = [trace.duration_micros[b.launch[0]] for step in backward for b in step.buckets]
    costs = Elementwise(trace), view_micros(trace), float(np.median(launches))
    nodes = Nodes(*costs, times, ranks, collective, int(trace.column("lane", -1)[collective]))
    parameters = {each.shape for step in backward for each in step.gradients}

    def piece(shape: Shape) -> Shape:
        if shape not in parameters:
            return shape
        rows = -(-shape[0] // ranks)
        return (min(max(shape[0] - place * rows, 0), rows), *shape[1:])

    made, count = resized(trace, lambda shapes: with_shapes(shapes, piece), b"optimizer")
    new = [node for step in steps for node in nodes.step(step)]
    return insert(made, ddp_rows(trace, backward), new), count


def view_micros(trace: ExecutionTrace) -> float:
    """What an operator that returns a view takes on average, the measure of the CPU's own speed; µs."""
    views = [bool(VIEWS.fullmatch(name.decode("utf-8", "replace"))) for name in trace.names.table]
    chosen = np.array(views, bool)[trace.names.index] & (trace.column("is_cpu_op") != 0)
    return float(trace.duration_micros[chosen].mean()) if chosen.any() else 0.0


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together: a repeated block, or the rest (root). ``block``: number of its
    block, -1: the root. Rows in front of which it is gathered: ``forward``, and ``backward`` (of the root:
    where the backward pass begins); ``reduced``: the row in front of which its gradients are reduced."""

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
    *of_blocks, rest = held
    units = []
    for block, gradients in enumerate(of_blocks):
        mine = blocks.block[on_cpu] == block
        there, back = on_cpu[mine & ~backward], on_cpu[mine & backward]
        if not gradients or not len(there) or not len(back):
            raise TraceError(
                f"{where}: block {block} of {blocks.held} has no gradients: only trained blocks are known"
            )
        units.append(Unit(block, gradients, int(there[0]), int(back[0]), int(back[-1]) + 1))
    for one, two in zip(units, units[1:], strict=False):
        if one.forward > two.forward or one.backward < two.reduced:
            raise TraceError(f"{where}: blocks {one.block} and {two.block} don't run one behind the other")
    # The root is gathered in front of the model's first operator, and its first gradient begins the
    # backward pass.
    phases = [(row, operators.phase[row]) for row in inside.tolist() if operators.top[row] == row]
    first = {phase: next((row for row, of in phases if of == phase), -1) for phase in ("forward", "backward")}
    root = Unit(-1, rest, first["forward"], first["backward"], end) if rest else None
    late = not any(each.rows[0] >= units[0].reduced for each in rest)
    if late:
        units[0] = replace(units[0], reduced=end)
    found = ShardedStep(root, units, late)
    for unit in found.units:  # what fully_shard refuses
        of = "the root" if unit.block < 0 else f"block {unit.block}"
        if any(not each.shape for each in unit.gradients):
            raise TraceError(f"{where}: {of} has a parameter without dimensions, which can't be sharded")
        types = sorted({each.type for each in unit.gradients})
        if len(types) > 1:
            raise TraceError(f"{where}: {of} has parameters of {' and '.join(types)}: FSDP2 needs one type")
    return found


@dataclass(frozen=True)
class Nodes:
    """Makes the nodes of one rank's steps. ``call``: its ``view_micros``; ``launch``: µs of a collective's
    call. ``collective``: a measured all-reduce, which lends attributes to new ones; ``lane``: theirs."""

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
        yield self._work(_WAIT, row, 1, 0, [nodes[-1]])

    def _gather(self, unit: Unit, row: int) -> list[New]:
        size = unit.shard_bytes(self.ranks)
        copy = self._work(_COPY_IN, row, self._calls(unit), 2 * size)
        call = self._work(_GATHER, row, 0, 0)
        micros = self.times.micros(CollectiveType.ALL_GATHER, size, self.ranks)
        if not self.times.model.was_measured(CollectiveType.ALL_GATHER, self.ranks):
            # gloo's copies out of its own buffer, which a measured one has in it.
            micros += self.rate.micros(2 * size * self.ranks, self.ranks)
        return [copy, call, self._collective(row, CollectiveType.ALL_GATHER, size, micros, call)]

    def _copy_out(self, unit: Unit, row: int, gather: New) -> New:
        return self._work(_COPY_OUT, row, 1, 2 * unit.shard_bytes(self.ranks) * self.ranks, [gather])

    def _reduce(self, unit: Unit) -> list[New]:
        piece, row = unit.shard_bytes(self.ranks), unit.reduced
        size = piece * self.ranks
        copy = self._work(_CHUNK_CAT, row, self._calls(unit), 2 * size)
        call = self._work(_SCATTER, row, 0, 2 * size)
        micros = self.times.micros(CollectiveType.ALL_REDUCE, size, self.ranks)
        micros += self.rate.micros(2 * size, 1)
        reduce = self._collective(row, CollectiveType.REDUCE_SCATTER, size, micros, call)
        return [copy, call, reduce, self._work(_KEEP_PIECE, row, 1, 2 * piece, [reduce])]

    def _calls(self, unit: Unit) -> float:
        return _CALLS[0] + _CALLS[1] * len(unit.gradients)

    def _work(self, name: str, row: int, calls: float, moved: int, needs: Sequence[New] = ()) -> New:
        """An operator of as many ``calls`` that reads and writes ``moved`` bytes, in front of ``row``."""
        micros = self.rate.micros(moved, 0) + calls * self.call
        micros += self.launch if name in (_GATHER, _SCATTER) else 0.0
        return New(row - 1, row, micros, name, [*needs], texts={"kind": "operator"})

    def _collective(self, row: int, kind: CollectiveType, size: int, micros: float, call: New) -> New:
        name = "gloo:all_gather" if kind is CollectiveType.ALL_GATHER else "gloo:all_reduce"
        node = New(row - 1, self.collective, micros, name, [call], collective=size, kind=kind)
        node.lane, node.texts = self.lane, {"kind": "collective"}
        return node
