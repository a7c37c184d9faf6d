"""A large rank is read and written by two processes: file and errors are as with one."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import write_pair
from chakra_et import jobs
from chakra_et.convert import runs
from chakra_et.convert.pair import PairOptions
from chakra_et.convert.runs import RunOptions, SetResult
from chakra_et.errors import TraceError
from chakra_et.files import read_json
from chakra_et.traces import sets

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LARGE", 1)
    monkeypatch.delitem(sys.modules, "upath", raising=False)  # as another test may have read a URL


def convert(folder: Path, workers: int) -> SetResult:
    (result,) = runs.convert_sets(sets.find(folder), PairOptions(), RunOptions(workers=workers))
    return result


def test_two_processes_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair(tmp_path, 17_000)  # several blocks
    assert not convert(tmp_path, 1).failed
    one = (tmp_path / "pair.0.et").read_bytes()
    used: list[int] = []
    together = jobs.together

    def counted(calls: Sequence[Callable[[], Any]]) -> list[Any]:
        used.append(len(calls))
        return together(calls)

    monkeypatch.setattr(jobs, "together", counted)
    assert not convert(tmp_path, 2).failed
    assert used == [3, 4]  # read both and take the checksum; write in two, take the checksum, check
    assert (tmp_path / "pair.0.et").read_bytes() == one
    (recorded,) = read_json(tmp_path / "pair_conversion.json")["files"]
    assert recorded["sha256"] == hashlib.sha256(one).hexdigest()


def test_errors_are_those_of_one_process(tmp_path: Path) -> None:
    write_pair(tmp_path, 400)
    (tmp_path / "pair_host.json").write_text('{"schema": "1.1.1", "nodes": []}')
    texts = [str(convert(tmp_path, workers).ranks[0]) for workers in (1, 2)]
    assert texts[0] == texts[1]
    assert "has no node" in texts[0]


def test_a_trace_that_was_cut_is_repaired(tmp_path: Path) -> None:
    write_pair(tmp_path, 4_000)
    path = tmp_path / "pair_host.json"
    path.write_bytes(path.read_bytes()[:-2000])
    found = [convert(tmp_path, workers).ranks[0] for workers in (1, 2)]
    one, two = (result.report.repairs for result in found if not isinstance(result, TraceError))
    assert one
    assert one == two


def test_a_process_that_dies_ends_the_other(tmp_path: Path) -> None:
    def work(number: int) -> None:
        if number:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(TraceError, match="was killed, perhaps for lack of memory"):
        jobs.together([functools.partial(work, number) for number in (0, 1)])
    assert time.monotonic() - begin < 30


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """A limit of the file size stands in for the disk."""
    write_pair(tmp_path, 17_000)
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000)); "
        "from chakra_et import jobs; from chakra_et.convert import command; jobs.LARGE = 1; "
        "sys.exit(command.main())"
    )
    command = [sys.executable, "-c", limited, "--dir", str(tmp_path), "--workers", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.et")) + [path for path in tmp_path.iterdir() if path.name[0] == "."]
