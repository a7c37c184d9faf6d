#!/usr/bin/env python3
"""A planned and a measured pipeline on one time axis, for the documents.

    megatron_lm/plan_run_compare.sh --stages 4 --global-batch 8 --iterations 8 --output outputs/compare
    python benchmarks/pipeline_pictures.py outputs/compare/plan.json JOB

JOB: the job id of its last run, which ran the plan. Writes pipeline_planned.svg and pipeline_measured.svg to
docs/pictures/, from the iteration whose time is the median. Needs matplotlib.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from chakra_et import cli
from chakra_et.report.schedule import Picture
from fasop.errors import PlanError
from fasop.plans.plan import pick_plan
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
    return cli.run(lambda: make(config), (RunError, PlanError))


def make(config: Config) -> None:
    plan = pick_plan(str(config.plan), 1)
    planned = picture.predicted_events(plan)
    found, _ = picture.read_events(runs.find((config.job,), conf.log_dir()), "all")
    measured = typical([event for event in found if event.lane in (COMPUTE, COMMUNICATION)])
    layers = "-".join(map(str, plan.layers))
    longest = max(length(planned), length(measured))
    for name, events, row, words in (
        ("planned", planned, "stage", "planned by FASOP"),
        ("measured", measured, "rank", "measured, gloo on CPUs"),
    ):
        heading = f"{layers} layers, {words}: {1000 * length(events):.0f} ms"
        path = config.output / f"pipeline_{name}.svg"
        draw(picture.picture_of(events, "", row), heading, longest, path)
        print(f"{path}: {heading}, {path.stat().st_size / 1000:.0f} kB")


def draw(drawn: Picture, heading: str, until: float, path: Path) -> None:
    """Draw compute, and a narrow strip of communication below, of each lane."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pipeline"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(14, 1 + 0.5 * len(drawn.lanes)), layout="constrained")
    for key, (label, colour) in drawn.kinds.items():
        for strip, low, height in ((COMPUTE, 0.3, 0.6), (COMMUNICATION, 0.1, 0.2)):
            for lane in range(len(drawn.lanes)):
                bars = [
                    (span.start, span.end - span.start)
                    for span in drawn.spans
                    if (span.lane, span.kind, span.strip) == (lane, key, strip)
                ]
                axes.broken_barh(bars, (lane + low, height), color=colour, edgecolor="white", linewidth=0.3)
        axes.broken_barh([], (0, 0), color=colour, label=label)
    axes.set_yticks([at + 0.6 for at in range(len(drawn.lanes))], [f"{a}\n{b}" for a, b in drawn.lanes])
    axes.set(xlim=(0, until), ylim=(len(drawn.lanes), 0), xlabel="s", title=heading)
    axes.legend(ncols=len(drawn.kinds), loc="upper right", bbox_to_anchor=(1, 1.2), frameon=False)
    figure.savefig(path, metadata={"Date": None})


def typical(found: list[Event]) -> list[Event]:
    """The events of the iteration of median length; the first is left out, as it also sets up."""
    numbers = sorted({event.iteration for event in found})[1:]
    of = {number: [event for event in found if event.iteration == number] for number in numbers}
    if not of:
        raise RunError("the run has one iteration only: run some more")
    return of[sorted(numbers, key=lambda number: length(of[number]))[len(numbers) // 2]]


def length(found: list[Event]) -> float:
    return max(event.end for event in found) - min(event.start for event in found)


if __name__ == "__main__":
    sys.exit(main())
