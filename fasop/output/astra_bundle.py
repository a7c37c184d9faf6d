"""A planned set as a folder that ASTRA-sim runs, on the network that the plan assumes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from chakra_et.astra.bundle import ranks_of, write_bundle
from chakra_et.cost.network_sources import planned_topology
from chakra_et.job.sets import read_set
from fasop.plans.plan import Plan, plans_json


def write(plan: Plan, folder: Path, name: str) -> tuple[Path, list[str]]:
    """Write ``folder/NAME_astra-sim`` for the set NAME there; returns it and its notes, a sentence each.

    Its README states which of the planner's assumptions ASTRA-sim's network can't express. Raises
    ``TraceError`` for a plan without a network: one GPU, or fewer than its nodes have.
    """
    found = read_set(str(folder / name))
    entry = msgspec.json.decode(plans_json([plan]))["plans"][0]
    topology = planned_topology(entry, len(found.files), "the plan")
    bundle = folder / f"{name}_astra-sim"
    return bundle, write_bundle(ranks_of(found), topology, bundle)
