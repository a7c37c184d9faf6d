"""What the tests of clusters share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.convert.test_together import Machine


@pytest.fixture
def traces(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with traces of as many ranks as the module has ``RANKS``."""
    folder, ranks = tmp_path / "traces", request.module.RANKS
    folder.mkdir()
    return Machine([[300.0 + rank] * 3 for rank in range(ranks)], [0.0] * ranks).write(folder)


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """The names and bytes of the files in a folder."""
    return lambda folder: {path.name: path.read_bytes() for path in folder.iterdir()}
