"""The commands on real captures: fix_host_traces.py, convert_to_et.py, convert_remaining.py."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chakra_et import jobs
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file

ROOT = Path(__file__).resolve().parents[2]
CAPTURES = ROOT / "tests" / "fixtures" / "captures"
VERSIONS = sorted(path.name for path in CAPTURES.iterdir() if path.is_dir())


def run(script: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Both captures of the newest PyTorch, unpacked: one run of one rank, one of two."""
    return unpacked(tmp_path, VERSIONS[0])


def unpacked(folder: Path, version: str) -> Path:
    for path in (CAPTURES / version).glob("tiny_*"):
        if path.suffix == ".gz":
            (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        elif path.name.endswith("manifest.json"):
            shutil.copy(path, folder)
    return folder


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if ".et" in path.suffixes}


def without_trace_bytes(path: Path) -> bytes:
    """The file as if its traces had other sizes and were never repaired."""
    trace = et_file.read(path)
    del trace.metadata["trace_bytes"], trace.metadata["conversion_report"]
    et_file.write(path.with_suffix(".again"), trace)
    return path.with_suffix(".again").read_bytes()


def counts(report: dict[str, Any], kind: str) -> dict[str, int]:
    """The report's findings of one kind: id → count."""
    return {found["id"]: found["count"] for found in report[kind]}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_rank_of_every_run_converts(tmp_path: Path, version: str) -> None:
    unpacked(tmp_path, version)
    done = run("convert_to_et.py", "--dir", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(written(tmp_path)) == {
        "tiny_1gpu.0.et", "tiny_1gpu.et", "tiny_2gpu.0.et", "tiny_2gpu.1.et", "tiny_2gpu.et",
    }  # fmt: skip
    assert (tmp_path / "tiny_2gpu.et").read_bytes() == (tmp_path / "tiny_2gpu.0.et").read_bytes()
    assert json.loads((tmp_path / "tiny_2gpu_comm_groups.json").read_text()) == {"1": [0, 1]}
    for rank in ("0", "1"):
        report = json.loads((tmp_path / "tiny_2gpu_conversion.json").read_text())["ranks"][rank]
        assert report["link_rate"] == 1.0
        assert report["events_in"] == report["events_kept"] + sum(counts(report, "losses").values())
        assert report["nodes"] == report["events_kept"] + report["segments"] + report["overhead"]
        assert report["edges_by_kind"]["collective"] > 0
    module = [sys.executable, "-m", "chakra_et"]
    for command in (["validate", "tiny_2gpu"], ["replay", "tiny_2gpu", "--max-error", "2"]):
        checked = subprocess.run(
            [*module, command[0], str(tmp_path / command[1]), *command[2:]], cwd=ROOT, capture_output=True
        )
        assert checked.returncode == 0, checked.stdout


def test_gzip_pairs_convert_to_the_same_bytes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    packed = tmp_path_factory.mktemp("packed")
    for path in (CAPTURES / VERSIONS[0]).glob("tiny_*"):
        shutil.copy(path, packed)
    assert run("convert_to_et.py", "--dir", folder).returncode == 0
    assert run("convert_to_et.py", "--dir", packed).returncode == 0
    assert written(packed) == written(folder)


def test_bad_pair_does_not_stop_the_others(folder: Path) -> None:
    (folder / "bad_host.json").write_text("no trace")
    (folder / "bad_device.json").write_text("{}")
    (folder / "lonely_host.json").write_text("{}")
    done = run("convert_to_et.py", "--dir", folder)
    assert done.returncode == 1
    assert "FAILED" in done.stdout and "Traceback" not in done.stderr
    assert "lonely_host.json: rank 0 has no device trace" in done.stderr
    assert "tiny_2gpu.1.et" in written(folder)


def test_remaining_converts_only_what_is_missing_or_older_than_its_traces(folder: Path) -> None:
    assert run("convert_to_et.py", "--dir", folder).returncode == 0
    first = {path: path.stat().st_ino for path in folder.glob("*.et")}
    assert "no files written" in run("convert_remaining.py", "--dir", folder).stdout
    assert {path: path.stat().st_ino for path in folder.glob("*.et")} == first
    (folder / "tiny_2gpu.1.et").unlink()
    done = run("convert_remaining.py", "--dir", folder)
    assert done.returncode == 0 and "1 file written" in done.stdout and "tiny_2gpu.1.et" in written(folder)
    assert "2 kept" in done.stdout
    answer = json.loads(run("convert_remaining.py", "--dir", folder, "--json").stdout)
    assert answer["status"] == 0, "nothing but JSON"
    os.utime(folder / "tiny_1gpu_host.json", (time.time() + 5, time.time() + 5))
    assert "2 kept" in run("convert_remaining.py", "--dir", folder).stdout


def test_files_of_ranks_that_the_run_no_longer_has_are_removed(folder: Path) -> None:
    (folder / "tiny_2gpu.7.et").write_bytes(b"old")
    (folder / "tiny_2gpu.x.et").write_bytes(b"not ours")
    assert run("convert_to_et.py", "--dir", folder).returncode == 0
    assert "tiny_2gpu.7.et" not in written(folder) and "tiny_2gpu.x.et" in written(folder)


def test_truncated_host_trace_is_repaired_during_conversion(folder: Path) -> None:
    host = folder / "tiny_1gpu_host.json"
    cut = host.read_bytes()[: host.stat().st_size * 3 // 4]
    host.write_bytes(cut)
    done = run("convert_to_et.py", "--dir", folder, "--name", "tiny_1gpu")
    assert done.returncode == 0, done.stderr
    assert "cut, 1 repair" in done.stdout and "  ok" not in done.stdout
    report = json.loads((folder / "tiny_1gpu_conversion.json").read_text())["ranks"]["0"]
    damage = r"host trace, byte [0-9]+: truncated: .* left out"
    assert any(re.fullmatch(damage, repair["text"]) for repair in report["repairs"])
    assert counts(report, "notes")["no-host-node"] > 0
    assert host.read_bytes() == cut


def test_repair_does_not_make_a_truncated_device_trace_pass(folder: Path) -> None:
    device = folder / "tiny_1gpu_device.json"
    device.write_bytes(device.read_bytes()[: device.stat().st_size * 3 // 4])
    flags = ["--dir", folder, "--name", "tiny_1gpu"]
    before = run("convert_to_et.py", *flags)
    assert run("fix_host_traces.py", "--dir", folder).returncode == 0
    after = run("convert_to_et.py", *flags)
    for done in (before, after):
        assert done.returncode == 1 and "invalid" in done.stdout and "was cut off" in done.stderr
    report = json.loads((folder / "tiny_1gpu_conversion.json").read_text())["ranks"]["0"]
    assert any(": truncated: " in repair["text"] for repair in report["repairs"])
    allowed = run("convert_to_et.py", *flags, "--allow-truncated")
    assert allowed.returncode == 0 and "cut, 1 repair" in allowed.stdout


def test_a_host_trace_with_two_objects_in_it(folder: Path) -> None:
    host = folder / "tiny_1gpu_host.json"
    whole = host.read_bytes()
    assert run("convert_to_et.py", "--dir", folder, "--name", "tiny_1gpu").returncode == 0
    first = without_trace_bytes(folder / "tiny_1gpu.0.et")
    host.write_bytes(whole + whole)
    fixed = run("fix_host_traces.py", host)
    assert fixed.returncode == 0 and "concatenated" in fixed.stdout + fixed.stderr
    fixed_trace = json.loads(host.read_bytes())
    assert len(fixed_trace.pop("chakra_et_repairs")) == 2
    assert fixed_trace == json.loads(whole)
    assert (folder / "tiny_1gpu_host.json.backup").read_bytes() == whole + whole
    again = run("fix_host_traces.py", host)
    assert again.returncode == 0 and not (folder / "tiny_1gpu_host.json.backup.1").exists()
    assert run("convert_to_et.py", "--dir", folder, "--name", "tiny_1gpu").returncode == 0
    assert without_trace_bytes(folder / "tiny_1gpu.0.et") == first


def test_intact_traces_are_not_changed(folder: Path) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert run("fix_host_traces.py", "--dir", folder).returncode == 0
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_traces_of_different_runs_are_rejected(folder: Path) -> None:
    other = folder / "tiny_2gpu_rank1_device.json"
    shutil.copy(other, folder / "tiny_1gpu_device.json")
    done = run("convert_to_et.py", "--dir", folder, "--name", "tiny_1gpu")
    assert done.returncode == 1
    assert "tiny_1gpu_device.json" in done.stderr and "rank 1" in done.stderr
    assert not written(folder)


def test_missing_rank_is_reported(folder: Path) -> None:
    (folder / "tiny_2gpu_rank1_host.json").unlink()
    (folder / "tiny_2gpu_rank1_device.json").unlink()
    done = run("convert_to_et.py", "--dir", folder, "--name", "tiny_2gpu")
    assert done.returncode == 1 and "of 2 ranks, the traces of 1 are missing" in done.stderr
    assert run("convert_to_et.py", "--dir", folder, "--allow-missing-ranks").returncode == 0


def test_one_step_of_several(folder: Path) -> None:
    whole = run("convert_to_et.py", "--dir", folder, "--name", "tiny_1gpu")
    assert whole.returncode == 0
    steps = json.loads((folder / "tiny_1gpu_conversion.json").read_text())["ranks"]["0"]["steps_us"]
    first = min(steps, key=int)
    nodes = len(et_file.read(folder / "tiny_1gpu.0.et"))
    assert run("convert_to_et.py", "--dir", folder, "--name", "tiny_1gpu", "--step", first).returncode == 0
    one = et_file.read(folder / "tiny_1gpu.0.et")
    assert len(one) < nodes if len(steps) > 1 else len(one) == nodes
    wrong = run("convert_to_et.py", "--dir", folder, "--name", "tiny_1gpu", "--step", "999")
    assert wrong.returncode == 1 and "has no ProfilerStep#999" in wrong.stderr


def test_mlcommons_engine_reports_missing_tools(folder: Path) -> None:
    if subprocess.run([sys.executable, "-c", "import et_replay"], capture_output=True).returncode == 0:
        pytest.skip("et_replay is installed")
    done = run("convert_to_et.py", "--dir", folder, "--name", "tiny_1gpu", "--engine", "mlcommons")
    assert done.returncode == 1 and "install_chakra_tools.sh" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dir", "nowhere"], "no such folder"),
        (["--dir", "."], "no trace matches"),
        (["--workers", "-1"], "--workers is -1: give at least 0"),
        (["--step", "last"], "--step must be"),
    ],
)
def test_bad_arguments_are_one_sentence(tmp_path: Path, arguments: list[str], words: str) -> None:
    command = [sys.executable, str(ROOT / "convert_to_et.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def dies_or_fails(what: str) -> str:
    if what == "dies":
        os.kill(os.getpid(), 9)
    if what == "fails":
        raise KeyError("a defect")
    return what


def test_job_that_dies_or_fails_affects_no_other() -> None:
    results = dict(jobs.run(dies_or_fails, ["dies", "fails", "works"], workers=3))
    assert results[2] == "works"
    assert all(isinstance(results[number], TraceError) for number in range(2))
    for number, words in enumerate(("killed", "internal error KeyError")):
        assert words in str(results[number])
