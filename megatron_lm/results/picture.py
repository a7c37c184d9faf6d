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
from chakra_et.report.page import TextTable, schedule_page
from megatron_lm.logs import runs
from megatron_lm.logs.runs import Run
from megatron_lm.results import report, timeline
from megatron_lm.results.timeline import Bubble, Event
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
FROM_TO = "first forward to last backward of any rank, s"


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
    found, settings = timeline.read_events(run, config.node, config.iterations)
    predicted = []
    if config.plan is not None:
        # Only --plan needs fasop.
        from megatron_lm import planner

        predicted = planner.predicted_events(planner.read_plan(config.plan))
    report.write(config.output, draw(run, found, settings, predicted))
    print(f"{config.output}: {len(found)} events of {len({event.rank for event in found})} ranks")
    return 0


def draw(run: Run, found: list[Event], settings: dict[str, str], predicted: list[Event]) -> str:
    """The page: measured schedule, predicted schedule if there is one, tables."""
    pictures = [measured_picture(found, settings)]
    tables = [bubble_table("Bubbles, measured", found, "rank")]
    if predicted:
        pictures.append(picture_of(predicted, "predicted", "stage"))
        tables.append(bubble_table("Bubbles, predicted", predicted, "stage"))
    names = ("PIPELINE_MP_SIZE", "GLOBAL_BATCH_SIZE", "MICRO_BATCH_SIZE", "DP_SIZE")
    stages, batch, micro, data = _numbers(settings, *names)
    if stages and micro and data and (count := batch // micro // data):
        ideal = (stages - 1) / (count + stages - 1)
        header = ("stages", "micro-batches", "bubble if all stages were equal, %")
        tables.append(TextTable("Ideal", header, [(str(stages), str(count), f"{100 * ideal:.1f}")]))
    numbers = sorted({event.iteration for event in found})
    span = f"iterations {numbers[0]} to {numbers[-1]}" if numbers[1:] else f"iteration {numbers[0]}"
    also = ". Predicted by FASOP: one iteration, one lane per stage, on the same scale" if predicted else ""
    return schedule_page(f"Run {' '.join(run.jobs)}", pictures, tables, f"Measured: {span}{also}.")


def measured_picture(found: Sequence[Event], settings: dict[str, str]) -> Picture:
    """Measured events; a bold line follows the ranks of each pipeline stage, which are consecutive."""
    ranks = sorted({event.rank for event in found})
    tensor, data = _numbers(settings, "TENSOR_MP_SIZE", "DP_SIZE")
    group = tensor * data or len(ranks)
    ends = [at for at, rank in enumerate(ranks[:-1]) if rank // group != ranks[at + 1] // group]
    return replace(picture_of(found, "measured", "rank"), rules=ends)


def picture_of(found: Sequence[Event], title: str, row: str) -> Picture:
    """Events as lanes of bars, from the start of the first one on; ``row``: what a lane is."""
    zero = min(event.start for event in found)
    nodes = dict(sorted({event.rank: event.node for event in found}.items()))
    lane_of = {rank: at for at, rank in enumerate(nodes)}
    idle = {bubble.rank: f"{bubble.share:.1%} bubble" for bubble in timeline.bubbles(found)}
    lanes = [PictureLane(f"{row} {rank} ({node})", idle.get(rank, "")) for rank, node in nodes.items()]
    iterations: dict[int, float] = {}
    spans = []
    for event in found:
        iterations[event.iteration] = min(iterations.get(event.iteration, event.start), event.start)
        title_of = f"{event.label}: {1000 * (event.end - event.start):.3f} ms"
        times = (event.start - zero, event.end - zero)
        spans.append(Span(lane_of[event.rank], *times, _kind(event), event.label, title_of, event.lane))
    used = {span.kind for span in spans}
    return Picture(
        title,
        lanes,
        spans,
        {name: kind for name, kind in KINDS.items() if name in used},
        strips=STRIPS,
        strip_labels=("compute", "sub-steps", "communication"),
        marks=[Mark(start - zero, f"iteration {number}") for number, start in sorted(iterations.items())],
    )


def bubble_table(heading: str, found: Iterable[Event], row: str) -> TextTable:
    """One row per rank, then all ranks together."""
    bubbles = timeline.bubbles(found)
    totals = (sum(getattr(b, name) for b in bubbles) for name in ("seconds", "compute", "communication"))
    rows = []
    for b in [*bubbles, Bubble(-1, *totals)]:
        seconds = (f"{each:.4f}" for each in (b.seconds, b.compute, b.communication))
        rows.append(("all" if b.rank < 0 else str(b.rank), *seconds, f"{100 * b.share:.1f}"))
    header = (row, FROM_TO, "compute, s", "communication and waiting, s", "bubble, %")
    return TextTable(heading, header, rows)


def _kind(event: Event) -> str:
    """One of ``KINDS``."""
    if event.task in KINDS:
        return event.task
    if event.lane == timeline.SUB_STEP:
        return "sub-step"
    return "collective" if timeline.COLLECTIVE.fullmatch(event.task) else "p2p"


def _numbers(settings: dict[str, str], *names: str) -> list[int]:
    """Settings as numbers; zeros if any is missing."""
    found = [settings.get(name, "") for name in names]
    return list(map(int, found)) if all(map(str.isdigit, found)) else [0] * len(names)
