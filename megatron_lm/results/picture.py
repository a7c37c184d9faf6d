"""Draws what every rank did when, as one self-contained HTML page.

    python megatron_lm/_05_report_visualization.py JOBID [--node n1 n2] [--iterations 9-10] [--plan PLAN.json]

x: time; y: ranks, with three rows each: compute (forward blue, backward red, optimizer navy), its sub-steps,
communication (green). A bold line marks the end of each pipeline stage's data-parallel group. The timeline is
that of ``chakra-et report``: it zooms, searches, and names what is under the cursor. A table gives the
idle time of each rank. With a plan of ``python -m fasop``, its predicted schedule follows on the same scale.
Node clocks are not corrected: synchronise them with NTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from chakra_et import cli
from chakra_et.drawing.lanes import Kind, Mark, Picture, PictureLane, Span
from chakra_et.report.schedule import TextTable, schedule_page
from megatron_lm.errors import RunError
from megatron_lm.logs import records, runs
from megatron_lm.logs.runs import Run
from megatron_lm.results import pages, speed, timeline
from megatron_lm.results.pages import Table
from megatron_lm.results.timeline import Event
from megatron_lm.settings import conf

KINDS = {
    "forward": Kind("forward", "#1f77ff"),
    "backward": Kind("backward", "#d62728"),
    "optimizer": Kind("optimizer", "#001f5b"),
    "sub-step": Kind("sub-steps", "#f0a830"),
    "p2p": Kind("p2p", "#2ca02c"),
    "collective": Kind("collectives", "#145a14"),
}
STRIPS = (26, 10, 10)  # by lane of the timeline
MOST_EVENTS = 200_000  # that a browser can hold


@dataclass(frozen=True)
class PictureConfig:
    """Which events to draw, and where to."""

    job_ids: tuple[str, ...] = field(
        metadata={"positional": True, "help": "job id, or both ids of a heterogeneous run"}
    )
    node: tuple[str, ...] = field(default=(), metadata={"help": "only these nodes (default: all)"})
    iterations: str = field(default="last", metadata={"help": "which iterations: 3, 3-5, all or last"})
    plan: Path | None = field(
        default=None, metadata={"help": "plan of 'python -m fasop' to draw below the run"}
    )
    output: Path = field(default=Path("out.html"), metadata={"help": "HTML page to write"})

    def __post_init__(self) -> None:
        if not 1 <= len(self.job_ids) <= 2:
            raise ValueError(f"give one or two job ids, not {len(self.job_ids)}")
        if not re.fullmatch(r"all|last|[1-9]\d*(-[1-9]\d*)?", self.iterations):
            raise ValueError(
                f"--iterations {self.iterations}: give a number, a range such as 3-5, last or all"
            )


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(
        PictureConfig, argv, prog="_05_report_visualization.py", description=(__doc__ or "").splitlines()[0]
    )
    run = runs.find(config.job_ids, conf.log_dir())
    found, settings = read_events(run, config.node, config.iterations)
    predicted = []
    if config.plan is not None:
        # Only --plan needs fasop.
        from megatron_lm.planner import read_plan
        from megatron_lm.results.predicted import predicted_events

        predicted = predicted_events(read_plan(config.plan))
    pages.write(config.output, draw(run, found, settings, predicted))
    print(f"{config.output}: {len(found)} events of {len({event.rank for event in found})} ranks")
    return 0


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
    count = timeline.iteration_count(of_node for _, of_node in timers)
    if not count:
        raise RunError("these logs have no start and end times: run with PROFILE=true.")
    lines = speed.iterations(data for _, data in outputs)
    before = max(0, lines[-1].number - count) if lines else 0
    chosen = _chosen(wanted, before + 1, before + count)
    found = [
        event for node, of_node in timers for event in timeline.events(of_node, node.name, chosen, before)
    ]
    if len(found) > MOST_EVENTS:
        raise RunError(
            f"{len(found)} events are too many for a browser: select fewer with --iterations or --node."
        )
    settings = next((of_node for _, data in outputs if (of_node := records.settings(data))), {})
    return found, settings


def draw(run: Run, found: list[Event], settings: dict[str, str], predicted: list[Event]) -> str:
    """The page: measured schedule, predicted schedule if there is one, tables."""
    pictures = [measured_picture(found, stage_ranks(settings, len({event.rank for event in found})))]
    tables = [bubble_table("Bubbles, measured", found, "rank")]
    if predicted:
        pictures.append(picture_of(predicted, "predicted", "stage"))
        tables.append(bubble_table("Bubbles, predicted", predicted, "stage"))
    stages, micro_batches = _schedule(settings)
    if stages and micro_batches:
        ideal = (stages - 1) / (micro_batches + stages - 1)
        tables.append(Table("Ideal", ("stages", "micro-batches", "bubble if all stages were equal, %"),
                            [(str(stages), str(micro_batches), f"{100 * ideal:.1f}")]))  # fmt: skip
    note = f"Measured: {_span(sorted({event.iteration for event in found}))}"
    if predicted:
        note += ". Predicted by FASOP: one iteration, one lane per stage, on the same scale"
    return schedule_page(
        f"Run {' '.join(run.jobs)}", pictures, [TextTable(*table) for table in tables], f"{note}."
    )


def measured_picture(found: Sequence[Event], group: int) -> Picture:
    """Measured events; a bold line follows each ``group`` ranks, those of one pipeline stage."""
    ranks = sorted({event.rank for event in found})
    ends = [at for at, rank in enumerate(ranks[:-1]) if rank // group != ranks[at + 1] // group]
    return replace(picture_of(found, "measured", "rank"), rules=ends)


def picture_of(found: Sequence[Event], title: str, row: str) -> Picture:
    """Events as lanes of bars, from the start of the first one on; ``row``: what a lane is."""
    zero = min(event.start for event in found)
    lane_of = {rank: at for at, rank in enumerate(sorted({event.rank for event in found}))}
    nodes = {event.rank: event.node for event in found}
    idle = {bubble.rank: bubble.share for bubble in timeline.bubbles(found)}
    iterations: dict[int, float] = {}
    for event in found:
        iterations[event.iteration] = min(iterations.get(event.iteration, event.start), event.start)
    return Picture(
        title,
        [
            PictureLane(f"{row} {rank} ({nodes[rank]})", f"{idle[rank]:.1%} bubble" if rank in idle else "")
            for rank in lane_of
        ],
        [
            Span(
                lane_of[event.rank], event.start - zero, event.end - zero, _kind(event), event.label,
                f"{event.label}: {1000 * (event.end - event.start):.3f} ms", event.lane,
            )
            for event in found
        ],
        {name: KINDS[name] for name in KINDS if any(_kind(event) == name for event in found)},
        strips=STRIPS,
        strip_labels=("compute", "sub-steps", "communication"),
        marks=[Mark(start - zero, f"iteration {number}") for number, start in sorted(iterations.items())],
    )  # fmt: skip


def bubble_table(heading: str, found: Iterable[Event], row: str) -> Table:
    """One row per rank, then all ranks together."""
    bubbles = timeline.bubbles(found)
    totals = (sum(getattr(b, name) for b in bubbles) for name in ("seconds", "compute", "communication"))
    rows = [
        (
            "all" if b.rank < 0 else str(b.rank),
            *(f"{seconds:.4f}" for seconds in (b.seconds, b.compute, b.communication)),
            f"{100 * b.share:.1f}",
        )
        for b in [*bubbles, timeline.Bubble(-1, *totals)]
    ]
    header = (
        row, "first forward to last backward of any rank, s", "compute, s", "communication and waiting, s",
        "bubble, %",
    )  # fmt: skip
    return Table(heading, header, rows)


def _kind(event: Event) -> str:
    """One of ``KINDS``."""
    if event.task in KINDS:
        return event.task
    if event.lane == timeline.SUB_STEP:
        return "sub-step"
    return "collective" if timeline.COLLECTIVE.fullmatch(event.task) else "p2p"


def _chosen(wanted: str, first: int, last: int) -> range:
    if wanted == "all":
        return range(first, last + 1)
    if wanted == "last":
        return range(last, last + 1)
    low, _, high = wanted.partition("-")
    chosen = range(int(low), int(high or low) + 1)
    if not chosen or chosen[0] < first or chosen[-1] > last:
        raise RunError(f"--iterations {wanted}: the logs have times of iterations {first} to {last}.")
    return chosen


def stage_ranks(settings: dict[str, str], ranks: int) -> int:
    """Ranks per pipeline stage; they are consecutive, tensor ranks innermost."""
    tensor, data = _numbers(settings, "TENSOR_MP_SIZE", "DP_SIZE")
    return tensor * data or max(ranks, 1)


def _schedule(settings: dict[str, str]) -> tuple[int, int]:
    """(stages, micro-batches per data-parallel rank); zeros if the settings lack them."""
    names = ("PIPELINE_MP_SIZE", "GLOBAL_BATCH_SIZE", "MICRO_BATCH_SIZE", "DP_SIZE")
    stages, batch, micro, data = _numbers(settings, *names)
    return (stages, batch // micro // data) if micro and data else (0, 0)


def _numbers(settings: dict[str, str], *names: str) -> list[int]:
    """Settings as numbers; zeros if any is missing."""
    found = [settings.get(name, "") for name in names]
    return list(map(int, found)) if all(map(str.isdigit, found)) else [0] * len(names)


def _span(numbers: list[int]) -> str:
    return f"iteration {numbers[0]}" if len(numbers) == 1 else f"iterations {numbers[0]} to {numbers[-1]}"
