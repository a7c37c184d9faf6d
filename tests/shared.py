"""The data that developers share in a folder beside the checkout; tests that need it skip without it."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared_path(name: str, *files: str, shared: Path = SHARED) -> Path:
    """The path of ``name``: a file, or a folder with at least ``files`` in it.

    Skips the test where one of them is missing; call it from a test or a fixture.
    """
    path = shared / name
    for wanted in [path / file for file in files] or [path]:
        if not wanted.exists():
            pytest.skip(f"no {wanted.relative_to(shared)} in {shared.name}/ beside the checkout")
    return path
