"""What each rank did when, from its timers' start and end times, and how long it was idle."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_lm.logs import records
from megatron_lm.logs.records import Times

COMPUTE, SUB_STEP, COMMUNICATION = range(3)  # lanes of a rank, top to bottom
WHOLE = "forward-backward"
COMPUTE_TASKS = {"forward-compute": "forward", "backward-compute": "backward", "optimizer": "optimizer"}
MESSAGE = re.compile(r"(?:forward|backward)-(?:send|recv)")
COLLECTIVE = re.compile(r".*(?:all-reduce|reduce-scatter|all-gather)")
MESSAGES = re.compile(
    rf"(?:{MESSAGE.pattern}|forward-backward-send-forward-backward-recv)(?:-{MESSAGE.pattern})*"
)
BY_MICRO_BATCH = ("forward-compute", "backward-compute", "post-process", "loss-compute", "batch-generator")


@dataclass(frozen=True)
class Event:
    """One bar of the picture. start, end: epoch seconds. micro_batch: None for work done once per
    iteration.
    """

    rank: int
    node: str
    task: str
    lane: int
    iteration: int
    micro_batch: int | None
    start: float
    end: float

    @property
    def label(self) -> str:
        return self.task if self.micro_batch is None else f"{self.task}-{self.micro_batch}"


@dataclass(frozen=True)
class Bubble:
    """One rank's idle time, in seconds summed over the iterations shown. seconds: from the first forward of
    any rank to the last backward of any; compute: this rank's forward and backward; communication: sending,
    receiving and waiting for a peer while it does not compute."""

    rank: int
    seconds: float
    compute: float
    communication: float

    def over(self, iterations: int) -> Bubble:
        """The same per iteration."""
        times = (each / iterations for each in (self.seconds, self.compute, self.communication))
        return Bubble(self.rank, *times)

    @property
    def share(self) -> float:
        """Fraction of the time in which the rank did not compute, 0 to 1."""
        return 1 - self.compute / self.seconds if self.seconds else 0.0


def lane_of(timer: str) -> int:
    """The lane of a timer's events."""
    if timer in COMPUTE_TASKS:
        return COMPUTE
    return COMMUNICATION if MESSAGES.fullmatch(timer) or COLLECTIVE.fullmatch(timer) else SUB_STEP


def iteration_count(timers: Iterable[records.Timers]) -> int:
    """Number of iterations on the rank that has the most."""
    lists = (found for of_node in timers for (_, name), found in of_node.lists.items() if name == WHOLE)
    return max((len(found.start) for found in lists), default=0)


def events(timers: records.Timers, node: str, wanted: range, before: int) -> list[Event]:
    """All events of one node's ranks in the ``wanted`` iterations, by rank and start time.

    before: number of the iteration before the first recorded one (0 unless the run was resumed).
    """
    found = []
    windows = {rank: lists.start for (rank, name), lists in timers.lists.items() if name == WHOLE}
    for (rank, name), lists in timers.lists.items():
        if name == WHOLE or rank not in windows:
            continue
        numbers = before + np.searchsorted(windows[rank], lists.start, side="right")
        # Events before the first forward-backward belong to the first iteration.
        numbers = np.maximum(numbers, before + 1)
        for number in wanted:
            of_iteration = np.flatnonzero(numbers == number)
            for k, i in enumerate(of_iteration):
                micro_batch = k if name in BY_MICRO_BATCH else None
                task = COMPUTE_TASKS.get(name, name)
                start, end = float(lists.start[i]), float(lists.end[i])
                found.append(Event(rank, node, task, lane_of(name), number, micro_batch, start, end))
    found.sort(key=lambda event: (event.rank, event.start))
    return _number_messages(found)


def bubbles(found: Iterable[Event]) -> list[Bubble]:
    """The idle time of each rank, by rank."""
    by_iteration: dict[int, dict[int, list[Event]]] = {}
    for event in found:
        by_iteration.setdefault(event.iteration, {}).setdefault(event.rank, []).append(event)
    sums: dict[int, Times] = {}
    for by_rank in by_iteration.values():
        work = [e for of_rank in by_rank.values() for e in of_rank if e.task in ("forward", "backward")]
        if not work:
            continue
        first, last = min(e.start for e in work), max(e.end for e in work)
        for rank, of_rank in by_rank.items():
            mine = [(e.start, e.end) for e in of_rank if e.task in ("forward", "backward")]
            messages = [(e.start, e.end) for e in of_rank if e.lane == COMMUNICATION]
            compute = _covered(mine, first, last)
            communication = _covered(mine + messages, first, last) - compute
            sums[rank] = sums.get(rank, np.zeros(3)) + (last - first, compute, communication)
    return [Bubble(rank, *map(float, of_rank)) for rank, of_rank in sorted(sums.items())]


def _number_messages(found: list[Event]) -> list[Event]:
    """Number messages by micro-batch: the k-th message of a rank in one direction belongs to micro-batch k.

    A combined message takes the number of the first part of its name.
    """
    counts: dict[tuple[int, int, str], int] = {}
    numbered = []
    for event in found:
        parts = MESSAGE.findall(event.task) if event.lane == COMMUNICATION else []
        number = event.micro_batch
        for part in reversed(parts):
            key = (event.rank, event.iteration, part)
            number = counts.get(key, 0)
            counts[key] = number + 1
        if number is not event.micro_batch:
            event = Event(**{**event.__dict__, "micro_batch": number})
        numbered.append(event)
    return numbered


def _covered(intervals: list[tuple[float, float]], first: float, last: float) -> float:
    """Length of the union of the intervals within [first, last]."""
    total, reached = 0.0, first
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, last)
        if end > start:
            total += end - start
            reached = end
    return total
