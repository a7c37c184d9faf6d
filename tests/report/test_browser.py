"""The pages in a real browser: no console message, hover, zoom, sort, search, a walk along dependencies."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chakra_et.__main__ import main
from chakra_et.report.page import write_page
from chakra_et.report.schedule import Kind, Picture, Span, schedule_page
from tests.export.test_recorded import converted, trace
from tests.report.made_run import HOSTILE, write_large, write_run
from tests.report.test_many import made_content
from tests.shared import shared_path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def made_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_run(folder, gemm_name=HOSTILE)
    assert main(["report", str(folder / "made")]) == 0
    return folder / "made_report.html"


@pytest.fixture(scope="module")
def page(browser: Any) -> Any:
    return browser.new_context(viewport={"width": 1400, "height": 900}, offline=True).new_page()


@pytest.fixture
def shown(page: Any) -> Iterator[Any]:
    """``shown(path)``: the page, once it is ready; at the end there must be no message on its console."""
    messages: list[str] = []
    listeners = {
        "console": lambda message: messages.append(message.text),
        "pageerror": lambda error: messages.append(str(error)),
    }

    def show(path: Path, scheme: str = "light") -> Any:
        page.emulate_media(color_scheme=scheme, media="screen")
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=WAIT_MS)
        return page

    for event, listener in listeners.items():
        page.on(event, listener)
    yield show
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    assert messages == []


def place(page: Any, name: str, rank: int) -> tuple[float, float]:
    """Where on the page a node is drawn."""
    x, y = page.evaluate(
        """([name, rank]) => {
            const { view } = chakraReport, { nodes } = view;
            const all = Array.from({ length: nodes.count }, (_, at) => at);
            const node = all.find(at => nodes.title(at) === name && nodes.rank(at) === rank);
            const box = view.canvas.getBoundingClientRect();
            const x = (view.x(nodes.start[node]) + view.x(nodes.end(node))) / 2;
            return [box.left + x, box.top + view.y(nodes.row[node]) + 8];
        }""",
        [name, rank],
    )
    return x, y


def pixel(page: Any, x: float, y: float) -> list[int]:
    found: list[int] = page.evaluate(
        """([x, y]) => {
            const { canvas } = chakraReport.view, box = canvas.getBoundingClientRect();
            chakraReport.view.draw();
            const copy = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
            const [left, top] = [x - box.left, y - box.top].map(each => each * devicePixelRatio);
            copy.drawImage(canvas, left, top, 1, 1, 0, 0, 1, 1);
            return Array.from(copy.getImageData(0, 0, 1, 1).data);
        }""",
        [x, y],
    )
    return found


def timeline(page: Any) -> None:
    page.locator("#timeline").scroll_into_view_if_needed()


def test_the_page_shows_every_section(shown: Any, made_page: Path) -> None:
    page = shown(made_page)
    assert "160 µs per step" in page.locator(".lead").inner_text()
    titles = page.locator("section h2").all_inner_texts()
    assert titles == ["Timeline", "Where the time went", "Operators, kernels and modules", "Communication"]
    assert page.title() == "made: report"
    assert page.locator("img").count() == 0


def test_hovering_names_a_node(shown: Any, made_page: Path) -> None:
    page = shown(made_page)
    timeline(page)
    page.mouse.move(*place(page, "ncclAllReduce", 0))
    tip = page.locator(".tip").inner_text()
    assert "ncclAllReduce" in tip
    assert "waits 40.0 µs for other ranks" in tip


def test_a_walk_along_dependencies(shown: Any, made_page: Path) -> None:
    page = shown(made_page)
    timeline(page)
    page.mouse.click(*place(page, "Optimizer.step", 0))
    details = page.locator(".details")
    assert "Optimizer.step" in details.inner_text()
    details.locator("ul.before button", has_text="ncclAllReduce").click()
    assert "40.0 µs for other ranks, then 20.0 µs of transfer" in details.inner_text()
    details.locator("ul.peers button").click()
    assert "rank 1, stream 9" in details.inner_text()
    details.locator("ul.before button", has_text="onerror").click()
    assert HOSTILE in details.locator("h3").inner_text()
    assert "5.00 MFLOP" in details.inner_text()
    page.locator("canvas").press("[")
    assert "aten::mm" in details.locator("h3").inner_text()


def test_zoom_pan_and_back(shown: Any, made_page: Path) -> None:
    page = shown(made_page)
    timeline(page)
    window = "[chakraReport.view.from, chakraReport.view.to]"
    whole = page.evaluate(window)
    x, y = place(page, "ncclAllReduce", 1)
    page.mouse.move(x, y)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    page.wait_for_function(
        "([from, to]) => chakraReport.view.to - chakraReport.view.from < to - from", arg=whole
    )
    # The node under the cursor stays under it.
    assert abs(place(page, "ncclAllReduce", 1)[0] - x) < 2
    before = page.evaluate(window)
    page.mouse.down()
    page.mouse.move(x - 50, y)
    page.mouse.up()
    assert page.evaluate(window)[0] > before[0]
    page.locator("canvas").press("0")
    assert page.evaluate(window) == pytest.approx(whole)


def test_search_lights_what_it_finds(shown: Any, made_page: Path) -> None:
    page = shown(made_page)
    timeline(page)
    dimmed = place(page, "aten::mm", 0)
    before = pixel(page, *dimmed)
    page.locator("#search").fill("ALLREDUCE")
    assert "4 nodes" in page.locator("#timeline output").inner_text()
    assert pixel(page, *dimmed) != before
    page.locator("#search").press("Enter")
    assert "1 of 4" in page.locator("#timeline output").inner_text()
    assert "allreduce" in page.locator(".details h3").inner_text().lower()


def test_the_critical_path_is_lit(shown: Any, made_page: Path) -> None:
    page = shown(made_page)
    timeline(page)
    on_path, beside = place(page, "aten::mm", 1), place(page, "aten::mm", 0)
    was = [pixel(page, *on_path), pixel(page, *beside)]
    page.locator("#path").click()
    assert pixel(page, *on_path) == was[0]
    assert pixel(page, *beside) != was[1]


def test_a_click_on_a_column_sorts(shown: Any, made_page: Path) -> None:
    page = shown(made_page)
    assert page.locator("#operators table tbody td:first-child").all_inner_texts() == [
        "matrix product",
        "memory copy",
    ]
    page.locator("#operators").get_by_text("kernels and copies", exact=True).click()
    table = page.locator("#operators table")
    names = lambda: table.locator("tbody td:first-child").all_inner_texts()  # noqa: E731
    assert "Memcpy HtoD" in names()
    page.locator("#operators").get_by_text("operators", exact=True).click()
    assert names()[0] in ("aten::mm", "Optimizer.step")
    table.locator("th", has_text="name").click()
    assert names() == sorted(names(), key=str.lower)
    table.locator("th", has_text="name").click()
    assert names() == sorted(names(), key=str.lower, reverse=True)
    page.locator("#operators input").fill("mm")
    assert names() == ["aten::mm"]


def large_page(folder: Path) -> Path:
    write_large(folder, 8, 2000)
    assert main(["report", str(folder / "large")]) == 0
    return folder / "large_report.html"


def test_a_narrow_window_has_no_sideways_scrolling(shown: Any, tmp_path: Path) -> None:
    page = shown(large_page(tmp_path))
    page.set_viewport_size({"width": 390, "height": 800})
    width = page.evaluate("document.documentElement.scrollWidth")
    page.set_viewport_size({"width": 1400, "height": 900})
    assert width <= 390


def test_the_critical_path_is_scrolled_to(shown: Any, tmp_path: Path) -> None:
    page = shown(large_page(tmp_path))
    timeline(page)
    page.evaluate("chakraReport.view.scroller.scrollTop = 0")
    page.locator("#path").click()
    assert page.evaluate(
        """() => {
            const { view } = chakraReport, line = view.lineOfRow[view.nodes.row[view.longestOnPath()]];
            const top = view.scroller.scrollTop;
            return line.top >= top && line.top < top + view.visible;
        }"""
    )


def test_dark_mode_and_print(shown: Any, made_page: Path) -> None:
    page = shown(made_page, scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.locator("#theme").click()
    assert page.evaluate(background) == "rgb(255, 255, 255)" != dark
    page.locator("#theme").click()
    page.emulate_media(media="print")
    assert page.locator("#theme").is_hidden()
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    window = page.viewport_size
    page.set_viewport_size({"width": 720, "height": 1000})  # A4 without its margins
    assert page.evaluate("document.documentElement.scrollWidth") <= 720
    page.set_viewport_size(window)


def test_memory_has_a_curve_and_a_table(shown: Any, tmp_path: Path) -> None:
    write_run(tmp_path, memory=True)
    assert main(["report", str(tmp_path / "made")]) == 0
    page = shown(tmp_path / "made_report.html")
    timeline(page)
    x, y, bottom = page.evaluate(
        """() => {
            const { view } = chakraReport, box = view.canvas.getBoundingClientRect();
            const line = view.lines.find(each => each.curve?.device.includes("memory"));
            const top = box.top + TOP - view.scroller.scrollTop + line.top;
            return [box.left + view.x(100), top + 4, top + line.height - 4];
        }""".replace("TOP", "56")
    )
    page.mouse.move(x, bottom)
    assert "8.00 MB allocated, 16.0 MB reserved" in page.locator(".tip").inner_text()
    assert pixel(page, x, bottom) != pixel(page, x, y), "the curve is half as high as what is reserved"
    assert "9.00 MB" in page.locator("#memory tbody tr").inner_text()
    page.locator("#memory tbody tr").click()
    assert page.evaluate("chakraReport.view.to - chakraReport.view.from") < 20


def test_two_runs_side_by_side(shown: Any, tmp_path: Path) -> None:
    write_run(tmp_path, "before")
    write_run(tmp_path, "after", slow=50)
    names = [str(tmp_path / name) for name in ("before", "after")]
    assert main(["compare", *names, "-o", str(tmp_path / "page.html")]) == 0
    page = shown(tmp_path / "page.html")
    assert "after" in page.locator(".lead").inner_text()
    for tab in ("classes of kernels", "kernels and copies"):
        page.get_by_role("tab", name=tab, exact=True).click()
        assert "−20.0 µs" in page.locator("#changes tbody").first.inner_text()
    assert page.locator("#changes [aria-label=partners] tbody").inner_text().startswith("in both")
    for tab, name in (("modules", "Linear_0"), ("call tree", "Net_0")):
        page.get_by_role("tab", name=tab, exact=True).click()
        assert name in page.locator("#changes tbody").inner_text()


def test_a_page_without_communication_or_steps(shown: Any, tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[1] / "fixtures" / "traces" / "no_profiler_step"
    assert main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    page = shown(tmp_path / "page.html")
    assert "What this page lacks" in page.locator("#summary").inner_text()


@pytest.mark.slow
def test_200_000_nodes_are_shown_within_two_seconds(shown: Any, tmp_path: Path) -> None:
    write_large(tmp_path, 2, 100_000)
    assert main(["report", str(tmp_path / "large")]) == 0
    ready = [
        float(shown(tmp_path / "large_report.html").evaluate("document.documentElement.dataset.ready"))
        for _ in range(3)
    ]
    assert min(ready) <= 2000


@pytest.mark.slow
def test_real_gpu_traces_are_shown(shown: Any, tmp_path: Path) -> None:
    folder = shared_path("data/traces/public", "mi300_resnet_rank0.json.gz")
    for path in sorted(folder.glob("*.json.gz")):
        assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 0
        assert shown(tmp_path / "page.html").locator("canvas").is_visible()


def test_the_page_of_many_ranks(shown: Any, tmp_path: Path) -> None:
    path = tmp_path / "many.html"
    write_page(
        path,
        "many",
        "many",
        *made_content(tmp_path, 512),
    )
    page = shown(path)
    assert page.locator("#outliers tbody td:first-child").all_inner_texts() == ["100", "200"]

    def told(row: int, column: int) -> str:
        """What the map says of a cell. A mouse is at whole pixels, and a row is a pixel high."""
        canvas = page.locator("#steps canvas")
        canvas.evaluate("canvas => canvas.scrollIntoView()")
        box = canvas.bounding_box()
        across = box["x"] + box["width"] * (column + 0.5) / 20
        page.mouse.move(across, math.ceil(box["y"] + box["height"] * row / 512))
        return str(page.locator("#steps p[aria-live]").inner_text())

    assert told(100, 10).startswith("rank 100, step 10")
    page.locator("#steps select").select_option("slowest first")
    assert told(0, 0).startswith("rank 100, step 0")
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1400, "height": 900})


def test_the_flame_view_zooms(shown: Any, made_page: Path) -> None:
    page = shown(made_page)
    page.locator("#operators").get_by_role("tab", name="flame", exact=True).click()
    bars = page.locator(".flame button")
    names = [text.partition(":")[0] for text in bars.evaluate_all("all => all.map(bar => bar.title)")]
    assert names[:3] == ["Net_0", "Linear_0", "aten"]
    page.locator(".flame button", has_text="Linear_0").click()
    assert bars.first.inner_text() == "Linear_0"


def test_call_stacks_are_shown_hidden_and_walked(shown: Any, tmp_path: Path) -> None:
    name = converted(tmp_path, trace())
    assert main(["report", str(name)]) == 0
    page = shown(tmp_path / "run_report.html")
    rows = "chakraReport.view.lines.filter(line => line.row >= 0).length"
    assert page.locator("#stacks").get_attribute("aria-pressed") == "true"
    with_stacks = page.evaluate(rows)
    page.locator("#stacks").click()
    assert page.evaluate(rows) == with_stacks - 3
    page.evaluate(
        """() => {
            const { view } = chakraReport, { nodes } = view;
            view.select(nodes.search("add_kernel").find(node => !nodes.isSlice(node)));
        }"""
    )
    page.locator(".details button", has_text="train.py(3): step").click()
    assert page.locator("#stacks").get_attribute("aria-pressed") == "true", "a frame that is gone to is shown"
    assert "python" in page.locator(".details").inner_text()


def test_a_page_of_schedules_is_shown(shown: Any, tmp_path: Path) -> None:
    spans = [Span(0, 0.0, 1.0, "work", "first"), Span(1, 1.0, 3.0, "work", "second")]
    picture = Picture("step", [("a", ""), ("b", "idle")], spans, {"work": Kind("work", "#123456")})
    (tmp_path / "page.html").write_text(schedule_page("step", [picture]))
    page = shown(tmp_path / "page.html")
    x, y = place(page, "second", 1)
    page.mouse.click(x, y)
    assert "second" in page.locator(".details h3").inner_text()
