"""scripts/environment.py with real venvs and a real pip, on a tiny project with a wheel of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Result = subprocess.CompletedProcess
BASE = getattr(sys, "_base_executable", sys.executable)  # of no environment


def make_wheel(folder: Path, version: str = "1.2.0", name: str = "mosimprobe", needs: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def make_project(folder: Path, repo_root: Path) -> Path:
    (folder / "scripts").mkdir(parents=True)
    script = (repo_root / "scripts" / "environment.py").read_text()
    # Its PyTorch comes from the lock here.
    for real, here in (("pinned.append([TORCH, *index])", "pass"), ("= cpu_index()", "= []")):
        assert real in script
        script = script.replace(real, here)
    (folder / "scripts" / "environment.py").write_text(script)
    (folder / "locks").mkdir()
    require(folder, dependencies="mosimprobe>=1.0,<2")
    lock(folder, "mosimprobe==1.2.0")
    (folder / "wheels").mkdir()
    make_wheel(folder / "wheels")
    make_wheel(folder / "wheels", "1.3.0")
    make_wheel(folder / "wheels", name="mosimlonely", needs="Requires-Dist: nowhere-to-be-found\n")
    return folder


def require(project: Path, **lists: str) -> None:
    """Write the lists of pyproject.toml, one requirement each."""
    names = ("dependencies", "train", "megatron", "dev", "mlcommons")
    lines = [f'{name} = ["{lists[name]}"]' if name in lists else f"{name} = []" for name in names]
    (project / "pyproject.toml").write_text("\n".join(lines) + "\n")


def lock(project: Path, *lines: str) -> None:
    for name in ("run", "megatron", "dev", "mlcommons", "convert"):
        (project / "locks" / f"{name}.txt").write_text("\n".join(lines) + "\n")


def environment(project: Path, **more: str) -> dict[str, str]:
    """Variables under which only the project's own wheels can be found."""
    hidden = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PIP_EXTRA_INDEX_URL")
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    local = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": (project / "wheels").as_uri(), "MOSIM_TORCH": "cpu"}
    return {**kept, **local, **more}


def command(project: Path, kind: str, python: str | Path = BASE) -> list[str]:
    return [str(python), str(project / "scripts" / "environment.py"), kind]


def set_up(project: Path, kind: str = "run", python: str | Path = BASE, **more: str) -> Result[str]:
    variables = environment(project, **more)
    words = command(project, kind, python)
    return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=120)


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


@pytest.fixture
def project(tmp_path: Path, repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
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
    python = finished[0] / ".venv" / "bin" / "python"
    result = set_up(project, python=python)
    assert result.stdout.strip() == str(python)
    assert not (project / ".venv").exists()
    assert set_up(project, "convert", python).stdout == result.stdout


def test_the_calling_python_is_used_where_it_has_everything(project: Path) -> None:
    """The Docker image: no environment is active and nothing may be installed."""
    require(project, dependencies="pytest>=8", train="packaging")
    result = set_up(project, python=sys.executable)
    assert result.stdout.strip() == sys.executable
    assert not (project / ".venv").exists()


def test_the_image_tests_without_megatron_core(project: Path) -> None:
    """megatron-core needs a newer PyTorch than the image has; a second environment would be some GB."""
    require(project, train="pytest>=8", dev="packaging", megatron="nowhere-to-be-found>=1")
    result = set_up(project, "dev", sys.executable)
    assert (result.stdout.strip(), result.stderr) == (sys.executable, "")
    assert not (project / ".venv").exists()


@pytest.mark.slow
def test_an_active_environment_that_lacks_something_is_left_alone(
    finished: tuple[Path, Result[str]], project: Path
) -> None:
    other = finished[0] / ".venv"
    require(project, train="mosimprobe>=1.3")
    lock(project, "mosimprobe==1.3.0")
    result = set_up(project, python=other / "bin" / "python")
    assert result.returncode == 0, result.stderr
    assert f"the active environment {other} lacks mosimprobe>=1.3: using .venv/" in result.stderr
    assert probe_version(result.stdout.strip()) == "1.3.0"
    assert probe_version(str(other / "bin" / "python")) == "1.2.0"


def test_changed_requirements_are_installed_into_the_same_environment(project: Path) -> None:
    assert set_up(project).returncode == 0
    kept = project / ".venv" / "kept"
    kept.touch()
    require(project, dependencies="mosimprobe>=1.0,<2", megatron="mosimengine")
    lock(project, "mosimprobe==1.3.0", "mosimengine==1.2.0", "mosimlonely==1.2.0")
    make_wheel(project / "wheels", name="mosimengine")
    result = set_up(project, "dev")
    assert probe_version(result.stdout.strip(), "mosimengine") == "1.2.0"
    assert probe_version(result.stdout.strip()) == "1.3.0"
    assert probe_version(result.stdout.strip(), "mosimlonely") == "1.2.0", "its dependency cannot be had"
    assert kept.exists()
    assert set_up(project).stderr == "", "an environment for tests also serves runs"


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_pins_that_this_python_cannot_meet_give_way_to_the_ranges(project: Path) -> None:
    lock(project, "mosimprobe==1.9")
    result = set_up(project)
    assert "locks/run.txt cannot be installed here" in result.stderr
    assert probe_version(result.stdout.strip()) == "1.3.0"


@pytest.mark.slow
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


@pytest.mark.slow
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
    text = (repo_root / "scripts" / "environment.py").read_text()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "environment.py").write_text(text)
    require(tmp_path, dependencies=requirement)
    code = "import environment, sys; print(*environment.unmet(('dependencies',), sys.path))"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "scripts")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split() == ([] if met else [requirement])


def listed(repo_root: Path, *names: str) -> list[str]:
    """Requirements as the script reads them from pyproject.toml."""
    command = [sys.executable, repo_root / "scripts" / "environment.py", "list", *names]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_lists_are_read_as_toml_has_them(repo_root: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no parser for TOML")
    text = tomllib.loads((repo_root / "pyproject.toml").read_text())
    lists = text["project"]["optional-dependencies"] | text["dependency-groups"]
    lists["dependencies"] = text["project"]["dependencies"]
    for name, requirements in lists.items():
        assert listed(repo_root, name) == requirements


def test_locks_and_requirements_are_those_of_pyproject(repo_root: Path) -> None:
    lines = (repo_root / "requirements.txt").read_text().splitlines()[1:]
    assert sorted(lines) == sorted(listed(repo_root, "dependencies", "train"))
    kinds = {
        "convert": [],
        "run": ["train"],
        "megatron": ["train", "megatron"],
        "dev": ["train", "megatron", "dev"],
        "mlcommons": ["train", "mlcommons"],
        "image": ["train", "mlcommons", "dev"],
    }
    assert {path.stem for path in (repo_root / "locks").iterdir()} == set(kinds)
    for name, lists in kinds.items():
        text = (repo_root / "locks" / f"{name}.txt").read_text().replace("\\\n", "")
        pins = [line.split("--hash=") for line in text.splitlines() if line[:1].isalnum()]
        assert all(len(pin) > 1 for pin in pins), "no pin without a hash"
        pinned: dict[str, list[str]] = {}
        for requirement in (Requirement(pin[0]) for pin in pins):
            (version,) = (bound.version for bound in requirement.specifier)
            pinned.setdefault(canonicalize_name(requirement.name), []).append(version)
        for wanted in map(Requirement, listed(repo_root, "dependencies", *lists)):
            versions = pinned.get(canonicalize_name(wanted.name), [])
            assert wanted.name == "torch" or versions, f"{name}: {wanted}: run scripts/lock.sh"
            assert all(wanted.specifier.contains(version) for version in versions), f"{name}: {wanted}"
