"""Which step, communication and operation each node of a replay graph belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.et.node_attributes import texts
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.run import Run
from chakra_et.simulate.time_by_kind import KINDS


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
    graph, steps = run.graph, _steps(run)
    if all("comm_ordinal" in trace.attributes for trace in graph.traces):  # skeletons know theirs
        step, ordinal = (graph.attribute(of, 0) for of in ("step_index", "comm_ordinal"))
        return Stretches(steps, step, ordinal, *_optypes(run))
    launched, step = _launches(graph), np.zeros(len(graph), np.int64)
    for low, high, of in zip(graph.first[:-1], graph.first[1:], run.steps, strict=True):
        begins = np.sort(graph.position[of.first[of.first >= 0]])
        step[low:high] = np.maximum(np.searchsorted(begins, launched[low:high], side="right") - 1, 0)
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


def _launches(graph: ReplayGraph) -> np.ndarray:
    """When each node was launched, int64[N]: the position of the last host node that leads to it."""
    on_host, position = graph.is_cpu, graph.position
    launched = np.where(on_host, position, -1).tolist()
    edges = np.flatnonzero(~on_host[graph.target])
    edges = edges[np.argsort(position[graph.target[edges]], kind="stable")]
    pairs = zip(graph.source[edges].tolist(), graph.target[edges].tolist(), strict=True)
    for source, target in pairs:
        launched[target] = max(launched[target], launched[source])
    found = np.array(launched, dtype=np.int64)
    return np.where(found < 0, position, found)


def _steps(run: Run) -> list[int]:
    """The numbers of the steps; one step 0 where none is annotated."""
    numbers = [[int(name.partition("#")[2] or 0) for name in steps.names] for steps in run.steps]
    for rank, own in zip(run.graph.ranks, numbers, strict=True):
        if own != numbers[0]:
            raise TraceError(
                f"{run.name}: rank {rank} recorded steps {_span(own)}, but rank {run.graph.ranks[0]} steps "
                f"{_span(numbers[0])}: record the same steps on all ranks"
            )
    return numbers[0]


def _span(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) < 4 else f"{steps[0]} to {steps[-1]} ({len(steps)})"


def _optypes(run: Run) -> tuple[list[str], np.ndarray]:
    """The names of the types, and each node's index into them."""
    phases, columns, graph = [""], [], run.graph
    for trace in graph.traces:
        known, index = texts(trace, "phase")
        phases += [each for each in known if each not in phases]
        codes = np.array([*map(phases.index, known), 0])  # the last for nodes of none
        columns.append(codes[index])
    code = graph.gather(columns) * len(KINDS) + run.kind
    names = [f"{phase}-{kind}".lstrip("-") for phase in phases for kind in KINDS]
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
