"""_04_report.sh, and the GPU log that it reads."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lm.__main__ import main as command
from megatron_lm.logs import gpus, records
from megatron_lm.results import report, view
from tests.megatron_lm import written_logs
from tests.megatron_lm.conftest import REPO_ROOT, Script
from tests.megatron_lm.written_logs import simple_iteration, write_node


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
            gpus.format_line(gpus.Gpu(0, "NVIDIA A10", 50, second % 101, 1000 + second, 22731, ("root(1M)",)))
            + "\n"
            for second in range(1300)
        )
        write_node(
            folder, name, out=out, err=f"error of {name}\n" + WARNED * (rank == 0), gpu=gpu, state="exit 0\n"
        )
    return folder


WARNED = "10:00:00 rank 0 WARNING checkpoint x is damaged\n"


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_a_kind_of_log_is_printed_node_by_node(run: Path, script: Script) -> None:
    done = script("_04_report.sh", "local-7", "err")
    assert (
        done.stdout == f"==> local-7/n1.err <==\nerror of n1\n{WARNED}==> local-7/n2.err <==\nerror of n2\n"
    )
    assert "NVIDIA A10" in script("_04_report.sh", "local-7", "gpu").stdout


def test_the_summary_has_settings_times_memory_and_gpu_use(run: Path, capsys) -> None:
    assert report.main(["local-7", "summary"]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.split()]
    assert paths == [run / "summary.md", run / "summary.html"]
    text = paths[0].read_text()
    for wanted in (
        "# Run local-7: COMPLETED",
        "| PARTITION | 12-12 |",
        "| median iteration without the first | 1.5000 s |",
        "| 100 | 1.5000 | 10 | 2 | 0.0001 |",
        "| MFU | 42.3% of A10's 125 TFLOP/s |",
        "| n2 | 1 | exit 0 | 1 | 50 | ",
        "| 10:00:00 | n1 | rank 0: checkpoint x is damaged |",
        "| 0 | 20 | 100.5 | 200.2 | 300.0 | 400.0 |",
        "## GPU use of n2",
    ):
        assert wanted in text
    assert text.count("| 0 NVIDIA A10 |") == 2 and "- **no GPU" not in text
    page = Page()
    page.feed(paths[1].read_text())
    assert not page.outside  # nothing is fetched from elsewhere
    assert "12-12" in page.cells and "GPU use over time" in paths[1].read_text()
    drawings = re.findall(r"<svg.*?</svg>", paths[1].read_text(), flags=re.DOTALL)
    titles = [
        "Loss",
        "Gradient norm",
        "Throughput",
        "Time per iteration",
        "Memory by rank",
        "GPU use over time",
    ]
    assert [re.search('font-size="15">([^<]*)', drawing)[1] for drawing in drawings] == titles
    # A bar for each figure of the one rank, as high as the figure.
    bars = re.findall(r'<rect [^>]*height="([\d.]+)"[^>]*><title>([^<]*)', drawings[4])
    heights = {title: float(height) for height, title in bars}
    reserved = heights["max reserved, rank 0: 400 MB"]
    assert heights["max allocated, rank 0: 200.25 MB"] == pytest.approx(reserved * 200.25 / 400, abs=0.1)
    assert not list(run.glob(".summary*"))


def test_several_runs_stand_beside_each_other(run: Path, capsys) -> None:
    for job, loss in (("local-8", 9.5), ("local-9", 8.5)):
        lines = (dataclasses.replace(simple_iteration(n, 0.5), loss=loss) for n in range(1, 11))
        out = "NODE_RANK: 0\nPARTITION: 24\n\n" + "".join(map(written_logs.iteration_line, lines))
        write_node(run.parent / job, "n5", out=out, err="", state="exit 0\n")
    for job in ("local-7", "local-8", "local-9"):
        (run.parent / job / "jobs").write_text(f"{job}\n")
    assert report.main(["local-7", "local-8", "local-9", "summary"]) == 0
    assert capsys.readouterr().out.split() == [str(run / "comparison.md"), str(run / "comparison.html")]
    text = (run / "comparison.md").read_text()
    assert "| figure | local-7 | local-8 | local-9 |" in text and "| PARTITION | 12-12 | 24 | 24 |" in text
    assert "| last loss | 10 | 9.5 | 8.5 |" in text and "## Iterations of local-9" in text
    loss = re.findall(r"<svg.*?</svg>", (run / "comparison.html").read_text(), flags=re.DOTALL)[0]
    assert all(f">{job}</text>" in loss for job in ("local-7", "local-8", "local-9"))


def test_a_long_gpu_log_is_sampled_over_all_its_time(run: Path) -> None:
    samples = gpus.samples((run / "n1.gpu").read_bytes(), view.GPU_SAMPLES)
    assert len(samples) <= view.GPU_SAMPLES and max(samples) >= 1296 and min(samples) == 0


@pytest.mark.parametrize("words", [["local-7"], ["local-7", "other"], ["out"]])
def test_words_that_make_no_sense_are_refused(words: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        report.main(words)
    assert stopped.value.code == 2 and "out, err, gpu, summary" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_sentence(run: Path, capsys) -> None:
    (run / "summary.md").mkdir()
    assert command(["report", "local-7", "summary"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "summary.md can't be written" in said and not list(run.glob(".summary*"))


def test_without_a_gpu_the_log_says_so_once() -> None:
    """Or, with one, it is a line a GPU and sample."""
    command = [sys.executable, REPO_ROOT / "megatron_lm", "gpu_log", "--samples", "2", "--interval", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith(gpus.NO_GPU):
        assert done.stdout.count("\n") == 1
    else:
        assert len(gpus.samples(done.stdout.encode())) == 2


class Unknown(Exception):
    pass


def test_what_nvml_tells_of_a_gpu_is_one_line() -> None:
    """With a stand-in for NVML, as a test machine need not have a GPU; one question has no answer."""

    def no_answer(*_: object) -> None:
        raise Unknown

    nvml = SimpleNamespace(
        NVMLError=Unknown,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetName=lambda _: b"NVIDIA A10",
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=3 * 2**30, total=22731 * 2**20),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=97),
        nvmlDeviceGetTemperature=no_answer,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=1 << 30, usedGpuMemory=None)],
    )
    line = gpus.format_line(gpus.sample(nvml, 3, None))
    assert line == "[3] NVIDIA A10       |  ?'C,  97 % |  3072 / 22731 MB | ?(0M)"
