"""What a check of .et files looks for, as a table, and one file as the rules see it.

Sources: mlc-chakra 1.0.0's feeder and ASTRA-sim's workload layer, by their behaviour.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from chakra_et.et.columns import Attribute, ExecutionTrace, NodeType, Strings
from chakra_et.et.edges import Edges, edges_of, forward_position

RING_OF_TWO = "two ranks: ASTRA-sim's congestion-aware network goes wrong on a Ring of 2, so choose a Switch"

# Rule → (severity, what happens to who ignores it). A "note" is about the simulator's set-up, not the file.
RULES: dict[str, tuple[str, str]] = {
    "unreadable": ("error", "the bytes aren't an execution trace"),
    "metadata-missing": ("error", "a file that doesn't start with GlobalMetadata loses its first node"),
    "no-nodes": ("error", "nothing to run"),
    "duplicate-id": ("error", "the last node of an id replaces the others"),
    "absent-dependency": ("error", "ASTRA-sim aborts; the Chakra feeder never frees the node"),
    "repeated-dependency": ("error", "the Chakra feeder never frees a node that names a dependency twice"),
    "repeated-ctrl-dependency": ("warning", "harmless today: no feeder counts ctrl_deps"),
    "self-dependency": ("error", "the node never runs, and the simulator still exits with 0"),
    "cycle": ("error", "the nodes never run, and the simulator still exits with 0"),
    "no-root": ("error", "no node can run first: ASTRA-sim aborts"),
    "ready-set": ("warning", "very many nodes ready at once make ASTRA-sim slow"),
    "id-order": ("warning", "lowest ready id first: ids against start times change the order between ranks"),
    "node-type": ("error", "no such node type"),
    "metadata-node": ("error", "ASTRA-sim aborts on METADATA nodes"),
    "attribute-kind": ("error", "the feeders read the attribute from one member of its value only"),
    "attribute-kind-unusual": ("warning", "the reference converter writes the attribute with another kind"),
    "unknown-field": ("warning", "fields that the schema doesn't have, or attributes given twice"),
    "text-encoding": ("error", "protobuf readers refuse text that isn't UTF-8"),
    "comm-type-missing": ("error", "ASTRA-sim throws without it"),
    "comm-type-unknown": ("error", "no such collective"),
    "comm-type-unsupported": ("warning", "ASTRA-sim doesn't simulate the collective"),
    "comm-size-missing": ("error", "ASTRA-sim throws without it"),
    "comm-size-zero": ("error", "a communication of no bytes never finishes"),
    "all-gather-small": ("error", "an all-gather of fewer bytes than preferred-dataset-splits hangs"),
    "comm-peer-missing": ("error", "a send needs comm_dst and comm_tag, a receive comm_src and comm_tag"),
    "tensor-size-missing": ("warning", "memory nodes are simulated from tensor_size"),
    "comm-on-cpu": ("error", "communication with is_cpu_op=true is run as a CPU operator"),
    "pg-name-text": ("error", "pg_name must be an integer: '12ab' reads as 12"),
    "pg-name-zero": ("warning", "pg_name '0' stands for all ranks"),
    "pg-name-unknown": ("error", "pg_name isn't in the comm-group file"),
    "comm-groups-missing": ("warning", "without a comm-group file groups can't be checked, nor simulated"),
    "group-file": ("error", "group ids are integers from 1 on, ranks are from 0 on and unique"),
    "group-one-member": ("error", "a group with one member never finishes"),
    "rank-not-in-group": ("error", "a rank communicates in a group that it isn't in"),
    "duration-bound": ("error", "a duration that is negative or longer than 30 days"),
    "start-bound": ("error", "a start time that is negative or beyond 2^53 µs"),
    "no-durations": ("warning", "all durations are 0: a replay takes no time"),
    "rank-beyond-world": ("error", "the metadata's rank isn't below its world_size"),
    # Of files checked against each other:
    "single-rank": ("warning", "ASTRA-sim needs two ranks or more"),
    "ring-of-two": ("note", "a congestion-aware Ring with 2 ranks goes wrong in ASTRA-sim"),
    "rank-missing": ("error", "ASTRA-sim opens the file of each rank, and ends where one is missing"),
    "rank-twice": ("error", "two files hold the same rank"),
    "rank-name": ("error", "the file's name and its metadata say different ranks"),
    "world-size": ("error", "the files come from runs with different numbers of ranks"),
    "group-rank-absent": ("error", "a group has a member that isn't a rank of the run"),
    "collective-count": ("error", "ranks are left waiting, and the simulator still exits with 0"),
    "collective-type": ("error", "ranks are left waiting, and the simulator still exits with 0"),
    "collective-size": ("error", "ranks are left waiting, and the simulator still exits with 0"),
    "collective-size-uneven": ("warning", "ranks of this collective may differ, but no simulator expects it"),
    "p2p-rank": ("error", "a send or receive whose peer isn't another rank of the run"),
    # Of --for astra-sim:
    "astra-memory-node": ("error", "ASTRA-sim ends the run: it has no remote memory"),
    "astra-collective": ("error", "ASTRA-sim throws"),
    "astra-roofline": ("error", "the compute node takes no time"),
    "astra-group-file": ("error", "every group but that of all ranks is unknown: ASTRA-sim ends the run"),
    "astra-network": ("error", "ASTRA-sim aborts, or simulates other links"),
    "astra-bandwidth": ("warning", "GB/s for GiB/s make the network 7.4% too fast"),
    "astra-dimensions": ("warning", "ASTRA-sim aborts at the end of the run, after correct results"),
    "astra-system": ("error", "ASTRA-sim aborts, or hangs"),
    "p2p-unmatched": ("error", "a send and its receive must agree on source, target, tag and size"),
}

INTEGER = re.compile(rb"[1-9][0-9]{0,8}")
TEXT_GROUP, ALL_RANKS = -1, 0


class Finding(NamedTuple):
    """``rows`` (maybe none) break ``rule``; ``message`` says how the first of them does, and what to do."""

    rule: str
    rows: np.ndarray | list[int]
    message: str


@dataclass
class File:
    """One file under check. ``rank`` None: unknown; ``comm_groups`` None: no comm-group file."""

    trace: ExecutionTrace
    rank: int | None = None
    comm_groups: dict[str, list[int]] | None = None
    dataset_splits: int = 4
    group_of: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.group_of = _groups(self)

    @cached_property
    def edges(self) -> Edges:
        return edges_of(self.trace)

    @cached_property
    def position(self) -> np.ndarray | None:
        return forward_position(self.trace, self.edges)

    def of_type(self, *types: NodeType) -> np.ndarray:
        return np.isin(self.trace.types, types)

    def columns(self, name: str) -> list[Attribute]:
        """The attribute with every kind that it has in the file."""
        attributes = self.trace.attributes.items()
        return [column for key, column in attributes if key == name or key.startswith(f"{name}#")]

    def has(self, name: str) -> np.ndarray:
        present = np.zeros(len(self.trace), bool)
        for column in self.columns(name):
            present[column.rows] = True
        return present

    def integer(self, name: str, default: int) -> np.ndarray:
        """The attribute as int64[N], whichever kind of integer it has."""
        dense = np.full(len(self.trace), default, np.int64)
        for column in self.columns(name):
            if not isinstance(column.values, Strings) and column.values.dtype.kind in "iu":
                dense[column.rows] = column.values.astype(np.int64)
        return dense

    @cached_property
    def communicates(self) -> np.ndarray:
        return self.of_type(NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV)

    @cached_property
    def size(self) -> np.ndarray:
        return self.integer("comm_size", 0)

    @cached_property
    def collective(self) -> np.ndarray:
        """``comm_type`` of the collectives that have one, -1 for all other nodes."""
        return np.where(self.of_type(NodeType.COMM_COLL), self.integer("comm_type", -1), -1)


def _groups(file: File) -> np.ndarray:
    """The group of each node, int64[N]: ``ALL_RANKS``, a positive id, or ``TEXT_GROUP`` for no number."""
    groups = np.full(len(file.trace), ALL_RANKS)
    for column in file.columns("pg_name"):
        if isinstance(column.values, Strings):
            numbers = [
                int(text) if INTEGER.fullmatch(text) else ALL_RANKS if text in (b"", b"0") else TEXT_GROUP
                for text in column.values.table
            ]
            groups[column.rows] = np.array(numbers, np.int64)[column.values.index]
        else:
            groups[column.rows] = TEXT_GROUP
    return groups
