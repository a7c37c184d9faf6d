"""More or fewer repeated blocks: what ``chakra-et scale --layers`` does to a set, for a prediction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.cost.network_fit import Model
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.job.gradients import Retime
from chakra_et.job.mesh import Mesh, mesh_of, message_distances
from chakra_et.simulate.run import Run
from chakra_et.transform import remodel
from chakra_et.transform.edit import lasting
from chakra_et.transform.network import find_communication, samples
from chakra_et.transform.rebuild import Times, as_run, with_transfers

FLAG = "--layers"


@dataclass(frozen=True)
class Layers:
    """``count`` repeated blocks: a number as text, or a factor as ``2x``. See ``simulators.layers``.

    Collectives of other bytes take what the network's ``model`` gives (None: fitted to the run).
    """

    count: str
    model: Model | None = None

    def rebuild(self, run: Run) -> Run:
        traces = dict(enumerate(with_transfers(run)))
        wanted = remodel.Model(layers=self.count)
        made = remodel.remodelled(traces, _stages(run), wanted, self._retime(run), f"{FLAG}: {run.name}")
        matched = run.graph.scatter((run.operation >= 0).astype(np.int64))
        found = [_retimed(trace, matched[at][made.source[at]] > 0) for at, trace in made.traces.items()]
        return as_run(run, found, [f"{FLAG} {self.count}: {note}" for note in made.notes])

    def _retime(self, run: Run) -> Retime:
        known = self.model or any(each.ranks > 1 for each in samples(find_communication(run)))
        times = Times(run, self.model) if known else None

        def micros(kind: CollectiveType, before: int, after: int, group: str, taken: float) -> float:
            members = len(run.comm_groups.get(group, ())) or len(run.graph.ranks)
            ratio = times.of_sizes(kind, after, before, members) if times and members > 1 else after / before
            return taken * ratio

        return micros


def _stages(run: Run) -> Mesh:
    """The mesh as far as its pipeline stages go, which messages show."""
    ranks = run.graph.ranks
    distances = message_distances(run.graph.traces)
    if distances and ranks != list(range(len(ranks))):
        raise TraceError(f"{FLAG}: {run.name} has messages between stages: give the files of all ranks")
    return mesh_of({}, {}, distances, len(ranks))


def _retimed(trace: ExecutionTrace, matched: np.ndarray) -> ExecutionTrace:
    """The trace whose matched communication has no more waits; ``matched``: bool[N]."""
    rows = np.flatnonzero(matched & (trace.types >= NodeType.COMM_SEND)).tolist()
    return lasting(trace, {row: float(trace.duration_micros[row]) for row in rows}) if rows else trace
