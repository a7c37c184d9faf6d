"""The plan of a file that ``simulate`` and ``export`` are asked about."""

from __future__ import annotations

from fasop.errors import PlanError
from fasop.plan import Plan, read_plans


def pick_plan(path: str, rank: int) -> Plan:
    """The ``rank``-th plan of the file, from 1. Raises ``PlanError``."""
    plans = read_plans(path)
    if not 1 <= rank <= len(plans):
        held = f"{len(plans)} plans" if len(plans) != 1 else "one plan"
        raise PlanError(f"{path}: holds {held}: --rank {rank} is none of them.")
    return plans[rank - 1]
