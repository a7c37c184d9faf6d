"""scripts/environment.py with real venvs and a real pip, on a tiny project with a wheel of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

Result = subprocess.CompletedProcess


def make_wheel(folder: Path, version: str = "1.2.0", name: str = "mosimprobe", needs: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def make_project(folder: Path, repo_root: Path) -> Path:
    shutil.copytree(repo_root / "scripts", folder / "scripts")
    (folder / "requirements.txt").write_text("# what it needs\nmosimprobe>=1.0,<2\n")
    (folder / "requirements-dev.txt").write_text("mosimprobe\n")
    (folder / "requirements-megatron.txt").write_text("mosimprobe\n")
    (folder / "requirements-dev-alone.txt").write_text("mosimlonely\n")
    (folder / "requirements-convert.txt").write_text("mosimprobe>=1.1\n")
    (folder / "constraints.txt").write_text("mosimprobe==1.2.0\n")
    (folder / "wheels").mkdir()
    make_wheel(folder / "wheels")
    make_wheel(folder / "wheels", "1.3.0")
    make_wheel(folder / "wheels", name="mosimlonely", needs="Requires-Dist: nowhere-to-be-found\n")
    return folder


def environment(project: Path, **more: str) -> dict[str, str]:
    """Variables under which only the project's own wheels can be found."""
    hidden = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PIP_EXTRA_INDEX_URL")
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    local = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": (project / "wheels").as_uri(), "MOSIM_TORCH": "cpu"}
    return {**kept, **local, **more}


def command(project: Path, kind: str) -> list[str]:
    return [sys.executable, str(project / "scripts" / "environment.py"), kind]


def set_up(project: Path, kind: str = "run", **more: str) -> Result[str]:
    return subprocess.run(
        command(project, kind), env=environment(project, **more), capture_output=True, text=True, timeout=120
    )


def probe_version(python: str, name: str = "mosimprobe") -> str:
    code = f"import {name}; print({name}.version)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> tuple[Path, Result[str]]:
    """A project whose .venv has been made once, and what that printed."""
    project = make_project(tmp_path_factory.mktemp("projects") / "with space", repo_root)
    return project, set_up(project, PATH="/usr/bin:/bin")


@pytest.fixture(scope="session")
def quick_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ``uv`` that makes a venv by copying one, to save time; it installs nothing."""
    folder = tmp_path_factory.mktemp("quick")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    uv = folder / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        f'#!/bin/sh\necho "$@" >>"{folder}/calls"\n[ "$1" = venv ] || exit 1\n'
        f'for last; do :; done\ncp -a "{folder}/venv" "$last"\n'
    )
    uv.chmod(0o755)
    return uv.parent


@pytest.fixture
def project(tmp_path: Path, repo_root: Path, quick_venv: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{quick_venv}:/usr/bin:/bin")
    return make_project(tmp_path / "project", repo_root)


def test_makes_an_environment_with_the_pinned_version(finished: tuple[Path, Result[str]]) -> None:
    project, result = finished
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [str(project / ".venv" / "bin" / "python")]
    assert probe_version(result.stdout.strip()) == "1.2.0"


def test_a_second_run_installs_nothing_and_is_quick(finished: tuple[Path, Result[str]]) -> None:
    project, first = finished
    log = (project / ".venv" / "install.log").stat().st_mtime_ns
    began = time.monotonic()
    again = set_up(project)
    assert (again.stdout, again.stderr) == (first.stdout, "")
    assert time.monotonic() - began < 3
    assert (project / ".venv" / "install.log").stat().st_mtime_ns == log


def test_an_active_environment_that_has_everything_is_used_as_it_is(
    finished: tuple[Path, Result[str]], project: Path
) -> None:
    other = finished[0] / ".venv"
    result = set_up(project, VIRTUAL_ENV=str(other))
    assert result.stdout.strip() == str(other / "bin" / "python")
    assert not (project / ".venv").exists()
    assert set_up(project, "convert", VIRTUAL_ENV=str(other)).stdout == result.stdout


def test_the_calling_python_is_used_where_it_has_everything(project: Path) -> None:
    """The Docker image: no environment is active and nothing may be installed."""
    (project / "requirements.txt").write_text("pytest>=8\npackaging\n")
    result = set_up(project)
    assert result.stdout.strip() == sys.executable
    assert not (project / ".venv").exists()


def test_the_image_tests_without_megatron_core(project: Path) -> None:
    """megatron-core needs a newer PyTorch than the image has; a second environment would be some GB."""
    (project / "requirements.txt").write_text("pytest>=8\n")
    (project / "requirements-dev.txt").write_text("packaging\n")
    (project / "requirements-dev-alone.txt").write_text("pluggy\n")
    (project / "requirements-megatron.txt").write_text("nowhere-to-be-found>=1\n")
    result = set_up(project, "dev")
    assert (result.stdout.strip(), result.stderr) == (sys.executable, "")
    assert not (project / ".venv").exists()


def test_an_active_environment_that_lacks_something_is_left_alone(
    finished: tuple[Path, Result[str]], project: Path
) -> None:
    other = finished[0] / ".venv"
    for file in ("requirements.txt", "constraints.txt"):
        (project / file).write_text("mosimprobe==1.3.0\n" if file[0] == "c" else "mosimprobe>=1.3\n")
    result = set_up(project, VIRTUAL_ENV=str(other))
    assert result.returncode == 0, result.stderr
    assert f"the active environment {other} lacks mosimprobe>=1.3: using .venv/" in result.stderr
    assert probe_version(result.stdout.strip()) == "1.3.0"
    assert probe_version(str(other / "bin" / "python")) == "1.2.0"


def test_changed_requirements_are_installed_into_the_same_environment(project: Path) -> None:
    assert set_up(project).returncode == 0
    kept = project / ".venv" / "kept"
    kept.touch()
    (project / "constraints.txt").write_text("mosimprobe==1.3.0\n")
    (project / "requirements-megatron.txt").write_text("mosimengine\n")
    make_wheel(project / "wheels", name="mosimengine")
    result = set_up(project, "dev")
    assert probe_version(result.stdout.strip(), "mosimengine") == "1.2.0"
    assert probe_version(result.stdout.strip()) == "1.3.0"
    assert probe_version(result.stdout.strip(), "mosimlonely") == "1.2.0", "its dependency cannot be had"
    assert kept.exists()
    assert set_up(project).stderr == "", "an environment for tests also serves runs"


def test_killed_install_is_detected_and_repaired(project: Path) -> None:
    half_made = project / ".venv" / "mosim-installing"
    process = subprocess.Popen(
        command(project, "run"),
        env=environment(project),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    wait_for(half_made.exists)
    process.send_signal(signal.SIGKILL)
    process.wait()
    result = set_up(project)
    assert result.returncode == 0, result.stderr
    assert "incomplete" in result.stderr
    assert probe_version(result.stdout.strip()) == "1.2.0"
    assert not half_made.exists()


def test_two_at_once_make_one_environment(project: Path) -> None:
    options = {
        "env": environment(project),
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    both = [subprocess.Popen(command(project, "run"), **options) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum("making .venv/" in messages for _, messages in outputs) == 1


def test_environment_made_without_gpu_is_made_anew_where_there_is_one(project: Path) -> None:
    """A cluster's login node has no GPU and gets PyTorch's CPU build; its compute nodes share the folder."""
    assert set_up(project).returncode == 0
    stubs = project / "stubs"
    stubs.mkdir()
    (stubs / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA Probe'\n")
    (stubs / "nvidia-smi").chmod(0o755)
    path = f"{stubs}:{os.environ['PATH']}"
    result = set_up(project, PATH=path, MOSIM_TORCH="")
    assert "making it anew" in result.stderr
    assert set_up(project, PATH=path, MOSIM_TORCH="").stderr == ""
    assert set_up(project).stderr == "", "a GPU build serves a machine without a GPU"


def test_uv_is_told_of_pips_indexes_and_pip_takes_over_where_it_fails(
    project: Path, quick_venv: Path
) -> None:
    calls = quick_venv.parent / "calls"
    calls.unlink(missing_ok=True)
    result = set_up(project)
    assert result.returncode == 0, result.stderr
    create, install = calls.read_text().splitlines()
    assert create.startswith("venv ")
    assert install.startswith("pip install ")
    assert f"--find-links {(project / 'wheels').as_uri()}" in install
    assert probe_version(result.stdout.strip()) == "1.2.0"


def test_pins_that_this_python_cannot_meet_give_way_to_the_ranges(project: Path) -> None:
    (project / "constraints.txt").write_text("mosimprobe==1.9\n")
    result = set_up(project)
    assert "constraints.txt cannot be met" in result.stderr
    assert probe_version(result.stdout.strip()) == "1.3.0"


def test_a_failed_install_says_so_and_the_next_run_starts_afresh(project: Path) -> None:
    wheels = project / "wheels"
    wheels.rename(project / "elsewhere")
    wheels.mkdir()
    result = set_up(project)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(
        "set-up: the packages could not be installed; the whole log"
    )
    assert "Traceback" not in result.stderr
    wheels.rmdir()
    (project / "elsewhere").rename(wheels)
    assert set_up(project).returncode == 0


def test_conversion_has_a_small_environment_of_its_own(project: Path) -> None:
    result = set_up(project, "convert")
    assert result.stdout.strip() == str(project / "chakra-venv" / "bin" / "python")
    assert not (project / ".venv").exists()


@pytest.mark.parametrize(
    "requirement", ["packaging>=23", "packaging<1", "Pytest>=8,<9999", "pytest>=9999", "nowhere"]
)
def test_unmet_agrees_with_packaging(requirement: str, tmp_path: Path, repo_root: Path) -> None:
    from importlib import metadata

    parsed = Requirement(requirement)
    try:
        met = parsed.specifier.contains(metadata.version(parsed.name))
    except metadata.PackageNotFoundError:
        met = False
    file = tmp_path / "requirements.txt"
    file.write_text(f"{requirement}  # why\n\n# nothing\n")
    script = repo_root / "scripts" / "environment.py"
    answer = subprocess.run(
        [sys.executable, script, "unmet", file], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ([] if met else [requirement])


def test_this_checkouts_requirement_files_agree(repo_root: Path) -> None:
    lines = {
        name: [line for line in (repo_root / name).read_text().splitlines() if line and line[0] != "#"]
        for name in (
            "requirements.txt",
            "requirements-convert.txt",
            "requirements-dev.txt",
            "requirements-stragglers.txt",
        )
    }
    assert set(lines["requirements-convert.txt"]) <= set(lines["requirements.txt"])
    for pins in ("constraints.txt", "constraints-image.txt"):
        pinned = [Requirement(line) for line in (repo_root / pins).read_text().splitlines() if line[0] != "#"]
        by_name = {pin.name.lower().replace("_", "-"): pin for pin in pinned}
        files = ("requirements.txt", "requirements-dev.txt", "requirements-stragglers.txt")
        for wanted in map(Requirement, [line for name in files for line in lines[name]]):
            if pins == "constraints-image.txt" and wanted.name == "torch":
                continue
            (version,) = (bound.version for bound in by_name[wanted.name.lower()].specifier)
            assert wanted.specifier.contains(version), f"{pins}: {wanted}"
