"""Capture on this machine: every kernel in the .et files, and a graph that takes as long as the real step."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chakra_et.doctor.results import Line, at_most, equal, not_run
from chakra_et.doctor.workload import Workload, changed, launched
from chakra_et.names import run_at
from chakra_et.simulate.run import load_run
from chakra_et.simulate.time_by_kind import KINDS, node_kinds, shares

LEAST_LINKED, MOST_UNEXPLAINED, MOST_STEP_ERROR, MOST_OVERHEAD = 0.99, 0.10, 0.08, 0.5
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def cases(on_gpu: bool) -> list[tuple[Workload, int]]:
    """What is captured, each with its number of ranks; small on a CPU."""
    size: dict[str, Any] = {"layers": 2, "hidden": 128}
    if on_gpu:
        size = {"layers": 12, "hidden": 768, "batch": 8, "seq": 512}
    tiny: dict[str, Any] = {"layers": 2, "hidden": 64, "batch": 1, "seq": 16}
    found = [
        (Workload("eager", **size), 1),
        (Workload("host-bound", **tiny), 1),
        (Workload("compiled", mode="compile", **tiny), 1),
        (Workload("checkpointed", mode="checkpoint", **size), 1),
        (Workload("gloo", backend="gloo", **(size | {"layers": 2})), 2),
    ]
    if on_gpu:
        found += [
            (Workload("graphs", mode="graphs", **size), 1),
            (Workload("nccl", backend="nccl", **size), 1),
        ]
    return found


def check(folder: Path, on_gpu: bool) -> Iterator[Line]:
    """The lines of each case; a case that fails is one bad line."""
    for given, ranks in cases(on_gpu):
        try:
            untraced = launched(changed(given, trace=str(folder)), ranks)["untraced_ms"]
            converted(folder, given.name)
        except (RuntimeError, OSError, ValueError) as error:
            yield equal(given.name, f"failed: {error}", "a capture that converts")
            continue
        yield from judged(folder, given.name, untraced, on_gpu)
    if not on_gpu:
        for name in ("graphs", "nccl"):
            yield not_run(name, "needs a GPU")


def converted(folder: Path, name: str) -> None:
    """Convert the run of this name. Raises ``RuntimeError`` where that fails."""
    quietly(["convert", "--dir", str(folder), "-o", str(folder), "--name", name])


def quietly(words: list[str]) -> None:
    """Run a command of this package. Raises ``RuntimeError`` with what it said where it fails."""
    from chakra_et.__main__ import main as chakra_et

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = chakra_et(words)
    if status:
        raise RuntimeError(f"{words[0]} ended with {status}: {said.getvalue().strip().splitlines()[-1:]}")


def judged(folder: Path, name: str, untraced_ms: float, on_gpu: bool) -> Iterator[Line]:
    """The lines of one captured and converted run, whose untraced step took ``untraced_ms``."""
    files = run_at(str(folder / name))
    report = json.loads(files.report_file.read_text())["ranks"]
    linked = min(float(each["link_rate"]) for each in report.values())
    yield at_most(f"{name}: operators that aren't linked", 1 - linked, 1 - LEAST_LINKED)
    run = load_run(str(folder / name))
    for rank, trace in zip(run.graph.ranks, run.graph.traces, strict=True):
        recorded = device_events(files.folder, name, rank)
        kinds = node_kinds(trace)
        on_device = trace.column("stream", -1) >= 0
        nodes = int((on_device & (kinds != KINDS.index("device-overhead"))).sum())
        yield equal(f"{name}, rank {rank}: kernels and copies in the .et", nodes, recorded)
        found = shares(trace)
        yield at_most(
            f"{name}, rank {rank}: critical path that nothing explains",
            found.overhead if found else 1.0,
            MOST_UNEXPLAINED,
            on_gpu,
        )
    facts = json.loads(str(run.graph.traces[0].metadata.get("steps_micros", "{}")))
    if facts.get("traced"):
        longer = max(facts["traced"] / 1e3 / untraced_ms - 1, 0.0)
        yield at_most(f"{name}: recording makes a step longer by", longer, MOST_OVERHEAD, on_gpu)
    replayed = max(
        (int(run.end_ns.max()) - int(run.start_ns.min())) / 1e6 / max(len(steps.names), 1)
        for steps in run.steps
    )
    yield at_most(
        f"{name}: step by replay ({replayed:.3f} ms) against untraced steps ({untraced_ms:.3f} ms)",
        abs(replayed / untraced_ms - 1),
        MOST_STEP_ERROR,
        on_gpu,
    )


def device_events(folder: Path, name: str, rank: int) -> int:
    """How many kernels, copies and memsets the device trace of a rank has within its steps' recording."""
    stem = f"{name}_device" if rank == 0 else f"{name}_rank{rank}_device"
    path = folder / f"{stem}.json"
    text = path.read_bytes() if path.is_file() else gzip.decompress((folder / f"{stem}.json.gz").read_bytes())
    events = json.loads(text)["traceEvents"]
    return sum(event.get("ph") == "X" and event.get("cat") in _DEVICE for event in events)
