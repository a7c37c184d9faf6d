"""The communication operations of a rank, its process groups, and the kernels that communicate by name."""

from __future__ import annotations

import functools
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from chakra_et.errors import TraceError, reason, time_limit
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.files import read_json
from chakra_et.findings import Findings

BY_STREAM = "by the order of streams"
"""The description of groups that aren't recorded."""
Operation = CollectiveType | Literal[NodeType.COMM_SEND, NodeType.COMM_RECV]


@dataclass(frozen=True)
class Group:
    """A process group: name and description in PyTorch, and global ranks (empty if not recorded)."""

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()

    def global_rank(self, rank: int) -> int:
        """The global rank of ``rank`` in the group; ``rank`` itself if the members are not recorded."""
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else rank


def group_number(group: Group) -> int:
    """The id of a group in the files: an integer ≥ 1, the same on all ranks.

    PyTorch names groups by a counter from 0, so the default group gets id 1. For a name that is not a number,
    the id is made from its hash.
    """
    if group.name.isascii() and group.name.isdigit() and len(group.name) < 9:
        return int(group.name) + 1
    text = f"{group.name} {group.ranks}".encode()
    return 500_000_000 + zlib.crc32(text) % 499_999_999


@dataclass(frozen=True)
class Communication:
    """One communication operation of a rank.

    - ``event``: row in the device trace; ``launch``: row of the operator that started it, -1 for none
    - ``type``: COMM_SEND, COMM_RECV or COMM_COLL
    - ``collective``: None for messages and for unknown operations
    - ``size``: bytes that this rank contributes (the shard of an all-gather) or receives (COMM_RECV); 0 if
      not recorded, 1 for a barrier or an empty tensor: no simulator ends one of 0 bytes
    - ``peer``: global rank of the other side of a message, -1 if unknown
    - ``sequence``: index among the collectives of its group, from 0
    - ``in_split``, ``out_split``: rows that an uneven all-to-all sends to and gets from each member
    - ``part``: index among the messages of one kernel
    """

    event: int
    launch: int
    type: NodeType
    collective: CollectiveType | None
    size: int
    group: Group
    dtype: str = ""
    peer: int = -1
    tag: int = 0
    asynchronous: bool | None = None
    sequence: int = -1
    on_gpu: bool = False
    storages: frozenset[int] = frozenset()
    api: str = ""
    part: int = 0
    in_split: str = ""
    out_split: str = ""

    @property
    def is_message(self) -> bool:
        """Whether it is a send or receive."""
        return self.type is not NodeType.COMM_COLL

    @property
    def is_local(self) -> bool:
        """Whether it is a collective of one rank: it moves no data and counts as compute."""
        return not self.is_message and len(self.group.ranks) == 1


@dataclass(eq=False, repr=False)
class Communications:
    """All communication of a rank in launch order, its process groups by name, and the findings."""

    items: list[Communication] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)


# ---- the kernels: a table in a data file, which users can extend ----

SENDRECV = "sendrecv"
TABLE = Path(__file__).with_name("communication_kernels.json")
_BY_WORD: dict[str, Operation] = {"send": NodeType.COMM_SEND, "recv": NodeType.COMM_RECV}
_BY_WORD |= {kind.name.lower(): kind for kind in CollectiveType}
# In the order in which they are looked for in a name, as some are parts of others.
_WORDS = "barrier all_reduce all_gather reduce_scatter all_to_all broadcast scatter gather send recv reduce"


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
    if SENDRECV in letters:
        return None
    return next((_BY_WORD[word] for word in _WORDS.split() if word.replace("_", "") in letters), None)


@functools.cache
def _patterns(path: Path) -> tuple[Pattern, ...]:
    """The rows of a table. Raises ``TraceError`` for an unreadable file or an invalid row."""
    patterns = []
    try:
        for row in read_json(path)["kernels"]:
            word = row.get("operation")
            if word is not None and word != SENDRECV and word not in _BY_WORD:
                raise ValueError(f"operation {word!r} is none of {', '.join(_BY_WORD)}, {SENDRECV} or null")
            pattern = re.compile(str(row["pattern"]), re.IGNORECASE)
            library = str(row.get("library") or "")
            patterns.append(Pattern(pattern, library, _BY_WORD.get(str(word)), word == SENDRECV))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error) as error:
        raise TraceError(
            f"{path}: not a table of communication kernels, it {reason(error)}: give "
            '{"kernels": [{"pattern": …, "library": …, "operation": …}]} as in communication_kernels.json.'
        ) from None
    return tuple(patterns)


def communication_names(names: list[str], added: str = "") -> dict[int, Pattern]:
    """Index of each communication kernel in ``names`` → its row of the table, first of those in the user's
    file ``added``. Raises ``TraceError`` for a pattern that never ends."""
    patterns = _patterns(Path(added)) if added else ()
    patterns += _patterns(TABLE) if any(names) else ()
    slow = TraceError(f"{added}: a pattern takes too long to match: give simpler ones.")
    # Template arguments contain other names and can be thousands of characters long.
    matches = (next((row for row in patterns if row.pattern.search(name[:200])), None) for name in names)
    with time_limit(10 + len(names) / 1000, slow):
        found = {code: row for code, row in enumerate(matches) if row}
    return found
