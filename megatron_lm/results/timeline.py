"""What each rank did when, from its timers' start and end times, and how long it was idle."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from megatron_lm.errors import RunError
from megatron_lm.logs import records
from megatron_lm.logs.runs import Run
from megatron_lm.results import speed

COMPUTE, SUB_STEP, COMMUNICATION = range(3)  # lanes of a rank, top to bottom
WHOLE = "forward-backward"
COMPUTE_TASKS = {"forward-compute": "forward", "backward-compute": "backward", "optimizer": "optimizer"}
WORK = ("forward", "backward")
MESSAGE = re.compile(r"(?:forward|backward)-(?:send|recv)")
COLLECTIVE = re.compile(r".*(?:all-reduce|reduce-scatter|all-gather)")
MESSAGES = re.compile(
    rf"(?:{MESSAGE.pattern}|forward-backward-send-forward-backward-recv)(?:-{MESSAGE.pattern})*"
)
BY_MICRO_BATCH = ("forward-compute", "backward-compute", "post-process", "loss-compute", "batch-generator")
MOST_EVENTS = 200_000  # that a browser can hold


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

    @property
    def share(self) -> float:
        """Fraction of the time in which the rank did not compute, 0 to 1."""
        return 1 - self.compute / self.seconds if self.seconds else 0.0


def read_events(run: Run, only: tuple[str, ...], wanted: str) -> tuple[list[Event], dict[str, str]]:
    """Events in the wanted iterations, of all nodes or of ``only`` these, and the run's settings.

    Raises ``RunError`` if there are none.
    """
    names = [node.name for node in run.nodes]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise RunError(f"this run has no node {' '.join(unknown)}: its nodes are {' '.join(names)}.")
    outputs = [(node, node.read("out")) for node in run.nodes]
    timers = [(node, records.timers(data)) for node, data in outputs if not only or node.name in only]
    wholes = (lists for _, of_node in timers for (_, name), lists in of_node.items() if name == WHOLE)
    count = max((len(lists.start) for lists in wholes), default=0)
    if not count:
        raise RunError("these logs have no start and end times: run with PROFILE=true.")
    lines = speed.iterations(data for _, data in outputs)
    before = max(0, lines[-1].number - count) if lines else 0
    first, last = before + 1, before + count
    low, _, high = {"all": f"{first}-{last}", "last": str(last)}.get(wanted, wanted).partition("-")
    chosen = range(int(low), int(high or low) + 1)
    if not chosen or chosen[0] < first or chosen[-1] > last:
        raise RunError(f"--iterations {wanted}: the logs have times of iterations {first} to {last}.")
    found = [event for node, of_node in timers for event in events(of_node, node.name, chosen, before)]
    if len(found) > MOST_EVENTS:
        raise RunError(
            f"{len(found)} events are too many for a browser: select fewer with --iterations or --node."
        )
    settings = next((of_node for _, data in outputs if (of_node := records.settings(data))), {})
    return found, settings


def lane_of(timer: str) -> int:
    """The lane of a timer's events."""
    if timer in COMPUTE_TASKS:
        return COMPUTE
    return COMMUNICATION if MESSAGES.fullmatch(timer) or COLLECTIVE.fullmatch(timer) else SUB_STEP


def events(timers: records.Timers, node: str, wanted: range, before: int) -> list[Event]:
    """All events of one node's ranks in the ``wanted`` iterations, by rank and start time.

    before: number of the iteration before the first recorded one (0 unless the run was resumed).
    """
    found = []
    windows = {rank: lists.start for (rank, name), lists in timers.items() if name == WHOLE}
    for (rank, name), lists in timers.items():
        if name == WHOLE or rank not in windows:
            continue
        numbers = before + np.searchsorted(windows[rank], lists.start, side="right")
        # Events before the first forward-backward belong to the first iteration.
        numbers = np.maximum(numbers, before + 1)
        task, lane = COMPUTE_TASKS.get(name, name), lane_of(name)
        for number in wanted:
            for k, i in enumerate(np.flatnonzero(numbers == number)):
                micro_batch = k if name in BY_MICRO_BATCH else None
                start, end = float(lists.start[i]), float(lists.end[i])
                found.append(Event(rank, node, task, lane, number, micro_batch, start, end))
    found.sort(key=lambda event: (event.rank, event.start))
    # The k-th message of a rank in one direction belongs to micro-batch k. A combined message takes the
    # number of the first part of its name.
    counts: dict[tuple[int, int, str], int] = {}
    for at, event in enumerate(found):
        for part in reversed(MESSAGE.findall(event.task) if event.lane == COMMUNICATION else []):
            key = (event.rank, event.iteration, part)
            found[at] = replace(event, micro_batch=counts.get(key, 0))
            counts[key] = counts.get(key, 0) + 1
    return found


def bubbles(found: Iterable[Event]) -> list[Bubble]:
    """The idle time of each rank, by rank."""
    by_iteration: dict[int, dict[int, list[Event]]] = {}
    for event in found:
        by_iteration.setdefault(event.iteration, {}).setdefault(event.rank, []).append(event)
    sums: dict[int, records.Times] = {}
    for by_rank in by_iteration.values():
        work = [each for of_rank in by_rank.values() for each in of_rank if each.task in WORK]
        if not work:
            continue
        first, last = min(each.start for each in work), max(each.end for each in work)
        for rank, of_rank in by_rank.items():
            mine = [(each.start, each.end) for each in of_rank if each.task in WORK]
            messages = [(each.start, each.end) for each in of_rank if each.lane == COMMUNICATION]
            compute = _covered(mine, first, last)
            communication = _covered(mine + messages, first, last) - compute
            sums[rank] = sums.get(rank, np.zeros(3)) + (last - first, compute, communication)
    return [Bubble(rank, *map(float, of_rank)) for rank, of_rank in sorted(sums.items())]


def _covered(intervals: list[tuple[float, float]], first: float, last: float) -> float:
    """Length of the union of the intervals within [first, last]."""
    total, reached = 0.0, first
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, last)
        if end > start:
            total += end - start
            reached = end
    return total
