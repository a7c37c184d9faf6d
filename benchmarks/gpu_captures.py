#!/usr/bin/env python3
"""Captures of a GPU, converted, beside what HTA and MLCommons' converter find in the same traces.

    python benchmarks/gpu_captures.py
    python benchmarks/gpu_captures.py --peers /path/to/python --update     (CONVERSION_SUMMARY.md)

``--peers`` is a Python with HolisticTraceAnalysis, mlc-chakra and et_replay (./install_chakra_tools.sh). HTA
gets the timed steps alone, in ns (it cuts times to whole µs) and with a last step of no work (it drops the
last one); ours are then of the same reduced trace. MLCommons' chakra_trace_link takes one step of the traces
as they are. The exit status is 1 where a kernel lacks or HTA's times are off by more than 2%.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.summary import put
from chakra_et.__main__ import main as chakra_et
from chakra_et.convert.inputs import load_run
from chakra_et.diagnose.verdict import diagnose
from chakra_et.doctor.captures import device_events
from chakra_et.simulate.breakdown import union_ns
from chakra_et.simulate.run import Run
from chakra_et.simulate.time_by_kind import KINDS, node_kinds

ROOT = Path(__file__).resolve().parents[1]
DEVICE, CALLS = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
HTA = """
import sys, json, logging, warnings
logging.disable(logging.CRITICAL); warnings.filterwarnings("ignore")
from hta.trace_analysis import TraceAnalysis
of = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=sys.argv[2])
[row] = of.get_temporal_breakdown(visualize=False).to_dict("records")
print(json.dumps([row["compute_time(us)"], row["idle_time(us)"]]))
"""
HEAD = (
    "run", "step, ms", "untraced, ms", "kernels", ".et", "MLCommons", "compute, ms", "HTA", "idle, ms", "HTA",
    "between operators", "unexplained", "bound by",
)  # fmt: skip


def said(words: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if chakra_et(words):
            raise SystemExit(f"{' '.join(words)} failed")


def timed_steps(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace of the steps after the observer's, without what our tracer noted of its cost."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = sorted(
        (event["ts"], event["ts"] + event["dur"], int(event["name"].partition("#")[2]))
        for event in events
        if event["cat"] == "user_annotation" and event["name"].startswith("ProfilerStep#")
    )
    begin = next(start for start, _, step in steps if step > trace["chakra_et"]["structure_step"])
    end = steps[-1][1]
    inside = [event for event in events if begin <= event["ts"] < end and event["cat"] not in DEVICE]
    launched = {event["args"].get("correlation") for event in inside if event["cat"] in CALLS}
    kept = [event for event in inside if event["cat"] in ("cpu_op", "user_annotation", *CALLS)]
    kept += [each for each in events if each["cat"] in DEVICE and each["args"]["correlation"] in launched]
    other = [event for event in trace["traceEvents"] if event.get("ph") == "M"]
    header = {key: value for key, value in trace.items() if key != "chakra_et"}
    header.setdefault("distributedInfo", {"rank": 0, "world_size": 1, "backend": "nccl"})
    return header | {"traceEvents": other + kept}


def for_hta(trace: dict[str, Any]) -> dict[str, Any]:
    first = min(event["ts"] for event in trace["traceEvents"] if event["ph"] == "X")
    moved = [
        event | {"ts": round((event["ts"] - first) * 1000) + 1000, "dur": round(event["dur"] * 1000)}
        if event["ph"] == "X" else event
        for event in trace["traceEvents"]
    ]  # fmt: skip
    end = max(event["ts"] + event["dur"] for event in moved if event["ph"] == "X")
    step = next(event for event in moved if event["name"].startswith("ProfilerStep#"))
    return trace | {
        "traceEvents": [*moved, step | {"name": "ProfilerStep#999", "ts": end + 1000, "dur": 1000}]
    }


def busy(run: Run) -> tuple[float, float]:
    """ms in which rank 0's kernels run, and in which its device idles between its first and last work."""
    trace = run.graph.traces[0]
    kind, on_device = node_kinds(trace), trace.column("stream", -1) >= 0
    start = trace.start_micros.astype(np.int64) * 1000
    end = start + trace.duration_micros.astype(np.int64) * 1000
    kernel, copy = (on_device & (kind == KINDS.index(each)) for each in ("kernel", "copy"))
    work = kernel | copy
    window = start[work].min(keepdims=True), end[work].max(keepdims=True)
    computes, works = (union_ns(start[each], end[each], *window)[0] / 1e6 for each in (kernel, work))
    return float(computes), float((window[1] - window[0])[0] / 1e6 - works)


def peers(python: str, files: list[Path], reduced: dict[str, Any], folder: Path) -> tuple[float, float, int]:
    """HTA's compute and idle, ms, and how many kernels and copies MLCommons' linked trace has."""
    (folder / "hta.json").write_text(json.dumps(for_hta(reduced)))
    words = [python, "-c", HTA, str(folder / "hta.json"), str(folder)]
    compute, idle = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    link = [str(Path(python).parent / "chakra_trace_link"), "--rank", "0"]
    link += ["--chakra-host-trace", str(files[0]), "--chakra-device-trace", str(files[1])]
    subprocess.run([*link, "--output-file", str(folder / "linked.json")], capture_output=True, check=True)
    nodes = json.loads((folder / "linked.json").read_text())["nodes"]
    return compute / 1e6, idle / 1e6, sum(node.get("cat") in DEVICE for node in nodes)


def row(name: str, folder: Path, scratch: Path, python: str) -> tuple[list[str], bool]:
    """The cells of one run, and whether they are as they should be."""
    files = []
    for kind in ("host", "device"):
        packed = gzip.decompress((folder / f"{name}_{kind}.json.gz").read_bytes())
        files.append(scratch / f"{name}_{kind}.json")
        files[-1].write_bytes(packed)
    trace = json.loads(files[1].read_text())
    out, alone = scratch / "out", scratch / "reduced.json"
    said(["convert", "--dir", str(folder), "-o", str(out), "--name", name])
    run, reduced = load_run(str(out / name)), timed_steps(trace)
    alone.write_text(json.dumps(reduced))
    said(["convert", str(alone), "-o", str(out)])
    computes, idles = busy(load_run(str(out / "reduced")))
    nodes = run.graph.traces[0].column("stream", -1) >= 0
    nodes &= node_kinds(run.graph.traces[0]) != KINDS.index("device-overhead")
    wanted, found = device_events(trace), int(nodes.sum())
    steps = len(run.steps[0].names)
    report = json.loads((out / f"{name}_conversion.json").read_text())["ranks"]["0"]
    path, facts = report["critical_path_us"], json.loads(run.graph.traces[0].metadata["steps_micros"])
    whole, untraced = sum(path.values()), f"{facts['untraced'] / 1e3:.2f}" if facts["untraced"] else "–"
    between = (path["host-overhead"] + path["device-overhead"]) / whole
    told = peers(python, files, reduced, scratch) if python else None
    cells = [
        name, f"{run.end_ns.max() / 1e6 / steps:.2f}", untraced, f"{wanted:,}",
        f"{found:,}", f"{told[2]:,} of {wanted // steps:,}" if told else "–", f"{computes:.3f}",
        f"{told[0]:.3f}" if told else "–", f"{idles:.3f}", f"{told[1]:.3f}" if told else "–",
        f"{between:.1%}", f"{report['unexplained_us'] / whole:.1%}", diagnose(run).bound,
    ]  # fmt: skip
    close = told is None or (abs(computes / told[0] - 1) <= 0.02 and abs(idles / told[1] - 1) <= 0.02)
    return cells, wanted == found and close


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=ROOT / "tests" / "fixtures" / "gpu", help="the captures")
    parser.add_argument("--peers", default="", help="a Python with HTA and MLCommons' tools")
    parser.add_argument("--update", action="store_true", help="write the table into CONVERSION_SUMMARY.md")
    given = parser.parse_args()
    folder, good, lines = given.dir.absolute(), True, []
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for file in sorted(folder.glob("*_manifest.json")):
        with tempfile.TemporaryDirectory() as scratch:
            cells, fine = row(file.name.removesuffix("_manifest.json"), folder, Path(scratch), given.peers)
        good &= fine
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if given.update:
        put("gpu", lines)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
