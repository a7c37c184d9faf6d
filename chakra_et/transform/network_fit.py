"""The latency and bandwidth that explain a set's collectives, for times at other numbers of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from chakra_et.cost.collectives import collective_time
from chakra_et.cost.topology import Topology
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.edit import texts

SAME_SIZE = 1.5
"""Bytes per message that differ by less than this factor don't show the latency."""
NEXT_TO_NOTHING = 1e-9
"""ns per byte or message of a figure that the fit put at 0."""


def fitted(
    traces: Mapping[int, ExecutionTrace],
    lasting: Mapping[int, np.ndarray],
    groups: Mapping[str, Sequence[int]],
) -> Topology | None:
    """One-dimensional network with the α and β that explain the collectives best, by relative error; None
    where the set has no collectives. ``lasting``: µs of each node, by rank. Notes: what was assumed."""
    rows: list[tuple[float, float, float]] = []
    for rank, trace in traces.items():
        table, index = texts(trace, "pg_name")
        kinds, sizes = trace.column("comm_type", -1), trace.column("comm_size", 0)
        for row in np.flatnonzero((trace.types == NodeType.COMM_COLL) & (index >= 0)).tolist():
            count = len(groups.get(table[index[row]], ()))
            time = float(lasting[rank][row]) * 1000
            if count > 1 and time > 0 and int(kinds[row]) in set(CollectiveType):
                rows.append((*_terms(CollectiveType(int(kinds[row])), int(sizes[row]), count), time))
    if not rows:
        return None
    messages, moved, time_ns = np.array(rows).T
    terms = np.stack([messages, moved], axis=1) / time_ns[:, None]
    world = max(len(members) for members in groups.values())
    ratios = moved / np.maximum(messages, 1)
    if ratios.max() <= SAME_SIZE * ratios.min():
        beta = float(terms[:, 1].sum() / (terms[:, 1] ** 2).sum()) if moved.all() else 0.0
        flat = Topology.flat(world, 1e9 / max(beta, NEXT_TO_NOTHING), 0.0)
        note = (
            "all collectives move about as many bytes, so that latency and bandwidth can't be told apart: "
            "all of their time is taken for bandwidth; name a --topology"
        )
        return dataclasses.replace(flat, notes=(note,))
    alpha, beta = _non_negative(terms)
    return Topology.flat(world, 1e9 / max(beta, NEXT_TO_NOTHING), alpha)


def _terms(kind: CollectiveType, size: int, count: int) -> tuple[float, float]:
    """How often α and β count in the time of a ring."""
    latency = collective_time(kind, 0, range(count), Topology.flat(count, 1e9, 1.0))
    whole = collective_time(kind, size, range(count), Topology.flat(count, 1e9, 0.0))
    return latency, whole


def _non_negative(terms: np.ndarray) -> tuple[float, float]:
    """α and β of terms · (α, β) = 1, least squares, neither below 0."""
    ones = np.ones(len(terms))
    alpha, beta = np.linalg.lstsq(terms, ones, rcond=None)[0].tolist()
    if alpha < 0 or not terms[:, 0].any():
        alpha, beta = 0.0, float(terms[:, 1].sum() / (terms[:, 1] ** 2).sum())
    elif beta < 0 or not terms[:, 1].any():
        alpha, beta = float(terms[:, 0].sum() / (terms[:, 0] ** 2).sum()), 0.0
    return float(alpha), float(beta)
