"""Which step, communication and operation each node of a replay graph belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.et.node_attributes import texts
from chakra_et.simulate.joint import ReplayGraph
from chakra_et.simulate.measured_steps import step_rows
from chakra_et.simulate.time_by_kind import KINDS, node_kinds

_MESSAGE_NAMES = {NodeType.COMM_SEND: "send", NodeType.COMM_RECV: "recv"}


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


def find_stretches(name: str, graph: ReplayGraph) -> Stretches:
    """Raises ``TraceError`` for ranks that recorded different steps; ``name``: the run, for that message."""
    if all("comm_ordinal" in trace.attributes for trace in graph.traces):  # skeletons know theirs
        steps, _ = _steps(name, graph, graph.position)
        step, ordinal = (graph.attribute(of, 0) for of in ("step_index", "comm_ordinal"))
        return Stretches(steps, step, ordinal, *_optypes(graph))
    launched = _launches(graph)
    steps, step = _steps(name, graph, launched)
    # Sorted by rank, step and launch, the communication of a rank and step lies together.
    where = (graph.trace_of * len(steps) + step) * len(graph)
    nodes = np.flatnonzero(graph.types >= NodeType.COMM_SEND)
    nodes = nodes[np.argsort((where + launched)[nodes], kind="stable")]
    keys = (where + launched)[nodes]
    first = np.searchsorted(keys, where, side="left")
    ordinal = np.searchsorted(keys, where + launched, side="left") - first
    # One call may launch several.
    ordinal[nodes] = np.arange(len(nodes)) - first[nodes]
    return Stretches(steps, step, ordinal, *_optypes(graph))


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


def _steps(name: str, graph: ReplayGraph, launched: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The numbers of the steps and each node's index into them; one step 0 where none is annotated."""
    step = np.zeros(len(graph), dtype=np.int64)
    numbers: list[int] | None = None
    for index, (rank, trace) in enumerate(zip(graph.ranks, graph.traces, strict=True)):
        names, rows = step_rows(trace)
        own = [int(each.partition("#")[2]) for each in names] or [0]
        if numbers is not None and own != numbers:
            raise TraceError(
                f"{name}: rank {rank} recorded steps {_span(own)}, but rank {graph.ranks[0]} steps "
                f"{_span(numbers)}: record the same steps on all ranks"
            )
        numbers = own
        nodes = np.arange(graph.first[index], graph.first[index + 1])
        begins = np.isin(graph.row[nodes], rows)
        found = np.searchsorted(np.sort(graph.position[nodes[begins]]), launched[nodes], side="right") - 1
        step[nodes] = np.maximum(found, 0)
    assert numbers is not None
    return numbers, step


def _span(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) < 4 else f"{steps[0]} to {steps[-1]} ({len(steps)})"


def _optypes(graph: ReplayGraph) -> tuple[list[str], np.ndarray]:
    """The names of the types, and each node's index into them."""
    phases = [""]
    columns = []
    for trace in graph.traces:
        known, index = texts(trace, "phase")
        phases += [each for each in known if each not in phases]
        codes = np.array([*map(phases.index, known), 0])  # the last for nodes of none
        columns.append(codes[index] * len(KINDS) + node_kinds(trace))
    code = graph.gather(columns)
    names = [f"{phase}-{kind}".lstrip("-") for phase in phases for kind in KINDS]
    collective = graph.attribute("comm_type", -1)
    for node_type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
        code[graph.types == node_type] = len(names)
        names.append(_MESSAGE_NAMES[node_type])
    for value in np.unique(collective[graph.types == NodeType.COMM_COLL]).tolist():
        code[(graph.types == NodeType.COMM_COLL) & (collective == value)] = len(names)
        known_type = value in set(CollectiveType)
        names.append(CollectiveType(value).name.lower().replace("_", "-") if known_type else "collective")
    used, optype = np.unique(code, return_inverse=True)
    return [names[at] for at in used.tolist()], optype
