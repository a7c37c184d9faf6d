"""Draws what every rank did when, as one self-contained HTML page.

    python megatron_lm/_05_report_visualization.py JOBID [--iterations 9-10] [--plan PLAN.json]

x: time; y: ranks, with three rows each: compute (forward blue, backward red, optimizer navy), its sub-steps,
communication (green). A bold line marks the end of each pipeline stage's data-parallel group. The timeline is
that of ``chakra-et report``: it zooms, searches, and names what is under the cursor. A table gives the
idle time of each rank. With a plan of ``python -m fasop``, its predicted schedule follows on the same scale.
Node clocks are not corrected: synchronise them with NTP.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from chakra_et import cli, files
from chakra_et.report.page import TextTable
from chakra_et.report.schedule import Kind, Picture, Span, schedule_page
from fasop.plans.plan import Plan, pick_plan
from fasop.schedule.events import covered, of_plan
from megatron_lm.errors import RunError
from megatron_lm.logs import records, runs
from megatron_lm.logs.runs import Run
from megatron_lm.settings import conf

COMPUTE, SUB_STEP, COMMUNICATION = range(3)  # lanes of a rank, top to bottom
WHOLE = "forward-backward"
COMPUTE_TASKS = {"forward-compute": "forward", "backward-compute": "backward", "optimizer": "optimizer"}
WORK = ("forward", "backward")
MESSAGE = re.compile(r"(?:forward|backward)-(?:send|recv)")
COLLECTIVE = re.compile(r".*(?:all-reduce|reduce-scatter|all-gather)")
BOTH = "forward-backward-send-forward-backward-recv"
MESSAGES = re.compile(rf"(?:{MESSAGE.pattern}|{BOTH})(?:-{MESSAGE.pattern})*")
BY_MICRO_BATCH = (*WORK, "post-process", "loss-compute", "batch-generator")
MOST_EVENTS = 200_000  # that a browser can hold
KINDS = {
    "forward": Kind("forward", "#1f77ff"),
    "backward": Kind("backward", "#d62728"),
    "optimizer": Kind("optimizer", "#001f5b"),
    "sub-step": Kind("sub-steps", "#f0a830"),
    "p2p": Kind("p2p", "#2ca02c"),
    "collective": Kind("collectives", "#145a14"),
}
PLANNED = {"forward": "forward", "backward": "backward", "reduction": "grads-all-reduce"}
STRIPS = ("compute", "sub-steps", "communication")  # by lane of the timeline
FROM_TO = "first forward to last backward of any rank, s"


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


@dataclass(frozen=True)
class PictureConfig:
    job_ids: tuple[str, ...] = cli.option("job id, or both ids of a heterogeneous run", positional=True)
    iterations: str = cli.option("which iterations: 3, 3-5, all or last", "last")
    plan: Path | None = cli.option("plan of 'python -m fasop' to draw below the run", None)
    output: Path = cli.option("HTML page to write", Path("out.html"))

    def __post_init__(self) -> None:
        if not re.fullmatch(r"all|last|[1-9]\d*(-[1-9]\d*)?", self.iterations):
            raise ValueError(f"--iterations {self.iterations}: give a number, a range as 3-5, last or all")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(PictureConfig, argv, prog="_05_report_visualization.py", description=__doc__)
    run = runs.find(config.job_ids, conf.log_dir())
    found, settings = read_events(run, config.iterations)
    predicted = predicted_events(pick_plan(str(config.plan), 1)) if config.plan is not None else []
    files.write_text(config.output, draw(run, found, settings, predicted))
    print(f"{config.output}: {len(found)} events of {len({event.rank for event in found})} ranks")
    return 0


def draw(
    run: Run, found: list[Event], settings: dict[str, str], predicted: list[Event],
    more: Sequence[TextTable] = (),
) -> str:  # fmt: skip
    """The page: measured schedule, predicted schedule if there is one, tables."""
    pictures = [measured_picture(found, settings)]
    tables = [*more, bubble_table("Bubbles, measured", found, "rank")]
    if predicted:
        pictures.append(picture_of(predicted, "predicted", "stage"))
        tables.append(bubble_table("Bubbles, predicted", predicted, "stage"))
    numbers = sorted({event.iteration for event in found})
    span = f"iterations {numbers[0]} to {numbers[-1]}" if numbers[1:] else f"iteration {numbers[0]}"
    also = ". Predicted by FASOP: one iteration, one lane per stage, on the same scale" if predicted else ""
    return schedule_page(f"Run {' '.join(run.jobs)}", pictures, tables, f"Measured: {span}{also}.")


def measured_picture(found: Sequence[Event], settings: dict[str, str]) -> Picture:
    """Measured events; a bold line follows the ranks of each pipeline stage, which are consecutive."""
    ranks = sorted({event.rank for event in found})
    sizes = [settings.get(name, "") for name in ("TENSOR_MP_SIZE", "DP_SIZE")]
    group = math.prod(map(int, sizes)) if all(map(str.isdigit, sizes)) else len(ranks)
    ends = [at for at, rank in enumerate(ranks[:-1]) if rank // group != ranks[at + 1] // group]
    return replace(picture_of(found, "measured", "rank"), rules=ends)


def picture_of(found: Sequence[Event], title: str, row: str) -> Picture:
    """Events as lanes of bars, from the start of the first one on; ``row``: what a lane is."""
    zero = min(event.start for event in found)
    nodes = dict(sorted({event.rank: event.node for event in found}.items()))
    lane_of = {rank: at for at, rank in enumerate(nodes)}
    idle = {bubble.rank: f"{bubble.share:.1%} bubble" for bubble in bubbles(found)}
    lanes = [(f"{row} {rank} ({node})", idle.get(rank, "")) for rank, node in nodes.items()]
    iterations: dict[int, float] = {}
    spans = []
    for event in found:
        iterations[event.iteration] = min(iterations.get(event.iteration, event.start), event.start)
        times = (event.start - zero, event.end - zero)
        spans.append(Span(lane_of[event.rank], *times, _kind(event), event.label, event.lane))
    used = {span.kind for span in spans}
    kinds = {name: kind for name, kind in KINDS.items() if name in used}
    marks = [(start - zero, f"iteration {number}") for number, start in sorted(iterations.items())]
    return Picture(title, lanes, spans, kinds, strips=STRIPS, marks=marks)


def bubble_table(heading: str, found: Iterable[Event], row: str) -> TextTable:
    """One row per rank, then all ranks together."""
    idle = bubbles(found)
    totals = (sum(getattr(b, name) for b in idle) for name in ("seconds", "compute", "communication"))
    rows = []
    for b in [*idle, Bubble(-1, *totals)]:
        seconds = (f"{each:.4f}" for each in (b.seconds, b.compute, b.communication))
        rows.append(("all" if b.rank < 0 else str(b.rank), *seconds, f"{100 * b.share:.1f}"))
    header = (row, FROM_TO, "compute, s", "communication and waiting, s", "bubble, %")
    return TextTable(heading, header, rows)


def _kind(event: Event) -> str:
    """One of ``KINDS``."""
    if event.task in KINDS:
        return event.task
    if event.lane == SUB_STEP:
        return "sub-step"
    return "collective" if COLLECTIVE.fullmatch(event.task) else "p2p"


def read_events(run: Run, wanted: str) -> tuple[list[Event], dict[str, str]]:
    """Events in the wanted iterations, as --iterations has them, and the run's settings. Raises ``RunError``
    if there are none.
    """
    outputs = [(node.name, node.read("out")) for node in run.nodes]
    timers = [(node, records.timers(data)) for node, data in outputs]
    wholes = (lists for _, of_node in timers for (_, name), lists in of_node.items() if name == WHOLE)
    count = max((len(lists.start) for lists in wholes), default=0)
    if not count:
        raise RunError("these logs have no start and end times: run with PROFILE=true.")
    lines = records.all_iterations(data for _, data in outputs)
    before = max(0, lines[-1].number - count) if lines else 0
    first, last = before + 1, before + count
    low, _, high = {"all": f"{first}-{last}", "last": str(last)}.get(wanted, wanted).partition("-")
    chosen = range(int(low), int(high or low) + 1)
    if not chosen or chosen[0] < first or chosen[-1] > last:
        raise RunError(f"--iterations {wanted}: the logs have times of iterations {first} to {last}.")
    found = [event for node, of_node in timers for event in events(of_node, node, chosen, before)]
    if len(found) > MOST_EVENTS:
        raise RunError(f"{len(found)} events are too many for a browser: select fewer with --iterations.")
    settings = next((of_node for _, data in outputs if (of_node := records.settings(data))), {})
    return found, settings


def lane_of(timer: str) -> int:
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
        # Events before the first forward-backward belong to the first iteration.
        numbers = before + np.maximum(np.searchsorted(windows[rank], lists.start, side="right"), 1)
        task, lane = COMPUTE_TASKS.get(name, name), lane_of(name)
        for at in np.flatnonzero((numbers >= wanted[0]) & (numbers <= wanted[-1])):
            start, end = float(lists.start[at]), float(lists.end[at])
            found.append(Event(rank, node, task, lane, int(numbers[at]), None, start, end))
    found.sort(key=lambda event: (event.rank, event.start))
    # The k-th event of a kind belongs to micro-batch k. A combined message counts for each part of its name,
    # and takes the number of the first.
    counts: Counter[tuple[int, int, str]] = Counter()
    for place, event in enumerate(found):
        kinds = [event.task] if event.task in BY_MICRO_BATCH else MESSAGE.findall(event.task)
        for kind in reversed(kinds):
            key = (event.rank, event.iteration, kind)
            found[place] = replace(event, micro_batch=counts[key])
            counts[key] += 1
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
            compute = covered(mine, first, last)
            communication = covered(mine + messages, first, last) - compute
            sums[rank] = sums.get(rank, np.zeros(3)) + (last - first, compute, communication)
    return [Bubble(rank, *map(float, of_rank)) for rank, of_rank in sorted(sums.items())]


def predicted_events(plan: Plan) -> list[Event]:
    """One iteration of every stage, starting at 0 s; stages take the place of ranks."""
    found = []
    for event in of_plan(plan):
        lane = COMPUTE if event.kind in ("forward", "backward") else COMMUNICATION
        task = PLANNED.get(event.kind) or ("forward-send" if event.up else "backward-send")
        micro_batch = event.micro_batch if event.micro_batch >= 0 else None
        if event.kind in (*PLANNED, "send"):
            name = plan.stage_gpu[event.stage]
            found.append(Event(event.stage, name, task, lane, 1, micro_batch, event.start, event.end))
    return sorted(found, key=lambda event: (event.rank, event.start))
