#!/usr/bin/env python3
"""What a report of a large run costs: time, memory and bytes to write, and the time until a browser shows it.

    python benchmarks/report_benchmark.py                     8 ranks of 100,000 nodes, and a page of 200,000
    python benchmarks/report_benchmark.py --ranks 2 --nodes 10000
    python benchmarks/report_benchmark.py --ranks 2 --nodes 500000 --shown 1000000 --many 0

Limits: 20 s of CPU time, 1 GB and 10 MB for 8 ranks of 100,000 nodes; 2 s until 200,000 nodes can be used;
15 MB and 2 s for the page of 4,096 ranks × 20 steps, whose times are made here, as skeletons give them.
Exit status 1 if one is exceeded. The last one needs Playwright and Chromium. CPU time is user + system, as
the machine's clock also counts what other processes do.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from chakra_et import cli
from chakra_et.report.page import write_page
from tests.report.made_run import write_large
from tests.report.test_many import made_content

# A process of its own, as the peak memory of children is the largest of all that a process has had.
MEASURE = """
import json, resource, subprocess, sys, time
begin = time.perf_counter()
subprocess.run(json.loads(sys.argv[1]), check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3]))
"""
LIMITS = {
    "CPU seconds": 20.0,
    "megabytes of memory": 1000.0,
    "megabytes of page": 10.0,
    "seconds to interactive": 2.0,
    "megabytes, many ranks": 15.0,
    "seconds, many ranks": 2.0,
}


@dataclass
class Config:
    """What is measured."""

    ranks: int = field(default=8, metadata={"help": "ranks of the run that is written"})
    nodes: int = field(default=100_000, metadata={"help": "nodes of each rank"})
    shown: int = field(default=200_000, metadata={"help": "nodes of the run that a browser shows"})
    many: int = field(default=4096, metadata={"help": "ranks of the page of very many ranks"})


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_large(folder, config.ranks, config.nodes)
        command = [sys.executable, "-m", "chakra_et", "report", str(folder / "large")]
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, json.dumps(command)],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        wall, cpu, memory = json.loads(done.stdout)
        page = folder / "large_report.html"
        found = {
            "CPU seconds": cpu,
            "megabytes of memory": memory,
            "megabytes of page": page.stat().st_size / 1e6,
        }
        print(f"{config.ranks} ranks of {config.nodes:,} nodes, written in {wall:.1f} s:")
        if config.shown:
            write_large(folder, 2, config.shown // 2, "shown")
            command = [sys.executable, "-m", "chakra_et", "report", str(folder / "shown")]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
            if (seconds := interactive(folder / "shown_report.html")) is not None:
                found["seconds to interactive"] = seconds
        if config.many:
            page = folder / "many.html"
            size = write_page(page, "many", "many", *made_content(folder, config.many))
            found["megabytes, many ranks"] = size / 1e6
            if (seconds := interactive(page, zooms=False)) is not None:
                found["seconds, many ranks"] = seconds
    for name, value in found.items():
        print(f"  {name:24} {value:8.2f}   limit {LIMITS[name]:g}")
    return int(any(value > LIMITS[name] for name, value in found.items()))


def interactive(page: Path, repeat: int = 3, zooms: bool = True) -> float | None:
    """Seconds from the start of navigation until the page can be used, the best of several loads."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("note: no Playwright or no Chromium, so that the time to interactive is not measured")
        return None
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        times = []
        for _ in range(repeat):
            tab = browser.new_page()
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-ready]", timeout=60_000)
            times.append(float(tab.evaluate("document.documentElement.dataset.ready")) / 1000)
            frames = tab.evaluate(FRAMES) if zooms else None
            tab.close()
        if frames is not None:
            print(f"  a frame while zooming takes {frames:.1f} ms in the median")
        browser.close()
    return min(times)


FRAMES = """() => {
    const { view } = chakraReport, times = [];
    for (let at = 0; at < 60; at++) {
        view.zoom(at < 30 ? 0.8 : 1.25);
        const begin = performance.now();
        view.draw();
        times.push(performance.now() - begin);
    }
    return times.sort((a, b) => a - b)[30];
}"""


if __name__ == "__main__":
    begin = time.perf_counter()
    status = main()
    print(f"measured in {time.perf_counter() - begin:.0f} s")
    sys.exit(status)
