"""A job from our own .et files, which the joint device replay simulates, and its typical durations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from chakra_et.arrays import coded, medians
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.job.mesh import dp_ranks_of, stages_of
from chakra_et.names import run_at
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.run import Run
from chakra_et.simulate.time_by_kind import KINDS
from chakra_et.text import list_ranks

NS = 1e-9


@dataclass(frozen=True)
class JobOperations:
    """N operations of all ranks of a job; arrays have N entries, int64 unless stated.

    ``optype``: index into ``optypes``. ``dp_rank``, ``stage``, ``rank``: who ran it. ``step``: its training
    step. ``group``: operations with the same number do the same work. ``work_s`` float64: seconds that it
    takes by itself, for communication the time from the last peer's start. ``node``: that of communication,
    else -1. ``stretch``: of computation, what the rank's host or device computes between two communications;
    -1 for communication, and where only other ranks have the stretch.
    """

    optypes: list[str]
    optype: np.ndarray
    dp_rank: np.ndarray
    stage: np.ndarray
    rank: np.ndarray
    step: np.ndarray
    group: np.ndarray
    work_s: np.ndarray
    node: np.ndarray
    stretch: np.ndarray


@dataclass(frozen=True)
class TimedJob:
    """A measured job that can be simulated with other durations. ``meta``: its name and how it is laid out.

    ``steps`` in ascending order; ``measured_s`` float64[steps]; ``notes``: what was assumed, one sentence
    each. ``step_s(work_s)``: step times in s, float64[steps], where each operation takes so long, float64[N]
    in s, and all ranks begin at once.
    """

    meta: dict[str, Any]
    operations: JobOperations
    steps: list[int]
    measured_s: np.ndarray
    notes: list[str]
    step_s: Callable[[np.ndarray], np.ndarray]


def typical(operations: JobOperations) -> np.ndarray:
    """What each operation takes in the ideal job, float64[N] in s.

    Communication takes the median of its group. Computation takes the mean of its group, and is spread
    evenly over the stages, type by type: the paper takes the mean because work that is spread unevenly over
    the workers could be spread evenly.
    """
    _, group = coded(operations.group)
    median = medians(operations.work_s, group)
    mean = np.bincount(group, operations.work_s) / np.bincount(group)
    times: np.ndarray = np.where(operations.node >= 0, median[group], mean[group])
    # So that the stages that have a type spend as long on it, per worker and step.
    stages = int(operations.stage.max()) + 1
    cell = operations.optype * stages + operations.stage
    size = len(operations.optypes) * stages
    workers = np.unique(np.stack([operations.stage, operations.rank, operations.step]), axis=1)[0]
    per_worker = np.bincount(cell, times, size).reshape(-1, stages) / np.bincount(workers, minlength=stages)
    has = per_worker > 0
    even = per_worker.sum(axis=1) / np.maximum(has.sum(axis=1), 1)
    factor = np.divide(even[:, None], per_worker, out=np.ones_like(per_worker), where=has)
    return np.where(operations.node >= 0, times, times * factor.ravel()[cell])


def recorded_job(run: Run) -> TimedJob:
    """The job of a run. Raises ``TraceError`` where ranks can't be compared, have no communication in common,
    or recorded different steps."""
    graph = run.graph
    if len(graph.ranks) < 2:
        raise TraceError(
            f"{run.name}: one rank has no others to compare it with: give the NAME of a run of several ranks"
        )
    if not run.matching.channels:
        raise TraceError(
            f"{run.name}: its ranks have no communication in common, so none waits for another: give the .et "
            "files of all ranks of one job"
        )
    found = find_stretches(run)
    stages = stages_of(graph.traces, graph.ranks)
    operations, stretch_of_node, notes = _operations(run, found, stages)
    notes = [*run.notes, *notes]

    def step_s(work_s: np.ndarray) -> np.ndarray:
        own = _durations(graph.own_ns, operations, stretch_of_node, work_s / NS)
        return _step_times(run, *run.schedule.run(own, own, np.zeros(len(graph), np.int64)))

    # Each rank from its own start: the step is the slowest rank's, as in the diagnosis.
    if graph.local_start_ns is not None:
        began = np.minimum.reduceat(graph.local_start_ns, graph.first[:-1])[graph.trace_of]
        start = graph.local_start_ns - began
        measured_s = _step_times(run, start, start + graph.duration_ns)
    else:
        notes.append("the files hold no start times: step_t_base is simulated")
        measured_s = _step_times(run, run.start_ns - run.release_ns, run.end_ns - run.release_ns)
    meta = {
        "trial_name": run_at(run.name).name,
        "dp_size": int(operations.dp_rank.max()) + 1,
        "pp_size": len(set(stages.values())),
        "world_size": len(graph.ranks),
    }
    return TimedJob(meta, operations, found.steps, measured_s, notes, step_s)


def _step_times(run: Run, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """From the last rank's begin of each step to that of the next, or to its end; float64[steps] in s."""
    bounds = [of.bounds_ns(start_ns[of.nodes], end_ns[of.nodes]) for of in run.steps]
    return np.diff(np.max(bounds, axis=0)) * NS


def _durations(
    own_ns: np.ndarray, operations: JobOperations, stretch_of_node: np.ndarray, work_ns: np.ndarray
) -> np.ndarray:
    """The nodes' ``own_ns``, int64[N], where the operations take ``work_ns``.

    All nodes of a stretch grow in proportion, as a rank may have no node of a type that others have.
    """
    own = own_ns.astype(np.float64)
    inside, computes, communicates = stretch_of_node >= 0, operations.stretch >= 0, operations.node >= 0
    count = int(stretch_of_node.max(initial=-1)) + 1
    recorded = np.bincount(stretch_of_node[inside], own[inside], count)
    wanted = np.bincount(operations.stretch[computes], work_ns[computes], count)
    factor = np.divide(wanted, recorded, out=np.ones(count), where=recorded > 0)
    own[inside] *= factor[stretch_of_node[inside]]
    own[operations.node[communicates]] = work_ns[communicates]
    return np.rint(own).astype(np.int64)


def _operations(
    run: Run, found: Stretches, stages: dict[int, int]
) -> tuple[JobOperations, np.ndarray, list[str]]:
    """The operations; the stretch of each node, int64[N], -1 for communication; and what can't be compared.

    ``stages``: rank → its stage. Ranks of one stage whose steps communicate alike do the same work.
    """
    graph = run.graph
    steps, types = len(found.steps), len(found.optypes)
    cell = graph.trace_of * steps + found.step
    kind_of_cell = _kinds_of_cells(graph, found, cell, stages)
    communicates = graph.types >= NodeType.COMM_SEND
    stretch_in_cell = found.ordinal * 2 + (graph.is_cpu & ~communicates)
    stretches = int(stretch_in_cell.max()) + 1
    place = stretch_in_cell * types + found.optype
    places = int(place.max()) + 1
    group = kind_of_cell[cell] * places + place
    nodes, comm = np.flatnonzero(~communicates), np.flatnonzero(communicates)

    groups, group_of_node = np.unique(group[nodes], return_inverse=True)
    row_group, row_cell, row_of_node = _rows(kind_of_cell, groups // places, group_of_node, cell[nodes])
    row_place = groups[row_group] % places
    work = np.bincount(row_of_node, graph.own_ns[nodes], len(row_group))
    _, comm_group = np.unique(group[comm], return_inverse=True)
    transfer = np.where(run.operation >= 0, run.measured.lasting_ns, graph.own_ns)

    stretch_of_node = np.full(len(graph), -1, dtype=np.int64)
    in_rank = (cell * stretches + stretch_in_cell)[nodes]
    known, stretch_of_node[nodes] = np.unique(in_rank, return_inverse=True)
    wanted = row_cell * stretches + row_place // types
    stretch = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    stretch = np.where(known[stretch] == wanted, stretch, -1)

    all_cells = np.concatenate([row_cell, cell[comm]])
    trace = all_cells // steps
    dp_rank = dp_ranks_of(stages)
    operations = JobOperations(
        optypes=found.optypes,
        optype=np.concatenate([row_place % types, found.optype[comm]]),
        dp_rank=np.array([dp_rank[each] for each in graph.ranks])[trace],
        stage=np.array([stages[each] for each in graph.ranks])[trace],
        rank=np.array(graph.ranks)[trace],
        step=np.array(found.steps)[all_cells % steps],
        group=np.concatenate([row_group, len(groups) + comm_group]),
        work_s=np.concatenate([work, transfer[comm]]) * NS,
        node=np.concatenate([np.full(len(row_group), -1), comm]),
        stretch=np.concatenate([stretch, np.full(len(comm), -1)]),
    )
    kinds = np.unique(np.stack([kind_of_cell, np.arange(len(kind_of_cell)) // steps]), axis=1)
    shared = np.unique(kinds[1, np.bincount(kinds[0])[kinds[0]] > 1])
    alone, lacking = len(graph.ranks) - len(shared), int((stretch < 0).sum())
    counts = {
        "ranks whose work no other rank does, compared only with their own other steps": alone,
        "operations of other ranks for which a rank has no node, left out of its ideal": lacking,
    }
    return operations, stretch_of_node, [f"{what}: {count}" for what, count in counts.items() if count]


def _kinds_of_cells(
    graph: ReplayGraph, found: Stretches, cell: np.ndarray, stages: dict[int, int]
) -> np.ndarray:
    """One number for cells (rank, step) of the same work: of one stage, with the same communication."""
    comm = np.flatnonzero(graph.types >= NodeType.COMM_SEND)
    comm = comm[np.lexsort((found.ordinal[comm], cell[comm]))]
    cells = len(graph.traces) * len(found.steps)
    sequences = np.split(found.optype[comm], np.searchsorted(cell[comm], np.arange(1, cells)))
    numbers: dict[tuple[int, bytes], int] = {}
    kinds = []
    for at, sequence in enumerate(sequences):
        key = stages[graph.ranks[at // len(found.steps)]], sequence.tobytes()
        kinds.append(numbers.setdefault(key, len(numbers)))
    return np.array(kinds, dtype=np.int64)


def _rows(
    kind_of_cell: np.ndarray, group_kind: np.ndarray, group_of_node: np.ndarray, cell_of_node: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row for each group and cell of its kind, also where the cell has no node: group and cell of each
    row, and the row of each node."""
    cells = np.argsort(kind_of_cell, kind="stable")
    count = np.bincount(kind_of_cell)
    first = np.cumsum(count) - count
    member = np.empty(len(cells), dtype=np.int64)
    member[cells] = np.arange(len(cells)) - first[kind_of_cell[cells]]
    rows = count[group_kind]
    offset = np.cumsum(rows) - rows
    group = np.repeat(np.arange(len(group_kind)), rows)
    cell = cells[first[group_kind[group]] + np.arange(len(group)) - offset[group]]
    return group, cell, offset[group_of_node] + member[cell_of_node]


# ---- which step, communication and operation each node belongs to ----


@dataclass(frozen=True)
class Stretches:
    """Where each of N nodes belongs; arrays are int64[N].

    ``step``: index into ``steps``, their numbers. ``ordinal``: how many communications of its rank and step
    were launched before it; for communication its own number. ``optype``: index into ``optypes``, such as
    ``forward-operator``, ``backward-kernel`` or ``all-reduce``.
    """

    steps: list[int]
    step: np.ndarray
    ordinal: np.ndarray
    optypes: list[str]
    optype: np.ndarray


def find_stretches(run: Run) -> Stretches:
    """Raises ``TraceError`` for ranks that recorded different steps."""
    graph, steps, of_node = run.graph, _steps(run), np.concatenate([of.step for of in run.steps])
    step = np.maximum(of_node, 0)
    if all("comm_ordinal" in trace.attributes for trace in graph.traces):  # skeletons know theirs
        return Stretches(steps, step, graph.attribute("comm_ordinal", 0), *_optypes(run))
    launched = np.where(graph.launched < 0, np.where(of_node < 0, 0, graph.position), graph.launched)
    # Sorted by rank, step and launch, the communication of a rank and step lies together.
    where = (graph.trace_of * len(steps) + step) * len(graph)
    nodes = np.flatnonzero(graph.types >= NodeType.COMM_SEND)
    nodes = nodes[np.argsort((where + launched)[nodes], kind="stable")]
    keys = (where + launched)[nodes]
    first = np.searchsorted(keys, where, side="left")
    ordinal = np.searchsorted(keys, where + launched, side="left") - first
    # One call may launch several.
    ordinal[nodes] = np.arange(len(nodes)) - first[nodes]
    return Stretches(steps, step, ordinal, *_optypes(run))


def _steps(run: Run) -> list[int]:
    """The numbers of the steps; one step 0 where none is annotated."""
    numbers = [[int(name.partition("#")[2] or 0) for name in steps.names] for steps in run.steps]
    for rank, own in zip(run.graph.ranks, numbers, strict=True):
        if own != numbers[0]:
            raise TraceError(
                f"{run.name}: rank {rank} recorded steps {list_ranks(own)}, but rank {run.graph.ranks[0]} "
                f"steps {list_ranks(numbers[0])}: record the same steps on all ranks"
            )
    return numbers[0]


def _optypes(run: Run) -> tuple[list[str], np.ndarray]:
    """The names of the types, and each node's index into them."""
    graph = run.graph
    index, phases = graph.codes("phase")
    code = (index + 1) * len(KINDS) + run.kind
    names = [f"{phase}-{kind}".lstrip("-") for phase in ("", *phases) for kind in KINDS]
    collective = graph.attribute("comm_type", -1)
    for node_type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
        code[graph.types == node_type] = len(names)
        names.append(node_type.name.removeprefix("COMM_").lower())
    for value in np.unique(collective[graph.types == NodeType.COMM_COLL]).tolist():
        code[(graph.types == NodeType.COMM_COLL) & (collective == value)] = len(names)
        known_type = value in set(CollectiveType)
        names.append(CollectiveType(value).name.lower().replace("_", "-") if known_type else "collective")
    used, optype = np.unique(code, return_inverse=True)
    return [names[at] for at in used.tolist()], optype
