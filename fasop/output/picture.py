"""A step of a plan as a picture, a lane for each pipeline stage: SVG, or a page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from chakra_et.drawing import lanes
from chakra_et.drawing.lanes import Kind, Picture, PictureLane, Span
from fasop.plans.plan import Plan
from fasop.schedule.events import Event, bubbles, step_time

KINDS = {
    "forward": Kind("forward", "#3b78c3"),
    "backward": Kind("backward", "#c8453b"),
    "send": Kind("message", "#3c9a5f"),
    "reduction": Kind("gradient reduction", "#1f6b3d"),
    "embedding": Kind("embedding all-reduce", "#7cb342"),
    "update": Kind("optimizer", "#2b3a67"),
    "gather": Kind("parameter all-gather", "#80a1c1"),
}
COMPUTE, COMMUNICATION = range(2)
STRIPS = (26, 10)


def draw(plan: Plan, events: Sequence[Event], schedule: str) -> str:
    """The SVG. Computation fills the upper part of a lane, communication the strip below; the rest is
    bubble."""
    return lanes.draw(_picture(plan, events, schedule))


def page(plan: Plan, events: Sequence[Event], schedule: str) -> str:
    """The SVG on an HTML page."""
    return lanes.page([_picture(plan, events, schedule)], f"{plan.model.name} on {plan.cluster.name}")


def _picture(plan: Plan, events: Sequence[Event], schedule: str) -> Picture:
    whole = step_time(list(events))
    title = f"{plan.title}, {schedule}: {whole:.4f} s per step"
    lanes = [
        PictureLane(
            f"stage {stage}: {plan.stage_gpu[stage]}, {plan.partition[stage]} units", f"{idle:.1%} bubble"
        )
        for stage, idle in enumerate(bubbles(plan, list(events)))
    ]
    spans = [_span(event) for event in events if event.kind in KINDS]
    return Picture(title, lanes, spans, KINDS, strips=STRIPS, until=whole)


def _span(event: Event) -> Span:
    what = KINDS[event.kind].label + (
        f" of micro-batch {event.micro_batch}" if event.micro_batch >= 0 else ""
    )
    if event.kind == "send":
        what += f", {'activations' if event.up else 'gradients'} to stage {event.peer}"
    if event.chunk > 0:
        what += f", chunk {event.chunk}"
    return Span(
        event.stage,
        event.start,
        event.end,
        event.kind,
        label=str(event.micro_batch) if event.micro_batch >= 0 else "",
        title=f"stage {event.stage}: {what}, {event.start:.4f} s to {event.end:.4f} s",
        strip=COMPUTE if event.kind in ("forward", "backward", "update") else COMMUNICATION,
    )
