"""Training in a container: how enroot is called, and what an interpreter must have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lm import saved
from scripts.environment import KINDS, requirements_of
from tests.megatron_lm.conftest import REPO_ROOT, Script, put_tool

ENROOT = """
printf '%s\\n' "$*" >>"$0.log"
case $1 in
    list) [ ! -e "$0.made" ] || echo megatron-lm ;;
    create) touch "$0.made" ;;
    remove) rm -f "$0.made" ;;
    start)
        shift
        while [ "$1" != megatron-lm ]; do
            case $1 in --mount | --env) shift 2 ;; *) shift ;; esac
        done
        shift
        exec "$@" ;;
esac
"""


@pytest.mark.slow
def test_with_enroot_the_ranks_run_in_the_container(
    script: Script, tiny: dict[str, str], tmp_path: Path
) -> None:
    """A stand-in for enroot notes how it is called, and runs what it is given without a container."""
    put_tool(tmp_path / "bin", "enroot", ENROOT)
    image = tmp_path / "megatron.sqsh"
    image.touch()
    env = {
        "PATH": f"{tmp_path / 'bin'}:{tiny['PATH']}",
        "CONTAINER_IMAGE_PATH": str(image),
        "CONTAINER_PATH": str(tmp_path / "unpacked"),
        "CONTAINER_NAME": "megatron-lm",
        "CONTAINER_PYTHON": sys.executable,
        "DATA_PATH": str(tmp_path / "data/squad/text"),
    }
    (tmp_path / "data/squad").mkdir(parents=True)
    header = saved.HEADER.pack(saved.MAGIC, 1, 8, 1, 1)
    (tmp_path / "data/squad/text.idx").write_bytes(header + bytes(4 + 2 * 8))
    (tmp_path / "data/squad/text.bin").touch()
    calls = tmp_path / "bin/enroot.log"
    for reload, expected in (("false", 4), ("false", 3), ("true", 5)):
        done = script("_03_submit.sh", "--local", RELOAD_CONTAINER=reload, **env)
        assert done.returncode == 0, done.stderr
        said = calls.read_text().splitlines()
        calls.unlink()
        kinds = [line.split()[0] for line in said]
        assert kinds == [
            *(["remove"] if reload == "true" else []),
            "list",
            *(["create"] if expected > 3 else []),
            "start",  # environment.py check
            "start",
        ]
    assert f"create --name megatron-lm {image}" in said
    start = said[-1]
    for mounted in (f"{tmp_path}/repo", f"{tmp_path}/log2", f"{tmp_path}/data/squad"):
        assert f"--mount {mounted}:{mounted} " in start
    assert "--env MEGATRON_MODEL=tiny " in start and "--env MEGATRON_PARTITION=2-2 " in start
    assert "-m torch.distributed.run" in start


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, ""),
        ({"torch": "2.6.0a0+ecf3bae40a.nv25.01"}, ""),
        ({"torch": "2.0.0a0+1767026.nv23.05"}, "lacks torch>=2.4, torch>=2.6; "),
        ({"megatron-core": ""}, "lacks megatron-core>=0.16.1,<0.17; "),
        ({"msgspec": ""}, "lacks msgspec>=0.18; "),
    ],
)
def test_an_interpreter_that_lacks_a_package_is_refused(
    tmp_path: Path, changed: dict[str, str], sentence: str
) -> None:
    bounds = (line.partition(">=")[::2] for line in requirements_of(KINDS["megatron"]))
    versions = {name: least.partition(",")[0] for name, least in bounds} | changed
    for name, version in versions.items():
        if version:
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    command = [sys.executable, "-S", REPO_ROOT / "scripts/environment.py", "check", "megatron"]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    if not sentence:
        assert (done.returncode, done.stderr) == (0, "")
        return
    assert done.returncode == 1 and not done.stdout
    (said,) = done.stderr.splitlines()
    assert sentence in said and "python3 scripts/environment.py megatron" in said
