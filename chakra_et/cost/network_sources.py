"""A network from whatever names one: a line of text, JSON, a plan of the planner, or a measured model.

A plan file is what ``fasop plan --json`` prints. The planner shares the bandwidth of a node among what leaves
it at once, takes 5% of it for losses, and lets the slowest link of a ring decide; a dimension has one
bandwidth per GPU, so that in such a network the bytes of each message stand for what differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chakra_et.cost.network_fit import read_model
from chakra_et.cost.topology import HOP_NS, INTER_LOSS, Dimension, Topology
from chakra_et.cost.topology_text import parse_topology
from chakra_et.errors import TraceError
from chakra_et.files import read_json


def read_topology(text: str, ranks: int) -> Topology:
    """A topology from text, JSON, a .json file, the file of a plan, or that of ``chakra-et measure-network``.
    Raises ``TraceError``."""
    path = Path(text.strip())
    if path.suffix == ".json" and path.is_file():
        try:
            loaded = read_json(path)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}: isn't JSON ({error})") from None
        if isinstance(loaded, dict) and "plans" in loaded:
            plans = loaded["plans"]
            if not isinstance(plans, list) or not plans:
                raise TraceError(f"{path}: holds no plan: write it with fasop plan --json")
            return planned_topology(plans[0], ranks, f"{path}: its first plan")
        if isinstance(loaded, dict) and str(loaded.get("format", "")).startswith("chakra-et network model"):
            return dataclasses.replace(read_model(path).topology(ranks), name=f"the network of {path.name}")
    return parse_topology(text, ranks)


def planned_topology(plan: Any, ranks: int, where: str) -> Topology:
    """The network of one entry of a file of plans, with the planner's effective bandwidths.

    Its notes state what of the planner's cluster the dimensions can't express. ``where`` begins a
    ``TraceError``.
    """
    try:
        topology = _dimensions(plan, plan["cluster"])
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        raise TraceError(f"{where} isn't a plan that can be read: write it with fasop plan --json") from None
    if topology.ranks != ranks:
        raise TraceError(
            f"{where} is for {topology.ranks} GPUs, and the set has {ranks} ranks: give the plan of this set"
        )
    if ranks < 2:
        raise TraceError(f"{where} is for one GPU: there is no network to simulate")
    return topology


def _dimensions(plan: Mapping[str, Any], cluster: Mapping[str, Any]) -> Topology:
    kinds = {gpu["name"]: gpu for gpu in cluster["gpus"]}
    used = [kinds[name] for name in dict.fromkeys(plan["placement"])]
    per_node, nodes = int(cluster["gpus_per_node"]), len(plan["placement"])
    intra = min(gpu["intra_bandwidth"] / (per_node if gpu["shared_bus"] else 1) for gpu in used) / 8
    inter = min(gpu["inter_bandwidth"] for gpu in used) / 8 / INTER_LOSS / per_node
    intra_ns = max(gpu["intra_latency"] for gpu in used) * 1e9 or HOP_NS
    inter_ns = max(gpu["inter_latency"] for gpu in used) * 1e9 or HOP_NS
    dimensions = (Dimension(per_node, intra, intra_ns), Dimension(nodes, inter, inter_ns))
    note = (
        "the planner's links are shared, lossy and unequal, and a dimension has one bandwidth: the bytes of "
        "each message and collective are those with which it lasts as long as planned"
    )
    name = f"{cluster['name']} as planned"
    kept = tuple(dimension for dimension in dimensions if dimension.size > 1)
    return Topology(kept, name=name, notes=(note,), effective=True)
