"""Match the communication nodes of different ranks, and report mismatches.

A channel is the collectives of one process group, or the messages with one (source, destination, tag, size).
Its sides are the member ranks of the group, or send and receive. The nth nodes of all sides are one
operation, which starts when the last of them is ready (see ``timing``). A node without a channel is replayed
by itself, for its own recorded duration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from chakra_et.arrays import rows_by_value
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.simulate.joint import EVERY_RANK, ReplayGraph

_MESSAGES = (NodeType.COMM_SEND, NodeType.COMM_RECV)
_EQUAL_SIZES = (CollectiveType.ALL_REDUCE, CollectiveType.REDUCE, CollectiveType.BROADCAST)


@dataclass
class Channel:
    """``sides``: side → rank. A side is a trace index for a group, or 0 (send) and 1 (receive)."""

    label: str
    sides: dict[int, int]
    is_group: bool


@dataclass
class Matching:
    """``channel``, ``side``: int64[N], -1 for a node replayed by itself; ``notes`` give the reasons.

    ``order``: int64[N], by which the nodes of a side are counted: the topological position, or, where it is
    known, the order in which a group's collectives were called (attribute comm_sequence). They may start in
    another order: gloo works on two at a time.
    """

    channel: np.ndarray
    side: np.ndarray
    order: np.ndarray
    channels: list[Channel] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def ordinal(self) -> np.ndarray:
        """int64[N]: each matched node's index within its channel and side, -1 for others."""
        nodes = np.flatnonzero(self.channel >= 0)
        nodes = nodes[np.lexsort((self.order[nodes], self.side[nodes], self.channel[nodes]))]
        new = np.stack([np.diff(column[nodes], prepend=-1) != 0 for column in (self.channel, self.side)])
        starts = np.flatnonzero(new.any(axis=0))
        ordinal = np.full(len(self.channel), -1)
        ordinal[nodes] = np.arange(len(nodes)) - np.repeat(starts, np.diff(starts, append=len(nodes)))
        return ordinal

    @cached_property
    def operation(self) -> np.ndarray:
        """int64[N]: the number of each node's operation, by channel and ordinal; -1 for none."""
        operation = np.full(len(self.channel), -1)
        nodes = np.flatnonzero(self.channel >= 0)
        key = self.channel[nodes] * len(operation) + self.ordinal[nodes]
        operation[nodes] = np.unique(key, return_inverse=True)[1].reshape(-1)
        return operation

    @cached_property
    def members(self) -> list[np.ndarray]:
        """The nodes of each operation."""
        nodes = np.argsort(self.operation, kind="stable")[int((self.operation < 0).sum()) :]
        return np.split(nodes, np.flatnonzero(np.diff(self.operation[nodes])) + 1) if len(nodes) else []

    def last_members(self, start_ns: np.ndarray) -> np.ndarray:
        """int64[N]: of each node of an operation with all sides present, the node that starts last and ends
        the waits of the others; -1 for others. ``start_ns``: on a common clock."""
        nodes, last = self.complete(), np.full(len(self.channel), -1)
        order = nodes[np.argsort(start_ns[nodes], kind="stable")]
        of_operation = np.empty(int(self.operation.max(initial=-1)) + 1, np.int64)
        of_operation[self.operation[order]] = order
        last[nodes] = of_operation[self.operation[nodes]]
        return last

    def complete(self) -> np.ndarray:
        """The nodes of operations of which all sides are there, int64, ascending."""
        nodes = np.flatnonzero(self.channel >= 0)
        sides = np.array([len(channel.sides) for channel in self.channels], dtype=np.int64)
        there = np.bincount(self.operation[nodes])[self.operation[nodes]]
        return nodes[there == sides[self.channel[nodes]]] if len(nodes) else nodes


def match(graph: ReplayGraph, comm_groups: Mapping[str, Sequence[int]] | None = None) -> Matching:
    """Find the channels of all communication nodes.

    ``comm_groups``: group id → ranks, as in ASTRA-sim's comm-group file. The members of a group that is not
    in it are the given ranks that use it; the group of all ranks has ``world_size`` members if the metadata
    has that, or else the given ranks. Raises ``TraceError`` if a rank uses a group that does not include it.
    """
    count = len(graph)
    matching = Matching(np.full(count, -1), np.full(count, -1), graph.position.copy())
    if len(graph.traces) > 1:
        _match_collectives(graph, matching, comm_groups or {})
        _match_messages(graph, matching)
    elif communications := int(np.isin(graph.types, (NodeType.COMM_COLL, *_MESSAGES)).sum()):
        matching.notes.append(
            f"{communications} communication nodes run unmatched for their own durations: there is one rank"
        )
    return matching


def _match_collectives(graph: ReplayGraph, matching: Matching, groups: Mapping[str, Sequence[int]]) -> None:
    collectives = np.flatnonzero(graph.types == NodeType.COMM_COLL)
    sequence = graph.attribute("comm_sequence", -1)
    alone, single = [], []
    everyone = set(graph.ranks)
    for number, nodes in rows_by_value(graph.group, collectives).items():
        name = graph.groups[number]
        users = {graph.ranks[trace] for trace in np.unique(graph.trace_of[nodes]).tolist()}
        members = users
        if name in groups:
            members = set(groups[name])
        elif name == EVERY_RANK:
            members = {*graph.ranks, *range(min(graph.world_size, 2**16))}
        if not users <= members:
            raise TraceError(
                f"rank {min(users - members)} has collectives of group {name}, whose members are ranks "
                f"{_few(sorted(members))}: give the comm-group file of this run"
            )
        if not members <= everyone:
            alone.append(name)
        elif len(members) == 1:
            single.append(name)
        else:
            matching.channel[nodes] = len(matching.channels)
            matching.side[nodes] = graph.trace_of[nodes]
            sides = {trace: rank for trace, rank in enumerate(graph.ranks) if rank in members}
            matching.channels.append(Channel(f"group {name}", sides, is_group=True))
            called = np.stack([graph.trace_of[nodes], sequence[nodes]])
            if (sequence[nodes] >= 0).all() and np.unique(called, axis=1).shape[1] == len(nodes):
                matching.order[nodes] = sequence[nodes]
    if alone:
        matching.notes.append(
            f"collectives of group {_few(alone)} run unmatched for their own durations: "
            "the files of some members were not given"
        )
    if single:
        matching.notes.append(f"collectives of group {_few(single)} run unmatched: the group has one rank")


def _match_messages(graph: ReplayGraph, matching: Matching) -> None:
    nodes = np.flatnonzero(np.isin(graph.types, _MESSAGES))
    is_receive = graph.types[nodes] == NodeType.COMM_RECV
    own_rank = np.array(graph.ranks, dtype=np.int64)[graph.trace_of[nodes]]
    to, sent_by, tag, size = (
        graph.attribute(name, -1)[nodes] for name in ("comm_dst", "comm_src", "comm_tag", "comm_size")
    )
    source, destination = np.where(is_receive, sent_by, own_rank), np.where(is_receive, own_rank, to)
    given = np.isin(source, graph.ranks) & np.isin(destination, graph.ranks)
    if not given.all():
        matching.notes.append(
            f"{int((~given).sum())} sends and receives run unmatched for their own durations: the peer is "
            "not recorded or its file was not given"
        )
    if not given.any():
        return
    keys = np.stack([source, destination, tag, size])[:, given]
    kinds, index = np.unique(keys, axis=1, return_inverse=True)
    matching.channel[nodes[given]] = len(matching.channels) + index.reshape(-1)
    matching.side[nodes[given]] = is_receive[given]
    for sender, receiver, number, length in kinds.T.tolist():
        label = f"rank {sender} to rank {receiver}, tag {number}, {length} bytes"
        matching.channels.append(Channel(label, {0: sender, 1: receiver}, is_group=False))


def compared(graph: ReplayGraph) -> np.ndarray:
    """What must be equal in the members of a collective, int64[2, N]: its type, and its size, except that
    the sizes of gathers, scatters and all-to-alls may differ between ranks."""
    kind, size = (graph.attribute(name, -1) for name in ("comm_type", "comm_size"))
    what = np.stack([kind, np.where(np.isin(kind, _EQUAL_SIZES), size, 0)])
    what[:, graph.types != NodeType.COMM_COLL] = 0
    return what


def differing(graph: ReplayGraph, matching: Matching) -> np.ndarray:
    """Whether the members of each operation differ in type or size, bool[K]."""
    nodes = np.flatnonzero(matching.operation >= 0)
    nodes = nodes[np.argsort(matching.operation[nodes], kind="stable")]
    what, operation = compared(graph)[:, nodes], matching.operation[nodes]
    differ = (operation[1:] == operation[:-1]) & (what[:, 1:] != what[:, :-1]).any(axis=0)
    found = np.zeros(int(operation.max(initial=-1)) + 1, bool)
    found[operation[1:][differ]] = True
    return found


OTHER_ORDERS = "they issue them in different orders: --semantics device, and chakra-et astra, give them one"


def disagreement(graph: ReplayGraph, matching: Matching, ordinal: int, nodes: list[int]) -> TraceError:
    """The error for collectives ``nodes`` that meet in a replay, but differ in type or size."""
    what, nodes = compared(graph), sorted(nodes)
    other = next(node for node in nodes if (what[:, node] != what[:, nodes[0]]).any())
    found = " but ".join(
        f"{_named(*what[:, node].tolist())} on rank {graph.rank(node)} ({graph.describe(node)})"
        for node in (nodes[0], other)
    )
    label, remedy = matching.channels[matching.channel[nodes[0]]].label, "convert the files of one run"
    if np.ptp(matching.operation[nodes]):
        remedy = OTHER_ORDERS
    return TraceError(f"the ranks disagree: collective {ordinal + 1} of {label} is {found}; {remedy}")


def _named(kind: int, size: int) -> str:
    name = CollectiveType(kind).name if kind in set(CollectiveType) else f"collective type {kind}"
    return f"{name} of {size} bytes" if kind in _EQUAL_SIZES else name


def deadlock(
    graph: ReplayGraph,
    matching: Matching,
    arrived: Mapping[tuple[int, int], list[int]],
    unfinished: np.ndarray,
    remedy: str = "convert the files of one run",
) -> TraceError:
    """The error that lists which rank waits for what.

    ``arrived``: (channel, ordinal) → the nodes that wait there; ``unfinished``: node numbers, int64.
    """
    waits = []
    for (number, ordinal), nodes in sorted(arrived.items())[:3]:
        channel = matching.channels[number]
        here = ", ".join(f"rank {graph.rank(node)} at {graph.describe(node)}" for node in nodes[:4])
        absent = []
        for side in sorted(channel.sides.keys() - {int(matching.side[node]) for node in nodes}):
            total = int(np.sum((matching.channel == number) & (matching.side == side)))
            has = "never gets there" if total > ordinal else f"has {total} of them"
            absent.append(f"rank {channel.sides[side]}, which {has}")
        what = "collective" if channel.is_group else ("receive" if matching.side[nodes[0]] else "send")
        waits.append(f"{what} {ordinal + 1} of {channel.label} ({here}) waits for {', '.join(absent[:4])}")
    names = ", ".join(f"rank {graph.rank(node)} {graph.describe(node)}" for node in unfinished[:5].tolist())
    return TraceError(
        f"the ranks disagree: {'; '.join(waits)}; {len(unfinished)} nodes never end ({names}"
        f"{', …' if len(unfinished) > 5 else ''}); {remedy}"
    )


def _few(names: Sequence[str | int]) -> str:
    return ", ".join(map(str, names[:5])) + (", …" if len(names) > 5 else "")
