"""``python -m fasop simulate PLAN``: one step of a plan, as a picture and as .et files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chakra_et import cli, files
from chakra_et.report.schedule import Kind, Picture, Span, schedule_page
from fasop.plans.plan import Plan, pick_plan
from fasop.schedule import events as events_
from fasop.schedule.events import Event

KINDS = {
    "forward": Kind("forward", "#3b78c3"),
    "backward": Kind("backward", "#c8453b"),
    "send": Kind("message", "#3c9a5f"),
    "reduction": Kind("gradient reduction", "#1f6b3d"),
    "embedding": Kind("embedding all-reduce", "#7cb342"),
    "update": Kind("optimizer", "#2b3a67"),
    "gather": Kind("parameter all-gather", "#80a1c1"),
}
WGRAD = {"wgrad": Kind("gradients of weights", "#e0a03a")}  # where they are put off
STRIPS = ("compute", "communication")


@dataclass
class Config:
    plan: str = cli.option("file that 'plan --json' printed", positional=True)
    rank: int = cli.option("which of its plans, counted from 1", 1)
    picture: str = cli.option("page to write, .html", "")
    et: bool = cli.option("write an .et file for every rank", False)
    output: str = cli.option("folder of the .et files", ".")
    name: str = cli.option("name of the .et files (default: model and cluster)", "")

    def __post_init__(self) -> None:
        if self.picture and not self.picture.endswith(".html"):
            raise ValueError(f"--picture {self.picture}: give a name that ends in .html")
        if self.name and not re.fullmatch(r"[\w][\w .+-]*", self.name):
            raise ValueError(f"--name {self.name}: give letters, digits, dots and dashes")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(Config, argv, description="Simulate one step of a plan.")
    plan = pick_plan(config.plan, config.rank)
    found = events_.of_plan(plan)
    whole, drawn = events_.step_time(found), picture(plan, found)
    lines = [
        f"{plan.title}, {plan.schedule}",
        f"simulated step {whole:.4f} s; planned with {plan.cost_model} {plan.step_time:.4f} s "
        f"({whole / plan.step_time - 1:+.2%})",
        *(f"  {label}: {idle}" for label, idle in drawn.lanes),
    ]
    if config.picture:
        title = f"{plan.title}, {plan.schedule}: {whole:.4f} s per step"
        files.write_text(Path(config.picture), schedule_page(title, [drawn]))
        lines.append(f"picture: {config.picture}")
    if config.et:
        from fasop.output import traces

        name = config.name or re.sub(r"[^\w.+-]+", "_", f"{plan.model.name}_{plan.cluster.name}")
        written = traces.write(plan, found, Path(config.output), name)
        lines.append(f"traces: {len(written)} files {Path(config.output) / name}.*.et")
    print("\n".join(lines))
    return 0


def picture(plan: Plan, events: list[Event]) -> Picture:
    """A step, a lane for each stage: a row of computation, and one of communication below."""
    stages = [
        (f"stage {stage}: {plan.stage_gpu[stage]}, {plan.partition[stage]} units", f"{idle:.1%} bubble")
        for stage, idle in enumerate(events_.bubbles(plan, events))
    ]
    kinds = KINDS | WGRAD if plan.weight_gradients else KINDS
    spans = [_span(event, kinds[event.kind].label) for event in events if event.kind in kinds]
    return Picture("step", stages, spans, kinds, STRIPS)


def _span(event: Event, label: str) -> Span:
    if event.micro_batch >= 0:
        label += f" {event.micro_batch}"
    if event.kind == "send":
        label += f", {'activations' if event.up else 'gradients'} to stage {event.peer}"
    if event.chunk > 0:
        label += f", chunk {event.chunk}"
    strip = int(event.kind not in ("forward", "backward", "wgrad", "update"))  # of STRIPS
    return Span(event.stage, event.start, event.end, event.kind, label, strip)
