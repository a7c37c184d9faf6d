"""The graph's time by class of module against steps that the graph has not seen.

    python -m benchmarks.step_truth --modules [--scripts …] [--sizes 0,1] [--turns 3]

Hooks around each call of an ``nn.Module`` open a record. Of the timed steps of a traced run, every other one
is cut from a copy of its device traces, and the copy is converted. The time in the forward calls of each
class of module on rank 0 is compared; medians over steps and turns; classes with less than a twentieth of the
step are left out. All times but ``cpu`` are by the clock, so this needs an idle machine with a core per
process.

- ``matched``: in the steps that stayed, by the events that Kineto wrote, against the graph's durations as
  recorded (``recorded_micros``): a module that lost an operator would show here;
- ``left out``: in the steps that were cut, against the same durations;
- ``cpu``: the CPU time of the thread in the calls of these steps, against the same durations without waits;
  where processes share cores, only these durations hold that others had the core;
- ``less cost``: the same times by the ratio of the untraced steps of the process to them, in CPU time,
  against the graph's durations without the cost of recording. That ratio takes recording to cost the same
  part of the time everywhere, but it costs the more the smaller the operators are;
- ``untraced``: in a process that was never traced, against the same durations of the graph.

``waits``: there is communication in the calls. ``observed``: what the judge says of a graph that is wrong,
which is converted from the structure step; if that passes, the judge is no good and the exit status is 1.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np

PREFIX = "module: "
MEAN, WORST = 3.0, 8.0
Times = dict[str, float]


def time_modules() -> dict[str, list[float]]:
    """The time, s, in calls of each class of module from now on, by the clock and of the thread's CPU; each
    call has its annotation."""
    import torch
    from torch.nn.modules import module as modules

    spent: dict[str, list[float]] = {}
    began: list[tuple[Any, float, float]] = []

    # The class record_function takes 6 µs of Python, as long as a small layer; these take 1 µs, of which a
    # recorded call has as much as the clock around them.
    # Within a compiled function there are no modules any more.
    def before(called: Any, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        at = time.perf_counter(), time.thread_time()
        began.append((torch.autograd._record_function_with_args_enter(PREFIX + type(called).__name__), *at))

    def after(called: Any, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        record, at, cpu = began.pop()
        torch.autograd._record_function_with_args_exit(record)
        of = spent.setdefault(type(called).__name__, [0.0, 0.0])
        of[0] += time.perf_counter() - at
        of[1] += time.thread_time() - cpu

    modules.register_module_forward_pre_hook(before)
    # Activation checkpointing ends calls by an exception when it has got far enough.
    modules.register_module_forward_hook(after, always_call=True)
    return spent


def cut(run: Path, target: Path, kept: Any) -> None:
    """Copy the run's traces to ``target`` without the timed steps whose position (0: the first) isn't in
    ``kept``. The numbers of the steps go on without a gap."""
    target.mkdir()
    manifest = json.loads((run / "run_manifest.json").read_text())
    for record in manifest["ranks"]:
        names = {side: entry["name"] for side, entry in record["files"].items()}
        shutil.copy(run / names["host"], target)
        trace = msgspec.json.decode((run / names["device"]).read_bytes())
        facts = trace["chakra_et"]
        first = facts["structure_step"] + 1
        begin, _ = step_windows(trace["traceEvents"], first)
        stays = np.array([True, *(at in kept for at in range(len(begin)))])
        number = np.cumsum(stays) - 2 + first
        events = []
        for event in trace["traceEvents"]:
            step = int(np.searchsorted(begin, float(event.get("ts", 0)), side="right"))
            if stays[step]:
                if step and event["name"].startswith("ProfilerStep#"):
                    event["name"] = f"ProfilerStep#{number[step]}"
                events.append(event)
        trace["traceEvents"] = events
        steps = facts["step_us"]
        facts["step_us"] = [*steps[:first], *(steps[first + at] for at in kept)]
        (target / names["device"]).write_bytes(msgspec.json.encode(trace))
        record["steps"] = list(range(first, first + len(kept)))
    (target / "run_manifest.json").write_text(json.dumps(manifest))


def step_windows(events: list[Any], first: int) -> tuple[list[float], float]:
    """Where the steps from number ``first`` on begin, in µs, and where the last one ends."""
    found = []
    for event in events:
        step = re.fullmatch(r"ProfilerStep#(\d+)", event.get("name", ""))
        if step and int(step[1]) >= first and event.get("cat") == "user_annotation":
            found.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    found.sort()
    return [begin for begin, _ in found], found[-1][1]


def raw_times(path: Path, kept: range) -> tuple[Times, Times, set[str], float]:
    """ms in each class of module by Kineto's events, medians of the timed steps that are ``kept`` and of
    those that aren't; the classes with communication in them; and the median of the latter steps."""
    trace = msgspec.json.decode(path.read_bytes())
    first = trace["chakra_et"]["structure_step"] + 1
    begin, end = step_windows(trace["traceEvents"], first)
    out = [at for at in range(len(begin)) if at not in kept]
    sums: dict[str, np.ndarray] = {}
    calls, communication = [], []
    for event in trace["traceEvents"]:
        if event["ph"] != "X" or "dur" not in event or not begin[0] <= float(event["ts"]) < end:
            continue
        at, took = float(event["ts"]), float(event["dur"])
        if event["name"].startswith(PREFIX):
            of = event["name"].removeprefix(PREFIX)
            step = int(np.searchsorted(begin, at, side="right")) - 1
            sums.setdefault(of, np.zeros(len(begin)))[step] += took / 1000
            calls.append((at, at + took, of))
        elif event["name"].startswith(("c10d::", "gloo:", "_c10d_functional")):
            communication.append(at)
    communication.sort()
    between = [np.searchsorted(communication, call[:2]) for call in calls]
    waits = {of for (*_, of), (a, b) in zip(calls, between, strict=True) if b > a}
    walls = np.diff([*begin, end])[out] / 1000
    matched, left_out = (
        {of: float(np.median(own[at])) for of, own in sums.items()} for at in (list(kept), out)
    )
    return matched, left_out, waits, float(np.median(walls))


def graph_times(folder: Path, waits: set[str]) -> tuple[Times, Times, Times]:
    """ms per step in each class of module in rank 0's graph: as recorded; without what recording cost; and as
    recorded without waits. Else, those in ``waits`` hold the waits of the graph, which have no duration."""
    from chakra_et.convert.pair import PairOptions
    from chakra_et.convert.runs import convert_sets
    from chakra_et.et import file as et_file
    from chakra_et.job.operators import inside
    from chakra_et.traces.sets import find

    (result,) = convert_sets(find(folder), PairOptions())
    assert not result.failed, [*result.problems, *result.ranks.values()]
    trace = et_file.read(result.traces.et_file(0))
    names = np.array([text.decode() for text in trace.names.table])[trace.names.index]
    start, own = trace.start_micros.astype(np.int64), trace.duration_micros.astype(np.int64)
    recorded = own.copy()
    if "recorded_micros" in trace.attributes:
        changed = trace.attributes["recorded_micros"]
        recorded[changed.rows] = np.asarray(changed.values)
    first = trace.column("segment") == 0
    marks = np.flatnonzero(np.char.startswith(names, "ProfilerStep#") & first)
    found: tuple[Times, Times, Times] = {}, {}, {}
    for name in sorted({name for name in names[first].tolist() if name.startswith(PREFIX)}):
        rows = np.flatnonzero((names == name) & first)
        call = inside(trace, rows.tolist())
        held = np.flatnonzero(call >= 0)
        held = held[trace.column("lane")[held] == trace.column("lane")[rows[call[held]]]]
        step_of = np.searchsorted(start[marks], start[rows], side="right") - 1
        last = start[rows]
        np.maximum.at(last, call[held], (start + own)[held])
        less_cost = last - start[rows]
        busy = np.zeros_like(less_cost)
        np.add.at(busy, call[held], recorded[held])
        as_recorded = busy
        if name.removeprefix(PREFIX) in waits:
            as_recorded = less_cost.copy()
            np.add.at(as_recorded, call[held], (recorded - own)[held])
        for times, took in zip(found, (as_recorded, less_cost, busy), strict=True):
            sums = np.zeros(len(marks))
            np.add.at(sums, step_of, took / 1000)
            times[name.removeprefix(PREFIX)] = float(np.median(sums))
    return found


class Row(NamedTuple):
    """ms per step of one class of module."""

    matched: float
    left_out: float
    recorded: float
    less_cost: float
    graph: float
    untraced: float
    observed: float
    busy: float
    cpu: float


def measure(name: str, size: int) -> tuple[dict[str, Row], set[str], float]:
    """Each class of module of rank 0; those that wait; and the median of the steps that were left out, ms."""
    from benchmarks.step_truth import MODULE_STEPS, run

    kept = range(0, MODULE_STEPS[size][1], 2)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run(name, size, folder, False, by_module=True)
        plain = json.loads((folder / "modules0_0.json").read_text())
        run(name, size, folder, True, by_module=True)
        matched, truth, waits, step = raw_times(folder / "run_device.json", kept)
        cut(folder, folder / "kept", kept)
        recorded, graph, busy = graph_times(folder / "kept", waits)
        cut(folder, folder / "observed", range(0))
        observed, *_ = graph_times(folder / "observed", waits)
        timed = json.loads((folder / "modules0_1.json").read_text())
        cut_off = [each for at, each in enumerate(timed) if at not in kept]
        ratio = _ratio(msgspec.json.decode((folder / "run_device.json").read_bytes())["chakra_et"], kept)
    rows = {
        of: Row(
            matched[of],
            time,
            recorded.get(of, 0.0),
            time * ratio,
            graph.get(of, 0.0),
            median(each.get(of, (0.0,))[0] for each in plain) * 1000,
            observed.get(of, 0.0),
            busy.get(of, 0.0),
            median(each[of][1] for each in cut_off) * 1000,
        )
        for of, time in truth.items()
    }
    return rows, waits, step


def _ratio(facts: dict[str, Any], kept: range) -> float:
    """CPU time of the untraced steps by that of the steps that were left out."""
    timed = facts["step_us"][facts["structure_step"] + 1 :]
    untraced = facts["step_us"][facts["untraced_steps"] // 2 : facts["untraced_steps"]]
    out = [cpu for at, (_, cpu) in enumerate(timed) if at not in kept]
    return median(cpu for _, cpu in untraced) / median(out)


KINDS = ("matched", "left out", "cpu", "less cost", "untraced", "observed")


def compare(scripts: list[str], sizes: list[int], turns: int) -> int:
    """Print all; 1 if a graph of the structure step passes."""
    columns = "left out ms  error %  cpu ms  error %"
    columns += "  less cost ms  graph ms  error %  untraced ms  error %  observed %"
    print(f"{'script':24} size  {'module':24} share %  waits  {columns}", flush=True)
    errors: list[tuple[bool, list[float]]] = []
    for name in scripts:
        for size in sizes:
            found = [measure(name, size) for _ in range(turns)]
            step = median(each[2] for each in found)
            waiting = {of for each in found for of in each[1]}
            for of in found[0][0]:
                row = Row(*(median(column) for column in zip(*(each[0][of] for each in found), strict=True)))
                if row.left_out < step / 20:
                    continue
                pairs = (
                    (row.recorded, row.matched),
                    (row.recorded, row.left_out),
                    (row.busy, row.cpu),
                    (row.graph, row.less_cost),
                    (row.graph, row.untraced),
                    (row.observed, row.left_out),
                )
                off = [100 * (value / truth - 1) for value, truth in pairs]
                errors.append((of in waiting, off))
                print(
                    f"{name:24} {size:4}  {of:24} {100 * row.left_out / step:7.0f}"
                    f"  {'waits' if of in waiting else '':5}"
                    f"  {row.left_out:11.2f}  {off[1]:+7.1f}"
                    f"  {row.cpu:6.2f}  {off[2]:+7.1f}"
                    f"  {row.less_cost:12.2f}  {row.graph:8.2f}  {off[3]:+7.1f}"
                    f"  {row.untraced:11.2f}  {off[4]:+7.1f}  {off[5]:+10.1f}",
                    flush=True,
                )
    for at, kind in enumerate(KINDS):
        every = [abs(off[at]) for _, off in errors]
        alone = [abs(off[at]) for waits, off in errors if not waits]
        print(
            f"{kind}: mean {mean(every):.1f}%, worst {max(every):.1f}% of {len(every)} classes; "
            f"without those that wait {mean(alone or [0]):.1f}%, {max(alone or [0]):.1f}% of {len(alone)}"
        )
    observed = [abs(off[-1]) for _, off in errors]
    return int(mean(observed) <= MEAN and max(observed) <= WORST)
