"""``gpus.json``: what GPUs are, and what their kernels reach."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("gpus.json")
_TIMES = ("launch", "split", "tile", "depth", "keys", "more", "least")
_COUNTS = ("moves", "elements", "lines")
"""Parameters that are times, and that are counts per µs and unit; the others are parts of specified rates."""


def parameters_of(name: str) -> dict[str, float]:
    """Those of a GPU, or of the one it is like: latencies pass in as many cycles there."""
    entry = table()[name]
    like = table()[entry.get("like", name)]
    faster = _megahertz(entry) / _megahertz(like)
    found = {}
    for each, value in like["parameters"].items():
        short = each.rpartition(".")[2]
        found[each] = value / faster if short in _TIMES else value * faster if short in _COUNTS else value
    return found


def _megahertz(entry: Mapping[str, Any]) -> float:
    return float(entry["clock"].removesuffix(" MHz"))


@functools.cache
def table() -> dict[str, Any]:
    """``gpus.json``."""
    loaded: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return loaded
