"""Where checkpoints are: ``SAVE/iter_0000050``, complete once it has its meta.json. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

META = "meta.json"


def of_iteration(save: Path, iteration: int) -> Path:
    """The folder of the checkpoint after ``iteration``."""
    return save / f"iter_{iteration:07d}"


def newest(path: Path) -> Path | None:
    """``path`` if it is a checkpoint, else the newest of the checkpoints in it; None if there is none."""
    if (path / META).is_file():
        return path
    found = sorted(folder.parent for folder in path.glob(f"iter_*/{META}")) if path.is_dir() else []
    return found[-1] if found else None


def read_meta(folder: Path) -> dict[str, Any]:
    """What a checkpoint records of itself. Raises ``OSError`` or ``ValueError``."""
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    if not isinstance(meta, dict):
        raise ValueError(f"{META} is not an object")
    return meta
