"""What is delivered: the workflows, the site, and a tool chain that needs neither fork nor Linux."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import chakra_et

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def run(*command: str | Path, cwd: Path = ROOT, **options: object) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def test_every_python_that_is_promised_is_tested() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    promised = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    assert jobs["tests"]["strategy"]["matrix"]["python"] == promised
    assert f'requires-python = ">={promised[0]}"' in PYPROJECT


def test_what_the_workflows_run_is_there() -> None:
    scripts = {name for path in WORKFLOWS for name in re.findall(r"\./(\w+\.sh)", path.read_text())}
    assert {"run_tests.sh", "build.sh", "run.sh"} <= scripts
    assert all((ROOT / name).exists() for name in scripts)
    (check,) = re.findall(
        r"python -c '(import chakra_et; .*?)'", (ROOT / ".github/workflows/release.yml").read_text()
    )
    assert run(sys.executable, "-c", check).strip() == chakra_et.__version__


def test_actionlint_finds_nothing() -> None:
    if not shutil.which("actionlint"):
        pytest.skip("actionlint is not installed; the workflow runs it")
    run("actionlint", *WORKFLOWS)


def test_conversion_needs_no_fork(tmp_path: Path) -> None:
    """macOS starts its workers by spawning."""
    shutil.copytree(ROOT / "tests/fixtures/captures/torch-2.13", tmp_path, dirs_exist_ok=True)
    code = (
        "import sys; sys.platform = 'darwin'; import os; del os.fork, os.sched_getaffinity;"
        "from chakra_et.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    convert = (sys.executable, "-c", code, "convert", tmp_path, "--name", "tiny_2gpu", "--workers", "2")
    run(*convert)
    spawned = {path.name: path.read_bytes() for path in tmp_path.glob("*.et")}
    for path in tmp_path.glob("*.et"):
        path.unlink()
    run(sys.executable, "-m", "chakra_et", *map(str, convert[3:]))
    assert spawned == {path.name: path.read_bytes() for path in tmp_path.glob("*.et")} and len(spawned) == 3


LIKE_WINDOWS = """
import os, platform, signal, sys, numpy, subprocess, shutil, tempfile, threading
platform.uname()
shutil._use_fd_functions = False
sys.modules.update(fcntl=None, resource=None, pwd=None, termios=None)
for module, names in ((os, "fork killpg setpgid uname sched_getaffinity getuid O_NONBLOCK"),
                      (signal, "SIGALRM SIGKILL SIGHUP setitimer pthread_sigmask")):
    for name in names.split():
        delattr(module, name)
opened, moved, removed = os.open, os.replace, os.unlink

def no_folder(path, *more, **named):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return opened(path, *more, **named)

def unless_open(change):
    def checked(path, *more, **named):
        held = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        if os.path.realpath(path) in held:
            raise PermissionError(32, "The process cannot access the file", str(path))
        return change(path, *more, **named)
    return checked

os.open, os.replace, os.unlink = no_folder, unless_open(moved), unless_open(removed)
from chakra_et.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_windows_reads_converts_and_reports(tmp_path: Path) -> None:
    """Without what Windows lacks: locks, signals, fork, and names for folders and files that are open."""
    shutil.copytree(ROOT / "tests/fixtures/captures/torch-2.13", tmp_path, dirs_exist_ok=True)
    name = tmp_path / "tiny_2gpu"

    def on_windows(*arguments: object) -> None:
        run(sys.executable, "-c", LIKE_WINDOWS, *map(str, arguments))

    on_windows("convert", tmp_path, "--name", "tiny_2gpu", "--workers", "2")
    made = {path.name: path.read_bytes() for path in tmp_path.glob("*.et")}
    for command in ("info", "validate", "replay", "report", "diagnose", "export", "scale"):
        on_windows(command, name, *(("--dp", "4") if command == "scale" else ()))
    on_windows("predict", name, "--bandwidth", "1Gbit/s")
    assert (tmp_path / "tiny_2gpu_report.html").exists() and not list(tmp_path.glob(".*.tmp"))
    run(sys.executable, "-m", "chakra_et", "convert", str(tmp_path), "--name", "tiny_2gpu")
    assert made and made == {name: (tmp_path / name).read_bytes() for name in made}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site's tools are not installed: pip install --group docs")
    run(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path)
    reference = (tmp_path / "docs/REFERENCE/index.html").read_text(encoding="utf-8")
    assert all(f"chakra_et.api.{name}" in reference for name in ("Job.scale", "load", "predict", "convert"))
    assert "MI300X, predicted" in (tmp_path / "docs/gpu_trace/index.html").read_text(encoding="utf-8")
