#!/usr/bin/env python3
"""The pictures of GPU runs in the documents: screenshots of the pages that the commands write.

    python scripts/public_traces.py traces
    python benchmarks/report_pictures.py traces

The traces are of AMD-AGI/TraceLens (tests/traces, MIT licence): ResNet on an MI300X, rank 0 of 8, BERT on an
H100, and TimeSformer on an H100 and on an MI300X; and of facebookresearch/param (MIT licence): DLRM on 8
V100. The job of very many ranks is a generated one. Writes PNG files to docs/pictures/; needs Playwright,
Chromium and Pillow.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cluster_benchmark import make_job
from chakra_et import cli
from chakra_et.__main__ import main as chakra_et
from chakra_et.errors import TraceError
from chakra_et.files import atomic_file

COLOURS = 96
# Select the longest communication of the first step, and light the critical path.
PATH = """() => {
    const { view } = chakraReport, { nodes } = view, step = [...view.steps.values()][0][0];
    const [start, end] = [step.start / nodes.unit, step.end / nodes.unit];
    const within = node => nodes.start[node] >= start && nodes.end(node) <= end;
    const transfers = nodes.search("").filter(node => nodes.kindName(node) === "transfer" && within(node));
    const longest = transfers.reduce((a, b) => nodes.length[a] >= nodes.length[b] ? a : b);
    document.querySelector("#path").click();
    view.select(longest);
    view.show(start, 0.1 * start + 0.9 * end);
}"""
FLAME = """() => {
    const tabs = [...document.querySelectorAll("#operators button")];
    tabs.find(each => each.textContent === "flame").click();
}"""
# The call stacks of a third of the step, down to runtime calls.
STACKS = """() => {
    const { view } = chakraReport, step = [...view.steps.values()][0].at(-1), unit = view.nodes.unit;
    view.show((0.6 * step.start + 0.4 * step.end) / unit, (0.3 * step.start + 0.7 * step.end) / unit);
    view.scroller.scrollTop = view.scroller.scrollHeight;
}"""
FIRST_CHART = """() => {
    document.querySelectorAll("#breakdown h3, #breakdown h3 ~ *").forEach(each => each.remove());
}"""
SLOWEST = """() => {
    const order = document.querySelector("#steps select");
    order.value = "the 64 slowest";
    order.dispatchEvent(new Event("change"));
    document.querySelectorAll("#steps ~ *, footer").forEach(each => each.remove());
}"""


@dataclass
class Config:
    """Where the traces are, and where the pictures go."""

    traces: Path = field(metadata={"positional": True, "help": "folder of scripts/public_traces.py"})
    output: Path = field(default=ROOT / "docs" / "pictures", metadata={"help": "folder of the pictures"})
    dlrm: Path = field(
        default=Path("../shared/data/traces/dlrm_8gpu"), metadata={"help": "folder of the 8-GPU traces"}
    )
    only: str = field(default="", metadata={"help": "the one picture to make, such as report_flame"})
    width: int = field(default=1280, metadata={"help": "pixels of the browser window"})


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    return cli.run(lambda: make(config), TraceError)


def make(config: Config) -> None:
    config.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, page, element, script in pages(config, Path(scratch)):
            path = config.output / f"{name}.png"
            with atomic_file(path) as file:
                file.write(screenshot(page, element, script, config.width))
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def pages(config: Config, scratch: Path) -> Iterator[tuple[str, Path, str, str]]:
    """Name of a picture, its page, the part of it, and what is done to the page before."""
    traces, only = config.traces, config.only
    resnet = traces / "mi300_resnet_rank0.json.gz"
    before, after = (
        traces / "pairs" / f"{gpu}_timesformer-base-finetuned-k400.json.gz" for gpu in ("h100", "mi300")
    )
    page = scratch / "page.html"

    def wanted(name: str, *command: object) -> bool:
        if not name.startswith(only):
            return False
        if chakra_et([*map(str, command), "-o", str(page)]):
            raise TraceError(f"{name}: chakra-et {command[0]} failed")
        return True

    if wanted("report_timeline", "report", resnet):
        yield "report_timeline", page, "#timeline", PATH
    if wanted("capture_stacks", "report", traces / "pairs" / "h100_bert-small-uncased.json.gz"):
        yield "capture_stacks", page, "#timeline", STACKS
    if wanted("stragglers_breakdown", "report", config.dlrm):
        yield "stragglers_breakdown", page, "#breakdown", FIRST_CHART
    if "scale_timeline".startswith(only):
        chakra_et(["convert", str(resnet), "-o", str(scratch)])
        larger = scratch / "resnet-dp16"
        chakra_et(["scale", str(scratch / "mi300_resnet"), "--fill", "--dp", "16", "-o", str(larger)])
        if wanted("scale_timeline", "report", larger):
            yield "scale_timeline", page, "#timeline", "() => {}"
    if wanted("report_flame", "report", before):
        yield "report_flame", page, "#operators", FLAME
    if "predict_gpu".startswith(only):
        for trace, name in ((before, "H100, measured"), (after, "MI300X, measured")):
            shutil.copy(trace, scratch / f"{name}.json.gz")
        chakra_et(["convert", str(scratch), "-o", str(scratch / "et")])
        h100, mi300x = (scratch / "et" / f"{gpu}, measured" for gpu in ("H100", "MI300X"))
        predicted = scratch / "et" / "MI300X, predicted"
        chakra_et(["predict", str(h100), "--gpu", "H100:MI300X", "--output", str(predicted)])
        if wanted("predict_gpu", "compare", h100, predicted, mi300x):
            yield "predict_gpu", page, "#page", "() => {}"
    if "report_many_ranks".startswith(only):
        make_job(scratch, 512, 20)
        if wanted("report_many_ranks", "report", scratch / "job512"):
            yield "report_many_ranks", page, "#page", SLOWEST


def screenshot(page: Path, element: str, script: str, width: int) -> bytes:
    """Part of a page as a PNG of few colours."""
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
        tab.evaluate("document.querySelector('header').style.position = 'static'")
        tab.evaluate(script)
        tab.wait_for_timeout(500)
        raw = tab.locator(element).screenshot()
        browser.close()
    packed = io.BytesIO()
    Image.open(io.BytesIO(raw)).convert("RGB").quantize(COLOURS).save(packed, "PNG", optimize=True)
    return packed.getvalue()


if __name__ == "__main__":
    sys.exit(main())
