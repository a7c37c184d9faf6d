"""FASOP's schedule of a plan as the events that the picture draws."""

from __future__ import annotations

from pathlib import Path

from fasop.errors import PlanError
from fasop.plans.plan import Plan, read_plans
from fasop.schedule import one_f_one_b as schedule
from megatron_lm.runs import RunError
from megatron_lm.timeline import COMMUNICATION, COMPUTE, Event


def read_plan(path: Path) -> Plan:
    """The first plan of a file of plans. Raises ``RunError``."""
    try:
        plans = read_plans(path)
    except PlanError as error:
        raise RunError(str(error)) from None
    if not plans:
        raise RunError(f"{path}: holds no plan: make one with 'python -m fasop plan --json'.")
    return plans[0]


def predicted_events(plan: Plan) -> list[Event]:
    """One iteration of every stage of a plan, from second 0; a stage is a rank here."""
    timeline = schedule.run(
        list(plan.stage_forward), list(plan.stage_backward), list(plan.p2p), plan.micro_batches
    )
    found = []

    def add(stage: int, task: str, lane: int, micro_batch: int | None, start: float, end: float) -> None:
        found.append(Event(stage, plan.stage_gpu[stage], task, lane, 1, micro_batch, start, end))

    for stage in range(plan.pp):
        for j in range(plan.micro_batches):
            end = timeline.forward_end[stage][j]
            add(stage, "forward", COMPUTE, j, end - plan.stage_forward[stage], end)
            end = timeline.backward_end[stage][j]
            add(stage, "backward", COMPUTE, j, end - plan.stage_backward[stage], end)
        if plan.dp > 1:
            end = timeline.stage_end[stage]
            add(stage, "grads-all-reduce", COMMUNICATION, None, end, end + plan.dp_allreduce[stage])
    for boundary, seconds in enumerate(plan.p2p):
        for j in range(plan.micro_batches):
            for sender, task, end in (
                (boundary, "forward-send", timeline.up_end[boundary][j]),
                (boundary + 1, "backward-send", timeline.down_end[boundary][j]),
            ):
                add(sender, task, COMMUNICATION, j, end - seconds, end)
    return sorted(found, key=lambda event: (event.rank, event.start))
