"""fsspec's URLs for input and output: the bytes that folders get, from memory:// and a real S3 server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import chakra_et
from chakra_et.__main__ import main
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.files import atomic_file, is_remote, path_of
from chakra_et.repair.file import repair_file
from tests.convert.test_together import Machine

pytest.importorskip("upath", reason="from a clone, pip install '.[remote]'")
RANKS = 4


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with traces of ``RANKS`` ranks, and what their conversion writes in ``et``."""
    folder = tmp_path / "traces"
    folder.mkdir()
    traces = Machine([[300.0 + rank] * 3 for rank in range(RANKS)], [0.0] * RANKS).write(folder)
    assert main(["convert", str(traces), "-o", str(tmp_path / "et"), "--skeletons", "on"]) == 0
    return tmp_path


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of moto's S3 server, which fsspec finds by its own variables."""
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()  # of another test's server
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    path_of("s3://ranks").mkdir(exist_ok=True)  # moto keeps what another test left
    yield "s3://ranks"
    server.stop()


def _upload(folder: Path, url: str) -> None:
    for path in folder.iterdir():
        path_of(f"{url}/{path.name}").write_bytes(path.read_bytes())


def _written(folder: Path) -> dict[str, bytes]:
    """All files but the record, which says where the traces are, and those that simulators don't read."""
    names = {path.name: path for path in folder.iterdir()}
    return {name: path.read_bytes() for name, path in names.items() if not name.endswith("conversion.json")}


def test_s3_gets_the_bytes_that_a_folder_gets(
    here: Path, bucket: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _upload(here / "traces", f"{bucket}/traces")
    monkeypatch.chdir(here)  # what would be left in the working folder would show
    before = set(os.listdir(here))
    assert main(["convert", f"{bucket}/traces", "-o", f"{bucket}/et", "--skeletons", "on"]) == 0
    assert _written(path_of(f"{bucket}/et")) == _written(here / "et")
    assert set(os.listdir(here)) == before
    capsys.readouterr()
    answers = []
    for run in (f"{here}/et/run", f"{bucket}/et/run"):
        for flags in (["replay", run], ["stragglers", run], ["replay", run, "--skeletons", "on"]):
            assert main([*flags, "--json"]) == 0
            answers.append(capsys.readouterr().out.replace(run, "RUN"))
    assert answers[:3] == answers[3:]
    assert main(["report", f"{bucket}/et/run"]) == 0
    assert b"<html" in path_of(f"{bucket}/et/run_report.html").read_bytes()
    assert len(chakra_et.load(f"{bucket}/et/run").ranks) == RANKS


def test_a_rank_in_memory(here: Path) -> None:
    _upload(here / "traces", "memory://ranks/traces")
    flags = ["--skeletons", "on"]
    for rank in range(RANKS):  # several ranks are several processes, which don't share memory
        traces = [f"memory://ranks/traces/run_rank{rank}.json"]
        assert main(["convert", *traces, "-o", f"memory://ranks/et{rank}", *flags]) in (0, 1)
        found = path_of(f"memory://ranks/et{rank}/run.{rank}.et")
        assert len(et_file.read(found)) == len(et_file.read(here / "et" / found.name))


def test_a_write_that_fails_leaves_nothing() -> None:
    path = path_of("memory://ranks/half")
    with pytest.raises(RuntimeError), atomic_file(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert not path.exists()


def test_file_urls_are_folders(tmp_path: Path) -> None:
    assert path_of(f"file://{tmp_path}/a b") == tmp_path / "a b"
    assert not is_remote(path_of(f"file://{tmp_path}"))


def test_what_fsspec_does_not_know_is_one_sentence() -> None:
    with pytest.raises(TraceError, match=r"nothing://x: .*pip install universal-pathlib"):
        path_of("nothing://x")


def test_a_store_without_credentials_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in botocore's traceback."""
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["report", "s3://no-such-ranks/run"]) == 2
    assert "the object store can't be used: Unable to locate credentials" in capsys.readouterr().err


def _cut(here: Path, place: str) -> tuple[bytes, bytes]:
    """Put a trace that breaks off at ``place``; its bytes, and those that repairing it in a folder gives."""
    path = here / "traces" / "run_rank0.json"
    damaged = path.read_bytes()[:-200]
    path_of(place).write_bytes(damaged)
    path.write_bytes(damaged)
    assert repair_file(path).changed
    return damaged, path.read_bytes()


def test_a_damaged_trace_in_memory_is_repaired(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "memory://damaged/run_rank0.json"
    damaged, repaired = _cut(here, url)
    assert not repair_file(path_of(url), write=False).backup and path_of(url).read_bytes() == damaged
    report = repair_file(path_of(url), output=path_of("memory://damaged/other.json"))
    assert report.changed and str(report.path) == str(path_of(url))
    assert path_of("memory://damaged/other.json").read_bytes() == repaired
    assert main(["repair", url]) == 0
    assert path_of(url).read_bytes() == repaired
    assert path_of(f"{url}.backup").read_bytes() == damaged
    assert not repair_file(path_of(url)).changed
    path_of(url).write_text("[1, 2]")
    assert main(["repair", url, "memory://damaged/absent.json"]) == 1
    error = capsys.readouterr().err
    assert "/tmp" not in error and error.count("\n") == 2 and "no such file" in error


def test_a_damaged_trace_on_s3_is_repaired_and_converted(here: Path, bucket: str) -> None:
    damaged, repaired = _cut(here, f"{bucket}/damaged/run_rank0_device.json")
    flags = ["--allow-truncated", "--allow-missing-ranks"]
    assert main(["convert", f"{bucket}/damaged", "-o", f"{bucket}/damaged/et", *flags]) == 0
    assert path_of(f"{bucket}/damaged/run_rank0_device.json").read_bytes() == damaged
    assert main(["repair", "--dir", f"{bucket}/damaged"]) == 0
    assert path_of(f"{bucket}/damaged/run_rank0_device.json").read_bytes() == repaired
