"""A large pair read in two processes: the same file, the same errors, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.convert import jobs, pair
from chakra_et.convert.pair import PairOptions, convert_pair
from chakra_et.errors import TraceError, UnreadableTrace
from chakra_et.traces import host as host_trace
from chakra_et.traces.host import HostTrace
from chakra_et.traces.sets import Pair
from tests.generator import Features, generate


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A small pair, which counts as large."""
    monkeypatch.setattr(pair, "WORTH_A_PROCESS", 0)
    folder = tmp_path / "traces"
    folder.mkdir()
    return Pair(-1, *generate(Features()).write(folder))


def test_the_host_trace_is_read_in_another_process(
    traces: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = tmp_path / "readers"
    monkeypatch.delitem(sys.modules, "upath", raising=False)  # with URLs in use, nothing is forked

    def load(path: Path, max_bytes: int) -> HostTrace:
        readers.write_text(str(os.getpid()))
        return real(path, max_bytes)

    real = host_trace.load
    monkeypatch.setattr(host_trace, "load", load)
    convert_pair(traces, PairOptions(two_processes=True))
    assert int(readers.read_text()) != os.getpid()
    convert_pair(traces, PairOptions())
    assert int(readers.read_text()) == os.getpid()
    monkeypatch.setattr(pair, "WORTH_A_PROCESS", 10_000_000)
    convert_pair(traces, PairOptions(two_processes=True))
    assert int(readers.read_text()) == os.getpid()


def test_one_and_two_processes_write_the_same_file(traces: Pair, tmp_path: Path) -> None:
    for workers in ("1", "2"):
        arguments = [str(traces.host), str(traces.device), "--workers", workers]
        assert main(["convert", *arguments, "-o", str(tmp_path / workers)]) == 0
    one, two = (sorted((tmp_path / workers).iterdir()) for workers in ("1", "2"))
    assert [path.name for path in one] == [path.name for path in two]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_a_damaged_host_trace_is_repaired_as_in_one_process(
    traces: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert traces.host
    traces.host.write_bytes(traces.host.read_bytes()[:-40])
    said = []
    for workers in ("1", "2"):
        folder = tmp_path / workers
        shutil.copytree(traces.host.parent, folder)
        main(["convert", str(folder), "--workers", workers])
        said.append(capsys.readouterr().out.replace(str(folder), ""))
    assert said[0] == said[1] and "repair" in said[0]


def test_errors_of_either_trace_are_those_of_one_process(traces: Pair) -> None:
    assert traces.host
    for path in traces.host, traces.device:
        before = path.read_bytes()
        path.write_bytes(b'{"nodes": [], "traceEvents": []}')
        texts = []
        for two in (False, True):
            with pytest.raises(TraceError) as caught:
                convert_pair(traces, PairOptions(two_processes=two))
            texts.append(str(caught.value))
        path.write_bytes(before)
        assert texts[0] == texts[1] and str(path) in texts[0]
    assert not multiprocessing.active_children()


def test_limits_hold_in_the_other_process(traces: Pair) -> None:
    assert traces.host
    with open(traces.host, "a") as file:
        file.write(" " * traces.device.stat().st_size)  # only the host trace is too long
    size = traces.device.stat().st_size
    with pytest.raises(TraceError, match=r"_host\.json: holds more than .*--max-bytes"):
        convert_pair(traces, PairOptions(max_bytes=size, two_processes=True))


def dies(_: int) -> None:
    os.kill(os.getpid(), 9)


def cannot_read(_: int) -> None:
    raise UnreadableTrace("cut off", Path("host.json"))


def large(size: int) -> bytes:
    return bytes(size)


def test_a_reader_that_is_killed_is_one_sentence() -> None:
    with (
        jobs.beside(dies, 0) as result,
        pytest.raises(TraceError, match="killed, perhaps for lack of memory"),
    ):
        result()


def test_the_path_of_an_unreadable_trace_is_kept() -> None:
    with jobs.beside(cannot_read, 0) as result, pytest.raises(UnreadableTrace, match="cut off") as caught:
        result()
    assert caught.value.path == Path("host.json")


def test_a_reader_ends_with_the_block_that_failed() -> None:
    # It is blocked in writing its result, which is larger than a pipe.
    with pytest.raises(KeyError), jobs.beside(large, 1 << 24):
        raise KeyError("the other trace")
    assert not multiprocessing.active_children()
