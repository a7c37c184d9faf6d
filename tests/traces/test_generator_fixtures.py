"""The fixtures, one folder per oddity of the formats, still convert to their kept results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.generator.fixtures import FOLDER, ODDITIES, convert, summary
from tests.simulate.replay_traces import makespan_ns, replay_device

FOLDERS = sorted(path for path in FOLDER.iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_fixture_converts_to_the_kept_result(folder: Path) -> None:
    converted = convert(folder)
    assert summary(converted) == json.loads((folder / "expected.json").read_text())
    assert converted.report.conserved() and converted.report.link_rate == 1.0
    begin, end = int(converted.trace.start_micros.min()), int(converted.trace.metadata["measured_end_micros"])
    assert abs(makespan_ns(replay_device(converted.trace)) / 1000 - (end - begin)) <= 5


def test_each_folder_documents_the_origin_of_its_oddity() -> None:
    assert {folder.name for folder in FOLDERS} == set(ODDITIES)
    for folder in FOLDERS:
        assert len((folder / "README.md").read_text().strip().splitlines()) == 1
