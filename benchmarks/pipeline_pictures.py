#!/usr/bin/env python3
"""A planned and a measured pipeline on one time axis, for the documents.

    megatron_lm/plan_run_compare.sh --stages 4 --global-batch 8 --iterations 8 --output outputs/compare
    python benchmarks/pipeline_pictures.py outputs/compare/plan.json JOB

JOB: the job id of its last run, which ran the plan. Writes pipeline_planned.svg and pipeline_measured.svg to
docs/pictures/, from the iteration whose time is the median.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from chakra_et import cli
from chakra_et.drawing.lanes import Picture, Span, draw
from chakra_et.files import write_text
from megatron_lm import planner
from megatron_lm.errors import RunError
from megatron_lm.logs import runs
from megatron_lm.results import picture
from megatron_lm.results.picture import COMMUNICATION, COMPUTE, Event
from megatron_lm.settings import conf


@dataclass
class Config:
    """Which plan and run, and where to."""

    plan: Path = field(metadata={"positional": True, "help": "plan.json of plan_run_compare.sh"})
    job: str = field(metadata={"positional": True, "help": "the job that ran it"})
    output: Path = field(default=ROOT / "docs" / "pictures", metadata={"help": "folder of the pictures"})


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    return cli.run(lambda: make(config), RunError)


def make(config: Config) -> None:
    plan = planner.read_plan(config.plan)
    planned = picture.predicted_events(plan)
    found, _ = picture.read_events(runs.find((config.job,), conf.log_dir()), (), "all")
    measured = typical([event for event in found if event.lane in (COMPUTE, COMMUNICATION)])
    layers = "-".join(map(str, plan.layers))
    longest = max(length(planned), length(measured))
    for name, events, row, words in (
        ("planned", planned, "stage", "planned by FASOP"),
        ("measured", measured, "rank", "measured, gloo on CPUs"),
    ):
        drawn = two_strips(picture.picture_of(events, "", row))
        heading = f"{layers} layers, {words}: {1000 * length(events):.0f} ms"
        path = config.output / f"pipeline_{name}.svg"
        write_text(path, draw(replace(drawn, title=heading, until=longest, marks=())))
        print(f"{path}: {heading}, {path.stat().st_size / 1000:.0f} kB")


def typical(found: list[Event]) -> list[Event]:
    """The events of the iteration of median length; the first is left out, as it also sets up."""
    numbers = sorted({event.iteration for event in found})[1:]
    of = {number: [event for event in found if event.iteration == number] for number in numbers}
    if not of:
        raise RunError("the run has one iteration only: run some more")
    return of[sorted(numbers, key=lambda number: length(of[number]))[len(numbers) // 2]]


def two_strips(drawn: Picture) -> Picture:
    """The picture without sub-steps, and without labels of messages."""
    spans: list[Span] = [
        replace(span, strip=0, label=span.label.rpartition("-")[2])
        if span.strip == COMPUTE
        else replace(span, strip=1, label="")
        for span in drawn.spans
    ]
    return replace(drawn, spans=spans, strips=(24, 8), strip_labels=())


def length(found: list[Event]) -> float:
    return max(event.end for event in found) - min(event.start for event in found)


if __name__ == "__main__":
    sys.exit(main())
