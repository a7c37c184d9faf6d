"""Draws what every rank did when, as one self-contained HTML page.

    python megatron_lm/_05_report_visualization.py JOBID [--node n1 n2] [--iterations 9-10] [--plan PLAN.json]

x: seconds; y: ranks, with three lanes each: compute (forward blue, backward red, optimizer navy), its
sub-steps, communication (green). A bold line marks the end of each pipeline stage's data-parallel group.
The table below gives the idle time of each rank. With a plan of ``python -m fasop``, its predicted schedule
follows on the same scale. Node clocks are not corrected: synchronise them with NTP.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import plotly.graph_objects as go

from chakra_et import cli
from megatron_lm.errors import RunError
from megatron_lm.logs import records, runs
from megatron_lm.logs.runs import Run
from megatron_lm.results import pages, speed, timeline
from megatron_lm.results.pages import Table
from megatron_lm.results.timeline import Event
from megatron_lm.settings import conf

COLOURS = {"forward": "#1f77ff", "backward": "#d62728", "optimizer": "#001f5b"}
COMMUNICATION_COLOUR, COLLECTIVE_COLOUR, SUB_STEP_COLOUR = "#2ca02c", "#145a14", "#f0a830"
LANE_HEIGHT = 0.26
LABELLED = 4000  # events; more labels than this slow the browser down and can't be read anyway
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
        from megatron_lm.results.predicted import predicted_events, read_plan

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
    group = stage_ranks(settings, len({event.rank for event in found}))
    iterations = sorted({event.iteration for event in found})
    measured = figure(found, group, f"Measured: {_span(iterations)}")
    figures = [measured]
    if predicted:
        figures.append(
            figure(predicted, 1, "Predicted by FASOP: one iteration, one row per stage", row="stage")
        )
        longest = max(_length(found), _length(predicted))
        for each in figures:
            each.update_xaxes(range=[0, longest * 1.02])
    charts = [
        each.to_html(full_html=False, include_plotlyjs=number == 0) for number, each in enumerate(figures)
    ]
    tables = [bubble_table("Bubbles, measured", found, "rank")]
    if predicted:
        tables.append(bubble_table("Bubbles, predicted", predicted, "stage"))
    stages, micro_batches = _schedule(settings)
    notes = []
    if stages and micro_batches:
        ideal = (stages - 1) / (micro_batches + stages - 1)
        notes.append(Table("Ideal", ("stages", "micro-batches", "bubble if all stages were equal, %"),
                           [(str(stages), str(micro_batches), f"{100 * ideal:.1f}")]))  # fmt: skip
    return pages.page(f"Run {' '.join(run.jobs)}", [], [*tables, *notes], charts)


def figure(found: list[Event], group: int, heading: str, row: str = "rank") -> go.Figure:
    """Events as bars. group: number of ranks per pipeline stage; a bold line follows each group."""
    zero = min(event.start for event in found)
    ranks = sorted({event.rank for event in found})
    nodes = {event.rank: event.node for event in found}
    chart = go.Figure()
    by_colour: dict[tuple[int, str, str], list[Event]] = {}
    for event in found:
        by_colour.setdefault((event.lane, *_colour(event)), []).append(event)
    for (lane, name, colour), events in sorted(by_colour.items()):
        # One bar trace per colour: a shape per event would be much slower.
        chart.add_bar(
            orientation="h",
            name=name,
            base=[event.start - zero for event in events],
            x=[event.end - event.start for event in events],
            y=[event.rank + (lane - 1) * LANE_HEIGHT * 1.1 for event in events],
            width=LANE_HEIGHT,
            marker={"color": colour, "line": {"width": 0}},
            text=[event.label for event in events] if len(found) <= LABELLED else None,
            textposition="inside",
            insidetextanchor="middle",
            constraintext="inside",
            textangle=0,
            textfont={"color": "white", "size": 9},
            customdata=[(event.label, event.rank, event.node, event.iteration) for event in events],
            hovertemplate=f"%{{customdata[0]}}<br>{row} %{{customdata[1]}} on %{{customdata[2]}}, iteration "
            "%{customdata[3]}<br>start %{base:.6f} s, %{x:.6f} s<extra></extra>",
        )
    chart.update_yaxes(
        tickvals=ranks,
        ticktext=[html.escape(f"{row} {rank} ({nodes[rank]})") for rank in ranks],
        range=[ranks[-1] + 0.55, ranks[0] - 0.55],
        showgrid=False,
        # Equal margins on all charts of a page, so that their time axes line up.
        automargin=False,
    )
    lines = sorted(
        {rank // group * group + group for rank in ranks if rank // group * group + group <= ranks[-1]}
    )
    for line in lines:
        chart.add_hline(y=line - 0.5, line_width=3, line_color="black")
    chart.update_layout(
        title=heading,
        barmode="overlay",
        xaxis_title="seconds",
        height=160 + 70 * len(ranks),
        margin={"l": 150, "r": 30},
        plot_bgcolor="#f7f7f7",
        # Labels that do not fit their bar are hidden until the user zooms in.
        uniformtext={"minsize": 7, "mode": "hide"},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"},
    )
    return chart


def bubble_table(heading: str, found: Iterable[Event], row: str) -> Table:
    """One row per rank, then all ranks together."""
    bubbles = timeline.bubbles(found)
    rows = [
        (
            str(b.rank),
            f"{b.seconds:.4f}",
            f"{b.compute:.4f}",
            f"{b.communication:.4f}",
            f"{100 * b.share:.1f}",
        )
        for b in bubbles
    ]
    seconds, compute = sum(b.seconds for b in bubbles), sum(b.compute for b in bubbles)
    rows.append(("all", f"{seconds:.4f}", f"{compute:.4f}", f"{sum(b.communication for b in bubbles):.4f}",
                 f"{100 * (1 - compute / seconds) if seconds else 0:.1f}"))  # fmt: skip
    header = (
        row,
        "first forward to last backward of any rank, s",
        "compute, s",
        "communication and waiting, s",
        "bubble, %",
    )
    return Table(heading, header, rows)


def _colour(event: Event) -> tuple[str, str]:
    if event.task in COLOURS:
        return event.task, COLOURS[event.task]
    if event.lane == timeline.SUB_STEP:
        return "sub-steps", SUB_STEP_COLOUR
    if timeline.COLLECTIVE.fullmatch(event.task):
        return "collectives", COLLECTIVE_COLOUR
    return "p2p", COMMUNICATION_COLOUR


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
    try:
        return int(settings["TENSOR_MP_SIZE"]) * int(settings["DP_SIZE"])
    except (KeyError, ValueError):
        return max(ranks, 1)


def _schedule(settings: dict[str, str]) -> tuple[int, int]:
    """(stages, micro-batches per data-parallel rank); zeros if the settings lack them."""
    try:
        batches = (
            int(settings["GLOBAL_BATCH_SIZE"])
            // int(settings["MICRO_BATCH_SIZE"])
            // int(settings["DP_SIZE"])
        )
        return int(settings["PIPELINE_MP_SIZE"]), batches
    except (KeyError, ValueError, ZeroDivisionError):
        return 0, 0


def _span(numbers: list[int]) -> str:
    return f"iteration {numbers[0]}" if len(numbers) == 1 else f"iterations {numbers[0]} to {numbers[-1]}"


def _length(found: list[Event]) -> float:
    return max(event.end for event in found) - min(event.start for event in found)
