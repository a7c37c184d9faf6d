"""Rules across the .et files of one run: ranks, collectives, sends and receives must agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.validate.table import ALL_RANKS, RING_OF_TWO, File, Finding

# Collectives to which ranks may contribute different numbers of bytes.
UNEVEN = (CollectiveType.ALL_GATHER, CollectiveType.GATHER, CollectiveType.SCATTER, CollectiveType.ALL_TO_ALL)


class RankFinding(NamedTuple):
    """A finding in the file of ``rank``, or in the run as a whole (None)."""

    rank: int | None
    finding: Finding


def check_ranks(files: Mapping[int, File], paths: Mapping[int, str]) -> Iterator[RankFinding]:
    """All findings across the files of one run. ``paths``: rank → the file name to report."""
    world = _world_size(files)
    yield from _check_world(files, paths, world)
    yield from _check_groups(files, world)
    yield from _check_collectives(files, paths)
    yield from _check_messages(files, paths, world)


def _world_size(files: Mapping[int, File]) -> int:
    """The largest ``world_size`` in the metadata, or else the highest rank plus one."""
    sizes = [file.trace.metadata_int("world_size") for file in files.values()]
    return max([size for size in sizes if size is not None and size > 0], default=max(files) + 1)


def _check_world(files: Mapping[int, File], paths: Mapping[int, str], world: int) -> Iterator[RankFinding]:
    if world == 1:
        yield RankFinding(
            None, Finding("single-rank", [], "the run has one rank: ASTRA-sim needs at least two")
        )
    if world == 2 and any(file.communicates.any() for file in files.values()):
        yield RankFinding(None, Finding("ring-of-two", [], RING_OF_TWO))
    missing = world - sum(rank < world for rank in files)
    if missing:
        first = next(rank for rank in range(world) if rank not in files)
        message = (
            f"{missing} of {world} ranks have no file, the first is rank {first}: convert it or name its file"
        )
        yield RankFinding(None, Finding("rank-missing", [], message))
    seen: dict[int, int] = {}
    for rank, file in files.items():
        recorded = file.trace.metadata_int("rank")
        if recorded is not None and recorded in seen:
            message = (
                f"holds rank {recorded}, and so does {paths[seen[recorded]]}: convert each rank's own traces"
            )
            yield RankFinding(rank, Finding("rank-twice", [], message))
        elif recorded is not None and recorded != rank:
            message = f"is rank {rank} by its name and rank {recorded} by its metadata"
            yield RankFinding(rank, Finding("rank-name", [], message))
        if recorded is not None:
            seen.setdefault(recorded, rank)
        size = file.trace.metadata_int("world_size")
        if size is not None and size != world:
            message = f"belongs to a run of {size} ranks, another file of the set to a run of {world}"
            yield RankFinding(rank, Finding("world-size", [], message))
        elif rank >= world:
            yield RankFinding(rank, Finding("world-size", [], f"is rank {rank} in a run of {world} ranks"))


def _check_groups(files: Mapping[int, File], world: int) -> Iterator[RankFinding]:
    groups = next(iter(files.values())).comm_groups or {}
    for name, ranks in groups.items():
        absent = [rank for rank in ranks if rank >= world]
        if absent:
            message = (
                f"group {name[:40]!r} in the comm-group file lists rank {absent[0]} of a run of {world} ranks"
            )
            yield RankFinding(None, Finding("group-rank-absent", [], message))


# ---- collectives ----


def _check_collectives(files: Mapping[int, File], paths: Mapping[int, str]) -> Iterator[RankFinding]:
    """The nth collective of a group must be the same on all members: simulators match them by position."""
    rows = {rank: _collectives(file) for rank, file in files.items()}
    used = sorted({group for of_rank in rows.values() for group in of_rank})
    groups = next(iter(files.values())).comm_groups or {}
    none = np.zeros(0, np.int64)
    for group in used:
        users = [rank for rank in files if group in rows[rank]]
        members = [
            rank for rank in groups.get(str(group), files if group == ALL_RANKS else users) if rank in files
        ]
        if len(members) < 2:
            continue
        # Compare with the rank that has most, so that a missing collective is reported where it is missing.
        first = max(members, key=lambda rank: (len(rows[rank].get(group, none)), -rank))
        for rank in sorted(members):
            if rank != first:
                mine, theirs = rows[rank].get(group, none), rows[first].get(group, none)
                yield from _compare(files, paths, group, (rank, mine), (first, theirs))


def _collectives(file: File) -> dict[int, np.ndarray]:
    """Group → the rows of its collectives in id order, in which simulators issue them."""
    rows = np.flatnonzero(file.of_type(NodeType.COMM_COLL) & (file.group_of >= 0))
    rows = rows[np.lexsort((file.trace.ids[rows], file.group_of[rows]))]
    groups, starts = np.unique(file.group_of[rows], return_index=True)
    return dict(zip(groups.tolist(), np.split(rows, starts[1:]), strict=True)) if len(rows) else {}


def _compare(
    files: Mapping[int, File],
    paths: Mapping[int, str],
    group: int,
    mine: tuple[int, np.ndarray],
    theirs: tuple[int, np.ndarray],
) -> Iterator[RankFinding]:
    (rank, rows), (other, other_rows) = mine, theirs
    file, other_file = files[rank], files[other]
    both = min(len(rows), len(other_rows))
    kind, other_kind = file.collective[rows[:both]], other_file.collective[other_rows[:both]]
    size, other_size = file.size[rows[:both]], other_file.size[other_rows[:both]]
    name = "all ranks" if group == ALL_RANKS else f"group {group}"

    def pair(at: int) -> str:
        here = f"collective {at + 1} of {name} is {_describe(file, int(rows[at]))} here"
        return f"{here} and {_describe(other_file, int(other_rows[at]))} in {paths[other]}"

    other_type = np.flatnonzero(kind != other_kind)
    uneven = np.isin(kind, UNEVEN)
    other_amount = np.flatnonzero((size != other_size) & ~uneven)
    if len(rows) != len(other_rows):
        counts = f"has {len(rows)} collectives of {name}, {paths[other]} has {len(other_rows)}"
        differs = np.flatnonzero((kind != other_kind) | (size != other_size) & ~uneven)
        if len(differs):
            message, where = f"{counts}: {pair(int(differs[0]))}", rows[differs[:1]]
        else:
            extra = _describe(other_file, int(other_rows[both]))
            message, where = f"{counts}: {extra} there has no counterpart here", rows[both - 1 : both]
        yield RankFinding(rank, Finding("collective-count", where, message))
    elif len(other_type):
        yield RankFinding(rank, Finding("collective-type", rows[other_type], pair(int(other_type[0]))))
    elif len(other_amount):
        yield RankFinding(rank, Finding("collective-size", rows[other_amount], pair(int(other_amount[0]))))
    else:
        differs = np.flatnonzero(size != other_size)
        if len(differs):
            yield RankFinding(rank, Finding("collective-size-uneven", rows[differs], pair(int(differs[0]))))


def _describe(file: File, row: int) -> str:
    kind = int(file.collective[row])
    what = CollectiveType(kind).name if kind in list(CollectiveType) else f"comm_type {kind}"
    return f"{what} of {file.size[row]} bytes (node {file.trace.ids[row]} {file.trace.names[row][:60]!r})"


# ---- sends and receives ----


def _check_messages(files: Mapping[int, File], paths: Mapping[int, str], world: int) -> Iterator[RankFinding]:
    """Each send needs a receive with the same source, target, tag and size, and vice versa."""
    tables = []
    for rank, file in files.items():
        for kind, peer in ((NodeType.COMM_SEND, "comm_dst"), (NodeType.COMM_RECV, "comm_src")):
            rows = np.flatnonzero(
                file.of_type(kind) & file.has(peer) & file.has("comm_tag") & file.has("comm_size")
            )
            peers = file.integer(peer, -1)[rows]
            wrong = rows[(peers < 0) | (peers >= world) | (peers == rank)]
            if len(wrong):
                number = file.integer(peer, -1)[wrong[0]]
                message = f"has {peer} {number}, which is not another rank of this run of {world}"
                yield RankFinding(rank, Finding("p2p-rank", wrong, message))
            keep = np.isin(peers, list(files)) & (peers != rank)
            rows, peers = rows[keep], peers[keep]
            own = np.full(len(rows), rank)
            sends = kind == NodeType.COMM_SEND
            ends = (own, peers) if sends else (peers, own)
            sign = np.full(len(rows), 1 if sends else -1)
            tables.append(
                np.stack([*ends, file.integer("comm_tag", 0)[rows], file.size[rows], sign, own, rows], 1)
            )
    table = np.concatenate(tables)
    if len(table):
        yield from _unmatched(files, paths, table)


def _unmatched(
    files: Mapping[int, File], paths: Mapping[int, str], table: np.ndarray
) -> Iterator[RankFinding]:
    """``table`` int64[M, 7], per message: source, target, tag, size, +1 (send) or -1 (receive), rank, row."""
    _, key = np.unique(table[:, :4], axis=0, return_inverse=True)
    key = key.reshape(-1)
    balance = np.bincount(key, table[:, 4]).astype(np.int64)
    unmatched = table[np.sign(balance[key]) == table[:, 4]]
    for rank in np.unique(unmatched[:, 5]).tolist():
        for sign in (1, -1):
            mine = unmatched[(unmatched[:, 5] == rank) & (unmatched[:, 4] == sign)]
            if not len(mine):
                continue
            source, target, tag, size = mine[0, :4].tolist()
            peer = target if sign > 0 else source
            verb, back = ("sends to", "receive") if sign > 0 else ("receives from", "send")
            message = (
                f"{verb} rank {peer} with tag {tag} and {size} bytes: {paths[peer]} has no matching {back}"
            )
            near = unmatched[(unmatched[:, 5] == peer) & (unmatched[:, 4] == -sign)]
            near = near[(near[:, 0] == source) & (near[:, 1] == target)]
            if len(near):
                node = files[peer].trace.ids[near[0, 6]]
                message += f"; its node {node} has tag {near[0, 2]} and {near[0, 3]} bytes"
            yield RankFinding(rank, Finding("p2p-unmatched", np.sort(mine[:, 6]), message))
