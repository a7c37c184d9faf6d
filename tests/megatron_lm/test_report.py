"""_04_report.sh, and the GPU log that it reads."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from chakra_et.drawing.charts import BOTTOM, HEIGHT
from megatron_lm.__main__ import main as command
from megatron_lm.logs import records
from megatron_lm.results import report, view
from tests.megatron_lm import written_logs
from tests.megatron_lm.conftest import Script, put_tool
from tests.megatron_lm.processes import processes_with
from tests.megatron_lm.written_logs import simple_iteration, write_node
from tests.report.page_data import page_data


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes, the second with the iterations, each with memory lines and 1,300 seconds of GPU log."""
    monkeypatch.setenv("MEGATRON_LOG_DIR", str(tmp_path / "log2"))
    folder = tmp_path / "log2/local-7"
    for rank, name in enumerate(["n1", "n2"]):
        out = f"NODE_RANK: {rank}\nMODEL: small\nWORLD_SIZE: 2\nPARTITION: 12-12\nstart | with a bar\n"
        out += written_logs.memory_line(records.Memory(rank, 20, 100.5, 200.25, 300.0, 400.0))
        if rank == 1:
            out += "".join(written_logs.iteration_line(simple_iteration(n)) for n in range(1, 101))
        gpu = "".join(
            written_logs.gpu_line(records.Gpu(0, "NVIDIA A10", 50, second % 101, 1000 + second, 22731)) + "\n"
            for second in range(1300)
        )
        write_node(
            folder, name, out=out, err=f"error of {name}\n" + WARNED * (rank == 0), gpu=gpu, state="exit 0\n"
        )
    return folder


WARNED = "10:00:00 rank 0 WARNING checkpoint x is damaged\n"


def page_content(page: Path) -> dict[str, Any]:
    """The title, problems, charts and tables of a page, which loads nothing from elsewhere."""
    text = page.read_text()
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", text)
    return page_data(text)[0]


def rows(content: dict[str, Any]) -> str:
    """The rows of all tables, as lines of cells between bars."""
    lines = (row for table in content["tables"] for row in [table["header"], *table["rows"]])
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def test_a_kind_of_log_is_printed_node_by_node(run: Path, script: Script) -> None:
    done = script("_04_report.sh", "local-7", "err")
    assert (
        done.stdout == f"==> local-7/n1.err <==\nerror of n1\n{WARNED}==> local-7/n2.err <==\nerror of n2\n"
    )
    assert "NVIDIA A10" in script("_04_report.sh", "local-7", "gpu").stdout


def test_the_summary_has_settings_times_memory_and_gpu_use(run: Path, capsys) -> None:
    assert report.main(["local-7", "summary"]) == 0
    assert capsys.readouterr().out == f"{run / 'summary.html'}\n"
    content = page_content(run / "summary.html")
    text, titles = rows(content), [table["title"] for table in content["tables"]]
    assert content["title"] == "Run local-7: COMPLETED" and "GPU use of n2" in titles
    for wanted in (
        "| PARTITION | 12-12 |",
        "| median iteration without the first | 1.5000 s |",
        "| 100 | 1.5000 | 10 | 2 | 0.0001 |",
        "| MFU | 42.3% of A10's 125 TFLOP/s |",
        "| n2 | 1 | exit 0 | 1 | 50 | ",
        "| 10:00:00 | n1 | rank 0: checkpoint x is damaged |",
        "| 0 | 20 | 100.5 | 200.2 | 300.0 | 400.0 |",
    ):
        assert wanted in text
    assert text.count("| 0 NVIDIA A10 |") == 2 and content["wrong"] == []
    drawings = content["charts"]
    assert all(ElementTree.fromstring(drawing).tag.endswith("svg") for drawing in drawings)
    titles = [
        "Loss",
        "Gradient norm",
        "Throughput",
        "Time per iteration",
        "Memory by rank",
        "GPU use over time",
    ]
    assert [re.search('font-size="15">([^<]*)', drawing)[1] for drawing in drawings] == titles
    # A point for each figure of the one rank, as high as the figure.
    points = re.findall(r'<circle [^>]*cy="([\d.]+)"[^>]*><title>([^<]*)', drawings[4])
    heights = {title: HEIGHT - BOTTOM - float(y) for y, title in points}
    reserved = heights["max reserved: 400 MB at rank 0"]
    assert heights["max allocated: 200.25 MB at rank 0"] == pytest.approx(reserved * 200.25 / 400, abs=0.1)
    assert not list(run.glob(".summary*"))


def test_several_runs_stand_beside_each_other(run: Path, capsys) -> None:
    for job, loss in (("local-8", 9.5), ("local-9", 8.5)):
        lines = (dataclasses.replace(simple_iteration(n, 0.5), loss=loss) for n in range(1, 11))
        out = "NODE_RANK: 0\nPARTITION: 24\n\n" + "".join(map(written_logs.iteration_line, lines))
        write_node(run.parent / job, "n5", out=out, err="", state="exit 0\n")
    for job in ("local-7", "local-8", "local-9"):
        (run.parent / job / "jobs").write_text(f"{job}\n")
    assert report.main(["local-7", "local-8", "local-9", "summary"]) == 0
    assert capsys.readouterr().out == f"{run / 'comparison.html'}\n"
    content = page_content(run / "comparison.html")
    text, titles = rows(content), [table["title"] for table in content["tables"]]
    assert "| figure | local-7 | local-8 | local-9 |" in text and "| PARTITION | 12-12 | 24 | 24 |" in text
    assert "| last loss | 10 | 9.5 | 8.5 |" in text and "Iterations of local-9" in titles
    loss = content["charts"][0]
    assert all(f">{job}</text>" in loss for job in ("local-7", "local-8", "local-9"))


def test_a_long_gpu_log_is_sampled_over_all_its_time(run: Path) -> None:
    samples = records.gpu_samples((run / "n1.gpu").read_bytes(), view.GPU_SAMPLES)
    assert len(samples) <= view.GPU_SAMPLES and max(samples) >= 1296 and min(samples) == 0


@pytest.mark.parametrize("words", [["local-7"], ["local-7", "other"], ["out"]])
def test_words_that_make_no_sense_are_refused(words: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        report.main(words)
    assert stopped.value.code == 2 and "out, err, gpu, summary" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_sentence(run: Path, capsys) -> None:
    (run / "summary.html").mkdir()
    assert command(["report", "local-7", "summary"]) == 2
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1 and "summary.html: Is a directory" in said and not list(run.glob(".summary*"))
    )


@pytest.mark.parametrize("answer", [pytest.param("97", marks=pytest.mark.slow), "[N/A]"])
def test_a_node_records_what_nvidia_smi_tells(script: Script, tmp_path: Path, answer: str) -> None:
    """A stand-in for it, as a test machine need not have a GPU; one question may have no answer."""
    row = f"3, NVIDIA A10, 49, {answer}, 3072, 22731"
    body = f'[ "$1" = -L ] || while :; do echo "{row}"; sleep 1; done\n'
    put_tool(tmp_path / "tools", "nvidia-smi", body)
    done = script("_03_submit.sh", "--local", PATH=f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "log2" / done.stdout.strip()).glob("*.gpu")
    percent = 97 if answer == "97" else None
    gpu = records.Gpu(3, "NVIDIA A10", 49, percent, 3072, 22731)
    assert {records.parse_gpu(line) for line in log.read_text().splitlines()} == {gpu}
    assert not processes_with(str(tmp_path / "tools"))


def test_a_real_browser_shows_charts_and_tables(run: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium to look at the page with (apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    assert report.main(["local-7", "summary"]) == 0
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1200, "height": 900}, offline=True).new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.goto((run / "summary.html").as_uri())
        page.wait_for_selector("html[data-ready]")
        assert page.locator(".figures svg").count() == 6
        assert page.locator(".figures svg").first.bounding_box()["width"] > 500
        assert page.locator("h2", has_text="Iterations").count() == 1
        assert not said
        browser.close()
