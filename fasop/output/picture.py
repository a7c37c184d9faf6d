"""A step of a plan as a picture, a lane for each pipeline stage: SVG, or a page that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Sequence

from fasop.plans.plan import Plan
from fasop.schedule.events import Event, bubbles, step_time

COLOURS = {
    "forward": "#3b78c3",
    "backward": "#c8453b",
    "send": "#3c9a5f",
    "reduction": "#1f6b3d",
    "embedding": "#7cb342",
    "update": "#2b3a67",
    "gather": "#80a1c1",
}
NAMES = {
    "forward": "forward",
    "backward": "backward",
    "send": "message",
    "reduction": "gradient reduction",
    "embedding": "embedding all-reduce",
    "update": "optimizer",
    "gather": "parameter all-gather",
}
WIDTH, LEFT, RIGHT, LANE, BAR = 1400, 165, 90, 46, 26
LABELLED = 16  # pixels that a micro-batch's number needs


def svg(plan: Plan, events: Sequence[Event], schedule: str) -> str:
    """The picture. Times run to the right; what is empty of a lane is bubble."""
    whole = step_time(list(events))
    scale = (WIDTH - LEFT - RIGHT) / whole
    height = 70 + plan.pp * LANE + 60
    title = (
        f"{plan.model.name} on {plan.cluster.name}: tp {plan.tp}, dp {plan.dp}, pp {plan.pp}, "
        f"{plan.micro_batches} micro-batches of {plan.mbs}, {schedule}: {whole:.4f} s per step"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="sans-serif" font-size="12">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15">{html.escape(title)}</text>',
    ]
    parts += _legend()
    for stage, idle in enumerate(bubbles(plan, list(events))):
        top = 60 + stage * LANE
        name = f"stage {stage}: {plan.stage_gpu[stage]}, {plan.partition[stage]} units"
        parts.append(f'<text x="12" y="{top + 16}">{html.escape(name)}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{top}" width="{whole * scale:.2f}" height="{BAR + 12}" fill="#f1f1ee"/>'
        )
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{top + 16}">{idle:.1%} bubble</text>')
    parts += [_bar(event, scale) for event in events if event.kind in COLOURS]
    parts += _axis(whole, scale, 60 + plan.pp * LANE + 4)
    return "\n".join([*parts, "</svg>"]) + "\n"


def page(plan: Plan, events: Sequence[Event], schedule: str) -> str:
    """The SVG on an HTML page."""
    title = html.escape(f"{plan.model.name} on {plan.cluster.name}")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body{margin:1em;font-family:sans-serif}svg{width:100%;min-width:900px}"
        "rect:hover{opacity:.6}</style></head>\n"
        f"<body>\n{svg(plan, events, schedule)}</body></html>\n"
    )


def _legend() -> list[str]:
    parts, x = [], LEFT
    for kind, name in NAMES.items():
        parts.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 17}" y="46">{name}</text>')
        x += 40 + 7 * len(name)
    return parts


def _bar(event: Event, scale: float) -> str:
    """Computation fills the upper part of a lane, communication the strip below it."""
    compute = event.kind in ("forward", "backward", "update")
    top = 60 + event.stage * LANE + (0 if compute else BAR + 1)
    x, width = LEFT + event.start * scale, max((event.end - event.start) * scale, 0.3)
    what = NAMES[event.kind] + (f" of micro-batch {event.micro_batch}" if event.micro_batch >= 0 else "")
    if event.kind == "send":
        what += f", {'activations' if event.up else 'gradients'} to stage {event.peer}"
    if event.chunk > 0:
        what += f", chunk {event.chunk}"
    title = f"stage {event.stage}: {what}, {event.start:.4f} s to {event.end:.4f} s"
    text = (
        f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{BAR if compute else 10}" '
        f'fill="{COLOURS[event.kind]}" stroke="white" stroke-width=".4"><title>{title}</title></rect>'
    )
    if event.micro_batch >= 0 and compute and width >= LABELLED:
        text += (
            f'<text x="{x + width / 2:.2f}" y="{top + 17}" text-anchor="middle" fill="white" font-size="11" '
            f'pointer-events="none">{event.micro_batch}</text>'
        )
    return text


def _axis(whole: float, scale: float, y: float) -> list[str]:
    step = 10.0 ** len(str(int(whole)))
    while whole / step < 5:
        step /= 2 if str(step)[0] != "5" else 2.5
    parts, tick = [], 0.0
    while tick <= whole:
        x = LEFT + tick * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 6}" stroke="#444"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 20}" text-anchor="middle">{tick:g} s</text>')
        tick = round(tick + step, 12)
    return parts
