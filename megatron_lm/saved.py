"""Whether what a run reads is complete: indexed datasets, PREFIX.bin and PREFIX.idx, and checkpoints,
``SAVE/iter_0000050``. A checkpoint exists once it has its meta.json, with the size and SHA-256 of each file.

Needs neither PyTorch nor numpy, because submission asks it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from chakra_et import files

# The index as megatron.core.datasets.indexed_dataset writes it: this header, then an int32 length and an
# int64 offset per sequence, then an int64 per document.
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the tokens' type, sequences, documents
MAGIC = b"MMIDIDX\0\0"
TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
LENGTH, OFFSET = struct.Struct("<i"), struct.Struct("<q")
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


def dataset_damage(prefix: str | Path) -> str:
    """What is wrong with the dataset's files, as a clause; empty if they are complete."""
    tokens, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    for path in (tokens, index):
        if not path.is_file():
            return f"there is no {path}; make it with megatron_lm/preprocess_data.py"
    try:
        with index.open("rb") as file:
            head = file.read(HEADER.size)
            if len(head) < HEADER.size or not head.startswith(MAGIC):
                return f"{index} is not the index of a dataset; make it with megatron_lm/preprocess_data.py"
            _, _, code, sequences, documents = HEADER.unpack(head)
            offsets = HEADER.size + sequences * LENGTH.size
            end = offsets + sequences * OFFSET.size + documents * OFFSET.size
            if not sequences or index.stat().st_size < end:
                return f"{index} is cut off; copy it again, or make it with megatron_lm/preprocess_data.py"
            file.seek(offsets - LENGTH.size)
            (length,) = LENGTH.unpack(file.read(LENGTH.size))
            file.seek(offsets + (sequences - 1) * OFFSET.size)
            (offset,) = OFFSET.unpack(file.read(OFFSET.size))
        if tokens.stat().st_size < offset + length * TOKEN_BYTES.get(code, 1):
            return f"{tokens} is cut off; copy it again, or make it with megatron_lm/preprocess_data.py"
    except OSError as error:
        return f"{index} can't be read ({error.strerror})"
    return ""
