"""The code against the modules and stubs of PyTorch 2.4, which the Docker image has, as mypy sees them.

They are of a small wheel for another system."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("chakra_et", "fasop", "utils", "megatron_lm", "gpt2", "bert", "examples")
KNOWN = "has no attribute", "Missing positional argument", "Unexpected keyword argument"
UNSTUBBED = '"Store" has no attribute "check"'  # which 2.4 has: its captures of two ranks used it


@pytest.mark.slow
def test_every_name_of_torch_is_there_in_2_4(tmp_path: Path) -> None:
    wheel = [
        "--platform",
        "macosx_11_0_arm64",
        "--python-version",
        "3.11",
        "--only-binary=:all:",
        "torch==2.4.0",
    ]
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(tmp_path),
        *wheel,
    ]
    done = subprocess.run(download, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no wheel of torch 2.4.0: {done.stderr.strip()[-200:]}")
    (path,) = tmp_path.glob("torch-*.whl")
    with zipfile.ZipFile(path) as file:
        texts = [name for name in file.namelist() if name.endswith((".py", ".pyi", "py.typed"))]
        file.extractall(tmp_path / "site", texts)
    config = tmp_path / "mypy.ini"
    config.write_text(
        f"[mypy]\nmypy_path = {tmp_path / 'site'}\nignore_missing_imports = True\nfollow_imports = silent\n"
    )
    check = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(config),
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    found = subprocess.run([*check, *PACKAGES], cwd=ROOT, capture_output=True, text=True).stdout
    assert "site/torch" in found, found[-500:]  # mypy has read 2.4, whose stubs it doesn't like in all places
    ours = [line for line in found.splitlines() if line.startswith(PACKAGES) and UNSTUBBED not in line]
    unknown = [line for line in ours if any(words in line for words in KNOWN)]
    # The module with the name before PyTorch 2.6, which the example tries next.
    assert [line for line in unknown if "fully_shard" not in line] == []
    assert all("examples/fsdp2.py" in line for line in unknown)
