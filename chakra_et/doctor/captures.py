"""Small captured runs: do the .et files hold all of them, predict changes, and tell what bounds a step?"""

from __future__ import annotations

import contextlib
import io
import json
import re
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from chakra_et.convert.inputs import load_run
from chakra_et.diagnose.verdict import diagnose
from chakra_et.doctor.results import Line, at_most, equal, guarded, not_run
from chakra_et.doctor.workload import WIDTH, Workload, launched, make_step, step_ms
from chakra_et.errors import TraceError
from chakra_et.names import gz, run_at
from chakra_et.predict.command import PredictConfig, changes
from chakra_et.predict.predict import predict
from chakra_et.simulate.run import NodeTimes, Run
from chakra_et.simulate.time_by_kind import KINDS, node_kinds, overhead_part, shares
from chakra_et.traces.records import open_trace

LEAST_LINKED, MOST_UNEXPLAINED, MOST_STEP_ERROR, MOST_OVERHEAD = 0.99, 0.10, 0.08, 0.5
MOST_MEAN, MOST_WORST = 0.03, 0.08
"""Errors of predictions."""
_DEVICE, _CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
BOUND = {
    "launches": ("host", ("python", "cpu")),
    "copies": ("memory", ("cpu",)),
    "products": ("compute", ("cpu",)),
}
"""Kind of workload → what bounds it on a GPU, and on a CPU."""


def quietly(words: list[str]) -> None:
    """Run a command of this package. Raises ``RuntimeError`` with what it said where it fails."""
    from chakra_et.__main__ import main as chakra_et

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = chakra_et(words)
    if status:
        raise RuntimeError(f"{words[0]} ended with {status}: {said.getvalue().strip().splitlines()[-1:]}")


def converted(folder: Path, name: str) -> Run:
    """Convert the capture of this name in ``folder``. Raises ``RuntimeError`` where that fails."""
    quietly(["convert", "--dir", str(folder), "-o", str(folder), "--name", name])
    return load_run(str(folder / name))


def complete(folder: Path, on_gpu: bool) -> Iterator[Line]:
    """Every kernel is in the .et files, and the graph takes as long as the real step."""
    large = {"layers": 12, "hidden": 768, "batch": 8, "seq": 512}
    size: dict[str, Any] = large if on_gpu else {"layers": 2, "hidden": 128}
    tiny: dict[str, Any] = {"layers": 2, "hidden": 64, "batch": 1, "seq": 16}
    cases = [
        Workload("eager", **size),
        Workload("host-bound", **tiny),
        Workload("compiled", mode="compile", **tiny),
        Workload("checkpointed", mode="checkpoint", **size),
        Workload("gloo", backend="gloo", **(size | {"layers": 2})),
        Workload("graphs", mode="graphs", **size),
        Workload("nccl", backend="nccl", **size),
    ]
    for given in cases:
        if not on_gpu and given.name in ("graphs", "nccl"):
            yield not_run(given.name, "needs a GPU")
        else:
            yield from guarded(given.name, _captured(given, folder, on_gpu))


def _captured(given: Workload, folder: Path, on_gpu: bool) -> Iterator[Line]:
    ranks = 2 if given.backend == "gloo" else 1
    launched(replace(given, trace=str(folder)), ranks)
    with ThreadPoolExecutor(1) as beside:  # a process that is never traced
        untraced = beside.submit(launched, given, ranks)
        run = converted(folder, given.name)
    yield from judged(run, untraced.result()["untraced_ms"], on_gpu)


def judged(run: Run, untraced_ms: float, on_gpu: bool) -> Iterator[Line]:
    """The lines of one captured and converted run, whose untraced step took ``untraced_ms``."""
    files = run_at(run.name)
    name = files.name
    report = json.loads(files.report_file.read_text())["ranks"]
    linked = min(float(each["link_rate"]) for each in report.values())
    yield at_most(f"{name}: operators that aren't linked", 1 - linked, 1 - LEAST_LINKED)
    for rank, trace in zip(run.graph.ranks, run.graph.traces, strict=True):
        device = files.trace_file(rank, "device")
        with open_trace(device if device.is_file() else gz(device)) as file:
            recorded = device_events(json.load(file))
        on_device = trace.column("stream", -1) >= 0
        nodes = int((on_device & (node_kinds(trace) != KINDS.index("device-overhead"))).sum())
        yield equal(f"{name}, rank {rank}: kernels and copies in the .et", nodes, recorded)
        found = shares(trace)
        between = overhead_part(found[0]) if found else 1.0
        yield at_most(
            f"{name}, rank {rank}: critical path that nothing explains ({between:.0%} are between operators)",
            found[2] / max(sum(found[0].values()), 1) if found else 1.0,
            MOST_UNEXPLAINED,
            on_gpu,
        )
    facts = json.loads(str(run.graph.traces[0].metadata.get("steps_micros", "{}")))
    if facts.get("traced"):
        longer = max(facts["traced"] / 1e3 / untraced_ms - 1, 0.0)
        yield at_most(f"{name}: recording makes a step longer by", longer, MOST_OVERHEAD, on_gpu)
    fewest = max(min(len(steps.names) for steps in run.steps), 1)
    replayed = (int(run.end_ns.max()) - int(run.start_ns.min())) / 1e6 / fewest
    yield at_most(
        f"{name}: step by replay ({replayed:.3f} ms) against untraced steps ({untraced_ms:.3f} ms)",
        abs(replayed / untraced_ms - 1),
        MOST_STEP_ERROR,
        on_gpu,
    )


def device_events(trace: dict[str, Any]) -> int:
    """How many kernels and copies the timed steps of a device trace have launched."""
    structure = trace.get("chakra_et", {}).get("structure_step", -1)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [
        (float(event["ts"]), float(event["ts"]) + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation"
        and (found := re.fullmatch(r"ProfilerStep#(\d+)", event["name"]))
        and int(found[1]) > structure
    ]
    launched = {
        event["args"].get("correlation")
        for event in events
        if event.get("cat") in _CALLS and any(begin <= float(event["ts"]) < end for begin, end in steps)
    }
    return sum(event.get("cat") in _DEVICE and event["args"]["correlation"] in launched for event in events)


def bases(on_gpu: bool) -> list[Workload]:
    """What is changed: on a GPU, a step whose pace the host sets and one whose pace the device sets. No two
    sizes of a model are alike."""
    small: dict[str, Any] = {"layers": 4, "hidden": 640, "batch": 6, "seq": 400, "noise": 1 << 27}
    large = small | {"hidden": 2048, "batch": 16, "noise": 1 << 28}
    if on_gpu:  # a host needs tens of steps until it is as fast as it gets
        return [Workload("host-bound", steps=30, **small), Workload("device-bound", steps=10, **large)]
    return [Workload("base", layers=2, hidden=320, batch=4, seq=72, noise=1 << 17, steps=2)]


def variants(base: Workload, on_gpu: bool) -> list[tuple[Workload, dict[str, object]]]:
    """Changed workloads, each with the flags of ``chakra-et predict`` that say the same."""
    sizes = (base.hidden, 3 * base.hidden, 4 * base.hidden, base.hidden // WIDTH)
    slower = "erfinv_kernel=4" if on_gpu else "erfinv=4"  # the host's call takes as long as it did
    return [
        (replace(base, name="batch", batch=2 * base.batch), {"batch": "2x"}),
        (replace(base, name="sequence", seq=2 * base.seq), {"seq": "2x"}),
        (replace(base, name="layers", layers=2 * base.layers), {"layers": "2x"}),
        (replace(base, name="hidden", hidden=2 * base.hidden), {"resize": [f"{n}={2 * n}" for n in sizes]}),
        (replace(base, name="slower-kernel", noise=4 * base.noise), {"scale": (slower,)}),
    ]


def predicted(folder: Path, on_gpu: bool) -> Iterator[Line]:
    """Predictions against measured steps of the changed workload, all in turns in one process."""
    errors: list[float] = []
    for base in bases(on_gpu):
        launched(replace(base, trace=str(folder)))
        run, changed = converted(folder, base.name), variants(base, on_gpu)
        steps = [make_step(each) for each in (base, *(given for given, _ in changed))]
        before, *measured = step_ms(steps, base.steps, 3 if on_gpu else 2)
        del steps
        for (given, flags), after in zip(changed, measured, strict=True):
            what = f"{base.name}, {given.name}: predicted"
            config = PredictConfig(name=base.name, **flags)  # type: ignore[arg-type]
            try:
                found = predict(run, changes(config, run), explain=False)
            except TraceError as error:
                yield equal(what, f"refused: {error}", "a prediction")
                continue
            told = found.after_ms / found.before_ms
            errors.append(abs(told * before / after - 1))
            busy = [device_ms(run, found.before), device_ms(found.changed, found.after)]
            what += (
                f" × {told:.3f} ({found.before_ms:.2f} → {found.after_ms:.2f} ms, device {busy[0]:.2f} → "
                f"{busy[1]:.2f}), measured × {after / before:.3f} ({before:.2f} → {after:.2f})"
            )
            yield at_most(what, errors[-1], MOST_WORST, on_gpu)
    if errors:
        yield at_most("mean of all changes", statistics.fmean(errors), MOST_MEAN, on_gpu)


def device_ms(run: Run, timeline: NodeTimes) -> float:
    """What kernels and copies take per step, ms."""
    return float(timeline.setting.own_ns[run.on_devices].sum()) / 1e6 / max(len(run.steps[0].names), 1)


def verdicts(folder: Path, on_gpu: bool) -> Iterator[Line]:
    """The diagnosis, report and export of cases that are made to have one answer."""
    for kind in BOUND:
        yield from guarded(kind, _verdict(kind, folder, on_gpu))


def _verdict(kind: str, folder: Path, on_gpu: bool) -> Iterator[Line]:
    launched(Workload(kind, kind=kind, trace=str(folder)))
    bound = diagnose(converted(folder, kind)).bound
    on_device, on_cpu = BOUND[kind]
    expected = (on_device,) if on_gpu else on_cpu
    yield equal(f"{kind}: bound by", bound, bound if bound in expected else " or ".join(expected))
    for command, suffix in (("report", "_report.html"), ("export", ".pftrace")):
        target = folder / f"{kind}{suffix}"
        quietly([command, str(folder / kind), "-o", str(target)])
        yield equal(f"{kind}: {command}", "written" if target.stat().st_size > 1000 else "empty", "written")
