"""utils/training/summary.py: the table at the end of a quick run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType, Ragged, Strings
from chakra_et.names import RunFiles
from utils.training.summary import files_of, summary

NAME = "gpt2_2gpu_quick_trace"


def write_trace(path: Path, types: list[NodeType]) -> None:
    """A chain of nodes of these types."""
    count = len(types)
    no_deps = Ragged(np.zeros(count + 1, np.int64), np.zeros(0, np.uint64))
    chain = Ragged(np.maximum(np.arange(-1, count), 0), np.arange(max(count - 1, 0), dtype=np.uint64))
    micros = np.arange(count, dtype=np.uint64)
    names = Strings([b"op"], np.zeros(count, np.int32))
    types_column = np.array(types, np.uint8)
    et_file.write(path, ExecutionTrace(micros, names, types_column, micros, micros, chain, no_deps))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    comp, coll = NodeType.COMP, NodeType.COMM_COLL
    write_trace(tmp_path / f"{NAME}.0.et", [comp, NodeType.MEM_LOAD, coll, comp])
    write_trace(tmp_path / f"{NAME}.1.et", [comp, coll])
    (tmp_path / f"{NAME}.et").write_bytes((tmp_path / f"{NAME}.0.et").read_bytes())
    for end in ("_host.json", "_rank1_device.json.gz", "_stacks.txt", "_v2_host.json", "_host.json.backup"):
        (tmp_path / f"{NAME}{end}").write_bytes(b"x" * 1500)
    ranks = [{"rank": 0, "step_times_us": {"7": 1500, "8": 2500}}, {"rank": 1, "step_times_us": {}}]
    (tmp_path / f"{NAME}_manifest.json").write_text(json.dumps({"ranks": ranks}))
    return tmp_path


def test_it_shows_files_nodes_and_step_times(run_folder: Path) -> None:
    text = "\n".join(summary(run_folder, NAME))
    rows = [line.split() for line in text.splitlines()]
    assert [f"{NAME}_host.json", "1.50", "kB", "host", "trace", "of", "rank", "0"] in rows
    assert [f"{NAME}_rank1_device.json.gz", "1.50", "kB", "device", "trace", "of", "rank", "1"] in rows
    assert ["0", "4", "2", "1", "1", "0", "3", "2.0", "ms"] in rows
    assert ["1", "2", "1", "0", "1", "0", "1", "-"] in rows
    assert f" -m chakra_et info {run_folder / NAME}.0.et " in text


def test_the_report_is_listed_once_it_is_there(run_folder: Path) -> None:
    page = run_folder / f"{NAME}_report.html"
    assert page.name not in "\n".join(summary(run_folder, NAME))
    page.write_text("x" * 1500)
    (line,) = [line for line in summary(run_folder, NAME) if page.name in line]
    assert "1.50 kB" in line and "open it in a browser" in line


def test_files_of_other_runs_and_backups_are_not_shown(run_folder: Path) -> None:
    shown = {path.name for path, _ in files_of(RunFiles(run_folder, NAME))}
    assert not any("v2" in name or "backup" in name for name in shown)


@pytest.mark.parametrize(
    "content, fault", [(None, "no .et file of this name"), (b"\x05junk", ""), (b"", "the file is empty")]
)
def test_a_run_that_cannot_be_shown_is_one_sentence(
    tmp_path: Path, repo_root: Path, content: bytes | None, fault: str
) -> None:
    if content is not None:
        (tmp_path / f"{NAME}.0.et").write_bytes(content)
    command = [sys.executable, "-m", "utils.training.summary", "--dir", str(tmp_path), "--name", NAME]
    result = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert fault in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_damaged_manifest_is_one_sentence(run_folder: Path, repo_root: Path) -> None:
    (run_folder / f"{NAME}_manifest.json").write_text('{"ranks": [')
    command = [sys.executable, "-m", "utils.training.summary", "--dir", str(run_folder), "--name", NAME]
    result = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
