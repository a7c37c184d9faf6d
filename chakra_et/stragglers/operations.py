"""The operations of a job, and what each would take if no worker were slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from chakra_et.arrays import coded, medians


@dataclass(frozen=True)
class JobMeta:
    """How a job is laid out."""

    trial_name: str
    dp_size: int
    pp_size: int
    world_size: int


@dataclass(frozen=True)
class JobOperations:
    """N operations of all ranks of a job; arrays have N entries, int64 unless stated.

    ``optype``: index into ``optypes``. ``dp_rank``, ``stage``, ``rank``: who ran it. ``step``: its training
    step. ``group``: operations with the same number do the same work. ``by_median`` bool: the group's typical
    time is its median, as for communication. ``work_s`` float64: seconds that it takes by itself, for
    communication the time from the last peer's start.
    """

    optypes: list[str]
    optype: np.ndarray
    dp_rank: np.ndarray
    stage: np.ndarray
    rank: np.ndarray
    step: np.ndarray
    group: np.ndarray
    by_median: np.ndarray
    work_s: np.ndarray

    def __len__(self) -> int:
        return len(self.optype)


@dataclass(frozen=True)
class TimedJob:
    """A measured job that can be simulated with other durations.

    ``steps`` in ascending order; ``measured_s`` float64[steps]; ``notes``: what was assumed, one sentence
    each. ``step_s(work_s)``: step times in s, float64[steps], where each operation takes so long, float64[N]
    in s, and all ranks begin at once.
    """

    meta: JobMeta
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
    times: np.ndarray = np.where(operations.by_median, median[group], mean[group])
    # So that the stages that have a type spend as long on it, per worker and step.
    stages = int(operations.stage.max()) + 1
    cell = operations.optype * stages + operations.stage
    size = len(operations.optypes) * stages
    workers = np.unique(np.stack([operations.stage, operations.rank, operations.step]), axis=1)[0]
    per_worker = np.bincount(cell, times, size).reshape(-1, stages) / np.bincount(workers, minlength=stages)
    has = per_worker > 0
    even = per_worker.sum(axis=1) / np.maximum(has.sum(axis=1), 1)
    factor = np.divide(even[:, None], per_worker, out=np.ones_like(per_worker), where=has)
    return np.where(operations.by_median, times, times * factor.ravel()[cell])
