"""The picture: what is drawn, its bubbles against a schedule whose bubble is known, and a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_lm.__main__ import main as command
from megatron_lm.logs import records, runs
from megatron_lm.results import picture
from tests.megatron_lm import written_logs
from tests.megatron_lm.written_logs import write_node

STAGES, MICRO_BATCHES, ITERATIONS = 4, 8, 3
SETTINGS = (
    f"TENSOR_MP_SIZE: 1\nDP_SIZE: 2\nPIPELINE_MP_SIZE: {STAGES}\nGLOBAL_BATCH_SIZE: {2 * MICRO_BATCHES}\n"
    "MICRO_BATCH_SIZE: 1\nstart\n"
)


@pytest.fixture
def log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Job 5: four nodes of two ranks each, one pipeline stage a node; iterations 11 to 13 are logged."""
    monkeypatch.setenv("MEGATRON_LOG_DIR", str(tmp_path / "log2"))
    monkeypatch.chdir(tmp_path)
    for stage in range(STAGES):
        text = f"NODE_RANK: {stage}\n{SETTINGS}"
        for number in range(ITERATIONS):
            for rank in (2 * stage, 2 * stage + 1):
                lists = written_logs.one_f_one_b(stage, STAGES, MICRO_BATCHES, 1.7e9 + number)
                lists["post-process"] = lists["forward-compute"]
                text += written_logs.timer_block(rank, lists)
        if stage == STAGES - 1:
            text += written_logs.iteration_line(written_logs.simple_iteration(13))
        write_node(tmp_path / "log2/5", f"n{stage + 1}", out=text, err="", gpu="no GPU\n")
    return tmp_path / "log2"


def test_the_bubble_of_equal_stages_is_the_one_of_the_formula(log_dir: Path) -> None:
    found, _ = picture.read_events(runs.find(("5",), log_dir), "all")
    ideal = (STAGES - 1) / (MICRO_BATCHES + STAGES - 1)
    bubbles = picture.bubbles(found)
    assert [bubble.rank for bubble in bubbles] == list(range(8))
    assert [bubble.share for bubble in bubbles] == pytest.approx([ideal] * 8, abs=1e-4)
    # One micro-batch takes 0.03 s on a stage; each of three iterations has 8 of them.
    assert [bubble.compute for bubble in bubbles] == pytest.approx([0.72] * 8, abs=1e-4)


def test_events_have_their_lane_iteration_and_micro_batch(log_dir: Path) -> None:
    found, _ = picture.read_events(runs.find(("5",), log_dir), "all")
    assert {event.iteration for event in found} == {11, 12, 13}
    of_rank = [event for event in found if event.rank == 2 and event.iteration == 12]
    lanes = {event.task: event.lane for event in of_rank}
    assert lanes == {
        "forward": picture.COMPUTE,
        "backward": picture.COMPUTE,
        "optimizer": picture.COMPUTE,
        "post-process": picture.SUB_STEP,
        "forward-recv": picture.COMMUNICATION,
        "backward-recv": picture.COMMUNICATION,
        "grads-all-reduce": picture.COMMUNICATION,
    }
    for task in ("forward", "backward", "forward-recv", "backward-recv"):
        labels = [event.label for event in of_rank if event.task == task]
        assert labels == [f"{task}-{k}" for k in range(MICRO_BATCHES)]
    assert [event.label for event in of_rank if event.task == "optimizer"] == ["optimizer"]


def test_a_message_of_two_kinds_counts_for_both() -> None:
    lists = {
        "forward-backward": ([0.0], [9.0]),
        "forward-recv": ([1.0], [1.1]),
        "backward-send-forward-recv": ([2.0, 3.0], [2.1, 3.1]),
        "backward-send": ([4.0], [4.1]),
    }
    timers = records.timers(written_logs.timer_block(0, lists).encode())
    labels = [event.label for event in picture.events(timers, "n1", range(1, 2), 0)]
    assert labels == [
        "forward-recv-0",
        "backward-send-forward-recv-0",
        "backward-send-forward-recv-1",
        "backward-send-2",
    ]


@pytest.mark.parametrize(
    ("timer", "lane"),
    [
        ("forward-compute", picture.COMPUTE),
        ("optimizer", picture.COMPUTE),
        ("optimizer-inner-step", picture.SUB_STEP),
        ("batch-generator", picture.SUB_STEP),
        ("forward-backward-send-forward-backward-recv", picture.COMMUNICATION),
        ("forward-send-backward-recv", picture.COMMUNICATION),
        ("embedding-grads-all-reduce", picture.COMMUNICATION),
        ("params-all-gather", picture.COMMUNICATION),
    ],
)
def test_each_timer_has_its_lane(timer: str, lane: int) -> None:
    assert picture.lane_of(timer) == lane


def test_colours_and_bold_lines_are_those_of_the_format(log_dir: Path) -> None:
    found, settings = picture.read_events(runs.find(("5",), log_dir), "last")
    drawn = picture.measured_picture(found, settings)
    colour = {name: kind.colour for name, kind in drawn.kinds.items()}
    assert (
        colour["forward"] == "#1f77ff"
        and colour["backward"] == "#d62728"
        and colour["optimizer"] == "#001f5b"
    )
    # A line under every stage's two ranks, but not under the last.
    assert list(drawn.rules) == [1, 3, 5]
    forward = next(span for span in drawn.spans if span.kind == "forward")
    assert forward.label == "forward-0" and min(span.start for span in drawn.spans) == 0
    assert [label for _, label in drawn.marks] == ["iteration 13"]
    assert drawn.lanes[0][1] == f"{100 * (STAGES - 1) / (MICRO_BATCHES + STAGES - 1):.1f}% bubble"


def test_iterations_can_be_chosen(log_dir: Path, capsys) -> None:
    assert picture.main(["5", "--iterations", "11-12"]) == 0
    assert "8 ranks" in capsys.readouterr().out
    for args, said in ((["--iterations", "1"], "the logs have times of iterations 11 to 13"),):
        assert command(["picture", "5", *args]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        picture.main(["5", "--iterations", "some"])


def test_logs_without_times_say_how_to_get_them(log_dir: Path, capsys) -> None:
    write_node(log_dir / "6", "n1", out="NODE_RANK: 0\nstart\n", err="", gpu="")
    assert command(["picture", "6"]) == 2
    said = capsys.readouterr().err
    assert "PROFILE=true" in said and said.count("\n") == 1 and not Path("out.html").exists()


def test_a_real_browser_zooms_and_names_what_is_under_the_cursor(log_dir: Path, tmp_path: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium to look at the page with (apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    assert picture.main(["5", "--iterations", "all"]) == 0
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1400, "height": 900}, offline=True).new_page()
        messages: list[str] = []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto((tmp_path / "out.html").as_uri())
        page.wait_for_selector("html[data-ready]", timeout=60_000)
        assert "iterations 11 to 13" in page.locator("header").inner_text()
        forwards = page.evaluate(
            """() => {
                const { nodes } = chakraReport.view;
                return nodes.kind.filter((_, node) => nodes.kindName(node) === "forward").length;
            }"""
        )
        assert forwards == 2 * STAGES * MICRO_BATCHES * ITERATIONS
        assert "rank 7 (n4)" in page.evaluate("chakraReport.content.timeline.lanes")
        page.select_option("#step", "iteration 12")
        before = page.evaluate("chakraReport.view.to - chakraReport.view.from")
        page.locator("#search").fill("backward-3")
        assert "24 nodes" in page.locator("#timeline output").inner_text()
        page.locator("#search").press("Enter")
        assert "backward-3" in page.locator(".details h3").inner_text()
        x, y, row = page.evaluate(
            """() => {
                const { view } = chakraReport, { nodes } = view, box = view.canvas.getBoundingClientRect();
                const node = view.selected, at = (view.x(nodes.start[node]) + view.x(nodes.end(node))) / 2;
                return [box.left + at, box.top + view.y(nodes.row[node]) + 6, nodes.lane(nodes.rank(node))];
            }"""
        )
        page.mouse.move(x, y)
        tip = page.locator(".tip").inner_text()
        assert "backward-3" in tip and "20.0 ms" in tip and f"{row}, iteration" in tip
        page.keyboard.down("Control")
        page.mouse.wheel(0, -200)
        page.keyboard.up("Control")
        page.wait_for_function("span => chakraReport.view.to - chakraReport.view.from < span", arg=before)
        header = page.locator("table[aria-label='Bubbles, measured'] th", has_text="compute, s")
        assert header.count() == 1
        browser.close()
    assert messages == []
