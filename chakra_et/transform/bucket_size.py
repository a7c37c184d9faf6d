"""Other bucket sizes of DistributedDataParallel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.cost.network_fit import NetworkModel
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace
from chakra_et.et.node_attributes import dependencies, lanes, parents
from chakra_et.et.rearrange import New, insert
from chakra_et.simulate.run import Run
from chakra_et.transform.changes import CollectiveTimes, as_run, with_transfers
from chakra_et.transform.ddp import Backward, Bucket, awaited, bucket_bytes, find_backward, plan_buckets

FLAG = "--bucket-mb"


@dataclass(frozen=True)
class BucketSize:
    """DDP with ``bucket_cap_mb=mb``. ``first_mb``: the first bucket's; None: as the others', which is what
    DDP does where bucket_cap_mb is given. ``model``: of the network, None: fitted to the run.

    Gradients go into buckets in the order in which they were ready, and the last one of a bucket launches its
    all-reduce, as the median launch of the run did. Copies into buckets and back stay; the wait for a bucket
    comes just before its first gradient is copied back. With gloo, the last all-reduce of a step takes as
    long as the last ones of the run did, as the backward pass has ended by then.
    """

    mb: float
    first_mb: float | None = None
    model: NetworkModel | None = None

    def rebuild(self, run: Run) -> Run:
        ranks, first_mb = run.graph.ranks, self.mb if self.first_mb is None else self.first_mb
        found = []
        for rank, trace in zip(ranks, with_transfers(run), strict=True):
            found.append((trace, find_backward(trace, rank, FLAG)))
            if not any(step.buckets for step in found[-1][1]):
                raise TraceError(f"{FLAG}: rank {rank} has no all-reduce of gradients: use --ranks for DDP")
        times = last = CollectiveTimes(run, self.model)
        if all((trace.column("stream", -1) < 0).all() for trace, _ in found):
            last = CollectiveTimes(run, self.model, awaited(run, [steps for _, steps in found]))
        traces, sizes = [], []
        for trace, steps in found:
            plan = [plan_buckets(step, self.mb, first_mb) if step.buckets else [] for step in steps]
            sizes.append(
                [
                    [bucket_bytes(step, part) for part in parts]
                    for step, parts in zip(steps, plan, strict=True)
                ]
            )
            traces.append(_rebucketed(trace, steps, plan, times, last, len(ranks)))
        for rank, of_rank in zip(ranks, sizes, strict=True):
            if of_rank != sizes[0]:
                raise TraceError(
                    f"{FLAG}: gradients become ready in another order on rank {rank} than on rank {ranks[0]}"
                )
        before = sum(len(step.buckets) for step in steps) / len(steps)
        note = (
            f"{FLAG} {self.mb:g}: {sum(map(len, sizes[0])) / len(steps):g} buckets per step in place of "
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
    old = sorted(
        (bucket for step in steps for bucket in step.buckets),
        key=lambda bucket: int(trace.duration_micros[bucket.launch].sum()),
    )
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
            last, size = max(around), bucket_bytes(step, part)
            of_network = last_times if number == len(parts) - 1 else times
            launch = {
                row: New(last, row, float(trace.duration_micros[row]), parent=around[0])
                for row in model.launch
            }
            for row, node in launch.items():
                node.parent = launch.get(int(above[row]), around[0])
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
