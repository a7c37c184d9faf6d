"""A program with a profiler of its own besides the tracer: what ``test_never_breaks.py`` runs.

Usage: profiler_worker.py FOLDER KIND
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

from chakra_et.capture.recorder import CaptureError
from chakra_et.capture.tracer import ChakraTracer

folder, kind = Path(sys.argv[1]), sys.argv[2]
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
warnings: list[str] = []


class Collect(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())


logging.getLogger("chakra_et").addHandler(Collect())


def step() -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()


def traced(steps: int = 8, before_step=lambda number: None, name: str = "t", strict: bool = False) -> None:
    with ChakraTracer(folder, name, 1, 1, 2, strict=strict) as tracer:
        for number in range(steps):
            before_step(number)
            step()
            tracer.step()


def events(profiler) -> int:
    profiler.export_chrome_trace(str(folder / "other.json"))
    names = [event["name"] for event in json.loads((folder / "other.json").read_text())["traceEvents"]]
    (folder / "other.json").unlink()
    return sum(name.startswith(("aten::", "autograd::", "Optimizer")) for name in names)


def other(strict: bool = False) -> int:
    """Train under the tracer and the other profiler; returns how many operators the other one recorded."""
    if kind == "around":
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            traced(strict=strict)
        return events(profiler)
    if kind == "around with autograd.profiler":
        with torch.autograd.profiler.profile() as profiler:
            traced(strict=strict)
        return len(profiler.function_events)
    if kind.startswith("around, wait "):
        plan = schedule(wait=int(kind[-1]), warmup=1, active=4, repeat=1)
        found: list[int] = []
        with profile(
            activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=lambda p: found.append(events(p))
        ) as profiler:
            traced(12, lambda number: profiler.step() if number else None, strict=strict)
        return found[0]
    if kind == "within one step":
        kept: list[profile] = []

        def before_step(number: int) -> None:
            if number == 3:
                with profile(activities=[ProfilerActivity.CPU]) as profiler:
                    step()
                    step()
                kept.append(profiler)

        traced(before_step=before_step, strict=strict)
        return events(kept[0])
    if kind == "from an active step to beyond the last":
        profiler = profile(activities=[ProfilerActivity.CPU])
        try:
            traced(before_step=lambda number: profiler.__enter__() if number == 2 else None, strict=strict)
        finally:
            profiler.__exit__(None, None, None)
        return events(profiler)
    observer = ExecutionTraceObserver().register_callback(str(folder / "observer.json"))
    observer.start()
    try:
        traced(strict=strict)
    finally:
        observer.stop()
        observer.unregister_callback()
    nodes = json.loads((folder / "observer.json").read_text())["nodes"]
    return sum(node["name"].startswith("aten::") for node in nodes)


recorded = other()
shown = list(warnings)
raised = None
with contextlib.suppress(CaptureError):
    raised = "CaptureError"
    other(strict=True)
    raised = None
traced(name="later")
print(json.dumps({"warnings": shown, "other": recorded, "strict": raised}))
