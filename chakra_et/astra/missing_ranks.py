"""The ranks of a bundle: those of a set, without its missing ranks or with copies in their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.astra.prepare import as_compute
from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.node_attributes import has, set_integers, with_metadata
from chakra_et.job.sets import InputSet


@dataclass(frozen=True)
class Ranks:
    """What goes into a bundle: a set that lacks no rank. ``steps``: what was done about those that it lacked;
    ``captured``: the captured numbers of the ranks, in order, where others were left out."""

    set: InputSet
    steps: Sequence[str] = ()
    captured: Sequence[int] | None = None


def ranks_of(found: InputSet, trim: bool = False) -> Ranks:
    """The ranks of a set. Raises ``TraceError`` where some are missing and ``trim`` is False."""
    if not found.missing:
        return Ranks(found)
    if not trim:
        raise TraceError(
            f"{found.name}: {found.lacks}: convert them, or use --trim to leave them out or --fill to "
            "make them from their like"
        )
    place = {rank: at for at, rank in enumerate(found.files)}
    step = (
        f"{found.lacks} and were left out (--trim): the others are ranks 0 to {len(place) - 1}, groups "
        "are cut to them, sizes are as recorded"
    )
    groups = {
        name: [place[rank] for rank in members if rank in place] for name, members in found.groups.items()
    }
    files = dict(enumerate(found.files.values()))
    used = {name: members for name, members in groups.items() if members}
    return Ranks(replace(found, files=files, groups=used), (step,), list(place))


def trimmed(trace: ExecutionTrace, ranks: Sequence[int]) -> tuple[ExecutionTrace, int]:
    """The trace with peers renumbered to their place in ``ranks``, and how many messages to and from absent
    ranks became compute. Collectives keep their sizes."""
    place = np.full(max(ranks) + 2, -1, dtype=np.int64)
    place[list(ranks)] = np.arange(len(ranks))
    lost = np.zeros(len(trace), dtype=bool)
    for name, kind in (("comm_src", NodeType.COMM_RECV), ("comm_dst", NodeType.COMM_SEND)):
        if name in trace.attributes:
            new = place[np.clip(trace.column(name, -1), -1, len(place) - 1)]
            lost |= (trace.types == kind) & (new < 0)
            present = has(trace, name) & (new >= 0)
            trace = set_integers(trace, name, trace.attributes[name].kind, new, present)
    return with_metadata(as_compute(trace, lost), world_size=len(ranks), rank=None), int(lost.sum())
