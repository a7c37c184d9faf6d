"""Another number of data-parallel ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.cost.network_fit import Model
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.job.axes import forward_uses
from chakra_et.job.buckets import FIRST_MIB, OTHERS_MIB
from chakra_et.predict.elementwise import Elementwise
from chakra_et.simulate.run import Run
from chakra_et.text import plural
from chakra_et.transform.bucket_size import plan_buckets, size_of
from chakra_et.transform.ddp import BACK, INTO_BUCKET, Backward, find_backward
from chakra_et.transform.edit import lasting
from chakra_et.transform.insert import New, insert
from chakra_et.transform.network import members_of
from chakra_et.transform.rebuild import Times, as_run, with_transfers

FLAG = "--ranks"
_SAME_SIZE = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.BROADCAST,
    CollectiveType.REDUCE,
    CollectiveType.BARRIER,
)
_GROUP, _CPU = "1", {"kind": "operator"}
# As the reducer of PyTorch 2.x records them with their operators inside: nodes, self time between each.
_INTO_NODES, _LAUNCH_NODES, _BACK_NODES = 11, 2, 6


@dataclass(frozen=True)
class Ranks:
    """The run with ``count`` ranks, each with a batch of the same size and hardware of its own.

    A run of several ranks has to be data-parallel: each collective is one of all ranks and of a size that
    doesn't depend on their number. Its time follows the network's ``model`` (None: fitted to the run); rank R
    computes as rank R modulo the number of measured ranks did.

    A run of one rank gets DDP's copies of gradients to buckets of ``mb`` (None: DDP's default) and back, and
    their all-reduces, which need a ``model``.
    """

    count: int
    mb: float | None = None
    model: Model | None = None

    def rebuild(self, run: Run) -> Run:
        if len(run.graph.ranks) == 1 and not run.is_communication.any():
            return self._with_ddp(run)
        return self._more(run)

    def _more(self, run: Run) -> Run:
        old = len(run.graph.ranks)
        group = _only_group(run)
        times = Times(run, self.model)
        traces, changed = [], 0
        for trace in with_transfers(run):
            kinds, sizes = trace.column("comm_type", -1), trace.column("comm_size", 0)
            rows = np.flatnonzero(trace.types == NodeType.COMM_COLL).tolist()
            micros = {
                row: times.ratio(CollectiveType(kinds[row]), int(sizes[row]), old, self.count)
                * int(trace.duration_micros[row])
                for row in rows
            }
            traces.append(lasting(trace, micros))
            changed += len(rows)
        notes = [
            f"{FLAG} {self.count}: {changed:,} collectives of {plural(old, 'rank')} take as long as the "
            f"model gives for {self.count}: {times.model.describe()}"
        ]
        if self.count > old:
            notes.append(
                f"{FLAG}: {plural(self.count - old, 'rank')} with the times of measured ones, so that steps "
                "don't vary more among them"
            )
        return self._run(run, traces, notes, group)

    def _with_ddp(self, run: Run) -> Run:
        if self.model is None:
            raise TraceError(
                f"{FLAG} {self.count}: a run of one rank has no collectives to fit a network to: give "
                f"--network FILE "
                "of chakra-et measure-network"
            )
        trace, rank = run.graph.traces[0], run.graph.ranks[0]
        if (trace.column("stream", -1) >= 0).any():
            raise TraceError(
                f"{FLAG} {self.count}: DDP can be added to a run of one rank on CPUs alone: capture two ranks"
            )
        steps = find_backward(trace, rank, FLAG)
        first, others = (FIRST_MIB, OTHERS_MIB) if self.mb is None else (self.mb, self.mb)
        rate, new = Elementwise(trace), []
        for step in steps:
            if step.finish >= 0:
                new += self._ddp(trace, step, plan_buckets(step, others, first), rate, self.model)
        made = insert(trace, np.zeros(len(trace), bool), new)
        buckets = sum(node.collective is not None for node in new)
        gradients = sum(len(step.gradients) for step in steps)
        notes = [
            f"{FLAG} {self.count}: {buckets:,} all-reduces in {plural(len(steps), 'step')} are assumed as "
            f"DDP makes them, with buckets of {first:g} MB and then {others:g} MB, and the network of "
            f"{self.model.describe()}",
            f"{FLAG}: {gradients:,} copies of gradients to buckets and as many back are assumed, at the rate "
            f"of "
            "elementwise operators; all ranks compute as the measured one",
        ]
        return self._run(run, [made], notes, _GROUP)

    def _ddp(
        self, trace: ExecutionTrace, step: Backward, plan: list[list[int]], rate: Elementwise, model: Model
    ) -> list[New]:
        """The nodes of one step's reduction."""
        texts = {"kind": "collective", "pg_name": _GROUP, "comm_dtype": step.gradients[0].type}
        lane = int(trace.column("lane", -1).max()) + 1
        new: list[New] = []
        back: list[New] = []
        end = max(step.gradients[-1].rows)
        for part in plan:
            for at in part:
                rows, moved = step.gradients[at].rows, 2 * step.gradients[at].size
                into = New(max(rows), rows[0], rate.micros(moved, _INTO_NODES), INTO_BUCKET, parent=rows[0])
                new.append(into)
                back.append(New(end, step.finish, rate.micros(moved, _BACK_NODES), BACK, texts=_CPU))
            size, rows = size_of(step, part), step.gradients[part[-1]].rows
            launch = New(
                max(rows), rows[0], rate.micros(0, _LAUNCH_NODES), "c10d::allreduce_", parent=rows[0]
            )
            reduce = New(max(rows), rows[0], model.time(CollectiveType.ALL_REDUCE, size, self.count) / 1e3)
            reduce.name, reduce.needs, reduce.parent = "gloo:all_reduce", [launch], launch
            reduce.collective, reduce.lane, reduce.texts = size, lane, texts
            back[-len(part)].needs.append(reduce)
            new += [launch, reduce]
        return [*new, *back]

    def _run(self, run: Run, traces: list[ExecutionTrace], notes: list[str], group: str) -> Run:
        members = list(range(self.count))
        found = []
        for rank in members:
            like = traces[rank % len(traces)]
            metadata = {**like.metadata, "rank": rank, "world_size": self.count}
            metadata["process_groups"] = json.dumps({group: ["0", "default_pg", members]})
            found.append(replace(like, metadata=metadata))
        return as_run(run, found, notes, members, {group: members})


def _only_group(run: Run) -> str:
    """The group of all collectives. Raises ``TraceError`` where there are others, or collectives whose size
    depends on the number of ranks."""
    graph = run.graph
    nodes = np.flatnonzero(run.is_communication)
    kinds = graph.attribute("comm_type", -1)[nodes]
    names = sorted({graph.groups[at] for at in np.unique(graph.group[nodes]).tolist()})
    messages = int((graph.types[nodes] != NodeType.COMM_COLL).sum())
    if messages:
        raise TraceError(
            f"{FLAG}: the run has {plural(messages, 'send or receive', 'sends and receives')} between single "
            "ranks, as pipeline stages have, so that it isn't data-parallel alone"
        )
    if len(names) != 1:
        raise TraceError(
            f"{FLAG}: the communication must be of one group of all ranks, not of {len(names)} groups "
            f"({', '.join(names[:4])})"
        )
    alone = nodes[run.operation[nodes] < 0]
    if len(alone):
        missing = sorted(set(members_of(run, int(alone[0]))) - set(graph.ranks))
        which = f", and those of ranks {', '.join(map(str, missing[:8]))} aren't here" if missing else ""
        raise TraceError(
            f"{FLAG}: {plural(len(alone), 'collective')} of group {names[0]} can't be matched among the "
            f"files of {plural(len(graph.ranks), 'rank')}{which}: give the .et files of all ranks of the run"
        )
    if not np.isin(kinds, _SAME_SIZE).all():
        other = int(kinds[~np.isin(kinds, _SAME_SIZE)][0])
        known = other in set(CollectiveType)
        what = CollectiveType(other).name.lower() if known else f"collectives of unknown type {other}"
        raise TraceError(
            f"{FLAG}: the run shards what it computes ({what}), so that it isn't data-parallel alone"
        )
    shared = list(forward_uses(graph.traces).values())
    if shared:
        raise TraceError(
            f"{FLAG}: {shared[0]}, so that its ranks share work, as with tensor parallelism, and aren't "
            "data-parallel replicas"
        )
    return str(names[0])
