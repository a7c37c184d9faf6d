"""MLCommons' tools and HTA beside ours, on the same traces: the table of CHAKRA_SETUP.md.

    .venv/bin/python benchmarks/upstream_chain.py tests/fixtures/captures/torch-2.13 TRACES

For every host/device pair in the folders: chakra_trace_link and chakra_converter where et_replay is
installed; chakra_jsonizer; chakra_visualizer. For device traces of GPUs: HTA, whose busy time is compared
with ours. ./install_chakra_tools.sh installs the packages; a missing one is reported.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import chakra_et as ce
from chakra_et.convert.rank import RECURSION, convert_by_mlcommons
from chakra_et.et import file as et_file
from chakra_et.et.columns import NodeType
from chakra_et.text import plural
from chakra_et.traces import sets

HOST = ("host overhead", "device overhead", "annotation", "runtime", "operator")
HAS_LINKER = importlib.util.find_spec("et_replay") is not None
HAS_HTA = importlib.util.find_spec("hta") is not None


def tool(module: str, *arguments: str | Path) -> None:
    """Run one of Chakra's tools. Raises ``RuntimeError`` with its last line where it fails."""
    program = RECURSION.format(module=f"chakra.src.{module}")
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{module}: {done.stderr.strip().splitlines()[-1]}")


def figures(path: Path) -> dict[str, Any]:
    """What an .et file holds; ``absent``: dependencies on nodes that it lacks."""
    trace = et_file.read(path)
    deps = (trace.data_deps.values, trace.ctrl_deps.values)
    communicates = trace.types >= NodeType.COMM_SEND
    return {
        "nodes": len(trace),
        "edges": sum(map(len, deps)),
        "absent": int((~np.isin(np.concatenate(deps), trace.ids)).sum()),
        "communication": int(communicates.sum()),
        "bytes": int(trace.column("comm_size", 0)[communicates].sum()),
        "times": bool(trace.start_micros.any()),
    }


def chain(traces: sets.TraceSet, folder: Path) -> tuple[list[tuple[str, dict[str, Any]]], float]:
    """Rank 0 by our converter and by the upstream chain, and our step in ms; both readers run too."""
    (result,) = ce.convert(traces.folder, output=folder, name=traces.name)
    native = result.traces.et_file(0)
    files = [("native", native)]
    if HAS_LINKER:
        upstream = folder / "upstream.et"
        convert_by_mlcommons(traces.pairs[0], upstream)
        files.append(("upstream", upstream))
    for _, path in files:
        tool("jsonizer.jsonizer", "--input_filename", path, "--output_filename", f"{path}.json")
        tool("visualizer.visualizer", "--input_filename", path, "--output_filename", f"{path}.graphml")
        assert all(Path(f"{path}.{ending}").stat().st_size > 0 for ending in ("json", "graphml"))
    steps = ce.load(native).steps.rows()
    mean = np.mean([step["end_ns"] - step["start_ns"] for step in steps]) / 1e6
    return [(by, figures(path)) for by, path in files], float(mean)


def hta(path: Path) -> tuple[float, float, float]:
    """GPU time of a device trace that is not idle, ms: by HTA, by our nodes, and by the file's own events."""
    logging.disable(logging.WARNING)
    from hta.trace_analysis import TraceAnalysis

    with contextlib.redirect_stdout(io.StringIO()):
        # Without the flag HTA leaves the last step out.
        files = {0: str(path)}
        analysis = TraceAnalysis(files, str(path.parent), include_last_profiler_step=True)
        found = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    nodes = [node for node in ce.load(path).nodes.rows() if node["stream"] is not None]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    work = [
        event for event in events if event.get("cat", "").lower() in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    ours = _busy([(n["start_ns"], n["duration_ns"]) for n in nodes if n["kind"] not in HOST])
    return (
        float(found["compute_time(us)"] + found["non_compute_time(us)"]) / 1e3,
        ours / 1e6,
        _busy([(event["ts"], event["dur"]) for event in work]) / 1e3,
    )


def _busy(spans: list[tuple[float, float]]) -> float:
    """The length of the union of (start, duration)."""
    total = end = 0.0
    for start, lasts in sorted(spans):
        total += max(start + lasts - max(start, end), 0)
        end = max(end, start + lasts)
    return total


def main(folders: list[str]) -> int:
    how = "chakra_trace_link, then chakra_converter 1.0.0"
    print(f"Upstream: {how if HAS_LINKER else 'left out, as et_replay is not installed'}.\n")
    print("| rank 0 of | by | nodes | edges | to absent nodes | communication | bytes | start times | step |")
    print("|---|---|---|---|---|---|---|---|---|")
    runs = [run for each in folders for run in [*_found(Path(each)), *_below(Path(each))] if _has_host(run)]
    for run in runs:
        with tempfile.TemporaryDirectory() as folder:
            rows, step = chain(run, Path(folder))
        for by, row in rows:
            lasts = f"{step:.1f} ms" if by == "native" else "none"
            cells = [f"{row[name]:,}" for name in ("nodes", "edges", "absent", "communication", "bytes")]
            print(
                f"| {run.name} | {by} | {' | '.join(cells)} | {'yes' if row['times'] else 'no'} | {lasts} |"
            )
    if not HAS_HTA:
        print("\nHolisticTraceAnalysis is not installed: its part is left out.")
        return 0
    print("\n| device trace | GPU busy by HTA 0.5.0 | by our nodes | by the events |\n|---|---|---|---|")
    for path in sorted(path for each in folders for path in Path(each).glob("*_*.json.gz")):
        if path.name.startswith(("a100", "b200", "mi", "sampled")):
            cells = [f"{each:.3f} ms" for each in hta(path)]
            print(f"| {path.name.partition('.')[0]} | {' | '.join(cells)} |", flush=True)
    print(f"\n{plural(len(runs), 'run')} went through the whole chain.")
    return 0


def _below(folder: Path) -> list[sets.TraceSet]:
    return [run for inner in sorted(folder.iterdir()) if inner.is_dir() for run in _found(inner)]


def _found(folder: Path) -> list[sets.TraceSet]:
    try:
        return sets.find(folder)
    except ce.TraceError:
        return []


def _has_host(run: sets.TraceSet) -> bool:
    return 0 in run.pairs and run.pairs[0].host is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
