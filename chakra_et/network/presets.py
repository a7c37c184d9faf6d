"""GPUs and nodes by name, from ``presets.json``; every entry there has its source."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chakra_et.errors import TraceError
from chakra_et.network.units import parse_bandwidth, parse_latency, parse_rate

FILE = Path(__file__).with_name("presets.json")
REDUCTION_PASSES = 3
"""Memory traffic of reducing one byte: two reads and a write, as ASTRA-sim counts it."""


@dataclass(frozen=True)
class Gpu:
    """``bandwidth`` (bytes per second and direction) and ``latency_ns`` of the link ``link`` to another GPU
    of the node; ``memory``: bytes per second; ``peak``: operations per second."""

    name: str
    link: str
    bandwidth: float
    latency_ns: float
    memory: float
    peak: float
    source: str


def gpu(name: str, link: str = "") -> Gpu:
    """The GPU of that name (any case) with that link ("": its usual one). Raises ``TraceError``."""
    entries = _presets()["gpus"]
    known = {key.lower(): key for key in entries}
    if name.lower() not in known:
        raise TraceError(
            f"GPU {name!r} is unknown: use one of {', '.join(entries)}, or give a topology as JSON"
        )
    name = known[name.lower()]
    entry = entries[name]
    links = {key.lower(): key for key in entry["links"]}
    chosen = links.get((link or entry["link"]).lower())
    if chosen is None:
        raise TraceError(f"{name} has no link {link!r}: use {' or '.join(entry['links'])}")
    of_link = entry["links"][chosen]
    return Gpu(
        name,
        chosen,
        parse_bandwidth(of_link["bandwidth"]),
        parse_latency(of_link["latency"]),
        parse_bandwidth(entry["memory"]),
        parse_rate(entry["peak"]),
        entry["source"],
    )


def node(name: str) -> str | None:
    """The text that a node preset such as ``dgx-h100`` stands for; None for no such preset."""
    entry = _presets()["nodes"].get(name.lower())
    return None if entry is None else str(entry["text"])


def names() -> list[str]:
    """The names of all node presets."""
    return list(_presets()["nodes"])


def assumed_latency(place: str) -> tuple[float, str]:
    """The latency, ns and as text, that stands in where none is given: ``between_nodes``,
    ``within_a_node``."""
    text = str(_presets()["assumed_latency"][place])
    return parse_latency(text), text


@functools.cache
def _presets() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return loaded
