"""Tests that need shared data skip where it is missing, wholly or in part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.shared import shared_path

TESTS = Path(__file__).resolve().parent
NAME, FILES = "data/tokenizers/gpt2", ("tokenizer.json", "tokenizer_config.json")


def test_all_there(tmp_path: Path) -> None:
    folder = tmp_path / NAME
    folder.mkdir(parents=True)
    for file in FILES:
        (folder / file).touch()
    assert shared_path(NAME, *FILES, shared=tmp_path) == folder
    assert shared_path(f"{NAME}/tokenizer.json", shared=tmp_path) == folder / "tokenizer.json"


@pytest.mark.parametrize("there", [None, "", "data", NAME, f"{NAME}/{FILES[0]}"])
def test_something_missing(tmp_path: Path, there: str | None) -> None:
    """No folder at all, an empty one, one without the data, and one that lacks a file."""
    shared = tmp_path / "shared"
    if there is not None:
        (shared / there).mkdir(parents=True)
    with pytest.raises(pytest.skip.Exception, match="beside the checkout"):
        shared_path(NAME, *FILES, shared=shared)


def test_no_test_finds_shared_data_by_itself() -> None:
    """A path of its own would be missing where the folder is there but empty."""
    pattern = re.compile(r"""["'/]shared["'/]""")
    users = [path for path in TESTS.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))]
    assert {path.name for path in users} <= {"shared.py", Path(__file__).name}
