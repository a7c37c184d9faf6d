"""What a search is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fasop.plans.plan import Plan
from fasop.plans.shapes import Degrees


@dataclass(frozen=True)
class Goal:
    """objective: time, cost ($ per step) or pareto (whatever no plan beats in both); top: plans wanted;
    everything: every shape, those that do not fit into memory too; tp, dp, pp, mbs: only these degrees.
    """

    objective: str = "time"
    top: int = 10
    max_step_time: float | None = None
    everything: bool = False
    tp: int | None = None
    dp: int | None = None
    pp: int | None = None
    mbs: int | None = None

    def fits(self, shape: Degrees) -> bool:
        """Whether a shape has the degrees that are asked for."""
        return all(getattr(self, key) in (None, getattr(shape, key)) for key in ("tp", "dp", "pp", "mbs"))

    def no_shape(self, found: Sequence[Degrees]) -> str:
        """What can be had instead of degrees that no shape has."""
        asked = [(key, getattr(self, key)) for key in ("tp", "dp", "pp", "mbs")]
        asked = [(key, value) for key, value in asked if value is not None]

        def distance(shape: Degrees) -> float:
            return sum(abs(math.log(getattr(shape, key) / value)) for key, value in asked)

        near = min(found, key=distance)
        wanted = ", ".join(f"{key} {value}" for key, value in asked)
        return (
            f"no plan has {wanted}: tp × dp × pp must fit on the GPUs, tp divide the heads and a node, "
            "dp × mbs the global batch; the nearest is "
            f"tp {near.tp}, dp {near.dp}, pp {near.pp}, mbs {near.mbs}."
        )


def pareto_front(plans: Sequence[Plan]) -> list[Plan]:
    """The plans than which no other is both as fast and as cheap per step, fastest first."""
    front: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.step_time, plan.price_per_step)):
        if not front or plan.price_per_step < front[-1].price_per_step:
            front.append(plan)
    return front
