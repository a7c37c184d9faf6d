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


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site's tools are not installed: pip install --group docs")
    run(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path)
    reference = (tmp_path / "docs/REFERENCE/index.html").read_text(encoding="utf-8")
    assert all(f"chakra_et.api.{name}" in reference for name in ("Job.scale", "load", "predict", "convert"))
    assert "MI300X, predicted" in (tmp_path / "docs/gpu_trace/index.html").read_text(encoding="utf-8")
