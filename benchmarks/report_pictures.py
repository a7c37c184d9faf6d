#!/usr/bin/env python3
"""The picture of a run in the documents: its timeline with the critical path.

    python benchmarks/report_pictures.py mi300_resnet_rank0.json.gz

The trace is one of AMD-AGI/TraceLens (tests/traces, MIT licence): ResNet on an MI300X, rank 0 of 8.

Writes report_timeline.png to docs/pictures/ (a screenshot: needs Playwright, Chromium and Pillow).
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from chakra_et import cli
from chakra_et.errors import TraceError
from chakra_et.files import atomic_file
from chakra_et.report.content import content
from chakra_et.report.inputs import device_traces, find_run
from chakra_et.report.page import write_page
from chakra_et.report.run import load

COLOURS = 96
# Select the longest communication, and light the critical path.
SHOW = """() => {
    const { view } = chakraReport, { nodes } = view;
    const length = node => nodes.length[node];
    const transfers = nodes.search("").filter(node => nodes.kindName(node) === "transfer");
    const longest = transfers.reduce((a, b) => length(a) >= length(b) ? a : b);
    document.querySelector("#path").click();
    view.select(longest);
    const step = view.steps.get(nodes.rank(longest))?.at(-1);
    if (step) view.show(step.start / nodes.unit, (0.2 * step.start + 0.8 * step.end) / nodes.unit);
    document.querySelector("header").style.position = "static";
}"""


@dataclass
class Config:
    """Which run, and where to."""

    name: str = field(metadata={"positional": True, "help": "the run, as for chakra-et report"})
    output: Path = field(default=ROOT / "docs" / "pictures", metadata={"help": "folder of the pictures"})
    width: int = field(default=1280, metadata={"help": "pixels of the browser window"})


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    return cli.run(lambda: make(config), TraceError)


def make(config: Config) -> None:
    config.output.mkdir(parents=True, exist_ok=True)
    chosen = find_run([config.name])
    run = load(chosen)
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "page.html"
        write_page(page, "report", run.name, *content(run, device_traces(chosen)[0]))
        with atomic_file(config.output / "report_timeline.png") as file:
            file.write(screenshot(page, config.width))
    for path in sorted(config.output.glob("report_*")):
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def screenshot(page: Path, width: int) -> bytes:
    """The timeline section as a PNG of few colours."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise TraceError("no Chromium: apt-get install chromium")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 900})
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-ready]", timeout=60_000)
        tab.evaluate(SHOW)
        tab.wait_for_timeout(500)
        raw = tab.locator("#timeline").screenshot()
        browser.close()
    packed = io.BytesIO()
    Image.open(io.BytesIO(raw)).convert("RGB").quantize(COLOURS).save(packed, "PNG", optimize=True)
    return packed.getvalue()


if __name__ == "__main__":
    sys.exit(main())
