"""The communication operations of a rank: what each is, and which process groups there are."""

from __future__ import annotations

from dataclasses import dataclass, field

from chakra_et.convert.graph.groups import Group
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.findings import Findings


@dataclass(frozen=True)
class Communication:
    """One communication operation of a rank.

    - ``event``: row in the device trace; ``launch``: row of the operator that started it, -1 for none
    - ``type``: COMM_SEND, COMM_RECV or COMM_COLL
    - ``collective``: None for messages and for unknown operations
    - ``size``: bytes that this rank contributes (the shard of an all-gather) or receives (COMM_RECV); 0 if
      not recorded, 1 for a barrier
    - ``peer``: global rank of the other side of a message, -1 if unknown
    - ``is_root``: whether this rank is the root of a scatter
    - ``ended``: whether it ended before the recording stopped
    - ``sequence``: index among the collectives of its group, from 0
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
    is_root: bool = False
    ended: bool = True

    @property
    def is_message(self) -> bool:
        """Whether it is a send or receive."""
        return self.type is not NodeType.COMM_COLL

    @property
    def is_local(self) -> bool:
        """Whether it is a collective of one rank: it moves no data and counts as compute."""
        return not self.is_message and len(self.group.ranks) == 1

    @property
    def start_row(self) -> int:
        """The row whose start time orders the communication."""
        return self.launch if self.launch >= 0 else self.event


@dataclass(eq=False, repr=False)
class Communications:
    """All communication of a rank in launch order, its process groups by name, and the findings."""

    items: list[Communication] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)
