"""Dockerfile and docker-compose.yml, as far as they can be checked without a Docker engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import shared_path

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def instructions(repo_root: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) pairs of the Dockerfile, continuation lines joined."""
    text = (repo_root / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


def test_what_is_copied_exists_and_the_project_comes_last(
    instructions: list[tuple[str, str]], repo_root: Path
) -> None:
    copies = [arguments.split() for name, arguments in instructions if name == "COPY"]
    for *sources, _ in copies:
        for source in sources:
            assert (repo_root / source).exists(), source
    assert copies[-1] == [".", "."]
    last_copy = max(i for i, (name, _) in enumerate(instructions) if name == "COPY")
    assert all(name != "RUN" for name, _ in instructions[last_copy:]), "a change of code must rebuild nothing"


def test_the_steps_it_runs_exist_and_nothing_asks_a_question(
    instructions: list[tuple[str, str]], repo_root: Path
) -> None:
    runs = [arguments for name, arguments in instructions if name == "RUN"]
    steps = [match[1] for run in runs if (match := re.search(r"docker_python_steps\.sh (\w+)", run))]
    script = (repo_root / "scripts" / "docker_python_steps.sh").read_text()
    assert steps == ["requirements", "tools", "tokenizers"]
    assert all(re.search(rf"^    {step}\)$", script, re.MULTILINE) for step in steps)
    for run in runs:
        if "apt-get install" in run:
            assert "-y --no-install-recommends" in run and "rm -rf /var/lib/apt/lists/*" in run
    assert ("WORKDIR", "/workspace/mosim-llms") in instructions
    assert instructions[0] == ("ARG", "BASE_IMAGE=pytorch/pytorch:2.4.0-cuda12.4-cudnn9-runtime")


def test_environments_and_outputs_stay_out_of_the_image(repo_root: Path) -> None:
    ignored = (repo_root / ".dockerignore").read_text().split()
    assert {".git", ".venv", "chakra-venv", "outputs", "checkpoints"} <= set(ignored)
    assert not {"tests", "scripts", "data", "constraints-image.txt"} & set(ignored)


def test_compose_reserves_gpus_and_keeps_the_folders(repo_root: Path, instructions: list) -> None:
    compose = yaml.safe_load((repo_root / "docker-compose.yml").read_text())
    service = compose["services"]["mosim-llms"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    mounted = dict(volume.split(":") for volume in service["volumes"])
    assert mounted == {
        f"./{name}": f"/workspace/mosim-llms/{name}" for name in ("outputs", "data", "checkpoints")
    }
    assert service["shm_size"] == "8gb"
    declared = {arguments.split("=")[0] for name, arguments in instructions if name == "ARG"}
    assert set(service["build"]["args"]) <= declared


def test_pinned_commits_are_whole_and_agree(repo_root: Path) -> None:
    steps = (repo_root / "scripts" / "docker_python_steps.sh").read_text()
    commits = dict(re.findall(r"facebookresearch/(\w+)\.git@(\w+)", steps))
    assert {name: len(commit) for name, commit in commits.items()} == {
        "param": 40,
        "HolisticTraceAnalysis": 40,
    }
    assert f"PARAM_COMMIT={commits['param']}\n" in (repo_root / "install_chakra_tools.sh").read_text()


def test_the_base_images_pytorch_is_held(repo_root: Path, tmp_path: Path) -> None:
    """pip must never replace the PyTorch that the base image brings, whatever the constraints file pins."""
    from importlib.metadata import version

    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "python"
    fake.write_text(
        f'#!/bin/bash\nif [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\n'
        'while [ "$1" != -c ]; do shift; done\ncat "$2"\nshift 2\necho "installs $*"\n'
    )
    fake.chmod(0o755)
    result = subprocess.run(
        ["bash", repo_root / "scripts" / "docker_python_steps.sh", "requirements"],
        env={**os.environ, "PATH": f"{fake.parent}:/usr/bin:/bin", "CONSTRAINTS": "constraints.txt"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("torch==")] == [f"torch=={version('torch')}"]
    assert lines[-1] == "installs -r requirements.txt -r requirements-dev.txt"


def test_tokenizers_are_saved_where_they_are_looked_for(repo_root: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if not shutil.which("bash"):
        pytest.skip("no bash")
    names = ("gpt2", "bert-base-uncased")
    files = [f"{name}/{file}" for name in names for file in ("tokenizer.json", "tokenizer_config.json")]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "TOKENIZER_SOURCE": str(shared_path("data/tokenizers", *files)),
    }
    script = repo_root / "scripts" / "docker_python_steps.sh"
    subprocess.run(["bash", script, "tokenizers", tmp_path], env=environment, check=True, timeout=120)
    for name in names:
        assert (tmp_path / name / "tokenizer.json").exists()
