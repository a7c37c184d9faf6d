"""Every command of the planner's README, and its cluster file."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fasop.inputs.clusters import load_clusters

README = Path(__file__).resolve().parents[2] / "fasop" / "README.md"
BLOCK = re.compile(r"```(bash|yaml)\n(.*?)```", re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(README.read_text(encoding="utf-8")) if name == language]


@pytest.mark.parametrize("command", [line for block in blocks("bash") for line in block.splitlines()])
def test_a_command_of_the_readme(command: str, tmp_path: Path) -> None:
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    script = words[1]
    if script.endswith(".py"):
        words[1] = str(README.parents[1] / script)
    target = None
    if ">" in words:
        target = tmp_path / words.pop()
        words.remove(">")
    clusters, layouts = blocks("yaml")
    (tmp_path / "my.yaml").write_text(clusters, encoding="utf-8")
    (tmp_path / "layouts.yaml").write_text(layouts, encoding="utf-8")
    if "plans.json" in words and not target:
        plan = [
            "-m",
            "fasop",
            "plan",
            "--model",
            "gpt2-xl",
            "--cluster",
            "paper-gpt2xl",
            "--json",
            "--pp",
            "8",
        ]
        made = subprocess.run([sys.executable, *plan], cwd=README.parents[1], capture_output=True, text=True)
        (tmp_path / "plans.json").write_text(made.stdout, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(README.parents[1])}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if target:
        target.write_text(done.stdout, encoding="utf-8")
    elif "--csv" in words:
        assert (tmp_path / "rows.csv").read_text(encoding="utf-8").count("\n") == 357
    else:
        shown = {"simulate": "traces: 32 files", "export": "PARTITION=", "evaluate": "1.4022"}
        assert shown.get(words[3] if words[1] == "-m" else "", "Plan 1") in done.stdout


def test_the_cluster_file_of_the_readme(tmp_path: Path) -> None:
    text, _ = blocks("yaml")
    path = tmp_path / "my.yaml"
    path.write_text(text, encoding="utf-8")
    (cluster,) = load_clusters(str(path))
    assert cluster.gpu_count == 24 and cluster.links[0].latency == 0.002
