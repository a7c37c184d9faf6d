"""By how much the step gets shorter where some of its time goes: the predictions behind a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.predict.predict import predict
from chakra_et.simulate.run import Run, Setting
from chakra_et.transform.changes import Change
from chakra_et.transform.durations import RankAs

FEW_RANKS = 8
"""Of more ranks than these, only the ones that compute the longest are tried as the slow one."""


@dataclass(frozen=True)
class Faster:
    """Chosen nodes (bool[N]) take ``factor`` times as long; of matched communication, its transfer."""

    chosen: np.ndarray
    factor: float

    def apply(self, run: Run, setting: Setting) -> Setting:
        factor = np.where(self.chosen, self.factor, 1.0)
        return replace(
            setting,
            own_ns=np.rint(setting.own_ns * factor).astype(np.int64),
            lasting_ns=np.rint(setting.lasting_ns * factor).astype(np.int64),
        )


def gain(run: Run, *changes: Change) -> float | None:
    """The part of the step (of the slowest rank, mean of its steps) that goes, as ``chakra-et predict`` has
    it; None where a change doesn't fit the run."""
    try:
        found = predict(run, changes, explain=False)
    except TraceError:
        return None
    return 1 - found.after_ms / found.before_ms if found.before_ms else None


def slowest_rank(run: Run) -> tuple[int, float] | None:
    """(rank, gain): the one rank that, as fast as the median of the others, shortens the step the most; None
    where none does by anything. ``run`` begins on all ranks at once."""
    ranks = run.graph.ranks
    if len(ranks) < 2:
        return None
    computing = np.bincount(run.graph.trace_of, run.measured.own_ns * ~run.is_communication, len(ranks))
    found = [
        (value, -rank)
        for at, rank in _candidates(ranks, computing)
        if (value := gain(run, RankAs(rank))) is not None and value > 0 and computing[at]
    ]
    if not found:
        return None
    value, rank = max(found)
    return -rank, value


def _candidates(ranks: Sequence[int], computing: np.ndarray) -> list[tuple[int, int]]:
    order = np.argsort(-computing, kind="stable")[:FEW_RANKS].tolist()
    return [(at, ranks[at]) for at in order]


def step_ms(run: Run) -> float:
    """The mean step of the slowest rank as replayed, ms."""
    return predict(run, [], explain=False).before_ms
