"""Links of GPUs and nodes by name, from ``networks.json``, which has a source for each entry."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chakra_et.cost import gpus
from chakra_et.cost.units import parse_bandwidth, parse_latency
from chakra_et.errors import TraceError

FILE = Path(__file__).with_name("networks.json")
REDUCTION_PASSES = 3
"""Memory traffic per reduced byte: two reads and a write, as in ASTRA-sim."""


@dataclass(frozen=True)
class LinkedGpu:
    """A GPU and its link to the other GPUs of the node.

    ``bandwidth``: bytes per second and direction of ``link``; ``memory``: bytes per second; ``peak``:
    operations per second. ``network``: bytes per second of each GPU between nodes, as they are sold, 0 if
    unknown; ``domain``: GPUs that the link joins. ``measured``: the measured node whose
    collectives stand for its own, "" for none.
    """

    name: str
    link: str
    bandwidth: float
    latency_ns: float
    memory: float
    peak: float
    measured: str = ""
    network: float = 0.0
    domain: int = 8


def gpu(name: str, link: str = "") -> LinkedGpu:
    """The GPU ``name`` (in any case) with ``link`` ("": its default link). Raises ``TraceError``."""
    entries = table()["gpus"]
    known = {key.lower(): key for key in entries}
    if name.lower() not in known:
        raise TraceError(
            f"GPU {name!r} is unknown: use one of {', '.join(entries)}, or ranks and a bandwidth, as in "
            "'8 ranks, 400 Gbit/s'"
        )
    name = known[name.lower()]
    entry = entries[name]
    links = {key.lower(): key for key in entry["links"]}
    chosen = links.get((link or entry["link"]).lower())
    if chosen is None:
        raise TraceError(f"{name} has no link {link!r}: use {' or '.join(entry['links'])}")
    of_link = entry["links"][chosen]
    return LinkedGpu(
        name,
        chosen,
        parse_bandwidth(of_link["bandwidth"]),
        parse_latency(of_link["latency"]),
        gpus.gpu(name).memory,
        gpus.gpu(name).peak("16 bit"),
        of_link.get("measured", ""),
        parse_bandwidth(entry["network"]) if "network" in entry else 0.0,
        entry.get("domain", 8),
    )


@functools.cache
def table() -> dict[str, Any]:
    """``networks.json``: ``gpus``, ``nodes``; ``measured``: the nodes whose collectives were measured, by
    "GPU link"; ``tuning``: the figures of NCCL's own."""
    return json.loads(FILE.read_text(encoding="utf-8"))
