"""Conversions that are killed, run out of space, overlap or may not write leave an old or a new file."""

from __future__ import annotations

import gzip
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from chakra_et import files
from chakra_et.et import file as et_file

ROOT = Path(__file__).resolve().parents[2]
CAPTURES = ROOT / "tests" / "fixtures" / "captures" / "torch-2.13"


def capture(folder: Path, pattern: str = "tiny_*") -> Path:
    folder.mkdir(exist_ok=True)
    for path in CAPTURES.glob(pattern):
        if path.suffix == ".gz":
            (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        elif path.name.endswith("manifest.json"):
            shutil.copy(path, folder)
    return folder


def line(script: str, folder: Path, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / script), "--dir", str(folder), *flags]


def run(script: str, folder: Path, *flags: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        line(script, folder, *flags), capture_output=True, text=True, timeout=120, **options
    )


def made(folder: Path) -> dict[str, bytes]:
    """The files that a conversion wrote."""
    ours = (".et", "_conversion.json", "_comm_groups.json")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.endswith(ours)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed conversion of both captures."""
    folder = capture(tmp_path_factory.mktemp("whole"))
    assert run("convert_to_et.py", folder).returncode == 0
    return made(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the ranks before all ranks are converted: without joint times."""
    folder = capture(tmp_path_factory.mktemp("alone"))
    assert run("convert_to_et.py", folder, "--ranks", "0-9").returncode == 0
    return made(folder)


def without_leavings(folder: Path) -> None:
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_killed_at_any_moment(
    tmp_path: Path, whole: dict[str, bytes], alone: dict[str, bytes], number: int
) -> None:
    """Existing files are complete, no process is left, and the next run converts the rest."""
    folder, random = capture(tmp_path / "run"), Random(int(number))
    seen = set()
    for _ in range(6):
        process = subprocess.Popen(
            line("convert_to_et.py", folder, "--workers", "2"), stderr=subprocess.PIPE, start_new_session=True
        )
        time.sleep(random.uniform(0.05, 1.2))
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        # Python itself shows where Ctrl-C met its start, the imports or a finalizer.
        shown = number == signal.SIGINT and (b"import" in errors or b"Exception ignored in" in errors)
        assert shown or b"Traceback" not in errors, errors
        assert shown or process.returncode in (0, -number, 128 + number), errors
        gone_by = time.monotonic() + 10
        while _group_is_there(process.pid) and time.monotonic() < gone_by:
            time.sleep(0.1)
        assert not _group_is_there(process.pid), "a worker outlived the conversion"
        for name, content in made(folder).items():
            assert content in (whole[name], alone.get(name)), f"{name} is neither absent nor whole"
            seen.add(name)
        if number != signal.SIGKILL:
            without_leavings(folder)
        for name in made(folder):
            (folder / name).unlink()
    done = run("convert_remaining.py", folder)
    assert done.returncode == 0, done.stderr
    assert made(folder) == whole
    without_leavings(folder)


def test_what_a_killed_report_left_is_gone_after_the_next_one(tmp_path: Path) -> None:
    """Only conversions removed the hidden files of killed processes."""
    left = tmp_path / f".gpt2_report.html.{files.HOST}01234567.tmp"
    left.touch()
    files.write_text(tmp_path / "gpt2_report.html", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2_report.html"]


def _group_is_there(group: int) -> bool:
    """Whether a process of the session is still running (a zombie is not)."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == group and fields[0] not in "ZX":
            return True
    return False


@pytest.mark.slow
def test_killed_while_replacing_older_files(
    tmp_path: Path, whole: dict[str, bytes], alone: dict[str, bytes]
) -> None:
    folder, random = capture(tmp_path / "run"), Random(1)
    for name in whole:
        (folder / name).write_bytes(b"older")
    for _ in range(6):
        process = subprocess.Popen(line("convert_to_et.py", folder), stderr=subprocess.DEVNULL)
        time.sleep(random.uniform(0.1, 1.0))
        process.kill()
        process.wait()
        for name, content in made(folder).items():
            assert content in (b"older", whole[name], alone.get(name)), f"{name} is half-written"
    assert run("convert_to_et.py", folder).returncode == 0
    assert made(folder) == whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with space for the traces of one capture and little more."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command).returncode != 0:
        pytest.skip("mounting a small tmpfs is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk(small_disk: Path) -> None:
    for path in CAPTURES.glob("tiny_1gpu*.gz"):
        shutil.copy(path, small_disk)
    assert run("convert_to_et.py", small_disk).returncode == 0
    first = made(small_disk)
    for path in small_disk.glob("*.gz"):
        os.utime(path)  # newer than the files
    room = shutil.disk_usage(small_disk).free
    with open(small_disk / "ballast", "wb") as file:
        file.write(bytes(max(0, room - 100_000)))
    done = run("convert_to_et.py", small_disk)
    assert done.returncode == 1 and "No space left on device" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    after = made(small_disk)
    assert all(after[name] == first[name] for name in ("tiny_1gpu.0.et", "tiny_1gpu.et"))
    without_leavings(small_disk)
    (small_disk / "ballast").unlink()
    assert run("convert_remaining.py", small_disk).returncode == 0
    assert made(small_disk) == first


def test_file_size_quota(tmp_path: Path) -> None:
    folder = capture(tmp_path / "run", "tiny_1gpu*")

    def quota() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = run("convert_to_et.py", folder, preexec_fn=quota)
    assert done.returncode == 1 and "File too large" in done.stderr and "Traceback" not in done.stderr
    assert not list(folder.glob("*.et"))
    without_leavings(folder)


def test_read_only_folder(tmp_path: Path) -> None:
    folder = capture(tmp_path / "run", "tiny_1gpu*")
    if os.geteuid() == 0:
        command = ["mount", "--bind", "-o", "ro", str(folder), str(folder)]
        if subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("root writes to read-only folders, and a read-only mount is not allowed here")
    else:
        folder.chmod(0o555)
    try:
        done = run("convert_to_et.py", folder)
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr
        assert "Read-only file system" in done.stderr or "Permission denied" in done.stderr
        assert not made(folder)
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", str(folder)], check=True)
        else:
            folder.chmod(0o755)


def test_a_file_that_can_not_be_written_is_named_as_it_was_given(tmp_path: Path) -> None:
    # The hidden file beside it was named, of which the user knows nothing.
    (tmp_path / "folder").mkdir()
    for place, reason in ((tmp_path / "no" / "x", "No such file"), (tmp_path / "folder", "Is a directory")):
        with pytest.raises(OSError, match=reason) as failed:
            files.write_text(place, "text")
        assert failed.value.filename == str(place) and ".tmp" not in str(failed.value)
    with pytest.raises(FileNotFoundError) as failed:
        files.copy(tmp_path / "nowhere", tmp_path / "y")
    assert str(failed.value.filename) == str(tmp_path / "nowhere")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"] and not any(
        (tmp_path / "folder").iterdir()
    )


def test_two_conversions_of_one_folder_at_once(tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = capture(tmp_path / "run")
    processes = [
        subprocess.Popen(line(script, folder), stderr=subprocess.PIPE, text=True)
        for script in ("convert_to_et.py", "convert_remaining.py", "convert_to_et.py")
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert made(folder) == whole
    without_leavings(folder)


def test_the_same_bytes_from_any_number_of_workers_and_any_hash_seed(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    for number, (workers, seed) in enumerate((("1", "1"), ("3", "77"), ("2", "random"))):
        folder = capture(tmp_path / f"run{number}")
        done = run(
            "convert_to_et.py", folder, "--workers", workers, env=os.environ | {"PYTHONHASHSEED": seed}
        )
        assert done.returncode == 0, done.stderr
        assert made(folder) == whole, f"{workers} workers, hash seed {seed}"


def test_leftovers_of_a_killed_conversion_are_removed(tmp_path: Path, whole: dict[str, bytes]) -> None:
    """A process that can't clean up leaves a hidden file, no .et; the next conversion removes it."""
    folder = capture(tmp_path / "run", "tiny_1gpu*")
    code = (
        "import os, sys; from chakra_et import files\n"
        "with files.atomic_file(sys.argv[1]) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", code, str(folder / "tiny_1gpu.0.et")]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert any(path.name.startswith(".tiny_1gpu.0.et.") for path in folder.iterdir())
    assert not (folder / "tiny_1gpu.0.et").exists()
    assert run("convert_to_et.py", folder).returncode == 0
    without_leavings(folder)
    assert len(et_file.read(folder / "tiny_1gpu.0.et")) > 0


def test_rank_0_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = capture(tmp_path / "run")
    for _ in range(2):  # again over files that already are one
        assert run("convert_to_et.py", folder).returncode == 0
        first, again = folder / "tiny_1gpu.0.et", folder / "tiny_1gpu.et"
        assert again.samefile(first) and not list(folder.glob(".*"))

    def no_links(*_: object) -> None:
        raise PermissionError("a file system without hard links")

    monkeypatch.setattr(os, "link", no_links)
    files.link(first, again)
    assert not again.samefile(first) and again.read_bytes() == first.read_bytes()
