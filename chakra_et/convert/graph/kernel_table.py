"""Communication kernels by name: a table in a data file, which users can extend."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chakra_et.errors import TraceError, reason
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.files import read_json

Operation = CollectiveType | Literal[NodeType.COMM_SEND, NodeType.COMM_RECV]
SENDRECV = "sendrecv"
TABLE = Path(__file__).with_name("communication_kernels.json")

# Part of a name, letters only → operation. The first match wins.
_PARTS: tuple[tuple[str, Operation], ...] = (
    ("barrier", CollectiveType.BARRIER),
    ("allreduce", CollectiveType.ALL_REDUCE),
    ("allgather", CollectiveType.ALL_GATHER),
    ("reducescatter", CollectiveType.REDUCE_SCATTER),
    ("alltoall", CollectiveType.ALL_TO_ALL),
    ("broadcast", CollectiveType.BROADCAST),
    ("scatter", CollectiveType.SCATTER),
    ("gather", CollectiveType.GATHER),
    ("send", NodeType.COMM_SEND),
    ("recv", NodeType.COMM_RECV),
    ("reduce", CollectiveType.REDUCE),
)
_BY_WORD: dict[str, Operation] = {kind.name.lower(): kind for kind in CollectiveType}
_BY_WORD |= {"send": NodeType.COMM_SEND, "recv": NodeType.COMM_RECV}


@dataclass(frozen=True)
class Pattern:
    """One row of the table. ``ambiguous``: a send/receive kernel, which NCCL also uses for all-to-alls."""

    pattern: re.Pattern[str]
    library: str
    operation: Operation | None
    ambiguous: bool


def operation_named(name: str) -> Operation | None:
    """The operation in a name such as ``c10d::_allgather_base_`` or ``ncclDevKernel_AllReduce_Sum_f32``; None
    if there is none, or both send and receive."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    if "sendrecv" in letters:
        return None
    return next((what for part, what in _PARTS if part in letters), None)


@functools.cache
def kernel_patterns(added: str = "") -> tuple[Pattern, ...]:
    """The rows of the table, those of the user's file ``added`` first.

    Raises ``TraceError`` for an unreadable file or an invalid row.
    """
    return (*(_read(Path(added)) if added else ()), *_read(TABLE))


def _read(path: Path) -> tuple[Pattern, ...]:
    try:
        rows = read_json(path)["kernels"]
        return tuple(_row(row) for row in rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error) as error:
        raise TraceError(
            f"{path}: not a table of communication kernels, it {reason(error)}: give "
            '{"kernels": [{"pattern": …, "library": …, "operation": …}]} as in communication_kernels.json.'
        ) from None


def _row(row: dict[str, str | None]) -> Pattern:
    word = row.get("operation")
    if word is not None and word != SENDRECV and word not in _BY_WORD:
        raise ValueError(f"operation {word!r} is not one of {', '.join(_BY_WORD)}, {SENDRECV} or null")
    operation = None if word in (None, SENDRECV) else _BY_WORD[str(word)]
    pattern = re.compile(str(row["pattern"]), re.IGNORECASE)
    return Pattern(pattern, str(row.get("library") or ""), operation, word == SENDRECV)


def communication_names(names: list[str], added: str = "") -> dict[int, Pattern]:
    """Index of each communication kernel in ``names`` → its row of the table."""
    patterns = kernel_patterns(added) if added or any(names) else ()
    found = {}
    for code, name in enumerate(names):
        # Template arguments contain other names and can be thousands of characters long.
        head = name[:200]
        match = next((row for row in patterns if row.pattern.search(head)), None)
        if match:
            found[code] = match
    return found
