"""Another way to shard: a run of DistributedDataParallel as FSDP2 (``fully_shard``) would run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.cost.network_fit import Model
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import lanes
from chakra_et.et.rearrange import insert
from chakra_et.job.blocks import Blocks, find_blocks
from chakra_et.job.operators import Operators, operators_of
from chakra_et.simulate.run import Run
from chakra_et.transform.changes import CollectiveTimes, as_run, with_transfers
from chakra_et.transform.ddp import Backward, awaited, find_backward, reduction
from chakra_et.transform.elementwise_rate import Elementwise
from chakra_et.transform.fsdp_nodes import WORK, Nodes, call_micros
from chakra_et.transform.fsdp_optimizer import Sharded, with_sharded_optimizer
from chakra_et.transform.fsdp_units import ShardedStep, described, find_units

FLAG = "--shard fsdp2"
_DOUBT = 0.25
"""Of the time of fully_shard's own work: one standard deviation. benchmarks/fsdp_overhead.py is off by 7%,
and the rate of copies is that of other operators."""


@dataclass(frozen=True)
class Shard:
    """DDP's run as that of FSDP2: ``fully_shard`` on each repeated block and on the model, with its defaults.

    Blocks are gathered in front of their forward and of their backward pass (the root once), gradients
    reduce-scattered behind the latter, and the optimizer works on one piece of each parameter. ``model``: of
    the network, None: fitted to the run. CPU ranks alone.
    """

    model: Model | None = None

    def rebuild(self, run: Run) -> Run:
        ranks = len(run.graph.ranks)
        traces = dict(zip(run.graph.ranks, with_transfers(run), strict=True))
        for rank, trace in traces.items():
            _check_device(trace, rank)
        where = f"{FLAG}: {run.name}"
        backward = {rank: _backward(trace, rank) for rank, trace in traces.items()}
        operators = {rank: operators_of(trace, f"{where}.{rank}") for rank, trace in traces.items()}
        blocks = find_blocks(operators, where)
        times = CollectiveTimes(run, self.model, awaited(run, list(backward.values())))
        made, planned = [], []
        for place, (rank, each) in enumerate(operators.items()):
            steps = [find_units(each, blocks[rank], step, f"{where}.{rank}") for step in backward[rank]]
            planned.append(steps)
            made.append(_sharded(each, backward[rank], steps, times, place, ranks))
            if described(steps, ranks) != described(planned[0], ranks):
                raise TraceError(
                    f"{where}: rank {rank} has other parameters in its blocks than rank {run.graph.ranks[0]}"
                )
        notes = _notes(run, backward, blocks, planned, made, times)
        return _doubting(as_run(run, [each.trace for each in made], notes), times)


def _check_device(trace: ExecutionTrace, rank: int) -> None:
    if (trace.column("stream", -1) >= 0).any():
        raise TraceError(
            f"{FLAG}: rank {rank} ran on a GPU: only CPU ranks are known, whose thread awaits gloo"
        )


def _backward(trace: ExecutionTrace, rank: int) -> list[Backward]:
    """The steps of DDP. Raises ``TraceError`` for any other communication."""
    steps = find_backward(trace, rank, FLAG)
    known = {bucket.collective for step in steps for bucket in step.buckets}
    other = sorted(set(np.flatnonzero(trace.types >= NodeType.COMM_SEND).tolist()) - known)
    if other:
        raise TraceError(
            f"{FLAG}: {len(other):,} of {len(known) + len(other):,} communication operators of rank {rank} "
            f"aren't DDP's all-reduces of gradients, {trace.names[other[0]]} for one"
        )
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
    operators: Operators,
    backward: Sequence[Backward],
    steps: Sequence[ShardedStep],
    times: CollectiveTimes,
    place: int,
    ranks: int,
) -> Sharded:
    """One rank's trace with what FSDP2 does in place of DDP."""
    trace = operators.trace
    collective = backward[0].buckets[0].collective
    lane = int(trace.column("lane", -1)[collective])
    # What a call does behind the launch, it does beside the collective.
    launches = [trace.duration_micros[b.launch[0]] for step in backward for b in step.buckets]
    costs = Elementwise(trace), call_micros(trace), float(np.median(launches))
    nodes = Nodes(*costs, times, ranks, collective, lane)
    shapes = {each.shape for step in backward for each in step.gradients}
    made = with_sharded_optimizer(trace, shapes, place, ranks)
    new = [node for step in steps for node in nodes.step(step)]
    return replace(made, trace=insert(made.trace, ddp_rows(trace, backward), new))


def _notes(
    run: Run,
    backward: dict[int, list[Backward]],
    blocks: dict[int, Blocks],
    planned: Sequence[Sequence[ShardedStep]],
    made: Sequence[Sharded],
    times: CollectiveTimes,
) -> list[str]:
    steps, first = planned[0], planned[0][0]
    buckets = sum(len(step.buckets) for step in backward[run.graph.ranks[0]]) / len(steps)
    sources = " and ".join(sorted({each.source for each in blocks.values()}))
    units, gathers = len(first.units), len(first.units) + len(first.blocks)
    work = sum(int(np.isin(each.trace.names.index, _indices(each.trace)).sum()) for each in made)
    before, after = (sum(getattr(each, name) for each in made) / 1e3 for name in ("before", "after"))
    others = len(first.root.gradients) if first.root else 0
    return [
        f"{FLAG}: {len(first.blocks)} blocks recognised by {sources}, and {others} other parameters in the "
        f"root: {gathers} all-gathers and {units} reduce-scatters per step in place of {buckets:g} "
        f"all-reduces of DDP; their times by the network that fits each step's last all-reduce, which "
        f"nothing runs beside: {times.model.describe()}; a reduce-scatter of gloo's takes what an all-reduce "
        "does",
        f"{FLAG}: {work:,} operators of fully_shard are assumed, at the rate of elementwise operators",
        f"{FLAG}: {sum(each.nodes for each in made):,} operators of the optimizer work on pieces: "
        f"{before:,.3f} ms become {after:,.3f} ms",
    ]


def _indices(trace: ExecutionTrace) -> list[int]:
    """Where the table of names has the operators of fully_shard."""
    known = {name.encode() for name in WORK}
    return [at for at, name in enumerate(trace.names.table) if name in known]


def _doubting(run: Run, times: CollectiveTimes) -> Run:
    """The run with the doubt in what was assumed."""
    setting = run.measured
    assumed = np.isin(run.name_of, [at for at, name in enumerate(run.names) if name in WORK])
    kinds = run.graph.attribute("comm_type", -1)
    moved = np.isin(kinds, [int(CollectiveType.ALL_GATHER), int(CollectiveType.REDUCE_SCATTER)])
    setting = setting.doubting("work of fully_shard", own_ns=np.where(assumed, _DOUBT * setting.own_ns, 0))
    off = np.where(moved, max(times.model.error, times.scatter) * setting.lasting_ns, 0)
    setting = setting.doubting("gathers and reduce-scatters", lasting_ns=off)
    return replace(run, measured=setting)
