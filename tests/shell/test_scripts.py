"""The scripts at the root: style, help and refusals, without running a job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USER_SCRIPTS = [
    "build.sh",
    "install_chakra_tools.sh",
    "run.sh",
    "run_all_experiments.sh",
    "run_all_profiling.sh",
    "run_bert.sh",
    "run_bert_quick.sh",
    "run_gpt2.sh",
    "run_gpt2_quick.sh",
    "run_tests.sh",
    "setup_and_convert.sh",
]
ALL_SCRIPTS = [*USER_SCRIPTS, ".ci/run", *(f"scripts/{path.name}" for path in ROOT.glob("scripts/*.sh"))]


def run(*command: str | Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_script_at_the_root_is_listed_here() -> None:
    assert sorted(path.name for path in ROOT.glob("*.sh")) == USER_SCRIPTS


@pytest.mark.parametrize("script", ALL_SCRIPTS)
def test_bash_accepts_it_and_it_stops_at_the_first_fault(script: str) -> None:
    assert run("bash", "-n", ROOT / script).stderr == ""
    text = (ROOT / script).read_text()
    assert re.search(r"^set -euo pipefail$", text, re.MULTILINE)
    assert "\r" not in text


@pytest.mark.parametrize("script", ALL_SCRIPTS)
def test_it_keeps_to_what_the_bash_of_macos_has(script: str) -> None:
    newer = r"declare -A|local -A|\bmapfile\b|\breadarray\b|\$\{\w+(,,|\^\^)|\|&|&>>|\bcoproc\b|\bwait -n\b"
    gnu_only = (
        r"\breadlink -f\b|\brealpath\b|\bsed -i\b|\bgrep -P\b|\bstat -c\b|\bnproc\b|\bdate -d\b|\btimeout \d"
    )
    for number, line in enumerate((ROOT / script).read_text().splitlines(), 1):
        assert not re.search(newer, line), f"{script}:{number}"
        if not script.startswith("scripts/docker_"):  # these run in the image
            assert not re.search(gnu_only, line), f"{script}:{number}"


def test_shellcheck_finds_nothing() -> None:
    beside_python = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside_python) if beside_python.exists() else shutil.which("shellcheck")
    if not shellcheck:
        pytest.skip("shellcheck is not installed (the group dev has it)")
    result = run(shellcheck, "-x", *ALL_SCRIPTS, cwd=ROOT)
    assert result.stdout == ""


@pytest.mark.parametrize("script", USER_SCRIPTS)
def test_help_tells_the_usage_and_does_nothing(script: str, tmp_path: Path) -> None:
    assert os.access(ROOT / script, os.X_OK)
    # No Python and no Docker can be found: help needs neither.
    result = run(ROOT / script, "--help", cwd=tmp_path, PATH="/usr/bin:/bin", VIRTUAL_ENV="", CONDA_PREFIX="")
    assert result.returncode == 0
    assert f"Usage: ./{script}" in result.stdout
    assert not result.stdout.startswith("#")
    assert "set -euo" not in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    "command, fault",
    [
        ("run_gpt2_quick.sh two", "num_gpus must be a positive whole number, not 'two'"),
        ("run_gpt2_quick.sh 0", "num_gpus must be a positive whole number, not '0'"),
        ("run_gpt2_quick.sh 1 -5", "unknown option -5"),
        ("run_bert_quick.sh 1 1.5", "max_steps must be a positive whole number, not '1.5'"),
        ("run_bert_quick.sh 1 2 3", "too many arguments: 1 2 3"),
        ("run_bert_quick.sh --batch-size 4", "unknown option --batch-size (flags of train.py go after --)"),
        ("run_bert_quick.sh 2 --nnodes 2", "--nnodes 2 needs --master-addr"),
        ("run_bert_quick.sh 2 --nnodes=x", "--nnodes must be a positive whole number, not 'x'"),
        ("run_bert_quick.sh 2 --output_dir", "--output-dir needs a value"),
        ("run_gpt2.sh 1 big", "batch_size must be a positive whole number, not 'big'"),
        ("run_bert.sh 99999999999999999999", "num_gpus must be a positive whole number"),
        ("run_all_profiling.sh 1 2", "too many arguments: 1 2"),
        ("run_all_experiments.sh none", "batch_size must be a positive whole number, not 'none'"),
        ("setup_and_convert.sh a b", "one folder at a time: a b"),
        ("setup_and_convert.sh --dir", "unknown option --dir"),
        ("install_chakra_tools.sh now", "it takes no arguments"),
        ("run.sh tpu", "say gpu or cpu"),
    ],
)
def test_bad_arguments_are_one_sentence_and_status_2(command: str, fault: str, tmp_path: Path) -> None:
    script, *arguments = command.split()
    result = run(ROOT / script, *arguments, cwd=tmp_path, MASTER_ADDR="")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"{script}: {fault}")
    assert len(result.stderr.splitlines()) == 1


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = run(ROOT / "setup_and_convert.sh", "traces of 월요일", cwd=tmp_path)
    assert result.returncode == 1
    assert f"no folder {tmp_path}/traces of 월요일: copy the" in result.stderr


@pytest.mark.parametrize("command", [["build.sh"], ["run.sh", "cpu"]])
def test_docker_that_does_not_answer_is_one_sentence(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    result = run(ROOT / command[0], *command[1:], PATH=f"{tmp_path}:/usr/bin:/bin")
    assert result.returncode == 1
    assert result.stderr.startswith(f"{command[0]}: Docker does not answer")


def test_no_python_is_one_sentence(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "tr", "sed", "env"):
        (tools / name).symlink_to(shutil.which(name))
    result = run(ROOT / "run_gpt2_quick.sh", PATH=str(tools), VIRTUAL_ENV="", CONDA_PREFIX="")
    assert result.returncode == 1
    assert result.stderr == "run_gpt2_quick.sh: Python 3.10 or newer is needed and none is on the PATH\n"
