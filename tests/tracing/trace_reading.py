"""Training under a tracer, and reading the traces back without the code under test."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from chakra_et.capture.tracer import ChakraTracer


def train(tracer: ChakraTracer, steps: int, at_step: Callable[[int], None] = lambda step: None) -> None:
    """Train a small model for ``steps`` steps; ``at_step`` runs at the beginning of each."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        at_step(step)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        tracer.step()


def load(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def attribute(node: dict[str, Any], name: str) -> Any:
    return next((entry["value"] for entry in node["attrs"] if entry["name"] == name), None)


def host_ids(host: dict[str, Any]) -> set[int]:
    """Ids of all operators; the roots and the record that precedes Kineto's start have no twin."""
    outside = ("[pytorch|profiler|execution_trace|", "## process_group:init ##")
    return {attribute(node, "rf_id") for node in host["nodes"] if not node["name"].startswith(outside)}


def device_ids(device: dict[str, Any]) -> set[int]:
    """Ids of all operators that ended while the profiler ran; the host trace has no others."""
    events = [event for event in device["traceEvents"] if event.get("args", {}).get("finished", True)]
    return {event["args"]["Record function id"] for event in events if _id_of(event)}


def _id_of(event: dict[str, Any]) -> int:
    return event.get("args", {}).get("Record function id", 0)


def steps_of(records: list[dict[str, Any]]) -> list[str]:
    return sorted(record["name"] for record in records if record["name"].startswith("ProfilerStep#"))
