"""scripts/public_traces.py against a mirror on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from scripts.public_traces import TRACES, Config, Trace, download
from tests.shared import shared_path

CONTENT = b"a trace"
SOURCE = "owner/repository/0123abc/folder"
TRACE = Trace("sets/a.json.gz", SOURCE, "some/a.json.gz", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    path = tmp_path / "mirror" / SOURCE / TRACE.path
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    return path


def _config(tmp_path: Path, **flags: str) -> Config:
    return Config(**{"folder": str(tmp_path / "out"), "base": (tmp_path / "mirror").as_uri()} | flags)


def test_a_trace_is_downloaded_once(tmp_path: Path, mirror: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(tmp_path)
    assert download(config, (TRACE,)) == 0
    out = tmp_path / "out" / TRACE.name
    assert out.read_bytes() == CONTENT
    mirror.unlink()
    assert download(config, (TRACE,)) == 0
    assert capsys.readouterr().out.count("kept") == 1


def test_a_trace_with_another_sha256_is_not_used(
    tmp_path: Path, mirror: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert download(_config(tmp_path), (TRACE,)) == 1
    assert f"not {TRACE.sha256}: not used" in capsys.readouterr().err
    assert not (tmp_path / "out" / TRACE.name).exists()


def test_a_trace_that_is_not_there(tmp_path: Path, mirror: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are downloaded all the same."""
    gone = TRACE._replace(name="gone.json.gz", path="gone.json.gz")
    assert download(_config(tmp_path), (gone, TRACE)) == 1
    printed = capsys.readouterr()
    assert "gone.json.gz: can't be downloaded" in printed.err and printed.err.count("\n") == 1
    assert "1 of 2 traces are in" in printed.out


def test_another_file_is_not_overwritten(
    tmp_path: Path, mirror: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / TRACE.name
    out.parent.mkdir(parents=True)
    out.write_bytes(b"mine")
    assert download(_config(tmp_path), (TRACE,)) == 1
    assert "there is another file of that name" in capsys.readouterr().err
    assert out.read_bytes() == b"mine"


def test_names_are_unique_and_stay_in_their_folder() -> None:
    assert len({trace.name for trace in TRACES}) == len({trace.sha256 for trace in TRACES}) == len(TRACES)
    assert not [trace.name for trace in TRACES if ".." in trace.name or trace.name.startswith("/")]


def test_the_sums_are_those_of_the_shared_traces() -> None:
    folder = shared_path("data/traces/public", *(trace.name for trace in TRACES))
    for trace in TRACES:
        # Environment dumps were removed from the shared copies of pairs; what is published still has them.
        if trace.name.startswith("pairs/"):
            continue
        assert hashlib.sha256((folder / trace.name).read_bytes()).hexdigest() == trace.sha256, trace.name
