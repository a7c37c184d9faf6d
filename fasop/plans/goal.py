"""What a search is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fasop.plans.plan import Plan

Of = TypeVar("Of")


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

    def fits(self, shape: Any) -> bool:
        """Whether a shape has the degrees that are asked for."""
        return all(getattr(self, key) in (None, getattr(shape, key)) for key in ("tp", "dp", "pp", "mbs"))

    @property
    def no_shape(self) -> str:
        """Why there is no plan of the degrees that are asked for."""
        asked = [(key, getattr(self, key)) for key in ("tp", "dp", "pp", "mbs")]
        wanted = ", ".join(f"{key} {value}" for key, value in asked if value is not None)
        return (
            f"no plan has {wanted}: tp × dp × pp must fit on the GPUs, tp divide the heads and a node, "
            "dp × mbs the global batch: leave out one of them."
        )


def by_time_and_price(plan: Plan) -> tuple[float, float]:
    return plan.step_time, plan.price_per_step


def pareto_front(plans: Sequence[Of], key: Callable[[Of], tuple[float, float]]) -> list[Of]:
    """The plans than which no other is both as fast and as cheap per step, fastest first; key: of one."""
    front: list[Of] = []
    for plan in sorted(plans, key=key):
        if not front or key(plan)[1] < key(front[-1])[1]:
            front.append(plan)
    return front
