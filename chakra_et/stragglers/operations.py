"""The operations of a job, and what each would take if no worker were slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Typical = Literal["mean", "median"]


@dataclass(frozen=True)
class JobMeta:
    """How a job is laid out; the names are those of the artifact's YAML file."""

    trial_name: str
    run_id: int = 0
    dp_size: int = 1
    pp_size: int = 1
    tp_size: int = 1
    dsp_size: int = 1
    vpp_size: int = 1
    world_size: int = 1


@dataclass(frozen=True)
class JobOperations:
    """N operations of all workers of a job; arrays have N entries, int64 unless stated.

    ``optype``: index into ``optypes``. ``dp_rank``, ``stage``, ``rank``: who ran it; one rank per
    data-parallel rank and stage. ``step``: its training step. ``group``: operations with the same number do
    the same work. ``by_median`` bool: the group's typical time is its median, as for communication.
    ``work_s`` float64: seconds that it takes by itself, for communication the time from the last peer's
    start. ``delay_s`` float64: seconds from the end of its dependencies to its start. ``is_first`` bool: the
    stage's first of a step.
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
    delay_s: np.ndarray
    is_first: np.ndarray

    def __len__(self) -> int:
        return len(self.optype)


@dataclass(frozen=True)
class TimedJob:
    """A measured job that can be simulated with other durations.

    ``steps`` in ascending order; ``measured_s`` float64[steps]; ``notes``: what was assumed, one sentence
    each. ``step_s(work_s, delay_s)``: step times in s, float64[steps], where each operation takes so long
    and is delayed by so much (None: not at all), float64[N] in s.
    """

    meta: JobMeta
    operations: JobOperations
    steps: list[int]
    measured_s: np.ndarray
    notes: list[str]
    step_s: Callable[[np.ndarray, np.ndarray | None], np.ndarray]


def typical(operations: JobOperations, compute: Typical = "mean") -> np.ndarray:
    """What each operation takes in the ideal job, float64[N] in s.

    Communication takes the median of its group. Computation takes the mean (or ``compute``) of its group, and
    is spread evenly over the stages, type by type: the paper takes the mean because work that is spread
    unevenly over the workers could be spread evenly.
    """
    _, group = np.unique(operations.group, return_inverse=True)
    count = np.bincount(group)
    ordered = operations.work_s[np.lexsort((operations.work_s, group))]
    first = np.cumsum(count) - count
    median: np.ndarray = (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) / 2
    mean = np.bincount(group, operations.work_s) / count
    by_median = operations.by_median | (compute == "median")
    times: np.ndarray = np.where(by_median, median[group], mean[group])
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
