"""What DistributedDataParallel did in a trace: when each gradient was ready, and which all-reduce took it;
and what it would do with buckets of another size.

DDP hangs its work on the autograd function that accumulates a gradient: it copies the gradient into a bucket,
and the last gradient of a bucket launches the bucket's all-reduce. At the end of the backward pass it waits
for the buckets in order and copies each back. Source: torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chakra_et.cost.network_fit import NetworkModel
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import dependencies, lanes, parents
from chakra_et.et.rearrange import New, insert
from chakra_et.job.gradients import buckets_of, sweeps_of
from chakra_et.job.operators import GRADIENT, Operators, inside, operators_of
from chakra_et.simulate.measured_steps import step_rows
from chakra_et.simulate.run import Run
from chakra_et.transform.changes import CollectiveTimes, as_run, with_transfers

BACK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
"""What copies a reduced gradient out of its bucket."""
INTO_BUCKET = "torch::distributed::reducer::mul_out"
"""The operator that divides a gradient by the number of ranks and writes it to its bucket."""
SUM_BYTES = 256


@dataclass(frozen=True)
class ReadyGradient:
    """``rows``: its accumulation with all inside, ascending, without the launch of an all-reduce; ``size`` in
    bytes of the element ``type``; ``shape``; ``back``: the last row of its copy back, -1 for none."""

    rows: list[int]
    size: int
    type: str
    shape: tuple[int, ...]
    back: int


@dataclass(frozen=True)
class Bucket:
    """``launch``: the rows of the operator that launches the all-reduce; ``collective``: the row of the
    all-reduce; ``first``, ``last``: its gradients are step.gradients[first:last]."""

    launch: list[int]
    collective: int
    first: int
    last: int


@dataclass(frozen=True)
class Backward:
    """One step: its gradients in the order in which they became ready, its buckets, and the row with which
    the thread goes on behind the last gradient (-1: none). ``begin``, ``end``: the rows of the step."""

    gradients: list[ReadyGradient]
    buckets: list[Bucket]
    finish: int
    begin: int
    end: int

    def bytes_of(self, bucket: list[int]) -> int:
        return sum(self.gradients[at].size for at in bucket)

    def rebucketed(self, limit: float) -> list[list[int]]:
        """The gradients of each bucket of ``limit`` bytes."""
        sizes, types = ([getattr(each, of) for each in self.gradients] for of in ("size", "type"))
        return buckets_of(sizes, types, limit, limit)


def find_backward(trace: ExecutionTrace, rank: int, flag: str) -> list[Backward]:
    """The backward passes of a trace, one per step. Raises ``TraceError``, which begins with ``flag``, where
    gradients or their sizes aren't recorded, or where they aren't what was all-reduced."""
    operators = operators_of(trace, f"{flag}: rank {rank}")
    sweeps, top = sweeps_of(operators, None), operators.top
    recorded = (each for sweep in sweeps for each in sweep.gradients if each.type)
    ready = sorted(recorded, key=lambda each: each.row)
    if not ready:
        raise TraceError(
            f"{flag}: rank {rank} has no node {GRADIENT} with a recorded shape: capture CPU operators with "
            "record_shapes"
        )
    group = inside(trace, [int(top[each.row]) for each in ready])
    launched = _launches(operators, [each for sweep in sweeps for each in sweep.launches])
    lane, on_cpu = lanes(trace), trace.column("is_cpu_op") != 0
    steps = step_rows(trace)[1].tolist() or [0]
    copies = [row for row, name in enumerate(operators.name) if name == BACK and operators.shapes(row)]
    part, backs, found = inside(trace, copies), np.full(len(copies), -1), []
    backs[part[part >= 0]] = np.flatnonzero(part >= 0)  # the last row of each
    for begin, end in zip(steps, [*steps[1:], len(trace)], strict=True):
        mine = [at for at, each in enumerate(ready) if begin <= each.row < end]
        if not mine:
            continue
        back = backs[(begin <= backs) & (backs < end)].tolist()
        back = back if len(back) == len(mine) else [-1] * len(mine)
        gradients, launches = [], []
        for at, behind in zip(mine, back, strict=True):
            rows, each = np.flatnonzero(group == at).tolist(), ready[at]
            launches += [(launched[row], row) for row in rows if row in launched]
            reducing = {row for launch, collective in launches for row in (*launch, collective)}
            own = [row for row in rows if row not in reducing]
            gradients.append(ReadyGradient(own, each.bytes, each.type, each.shape, behind))
        last = int(np.flatnonzero((group == mine[-1]) & on_cpu).max())
        after = np.flatnonzero((lane == lane[last]) & (np.arange(len(trace)) > last))
        finish = int(after[0]) if len(after) and after[0] < end else -1
        buckets = _buckets(trace, launches, gradients, f"a step of rank {rank}", flag)
        found.append(Backward(gradients, buckets, finish, begin, end))
    return found


def _launches(operators: Operators, known: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """By all-reduce, the rows of the operator that launched it, right inside that of a gradient; ``known``:
    (all-reduce, the innermost operator around it)."""
    kinds, parent = operators.trace.column("comm_type", -1), operators.parent
    outer = {row: launch for row, launch in known if kinds[row] == CollectiveType.ALL_REDUCE}
    for row, launch in outer.items():
        while parent[launch] not in (operators.top[launch], -1):
            launch = int(parent[launch])
        outer[row] = launch
    part = inside(operators.trace, list(outer.values()))
    rows, found = np.arange(len(part)), {}
    for at, (row, launch) in enumerate(outer.items()):
        # A collective right inside the operator of the gradient has no launch.
        found[row] = rows[(part == at) & (rows != row)].tolist() if parent[launch] >= 0 else []
    return found


def refuse_others(
    trace: ExecutionTrace, rank: int, steps: Sequence[Backward], rows: np.ndarray, flag: str
) -> None:
    """Raises ``TraceError``, which begins with ``flag``, for communication among the ``rows`` that isn't
    DDP's: FSDP's, or tensor and pipeline parallelism's. Sums of a few numbers, as of losses, may stay."""
    talks = rows[trace.types[rows] >= NodeType.COMM_SEND]
    summed = trace.column("comm_type", -1)[talks] == CollectiveType.ALL_REDUCE
    talks = talks[~summed | (trace.column("comm_size", 0)[talks] > SUM_BYTES)]
    other = np.setdiff1d(talks, [bucket.collective for step in steps for bucket in step.buckets])
    if len(other):
        raise TraceError(
            f"{flag}: {len(other):,} of {len(talks):,} communication operators of rank {rank} aren't DDP's "
            f"all-reduces of gradients, {trace.names[int(other[0])]} for one: only runs of DDP are known"
        )


def awaited(run: Run, backward: Sequence[Sequence[Backward]]) -> np.ndarray:
    """bool[N]: the last all-reduce of each step of each trace. Others run beside the backward pass, with
    which gloo's threads share the cores."""
    columns = []
    for trace, steps in zip(run.graph.traces, backward, strict=True):
        columns.append(np.zeros(len(trace), bool))
        columns[-1][[step.buckets[-1].collective for step in steps if step.buckets]] = True
    return np.asarray(run.graph.gather(columns))


def reduction(trace: ExecutionTrace, steps: Sequence[Backward]) -> np.ndarray:
    """bool[N]: the launches, the all-reduces and the copies of gradients into buckets."""
    found = np.zeros(len(trace), bool)
    for step in steps:
        for bucket in step.buckets:
            found[[*bucket.launch, bucket.collective]] = True
    recorded = trace.inputs.rows.tolist() if trace.inputs else []
    return found | (inside(trace, [row for row in recorded if trace.names[row] == INTO_BUCKET]) >= 0)


def _buckets(
    trace: ExecutionTrace,
    launched: list[tuple[list[int], int]],
    gradients: list[ReadyGradient],
    step: str,
    flag: str,
) -> list[Bucket]:
    """The buckets, whose bytes must be those of successive gradients."""
    size = trace.column("comm_size", -1)
    found: list[Bucket] = []
    first = 0
    for launch, row in launched:
        last, held = first, 0
        while last < len(gradients) and held < size[row]:
            held += gradients[last].size
            last += 1
        if held != size[row]:
            raise TraceError(
                f"{flag}: all-reduce {len(found) + 1} of {step} has {size[row]:,} bytes, which are not those "
                f"of successive gradients ({held:,}): only DDP without a hook, frozen parameters or sparse "
                "gradients is known"
            )
        found.append(Bucket(launch, row, first, last))
        first = last
    if found and first < len(gradients):
        raise TraceError(
            f"{flag}: {len(gradients) - first} of {len(gradients)} gradients of {step} are not in any "
            "all-reduce: accumulated steps can't be changed again"
        )
    return found


@dataclass(frozen=True)
class BucketSize:
    """DDP with ``bucket_cap_mb=mb``, the first bucket's too. ``model``: of the network, None: fitted to the
    run.

    Gradients go into buckets in the order in which they were ready, and the last one of a bucket launches its
    all-reduce, as the median launch of the run did. Copies into buckets and back stay; the wait for a bucket
    comes just before its first gradient is copied back. With gloo, the last all-reduce of a step takes as
    long as the last ones of the run did, the backward pass being over.
    """

    mb: float
    model: NetworkModel | None = None

    def rebuild(self, run: Run) -> Run:
        ranks = run.graph.ranks
        found = []
        for rank, trace in zip(ranks, with_transfers(run), strict=True):
            found.append((trace, find_backward(trace, rank, "--bucket-mb")))
            if not any(step.buckets for step in found[-1][1]):
                raise TraceError(f"--bucket-mb: rank {rank} has no all-reduce of gradients: use --dp for DDP")
        times = last = CollectiveTimes(run, self.model)
        if all((trace.column("stream", -1) < 0).all() for trace, _ in found):
            last = CollectiveTimes(run, self.model, awaited(run, [steps for _, steps in found]))
        traces, sizes = [], []
        for trace, steps in found:
            plan = [step.rebucketed(self.mb * 2**20) if step.buckets else [] for step in steps]
            pairs = zip(steps, plan, strict=True)
            sizes.append([[step.bytes_of(part) for part in parts] for step, parts in pairs])
            traces.append(_rebucketed(trace, steps, plan, times, last, len(ranks)))
        for rank, of_rank in zip(ranks, sizes, strict=True):
            if of_rank != sizes[0]:
                raise TraceError(
                    f"--bucket-mb: gradients become ready in another order on rank {rank} than on rank "
                    f"{ranks[0]}"
                )
        before = sum(len(step.buckets) for step in steps) / len(steps)
        note = (
            f"--bucket-mb {self.mb:g}: {sum(map(len, sizes[0])) / len(steps):g} buckets per step in place of "
            f"{before:g}; their times by the network of {times.model.describe()}"
        )
        return as_run(run, traces, [note])


def _rebucketed(
    trace: ExecutionTrace,
    steps: list[Backward],
    plan: list[list[list[int]]],
    times: CollectiveTimes,
    last_times: CollectiveTimes,
    ranks: int,
) -> ExecutionTrace:
    """``last_times`` is for the last bucket of each step, ``times`` for all other buckets."""
    buckets = (bucket for step in steps for bucket in step.buckets)
    old = sorted(buckets, key=lambda bucket: int(trace.duration_micros[bucket.launch].sum()))
    model = old[(len(old) - 1) // 2]  # the bucket whose launch took the median time
    removed = np.zeros(len(trace), bool)
    for bucket in old:
        removed[[*bucket.launch, bucket.collective]] = True
    wiring = _Wiring(trace, old, removed)
    numbers = sorted(set(trace.column("lane", -1)[[bucket.collective for bucket in old]].tolist()))
    above = parents(trace)
    new: list[New] = []
    for step, parts in zip(steps, plan, strict=True):
        for number, part in enumerate(parts):
            around = step.gradients[part[-1]].rows
            last, size = max(around), step.bytes_of(part)
            of_network = last_times if number == len(parts) - 1 else times
            launch: dict[int, New] = {}
            for row in model.launch:
                outer = launch.get(int(above[row]), around[0])
                launch[row] = New(last, row, float(trace.duration_micros[row]), parent=outer)
            before = wiring.before(last)
            first, *rest = launch.values() or [None]
            reduce = New(
                max([last, *before]),
                model.collective,
                of_network.micros(CollectiveType.ALL_REDUCE, size, ranks),
                needs=[first or last, *before],
                needed_by=wiring.waiting(step, part),
                parent=launch.get(int(above[model.collective]), around[0]),
                collective=size,
                lane=numbers[number % len(numbers)],
            )
            new += [*([first] if first else []), reduce, *(node for node in rest if node)]
    return insert(trace, removed, new)


class _Wiring:
    """What all-reduces wait for on the device, and what waits for them."""

    def __init__(self, trace: ExecutionTrace, old: list[Bucket], removed: np.ndarray) -> None:
        self.removed = removed
        self.source, self.target = dependencies(trace)
        collectives = np.array([bucket.collective for bucket in old])
        self.on_cpu = trace.column("is_cpu_op") != 0
        self.lane = lanes(trace)
        into = np.isin(self.target, collectives) & ~removed[self.source] & ~self.on_cpu[self.source]
        self.streams = np.unique(self.lane[self.source[into]]).tolist()
        # The call that launched each kernel.
        self.launcher = np.full(len(trace), -1)
        launches = self.on_cpu[self.source] & ~self.on_cpu[self.target]
        self.launcher[self.target[launches]] = self.source[launches]

    def before(self, row: int) -> list[int]:
        """The last kernels launched up to CPU node ``row`` on the streams that all-reduces wait for."""
        found = []
        for stream in self.streams:
            kernels = np.flatnonzero((self.lane == stream) & (self.launcher >= 0) & (self.launcher <= row))
            kernels = kernels[~self.removed[kernels]]
            if len(kernels):
                found.append(int(kernels.max()))
        return found

    def waiting(self, step: Backward, part: list[int]) -> list[int]:
        """What waits for a bucket: the copy back of its first gradient, or what waited for that gradient's
        bucket in the run."""
        finish = step.finish if step.finish >= 0 else len(self.removed)
        old = next(each for each in step.buckets if each.first <= part[0] < each.last)
        known = self.target[self.source == old.collective]
        later = known[~self.removed[known] & (known >= finish)]
        device: list[int] = later[~self.on_cpu[later]].tolist()
        if device or step.finish < 0:
            return device
        before = step.gradients[part[0] - 1].back if part[0] else -1
        if before < 0:
            return [step.finish]
        after = np.flatnonzero(self.lane[before + 1 :] == self.lane[before])
        return [before + 1 + int(after[0])] if len(after) else []
