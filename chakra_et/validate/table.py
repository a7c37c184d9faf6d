"""The table of rules for .et files, and the view of a file that the rules work on.

Source of the rules: the observed behaviour of mlc-chakra 1.0.0's feeder and of ASTRA-sim's workload layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from chakra_et.et.columns import FOR_ALL, CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.edges import Edges, edges_of
from chakra_et.et.node_attributes import communicates, texts
from chakra_et.et.sets import GROUP_ID

# Rule → severity, with what a simulator makes of it.
RULES = {
    "unreadable": "error",  # the file is not an execution trace
    "metadata-missing": "error",  # the first message is taken for GlobalMetadata: the first node is lost
    "no-nodes": "error",  # there is nothing to run
    "duplicate-id": "error",  # the last node with an id replaces the others
    "absent-dependency": "error",  # ASTRA-sim aborts; the Chakra feeder never frees the node
    "repeated-dependency": "error",  # the Chakra feeder never frees a node that lists a dependency twice
    "self-dependency": "error",  # the node never runs, and the simulator still exits with 0
    "cycle": "error",  # the nodes never run, and the simulator still exits with 0
    "id-order": "warning",  # the lowest ready id runs first: other ids, another order of nodes
    "node-type": "error",  # no such node type
    "metadata-node": "error",  # ASTRA-sim aborts on METADATA nodes
    "attribute-kind": "error",  # the feeders read the attribute from one member of AttributeProto.value only
    "attribute-kind-zero": "warning",  # the same, but read as 0, which it is
    "comm-type-missing": "error",  # ASTRA-sim throws without it
    "comm-type-unknown": "error",  # no such collective
    "comm-type-unsupported": "warning",  # ASTRA-sim does not simulate the collective
    "comm-size-missing": "error",  # ASTRA-sim throws without it
    "comm-size-zero": "error",  # communication of 0 bytes never finishes
    "comm-peer-missing": "error",  # a send needs comm_dst and comm_tag, a receive comm_src and comm_tag
    "tensor-size-missing": "warning",  # simulators time memory nodes by tensor_size
    "comm-on-cpu": "error",  # a communication node with is_cpu_op=true runs as a CPU operator
    "pg-name-text": "error",  # pg_name must be an integer: '12ab' is read as 12
    "pg-name-zero": "warning",  # pg_name '0' means all ranks
    "pg-name-unknown": "error",  # the group is not in the comm-group file
    "comm-groups-missing": "warning",  # groups can be neither checked nor simulated without the file
    "group-file": "error",  # group ids must be integers from 1 on, ranks distinct integers from 0 on
    "group-one-member": "error",  # a collective in a group of one never finishes
    "rank-not-in-group": "error",  # a rank communicates in a group that does not include it
    "duration-bound": "error",  # a duration is negative or longer than 30 days
    "start-bound": "error",  # a start time is negative or beyond 2^53 µs
    "no-durations": "warning",  # all durations are 0: a replay takes no time
    "rank-beyond-world": "error",  # rank in the metadata must be below world_size
    # Rules across the files of a run:
    "single-rank": "warning",  # ASTRA-sim needs at least two ranks
    "rank-missing": "error",  # ASTRA-sim opens one file per rank and exits if one is missing
    "rank-twice": "error",  # two files hold the same rank
    "rank-name": "error",  # the file's name and its metadata disagree about the rank
    "world-size": "error",  # the files come from runs with different numbers of ranks
    "group-rank-absent": "error",  # a group has a member that is not a rank of the run
    "collective-count": "error",  # ranks are left waiting, and the simulator still exits with 0
    "collective-type": "error",  # ranks are left waiting, and the simulator still exits with 0
    "collective-size": "error",  # ranks are left waiting, and the simulator still exits with 0
    "collective-size-uneven": "warning",  # the sizes may differ between ranks, but no simulator expects it
    "collective-splits": "error",  # a rank sends another one as many rows as that one expects
    "p2p-rank": "error",  # the peer of a send or receive is not another rank of the run
    "p2p-unmatched": "error",  # a send and its receive must agree on source, target, tag and size
    # Rules of --for astra-sim:
    "astra-memory-node": "error",  # ASTRA-sim ends the run: it has no remote memory
    "astra-collective": "error",  # ASTRA-sim throws
    "astra-size": "error",  # ASTRA-sim takes the size of a message modulo 2^32, and aborts or is too fast
    "astra-group-file": "error",  # every group but that of all ranks is unknown: ASTRA-sim ends the run
    "astra-network": "error",  # ASTRA-sim aborts
    "astra-order": "warning",  # ranks can wait for each other for ever: chakra-et astra puts them in order
}

SIMULATED = FOR_ALL  # by ASTRA-sim
# Collectives to which ranks may contribute different numbers of bytes.
UNEVEN = (CollectiveType.ALL_GATHER, CollectiveType.GATHER, CollectiveType.SCATTER, CollectiveType.ALL_TO_ALL)
LARGEST_MESSAGE = (1 << 31) - 1
"""Bytes of a message in ASTRA-sim, of which a collective has one for each member."""
TEXT_GROUP, ALL_RANKS = -1, 0


class Finding(NamedTuple):
    """``rows``, or with none the whole file or run, break ``rule``; ``message`` describes the first one and
    what to do."""

    rule: str
    rows: np.ndarray | list[int]
    message: str


def found(
    rule: str, broken: np.ndarray, message: str, values: Sequence[Any] | np.ndarray = ()
) -> Iterator[Finding]:
    """The finding for the nodes where ``broken`` (bool[N]) is true, if any. ``{}`` in the message stands for
    the first one's entry of ``values`` [N], if given."""
    rows = np.flatnonzero(broken)
    if len(rows):
        yield Finding(rule, rows, message.format(values[rows[0]]) if len(values) else message)


@dataclass(eq=False, repr=False)
class File:
    """The file ``name`` being checked. ``rank`` None: unknown; ``comm_groups`` None: no comm-group file."""

    trace: ExecutionTrace
    rank: int | None = None
    comm_groups: dict[str, list[int]] | None = None
    name: str = "trace"

    @cached_property
    def edges(self) -> Edges:
        return edges_of(self.trace)

    def of_type(self, *types: NodeType) -> np.ndarray:
        return np.isin(self.trace.types, types)

    @cached_property
    def communicates(self) -> np.ndarray:
        return communicates(self.trace)

    @cached_property
    def size(self) -> np.ndarray:
        return self.trace.column("comm_size")

    @cached_property
    def collective(self) -> np.ndarray:
        """int64[N]: ``comm_type`` of collectives, -1 for all other nodes and where it is missing."""
        return np.where(self.of_type(NodeType.COMM_COLL), self.trace.column("comm_type", -1), -1)

    @cached_property
    def group_of(self) -> np.ndarray:
        """int64[N]: the group of each node: ``ALL_RANKS``, a positive id, or ``TEXT_GROUP``."""
        table, index = texts(self.trace, "pg_name")
        numbers = [
            int(text) if GROUP_ID.fullmatch(text) else ALL_RANKS if text in ("", "0") else TEXT_GROUP
            for text in table
        ]
        return np.array([*numbers, ALL_RANKS], np.int64)[index]
