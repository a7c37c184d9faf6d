"""Dockerfile and docker-compose.yml, as far as they can be checked without a Docker engine."""

from __future__ import annotations

import itertools
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
    copied = [arguments for name, arguments in instructions if name == "COPY" and "--from" not in arguments]
    copies = [arguments.split() for arguments in copied]
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
    assert not {"tests", "scripts", "data", "locks", "pyproject.toml"} & set(ignored)


IN_IMAGE = "/workspace/mosim-llms"


def docker_words(folder: Path, repo_root: Path, script: str, *arguments: str, **env: str) -> list[str]:
    """The arguments that a script gives to a ``docker`` which records them."""
    folder.mkdir(exist_ok=True)
    (folder / "docker").write_text('#!/bin/sh\n[ "$1" = info ] || printf "%s\\n" "$@"\n')
    (folder / "docker").chmod(0o755)
    project = folder / "project"
    if not project.exists():
        shutil.copytree(repo_root / "scripts", project / "scripts")
        for name in ("run.sh", "build.sh"):
            shutil.copy(repo_root / name, project)
    result = subprocess.run(
        [project / script, *arguments],
        env={"PATH": f"{folder}:/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return result.stdout.splitlines()


def values(words: list[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(words) if name == option]


def test_compose_and_run_start_the_image_alike(
    repo_root: Path, instructions: list[tuple[str, str]], tmp_path: Path
) -> None:
    compose = yaml.safe_load((repo_root / "docker-compose.yml").read_text())
    service = compose["services"]["mosim-llms"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    declared = {arguments.split("=")[0] for name, arguments in instructions if name == "ARG"}
    assert set(service["build"]["args"]) <= declared

    passed = {line.split("=")[0] for line in service["environment"]}
    words = docker_words(tmp_path, repo_root, "run.sh", "gpu", **dict.fromkeys(passed, "1"))
    assert set(values(words, "--env")) == {*(passed - {"WANDB_MODE"}), "WANDB_MODE=1"}
    assert "WANDB_MODE=${WANDB_MODE:-offline}" in service["environment"]
    assert values(words, "--gpus") == ["all"]
    assert (values(words, "--network"), service["network_mode"]) == (["host"], "host")
    assert (values(words, "--shm-size"), service["shm_size"]) == (["8g"], "8gb")
    assert values(words, "--ulimit") == [f"{name}={limit}" for name, limit in service["ulimits"].items()]
    project = tmp_path / "project"
    folders = {f"./{name}": f"{IN_IMAGE}/{name}" for name in ("outputs", "data", "checkpoints")}
    own = [f"{source}:{target}" for source, target in folders.items()]
    assert service["volumes"] == [*own, "${HF_HOME:-huggingface}:/workspace/huggingface"]
    expected = [volume.replace("./", f"{project}/", 1) for volume in own]
    assert values(words, "--volume") == [*expected, "mosim-huggingface:/workspace/huggingface"]
    assert compose["volumes"]["huggingface"]["name"] == "mosim-huggingface"
    assert ("ENV", "HF_HOME=/workspace/huggingface") in instructions


def test_run_passes_only_what_is_set_and_hides_gpus_on_request(repo_root: Path, tmp_path: Path) -> None:
    words = docker_words(
        tmp_path, repo_root, "run.sh", "cpu", "echo", "two words", MASTER_PORT="6787", HF_HOME="/big/cache"
    )
    assert words[:2] == ["run", "--rm"]
    assert words[-3:] == ["mosim-llms:latest", "echo", "two words"]
    assert "--gpus" not in words
    assert values(words, "--env") == ["MASTER_PORT", "CUDA_VISIBLE_DEVICES=", "WANDB_MODE=offline"]
    assert "/big/cache:/workspace/huggingface" in values(words, "--volume")
    assert ("--device" in words) == Path("/dev/infiniband").exists()


def test_infiniband_is_an_addition_to_compose(repo_root: Path) -> None:
    added = yaml.safe_load((repo_root / "docker-compose.infiniband.yml").read_text())
    assert added == {"services": {"mosim-llms": {"devices": ["/dev/infiniband:/dev/infiniband"]}}}


def test_the_image_knows_the_projects_commit(
    repo_root: Path, instructions: list[tuple[str, str]], tmp_path: Path
) -> None:
    assert ("LABEL", "org.opencontainers.image.revision=${PROJECT_COMMIT}") in instructions
    words = docker_words(tmp_path, repo_root, "build.sh", "--no-cache")
    assert "PROJECT_COMMIT=" in words, "a project without git is built too"
    project, identity = tmp_path / "project", ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "all"], ["tag", "v9"]):
        subprocess.run(["git", *command], cwd=project, check=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=project, capture_output=True, text=True, check=True
    ).stdout.strip()
    words = docker_words(tmp_path, repo_root, "build.sh", "--no-cache")
    assert values(words, "--build-arg") == [f"PROJECT_COMMIT={commit}"]
    (project / "run.sh").write_text("changed")
    assert f"PROJECT_COMMIT={commit}-dirty" in docker_words(tmp_path, repo_root, "build.sh")


@pytest.mark.parametrize("owner", [0, 12345])
def test_the_container_runs_as_the_owner_of_the_outputs(owner: int, repo_root: Path, tmp_path: Path) -> None:
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv")
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    os.chown(outputs, owner, owner)
    command = [
        "bash",
        repo_root / "scripts" / "docker_entrypoint.sh",
        "sh",
        "-c",
        'id -u; id -g; echo "$0 $HOME"',
    ]
    environment = {**os.environ, "OUTPUTS": str(outputs), "HOME": "/root"}
    answer = subprocess.run([*command, "a b"], env=environment, capture_output=True, text=True, check=True)
    home = "/workspace/home" if owner else "/root"
    assert answer.stdout.splitlines() == [str(owner), str(owner), f"a b {home}"]


def test_hadolint_finds_nothing(repo_root: Path) -> None:
    beside_python = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside_python) if beside_python.exists() else shutil.which("hadolint")
    if not hadolint:
        pytest.skip("hadolint is not installed (the group dev has it)")
    result = subprocess.run([hadolint, repo_root / "Dockerfile"], capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("", 0)


def test_the_pinned_commit_is_whole_and_stands_in_one_place(repo_root: Path) -> None:
    tracked = subprocess.run(
        ["git", "grep", "-hoE", r"param(\.git@|/archive/)\w+"], cwd=repo_root, capture_output=True
    )
    found = re.findall(rb"[0-9a-f]{7,}", tracked.stdout)
    assert len(found) == 1 and len(found[0]) == 40


def test_the_base_images_pytorch_is_held(repo_root: Path, tmp_path: Path) -> None:
    """pip must never replace the PyTorch that the base image brings: no lock has one, and tools keep it."""
    from importlib.metadata import version

    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "python"
    fake.write_text(
        f'#!/bin/bash\nif [ "$1" != -m ]; then exec {sys.executable} "$@"; fi\n'
        'while [ "$1" != -c ] && [ "$1" != --no-deps ]; do shift; done\n'
        '[ "$1" = --no-deps ] || { cat "$2" "$4"; exit; }\necho "installs $*"\n'
    )
    fake.chmod(0o755)

    def step(name: str) -> list[str]:
        command = ["bash", str(repo_root / "scripts" / "docker_python_steps.sh"), name]
        path = f"{fake.parent}:/usr/bin:/bin"
        done = subprocess.run(
            command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    assert step("requirements") == ["installs --no-deps -r locks/image.txt"]
    assert not [
        path for path in (repo_root / "locks").iterdir() if re.search("^torch==", path.read_text(), re.M)
    ]
    held, *wanted = step("tools")
    assert held == f"torch=={version('torch')}"
    *extra, et_replay = wanted
    assert extra == ["mlc-chakra==1.0.0", "HolisticTraceAnalysis==0.5.0", "pandas<3"]
    assert et_replay.startswith("et_replay @ https://github.com/")


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
