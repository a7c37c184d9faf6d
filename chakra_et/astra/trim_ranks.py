"""A set without its missing ranks: those that are there, numbered from 0, with groups and messages cut to
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from chakra_et.astra.prepare import as_compute
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.node_attributes import set_integers, with_metadata


def trimmed_groups(groups: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> dict[str, list[int]]:
    """The groups with the new numbers of the ranks that are there; those without any are left out."""
    place = {rank: at for at, rank in enumerate(ranks)}
    cut = {name: [place[rank] for rank in members if rank in place] for name, members in groups.items()}
    return {name: members for name, members in cut.items() if members}


def trimmed(trace: ExecutionTrace, ranks: Sequence[int]) -> tuple[ExecutionTrace, int]:
    """The trace with peers renumbered to their place in ``ranks``, and how many messages to and from absent
    ranks became compute. Collectives keep their sizes."""
    place = np.full(max(ranks) + 2, -1, dtype=np.int64)
    place[list(ranks)] = np.arange(len(ranks))
    lost = np.zeros(len(trace), dtype=bool)
    for name, kind in (("comm_src", NodeType.COMM_RECV), ("comm_dst", NodeType.COMM_SEND)):
        attribute = trace.attributes.get(name)
        if attribute is None:
            continue
        old = trace.column(name, -1)
        new = place[np.clip(old, -1, len(place) - 1)]
        lost |= (trace.types == kind) & (new < 0)
        present = np.zeros(len(trace), dtype=bool)
        present[attribute.rows] = True
        trace = set_integers(trace, name, attribute.kind, new, present & (new >= 0))
    return with_metadata(as_compute(trace, lost), world_size=len(ranks), rank=None), int(lost.sum())
