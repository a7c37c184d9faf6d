"""What a simulation of a bundle should answer: each rank's time, measured, replayed and on its network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chakra_et.astra.network_dimensions import NetworkTimes
from chakra_et.cost.topology import Topology
from chakra_et.et.columns import ExecutionTrace
from chakra_et.simulate.joint import build_graph
from chakra_et.simulate.matching import match
from chakra_et.simulate.measured_steps import measured_times
from chakra_et.simulate.replays import astra_replay
from chakra_et.simulate.timing import Timing, timing


@dataclass(frozen=True)
class Expected:
    """µs by rank, from the rank's start to the end of its last node. ``measured``: recorded, None without
    start times. ``replayed``: nodes issued as ASTRA-sim does, communication as long as recorded.
    ``simulated``: the same with the times of ASTRA-sim's analytical network, all ranks starting together."""

    measured: dict[int, float | None]
    replayed: dict[int, float]
    simulated: dict[int, float]


def expected(
    traces: Mapping[int, ExecutionTrace], groups: Mapping[str, Sequence[int]], topology: Topology
) -> Expected:
    """Replay the prepared ``traces`` of all ranks. Raises ``TraceError`` where the ranks wait for ever."""
    ranks = list(traces)
    of_rank = list(traces.values())
    graph = build_graph(of_rank, ranks)
    matching = match(graph, groups)
    recorded = timing(graph, matching)
    replayed = astra_replay(graph, matching, recorded)
    network = NetworkTimes(graph, groups, topology)
    simulated = astra_replay(graph, matching, Timing([0] * len(ranks), None, ends=network))
    measured = {
        rank: end / 1000 if starts is not None else None
        for rank, trace in traces.items()
        for starts, end in [measured_times(trace)]
    }
    return Expected(
        measured,
        {
            rank: _micros(end) - release / 1000
            for rank, end, release in zip(ranks, replayed.end_ns, replayed.release_ns, strict=True)
        },
        {rank: _micros(end) for rank, end in zip(ranks, simulated.end_ns, strict=True)},
    )


def _micros(ends: np.ndarray) -> float:
    return float(ends.max()) / 1000
