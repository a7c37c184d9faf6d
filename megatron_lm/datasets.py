"""Whether an indexed dataset, PREFIX.bin and PREFIX.idx, is complete. Standard library only."""

from __future__ import annotations

import struct
from pathlib import Path

# The index as megatron.core.datasets.indexed_dataset writes it: this header, then an int32 length and an
# int64 offset per sequence, then an int64 per document.
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the tokens' type, sequences, documents
MAGIC = b"MMIDIDX\0\0"
TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
LENGTH, OFFSET = struct.Struct("<i"), struct.Struct("<q")


def problem(prefix: str | Path) -> str:
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
