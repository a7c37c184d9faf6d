"""The damaged fixtures, one folder per kind of damage, still give their kept results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.generator.damaged import DAMAGE, FOLDER, result

# Stable ids, on which reports and scripts may rely.
KINDS = """
bom leading-garbage trailing-garbage concatenated truncated missing-header damaged-header damaged limit
missing-comma double-comma trailing-comma unescaped-name control-character nan invalid-utf8 gz-truncated
gz-damaged gz-garbage
"""
FOLDERS = sorted(path for path in FOLDER.iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_damaged_fixture_gives_the_kept_result(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert result(folder) == json.loads((folder / "expected.json").read_text())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_each_folder_documents_the_origin_of_its_damage() -> None:
    assert {folder.name for folder in FOLDERS} == set(DAMAGE)
    for folder in FOLDERS:
        assert len((folder / "README.md").read_text().strip().splitlines()) == 1


def test_every_kind_of_repair_has_a_folder() -> None:
    seen = {
        kind
        for folder in FOLDERS
        for kinds in json.loads((folder / "expected.json").read_text())["repairs"].values()
        if isinstance(kinds, list)
        for kind in kinds
    }
    assert seen == set(KINDS.split())
