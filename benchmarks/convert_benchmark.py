#!/usr/bin/env python3
"""How fast a pair of traces becomes a checked .et file, in one run beside what it is compared with.

    python benchmarks/convert_benchmark.py --host outputs/gpt2_1gpu_quick_trace_host.json \
        --device outputs/gpt2_1gpu_quick_trace_device.json
    python benchmarks/convert_benchmark.py --events 10000 100000 1000000 --plot benchmarks/convert_scaling.svg
    python benchmarks/convert_benchmark.py --workers 1 2 4

The first measures whole processes, start-up included: our converter (read, link, build, validate, write),
Python's json.load of the same two files, pysimdjson's walk through all their fields (where it is installed),
and MLCommons' chakra_trace_link and chakra_converter (where et_replay is installed). The second makes
synthetic pairs of the given sizes and shows time and peak memory over size. The third converts eight copies
of the pair with each number of worker processes. CPU time is user + system, as the machine's clock also
counts what other processes do.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.summary import put
from benchmarks.synthetic import write_pair
from chakra_et import cli

JSON_LOAD = "import json, sys; [json.load(open(path, encoding='utf-8')) for path in sys.argv[1:]]"
# Each record of the long array, and each of its fields; "parse" stops before.
SIMDJSON = """
import sys, simdjson
for path in sys.argv[2:]:
    document = simdjson.Parser().load(path)
    records = document["nodes" if "nodes" in document else "traceEvents"]
    for record in records if sys.argv[1] == "walk" else ():
        for field in record.values():
            pass
"""

# A process of its own, as the peak memory of children is the largest of all that a process has had.
MEASURE = """
import json, resource, subprocess, sys, time
begin = time.perf_counter()
started = subprocess.Popen(json.loads(sys.argv[1]), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
errors = started.communicate()[1].decode(errors="replace")[-500:]
used = resource.getrusage(resource.RUSAGE_CHILDREN)
wall = time.perf_counter() - begin
print(json.dumps([started.returncode, used.ru_utime + used.ru_stime, wall, used.ru_maxrss, errors]))
"""


@dataclass
class Config:
    """What is measured."""

    host: str = field(
        default="outputs/gpt2_1gpu_quick_trace_host.json", metadata={"help": "host trace of the pair"}
    )
    device: str = field(
        default="outputs/gpt2_1gpu_quick_trace_device.json", metadata={"help": "device trace"}
    )
    events: tuple[int, ...] = field(
        default=(), metadata={"help": "sizes of synthetic pairs, in device events"}
    )
    workers: tuple[int, ...] = field(
        default=(), metadata={"help": "numbers of worker processes for eight copies of the pair"}
    )
    repeat: int = field(default=3, metadata={"help": "runs of each, the fastest counts"})
    update: bool = field(default=False, metadata={"help": "write the table into CONVERSION_SUMMARY.md"})
    plot: str = field(
        default="", metadata={"help": "SVG file for time and memory over size; needs matplotlib"}
    )


@dataclass
class Cost:
    """CPU seconds, wall seconds and peak MB of one process."""

    cpu: float
    wall: float
    megabytes: float


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    if config.events:
        name, lines = "scaling", scaling(config)
    else:
        host, device = Path(config.host), Path(config.device)
        for path in (host, device):
            if not path.is_file():
                print(f"error: {path}: no such trace; run ./run_gpt2_quick.sh first.", file=sys.stderr)
                return 2
        if config.workers:
            name, lines = "workers", several_workers(host, device, config)
        else:
            name, lines = "speed", compare(host, device, config.repeat)
    print("\n".join(lines))
    if config.update:
        put(name, lines)
    return 0


def compare(host: Path, device: Path, repeat: int) -> list[str]:
    """Our converter beside json.load and the upstream converter, as a table."""
    size = (host.stat().st_size + device.stat().st_size) / 1e6
    rows: list[tuple[str, Cost | None]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "pair_host.json").symlink_to(host.resolve())
        (folder / "pair_device.json").symlink_to(device.resolve())
        ours = best(convert_command(folder), repeat)
        rows.append(("ours: link, convert, validate, write", ours))
        load = [sys.executable, "-c", JSON_LOAD, str(host), str(device)]
        rows.append(("json.load of the two files", best(load, repeat)))
        rows += [(f"simdjson: {what}", simdjson(what, [host, device], repeat)) for what in ("parse", "walk")]
        if importlib.util.find_spec("et_replay") is None:
            print("note: et_replay is not installed (./install_chakra_tools.sh): upstream is left out")
        else:
            upstream = [*convert_command(folder), "--engine", "mlcommons"]
            rows.append(("upstream: --engine mlcommons", best(upstream, 1, may_fail=True)))
    title = f"{host.name.removesuffix('_host.json')}: {size:.1f} MB of JSON"
    lines = [f"| {title} | CPU, s | wall, s | peak, MB | CPU / ours |", "|---|---|---|---|---|"]
    for name, cost in rows:
        if cost is None:
            lines.append(f"| {name} | failed | | | |")
            continue
        figures = f"{cost.cpu:.2f} | {cost.wall:.2f} | {cost.megabytes:.0f} | {cost.cpu / ours.cpu:.2f}"
        lines.append(f"| {name} | {figures} |")
    return lines


def simdjson(what: str, files: list[Path], repeat: int) -> Cost | None:
    """What pysimdjson needs to "parse" or "walk" the files; None where it isn't installed."""
    if importlib.util.find_spec("simdjson") is None:
        print("note: simdjson is left out: pip install pysimdjson")
        return None
    return best([sys.executable, "-c", SIMDJSON, what, *map(str, files)], repeat)


def convert_command(folder: Path, workers: int = 1) -> list[str]:
    return [sys.executable, str(ROOT / "convert_to_et.py"), "--dir", str(folder), "--workers", str(workers)]


def several_workers(host: Path, device: Path, config: Config) -> list[str]:
    """Wall time of eight copies of the pair over the number of processes; peak of the largest process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = [f"| workers, on {cores} cores | wall, s | times faster | CPU, s | largest process, MB |"]
    lines.append("|---|---|---|---|---|")
    first = None
    for workers in config.workers:
        with tempfile.TemporaryDirectory() as scratch:
            for copy in range(8):
                (Path(scratch) / f"copy{copy}_host.json").symlink_to(host.resolve())
                (Path(scratch) / f"copy{copy}_device.json").symlink_to(device.resolve())
            cost = best(convert_command(Path(scratch), workers), config.repeat, key="wall")
        first = first or cost
        figures = f"{cost.wall:.2f} | {first.wall / cost.wall:.2f} | {cost.cpu:.2f} | {cost.megabytes:.0f}"
        lines.append(f"| {workers} | {figures} |")
    return lines


def scaling(config: Config) -> list[str]:
    """Time and memory over the size of a synthetic pair, with as many processes as there are cores, beside
    json.load of the same files."""
    points = []
    lines = [
        "| events | JSON, MB | CPU, s | µs / event | wall, s | largest process, MB | json.load CPU, s "
        "| wall, s | ours / json.load: CPU | wall | simdjson, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for events in config.events:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            write_pair(folder, events)
            files = sorted(folder.iterdir())
            size = sum(path.stat().st_size for path in files) / 1e6
            cost = best(convert_command(folder, 0), config.repeat)
            load = (
                best([sys.executable, "-c", JSON_LOAD, *map(str, files)], 1) if events <= 1_000_000 else None
            )
            walk = simdjson("walk", files, config.repeat)
        points.append((events, cost))
        loading = " |  |  | "
        if load:
            ratios = f"{cost.cpu / load.cpu:.3f} | {cost.wall / load.wall:.3f}"
            loading = f"{load.cpu:.2f} | {load.wall:.2f} | {ratios}"
        lines.append(
            f"| {events:,} | {size:.0f} | {cost.cpu:.2f} | {cost.cpu / events * 1e6:.1f} | {cost.wall:.2f} "
            f"| {cost.megabytes:.0f} | {loading} | {f'{walk.cpu:.2f}' if walk else ''} |"
        )
    if config.plot:
        plot(points, Path(config.plot))
    return lines


def best(command: list[str], repeat: int, may_fail: bool = False, key: str = "cpu") -> Cost | None:
    """The run of a command, of some, with the least ``key``."""
    costs = []
    for _ in range(repeat):
        outer = [sys.executable, "-c", MEASURE, json.dumps(command)]
        done = subprocess.run(outer, capture_output=True, text=True, check=True)
        status, cpu, wall, peak, errors = json.loads(done.stdout)
        if status != 0:
            last = errors.strip().splitlines()[-1][:200] if errors.strip() else f"status {status}"
            if not may_fail:
                raise SystemExit(f"error: {command[1]} failed: {last}")
            print(f"note: {command[-5:]} failed: {last}", file=sys.stderr)
            return None
        costs.append(Cost(cpu, wall, peak * (1 if sys.platform == "darwin" else 1024) / 1e6))
    return min(costs, key=lambda cost: getattr(cost, key))


def plot(points: list[tuple[int, Cost]], path: Path) -> None:
    """Two straight lines are what one hopes to see."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    events = [count for count, _ in points]
    left.loglog(events, [cost.cpu for _, cost in points], marker="o")
    left.set(xlabel="device events", ylabel="CPU seconds", title="time")
    right.loglog(events, [cost.megabytes for _, cost in points], marker="o")
    right.set(xlabel="device events", ylabel="peak MB", title="memory")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
