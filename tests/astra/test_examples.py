"""The sets that come with the package: small, whole, and as they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.astra.examples import FOLDER, examples
from tests.astra.sets import run_astra


def test_all_examples_together_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2_000_000
    assert {path.name.removesuffix(".tar.xz") for path in FOLDER.glob("*.tar.xz")} == set(examples())
    assert len(examples()) == 3


@pytest.mark.parametrize(
    "name", ["gpt2-gloo", "gpt2-xl-planned", pytest.param("megatron-pp2-dp2", marks=pytest.mark.slow)]
)
def test_an_example_runs_and_gives_the_expected_times(name: str, tmp_path: Path) -> None:
    assert main(["fetch-example", name, "-o", str(tmp_path)]) == 0
    folder = tmp_path / name
    about = json.loads((folder / "expected.json").read_text())
    assert about["ranks"] == examples()[name]["ranks"]
    assert main(["validate", str(folder / about["name"]), "--for", "astra-sim"]) == 0
    done = run_astra(folder)
    assert done.returncode == 0, done.stdout
    assert main(["astra", str(folder), "--check", str(folder / "astra.log"), "--max-error", "1"]) == 0
    assert main(["replay", str(folder / about["name"]), "--max-error", "3"]) == 0


def test_what_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch-example"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in examples())
    (tmp_path / "gpt2-gloo").mkdir()
    assert main(["fetch-example", "gpt2-gloo", "-o", str(tmp_path)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["fetch-example", "gpt5"]) == 2
    assert "no example 'gpt5'" in capsys.readouterr().err
