"""A run is committed whole, and every reader opens it through one check."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chakra_et.__main__ import main
from chakra_et.convert import together
from chakra_et.convert.inputs import find_run
from chakra_et.convert.together import finish_rank
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.sets import find_rank_sets
from chakra_et.names import run_at
from chakra_et.report.content import content
from chakra_et.report.run import load
from tests.chakra_et.test_atomic import ROOT, capture
from tests.shared import shared_path

READERS = {
    "diagnose": ["diagnose", "NAME"],
    "replay": ["replay", "NAME"],
    "predict": ["predict", "NAME", "--scale", "mm=2"],
    "report": ["report", "NAME"],
    "compare": ["compare", "NAME", "OTHER"],
    "stragglers": ["stragglers", "NAME"],
    "export": ["export", "NAME", "--format", "csv"],
    "astra": ["astra", "NAME", "-o", "OUT/bundle", "--topology", "dgx-h100, 1 nodes"],
    "scale": ["scale", "NAME", "--dp", "4", "-o", "OUT/larger"],
    "validate": ["validate", "NAME"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = capture(tmp_path_factory.mktemp("made"), "tiny_2gpu*")
    assert main(["convert", str(folder)]) == 0
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """folder/NAME of a converted run of two ranks."""
    return Path(shutil.copytree(made, tmp_path / "run")) / "tiny_2gpu"


def use(words: list[str], run: Path, *more: str) -> int:
    out = run.parent.parent
    if "OTHER" in words and not (out / "other").exists():
        shutil.copytree(run.parent, out / "other")
    named = {"NAME": str(run), "OUT": str(out), "OTHER": str(out / "other" / run.name)}
    for name, value in named.items():
        words = [word.replace(name, value) for word in words]
    return main(words + list(more))


def lost(run: Path) -> None:
    Path(f"{run}.1.et").unlink()


def other_version(run: Path) -> None:
    trace = et_file.read(f"{run}.1.et")
    trace.duration_micros[:] *= 2
    et_file.write(f"{run}.1.et", trace)


def cut(run: Path) -> None:
    os.truncate(f"{run}.1.et", 2_000)


def other_groups(run: Path) -> None:
    Path(f"{run}_comm_groups.json").write_text('{"1": [0]}')


def unfinished(run: Path) -> None:
    Path(f"{run}_conversion.json").write_text('{"schema_version": 3, "complete": false}')


def damaged(run: Path) -> None:
    Path(f"{run}_conversion.json").write_text("[]")


def changed_record(run: Path) -> None:
    record = Path(f"{run}_conversion.json")
    report = json.loads(record.read_text())
    report["ranks"]["1"]["nodes"] += 1
    record.write_text(json.dumps(report))


CHANGES: dict[Callable[[Path], None], str] = {
    lost: "the files of rank 1 have gone since the conversion",
    other_version: "tiny_2gpu.1.et isn't the file that the conversion wrote",
    cut: "tiny_2gpu.1.et isn't the file that the conversion wrote",
    other_groups: "tiny_2gpu_comm_groups.json isn't the file that the conversion wrote",
    unfinished: "tiny_2gpu: its conversion hasn't finished",
    damaged: "tiny_2gpu_conversion.json has another layout",
    changed_record: "tiny_2gpu_conversion.json isn't what the conversion wrote",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_it_is_refused(run: Path, change: Callable[[Path], None]) -> None:
    change(run)
    with pytest.raises(TraceError, match=CHANGES[change]):
        find_rank_sets([str(run)])
    assert any(CHANGES[change] in note for note in find_rank_sets([str(run)], allow_missing=True)[0].notes)


def test_every_reader_refuses_it_in_one_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost(run)
    before = sorted(run.parent.iterdir())
    for command, words in READERS.items():
        assert use(words, run) == 2, command
        printed = capsys.readouterr()
        assert CHANGES[lost] in printed.err and len(printed.err.splitlines()) == 1, command
    assert sorted(run.parent.iterdir()) == before


@pytest.mark.parametrize(
    "command", ["replay", "predict", "report", "compare", "export", "validate", "diagnose"]
)
def test_with_the_flag_it_works_on_what_is_there_and_says_so(
    run: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lost(run)
    assert use(READERS[command], run, "--allow-missing-ranks") in (0, 1 if command == "validate" else 0)
    printed = capsys.readouterr()
    said = printed.out + printed.err
    assert "the files of rank 1 have gone" in said and "1 of 2 ranks (without 1)" in said
    if command == "report":
        assert "1 of 2 ranks (without 1)" in str(content(load(find_run([str(run)], True)), {})[0]["lacks"])
    if command in ("replay", "predict", "validate", "diagnose"):
        use(READERS[command], run, "--allow-missing-ranks", "--json")
        answer = json.loads(capsys.readouterr().out)
        notes = answer["jobs"][0]["notes"] if command == "replay" else answer["notes"]
        assert any("1 of 2 ranks" in note for note in notes)


@pytest.mark.parametrize("command", ["replay", "predict", "report"])
def test_a_run_converted_from_some_of_its_ranks_works_and_says_so(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = capture(tmp_path / "run", "tiny_2gpu*")
    for path in folder.glob("*rank1*"):
        path.unlink()
    assert main(["convert", str(folder), "--allow-missing-ranks"]) == 0
    capsys.readouterr()
    assert use(READERS[command], folder / "tiny_2gpu") == 0
    printed = capsys.readouterr()
    assert "1 of 2 ranks (without 1)" in printed.out + printed.err


def test_a_run_of_the_version_before_opens_with_a_warning(run: Path) -> None:
    """Its NAME_conversion.json tells the ranks, but no files."""
    path = run_at(str(run)).report_file
    report = json.loads(path.read_text())
    for name in ("version", "complete", "world_size", "files", "comm_groups", "checksum"):
        del report[name]
    path.write_text(json.dumps(report | {"schema_version": 2}))
    (found,) = find_rank_sets([str(run)])
    assert [note.partition(":")[2] for note in found.notes] == [
        " an earlier version converted it, so that changed files aren't noticed: convert again"
    ]
    lost(run)
    with pytest.raises(TraceError, match="rank 1 have gone"):
        find_rank_sets([str(run)])


def test_files_of_different_conversions_without_a_record_are_refused(run: Path, tmp_path: Path) -> None:
    other = capture(tmp_path / "other", "tiny_2gpu*")
    assert main(["convert", str(other), "--no-timestamps"]) == 0
    shutil.copy(other / "tiny_2gpu.1.et", run.parent)
    run_at(str(run)).report_file.unlink()
    with pytest.raises(TraceError, match="are of different conversions"):
        find_rank_sets([str(run)])


def test_a_run_without_its_record_is_opened_with_a_note(run: Path) -> None:
    run_at(str(run)).report_file.unlink()
    (found,) = find_rank_sets([str(run)])
    (note,) = found.notes
    assert note.startswith("there is no ")
    assert "tiny_2gpu_conversion.json (removed, or an earlier version wrote the run)" in note


def test_a_folder_for_ASTRA_sim_lacks_no_record(run: Path, tmp_path: Path) -> None:
    assert main(["astra", str(run), "--topology", "2xH100 NVLink", "-o", str(tmp_path / "sim")]) == 0
    (found,) = find_rank_sets([str(tmp_path / "sim")])
    assert found.notes == []


def test_one_file_of_a_run_may_be_named(run: Path) -> None:
    (found,) = find_rank_sets([f"{run}.1.et"])
    assert found.notes == [
        "tiny_2gpu: 1 of 2 ranks (without 0): waiting for the others counts as communication"
    ]


def test_a_failed_rank_does_not_pass_an_older_file_off_as_its_own(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.parent / "tiny_2gpu_rank1_device.json").write_text("{}")
    assert main(["convert", str(run.parent)]) == 1
    capsys.readouterr()
    assert use(READERS["replay"], run) == 2
    assert "tiny_2gpu.1.et isn't the file that the conversion wrote" in capsys.readouterr().err


def _full(job: tuple[Path, Any, Any, Any]) -> Any:
    """``finish_rank`` on a disk that is full from rank 1 on; other processes find it by its name."""
    if job[0].name == "tiny_2gpu.1.et":
        raise OSError(errno.ENOSPC, "No space left on device", str(job[0]))
    return finish_rank(job)


@pytest.mark.parametrize("older", [False, True])
def test_a_rank_without_its_joint_times_is_not_committed(
    run: Path, older: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that was full in the pass over all ranks left files with the waits of unaligned clocks, which
    replayed with status 0."""
    for path in [] if older else [*run.parent.glob("*.et"), *run.parent.glob("*_conversion.json")]:
        path.unlink()
    monkeypatch.setattr(together, "finish_rank", _full)
    assert main(["convert", str(run.parent)]) == 1
    assert "tiny_2gpu.1.et: No space left on device" in capsys.readouterr().err
    assert Path(f"{run}.1.et").exists() == older
    assert use(READERS["replay"], run) == (2 if older else 0)
    printed = capsys.readouterr()
    said = "tiny_2gpu.1.et isn't the file that the conversion wrote" if older else "1 of 2 ranks (without 1)"
    assert said in printed.out + printed.err


KILLED = """
import os, signal, sys
from chakra_et.convert import together
from chakra_et.et import record
place, real = sys.argv[2], {"joint": together.joint_times, "begin": record.begin, "replace": os.replace}
def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
def second(source, target, calls=[]):
    if os.path.dirname(source) != os.path.dirname(target):
        calls.append(target)
    if len(calls) == 2:
        die()
    real["replace"](source, target)
def after(*arguments):
    real["begin"](*arguments)
    die()
if place == "joint":
    together.joint_times = die
elif place == "begin":
    record.begin = die
elif place == "after":
    record.begin = after
else:
    os.replace = second
from chakra_et.__main__ import main
main(["convert", sys.argv[1], "--workers", "1"])
"""


@pytest.mark.parametrize(
    ("place", "older"),
    [
        ("joint", False),
        ("rename", False),
        *(
            pytest.param(place, True, marks=pytest.mark.slow)
            for place in ("joint", "begin", "rename", "after")
        ),
    ],
)
def test_a_conversion_killed_before_its_end_leaves_nothing_that_passes_for_finished(
    made: Path, tmp_path: Path, place: str, older: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank files had their final names before the pass over all ranks, and replayed with wrong waits."""
    folder = Path(shutil.copytree(made, tmp_path / "run"))
    run = folder / "tiny_2gpu"
    whole = Path(f"{run}.1.et").read_bytes()
    for path in [*folder.glob("*.et"), *folder.glob("*_conversion.json")] if not older else ():
        path.unlink()
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), place], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    if place in ("rename", "after"):
        assert use(READERS["replay"], run) == 2
        assert "its conversion hasn't finished" in capsys.readouterr().err
    else:
        assert Path(f"{run}.1.et").exists() == older
        assert use(READERS["validate"], run) == (0 if older else 2)
    remaining = subprocess.run([sys.executable, str(ROOT / "convert_remaining.py"), "--dir", str(folder)])
    assert remaining.returncode == 0 and Path(f"{run}.1.et").read_bytes() == whole
    assert use(READERS["replay"], run) == 0 and not list(folder.glob(".*"))


def test_a_folder_with_one_run_is_that_run(run: Path) -> None:
    """``chakra-et validate FOLDER`` of a bundle said that there was no such file."""
    (found,) = find_rank_sets([str(run.parent)])
    assert found.name == str(run) and list(found.files) == [0, 1]
    shutil.copy(f"{run}.0.et", run.with_name("other.0.et"))
    with pytest.raises(TraceError, match="a folder with .et files of 2 runs: give the NAME of one, such as"):
        find_rank_sets([str(run.parent)])
    (run.parent / "empty").mkdir()
    with pytest.raises(TraceError, match="a folder without .et files: convert its traces"):
        find_rank_sets([str(run.parent / "empty")])


def test_a_trace_in_place_of_et_files_is_converted_on_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They said that it was to be converted first. The answers are those of the converted run."""
    folder = shared_path("data/traces/public/pairs")
    trace, name = folder / "h100_bert-small-uncased.json.gz", tmp_path / "h100_bert-small-uncased"
    assert main(["convert", str(trace), "-o", str(tmp_path)]) == 0
    for words in (["predict", "NAME", "--gpu-kernels", "2"], ["diagnose", "NAME"], ["replay", "NAME"]):
        answers = []
        for run in (trace, name):
            capsys.readouterr()
            assert main([*(str(run) if word == "NAME" else word for word in words), "--json"]) == 0
            answers.append(json.loads(capsys.readouterr().out))
        traced, converted = ((each["jobs"][0] if "jobs" in each else each) for each in answers)
        differ = {key for key in converted if traced[key] != converted[key]}
        assert differ <= {"name", "files", "notes"}, words
