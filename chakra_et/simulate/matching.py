"""Match the communication nodes of different ranks, and report mismatches.

A channel is the collectives of one process group, or the messages with one (source, destination, tag, size).
Its sides are the member ranks of the group, or send and receive. The nth nodes of all sides are one
operation, which starts when the last of them is ready (see ``timing``). A node without a channel is replayed
by itself, for its own recorded duration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, NodeType, Strings
from chakra_et.simulate.joint import EVERY_RANK, ReplayGraph

_MESSAGES = (NodeType.COMM_SEND, NodeType.COMM_RECV)
_COMMUNICATION = (NodeType.COMM_COLL, *_MESSAGES)
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

    ``sequence``: int64[N], the order in which a group's collectives were called (attribute comm_sequence), -1
    where it isn't known. They may start in another order: gloo works on two at a time.
    """

    channel: np.ndarray
    side: np.ndarray
    channels: list[Channel] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sequence: np.ndarray | None = None

    def ordinals(self, position: np.ndarray) -> np.ndarray:
        """int64[N]: each node's index within its channel and side, in the order of ``sequence``, or else of
        ``position``."""
        called = np.full(len(position), -1) if self.sequence is None else self.sequence
        order = np.lexsort((position, called, self.side, self.channel))
        channel, side = self.channel[order], self.side[order]
        starts = np.flatnonzero(np.r_[True, (np.diff(channel) != 0) | (np.diff(side) != 0)])
        ordinal = np.empty(len(order), np.int64)
        ordinal[order] = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
        return ordinal

    def operations(self, position: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """The matched operation of each node, int64[N], -1 for none, and the nodes of each operation."""
        operation = np.full(len(position), -1, np.int64)
        nodes = np.flatnonzero(self.channel >= 0)
        if not len(nodes):
            return operation, []
        key = np.stack([self.channel[nodes], self.ordinals(position)[nodes]])
        number = np.unique(key, axis=1, return_inverse=True)[1].reshape(-1)
        operation[nodes] = number
        order = np.argsort(number, kind="stable")
        return operation, np.split(nodes[order], np.flatnonzero(np.diff(number[order])) + 1)


def match(graph: ReplayGraph, comm_groups: Mapping[str, Sequence[int]] | None = None) -> Matching:
    """Find the channels of all communication nodes.

    ``comm_groups``: group id → ranks, as in ASTRA-sim's comm-group file. The members of a group that is not
    in it are the given ranks that use it; the group of all ranks has ``world_size`` members if the metadata
    has that, or else the given ranks. Raises ``TraceError`` if a rank uses a group that does not include it.
    """
    count = len(graph)
    matching = Matching(np.full(count, -1), np.full(count, -1))
    if len(graph.traces) > 1:
        _match_collectives(graph, matching, comm_groups or {})
        _match_messages(graph, matching)
        matching.sequence = _sequence(graph, matching)
    elif communications := int(np.isin(graph.types, _COMMUNICATION).sum()):
        matching.notes.append(
            f"{communications} communication nodes run unmatched for their own durations: there is one rank"
        )
    return matching


def _match_collectives(
    graph: ReplayGraph, matching: Matching, comm_groups: Mapping[str, Sequence[int]]
) -> None:
    collectives = np.flatnonzero(graph.types == NodeType.COMM_COLL)
    alone, single = [], []
    for number in np.unique(graph.group[collectives]).tolist():
        name = graph.groups[number]
        nodes = collectives[graph.group[collectives] == number]
        users = {graph.ranks[trace] for trace in np.unique(graph.trace_of[nodes]).tolist()}
        members = _members(graph, name, users, comm_groups)
        if not users <= members:
            raise TraceError(
                f"rank {min(users - members)} has collectives of group {name}, whose members are ranks "
                f"{_few(sorted(members))}: give the comm-group file of this run"
            )
        if not members <= set(graph.ranks):
            alone.append(name)
        elif len(members) == 1:
            single.append(name)
        else:
            matching.channel[nodes] = len(matching.channels)
            matching.side[nodes] = graph.trace_of[nodes]
            sides = {trace: rank for trace, rank in enumerate(graph.ranks) if rank in members}
            matching.channels.append(Channel(f"group {name}", sides, is_group=True))
    if alone:
        matching.notes.append(
            f"collectives of group {_few(alone)} run unmatched for their own durations: "
            "the files of some members were not given"
        )
    if single:
        matching.notes.append(f"collectives of group {_few(single)} run unmatched: the group has one rank")


def _sequence(graph: ReplayGraph, matching: Matching) -> np.ndarray:
    """``Matching.sequence``: the attribute, for channels whose nodes all have it, each once per side."""
    collectives = np.flatnonzero((matching.channel >= 0) & (graph.types == NodeType.COMM_COLL))
    recorded = graph.attribute("comm_sequence", -1)
    sequence = np.full(len(graph), -1)
    for number in np.unique(matching.channel[collectives]).tolist():
        nodes = collectives[matching.channel[collectives] == number]
        pairs = np.stack([matching.side[nodes], recorded[nodes]])
        if (recorded[nodes] >= 0).all() and np.unique(pairs, axis=1).shape[1] == len(nodes):
            sequence[nodes] = recorded[nodes]
    return sequence


def _members(
    graph: ReplayGraph, group: str, users: set[int], comm_groups: Mapping[str, Sequence[int]]
) -> set[int]:
    if group in comm_groups:
        return set(comm_groups[group])
    if group != EVERY_RANK:
        return users
    sizes = [trace.metadata_int("world_size") for trace in graph.traces]
    return set(graph.ranks).union(*(range(min(size, 2**16)) for size in sizes if size is not None))


def _match_messages(graph: ReplayGraph, matching: Matching) -> None:
    nodes = np.flatnonzero(np.isin(graph.types, _MESSAGES))
    is_receive = graph.types[nodes] == NodeType.COMM_RECV
    own_rank = np.array(graph.ranks, dtype=np.int64)[graph.trace_of[nodes]]
    named = {
        name: graph.attribute(name, -1)[nodes] for name in ("comm_src", "comm_dst", "comm_tag", "comm_size")
    }
    source = np.where(is_receive, named["comm_src"], own_rank)
    destination = np.where(is_receive, own_rank, named["comm_dst"])
    given = np.isin(source, graph.ranks) & np.isin(destination, graph.ranks)
    if not given.all():
        matching.notes.append(
            f"{int((~given).sum())} sends and receives run unmatched for their own durations: the peer is "
            "not recorded or its file was not given"
        )
    if not given.any():
        return
    keys = np.stack([source, destination, named["comm_tag"], named["comm_size"]])[:, given]
    kinds, index = np.unique(keys, axis=1, return_inverse=True)
    matching.channel[nodes[given]] = len(matching.channels) + index.reshape(-1)
    matching.side[nodes[given]] = is_receive[given]
    for sender, receiver, tag, size in kinds.T.tolist():
        label = f"rank {sender} to rank {receiver}, tag {tag}, {size} bytes"
        matching.channels.append(Channel(label, {0: sender, 1: receiver}, is_group=False))


def check_same(graph: ReplayGraph, channel: Channel, ordinal: int, nodes: list[int]) -> None:
    """Raise ``TraceError`` if the matched collectives ``nodes`` differ in type or size."""
    if not channel.is_group:
        return
    nodes, operations = sorted(nodes), []
    for node in nodes:
        kind = _attribute(graph, node, "comm_type")
        # The sizes of gathers, scatters and all-to-alls may differ between ranks.
        operations.append((kind, _attribute(graph, node, "comm_size") if kind in _EQUAL_SIZES else None))
    for node, operation in zip(nodes, operations, strict=True):
        if operation != operations[0]:
            what = " but ".join(
                f"{_operation(*of)} on rank {graph.rank(at)} ({graph.describe(at)})"
                for at, of in ((nodes[0], operations[0]), (node, operation))
            )
            raise TraceError(
                f"the ranks disagree: collective {ordinal + 1} of {channel.label} is {what}; "
                "convert the files of one run, or replay each rank with --alone"
            )


def _attribute(graph: ReplayGraph, node: int, name: str) -> int:
    attribute = graph.traces[graph.trace_of[node]].attributes.get(name)
    if attribute is None or isinstance(attribute.values, Strings) or attribute.values.dtype.kind == "f":
        return -1
    at = int(np.searchsorted(attribute.rows, graph.row[node]))
    present = at < len(attribute.rows) and attribute.rows[at] == graph.row[node]
    return int(attribute.values[at]) if present else -1


def _operation(kind: int, size: int | None) -> str:
    name = CollectiveType(kind).name if kind in set(CollectiveType) else f"collective type {kind}"
    return name if size is None else f"{name} of {size} bytes"


def deadlock(
    graph: ReplayGraph,
    matching: Matching,
    arrived: Mapping[tuple[int, int], list[int]],
    unfinished: np.ndarray,
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
        f"{', …' if len(unfinished) > 5 else ''}); convert the files of one run, "
        "or replay each rank with --alone"
    )


def _few(names: Sequence[str | int]) -> str:
    return ", ".join(map(str, names[:5])) + (", …" if len(names) > 5 else "")
