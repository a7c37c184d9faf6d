"""The package installed from a wheel in an empty environment, beside another project's utils.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from chakra_et.et import file as et_file

# What a wheel could pick up by mistake: every folder of the checkout that holds Python files for users.
SOURCES = ("chakra_et", "utils", "fasop", "gpt2", "bert", "megatron_lm", "scripts", "benchmarks")


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """Built from a copy, as setuptools leaves build/ and an egg-info where it works."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    for name in SOURCES:
        shutil.copytree(repo_root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in repo_root.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel")
    run(*pip, ".", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder, cwd=source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The bin folder of an environment with only the wheel and its dependencies."""
    folder = wheel.parent / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    for requirement in declared(wheel):
        for top in {file.parts[0] for file in metadata.files(requirement) or ()} - {".."}:
            os.symlink(Path(metadata.distribution(requirement).locate_file(top)), packages / top)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=wheel.parent)
    return python.parent


def declared(wheel: Path) -> list[str]:
    """The names of the packages that the wheel needs, extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    return re.findall(r"^Requires-Dist: ([\w.-]+)(?!.*extra ==)", text, re.MULTILINE)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Another project, with a module of the name that this repository uses for its training side."""
    (tmp_path / "utils.py").write_text("whose = 'theirs'\n")
    (tmp_path / "main.py").write_text(
        "import chakra_et, utils\nassert utils.whose == 'theirs'\nprint(chakra_et.__file__)\n"
    )
    return tmp_path


def test_the_wheel_holds_one_package_and_its_marker_of_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"chakra_et"}
    assert {"chakra_et/py.typed", "chakra_et/convert/graph/communication_kernels.json"} <= set(names)
    assert any("/licenses/LICENSE" in name for name in names)
    assert declared(wheel) == ["numpy", "msgspec", "tqdm"]


def test_it_works_beside_another_projects_utils(installed: Path, project: Path) -> None:
    found = run(installed / "python", "main.py", cwd=project)
    assert Path(found.strip()).is_relative_to(installed.parent)


@pytest.mark.parametrize("command", [["chakra-et"], ["python", "-m", "chakra_et"]], ids=" ".join)
def test_it_converts_a_capture_there(
    installed: Path, project: Path, command: list[str], repo_root: Path
) -> None:
    for path in (repo_root / "tests/fixtures/captures/torch-2.13").glob("tiny_1gpu_*"):
        shutil.copy(path, project)
    command = [str(installed / command[0]), *command[1:]]
    listed = run(*command, "--help", cwd=project)
    assert all(f"\n  {name} " in listed for name in ("convert", "repair", "validate", "info", "replay"))
    run(*command, "convert", "--dir", ".", cwd=project)
    assert len(et_file.read(project / "tiny_1gpu.0.et")) > 1_000
    run(*command, "validate", "tiny_1gpu.0.et", cwd=project)
