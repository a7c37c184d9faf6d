"""Where checkpoints are: ``SAVE/iter_0000050``, complete once it has its meta.json, which has the size and
SHA-256 of each other file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chakra_et import files

META = "meta.json"


def of_iteration(save: Path, iteration: int) -> Path:
    """The folder of the checkpoint after ``iteration``."""
    return save / f"iter_{iteration:07d}"


def newest_first(path: Path) -> list[Path]:
    """``path`` alone if it is a checkpoint, else the checkpoints in it."""
    if (path / META).is_file():
        return [path]
    found = sorted(folder.parent for folder in path.glob(f"iter_*/{META}")) if path.is_dir() else []
    return found[::-1]


def newest_whole(path: Path) -> tuple[Path | None, list[str]]:
    """(the newest checkpoint that is not damaged; a sentence on each newer one). Reads files whole."""
    damaged: list[str] = []
    for folder in newest_first(path):
        if not (problem := damage(folder)):
            return folder, damaged
        damaged.append(f"checkpoint {folder} is damaged: {problem}")
    return None, damaged


def damage(folder: Path, part: int = 0, parts: int = 1) -> str:
    """What is wrong with a checkpoint's files, as a clause; empty if nothing is.

    part, parts: look only at every ``parts``-th file from the ``part``-th on.
    """
    try:
        for name, (size, digest) in sorted(read_meta(folder).get("files", {}).items())[part::parts]:
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found:,} bytes instead of {size:,}"
            if files.sha256(folder / name) != digest:
                return f"{name} has changed since it was written (SHA-256)"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"can't be read ({error})"
    return ""


def read_meta(folder: Path) -> dict[str, Any]:
    """What a checkpoint records of itself. Raises ``OSError`` or ``ValueError``."""
    return dict(json.loads((folder / META).read_text(encoding="utf-8")))
