"""FASOP's predicted schedule of a plan, as events of the picture."""

from __future__ import annotations

from fasop.plans.plan import Plan
from fasop.schedule import events
from megatron_lm.results.timeline import COMMUNICATION, COMPUTE, Event

TASKS = {"forward": "forward", "backward": "backward", "reduction": "grads-all-reduce"}


def predicted_events(plan: Plan) -> list[Event]:
    """One iteration of every stage, starting at 0 s; stages take the place of ranks."""
    found = []
    for event in events.of_plan(plan):
        lane = COMPUTE if event.kind in ("forward", "backward") else COMMUNICATION
        task = TASKS.get(event.kind) or ("forward-send" if event.up else "backward-send")
        micro_batch = event.micro_batch if event.micro_batch >= 0 else None
        if event.kind in (*TASKS, "send"):
            name = plan.stage_gpu[event.stage]
            found.append(Event(event.stage, name, task, lane, 1, micro_batch, event.start, event.end))
    return sorted(found, key=lambda event: (event.rank, event.start))
