"""Rules across the .et files of one run: ranks, collectives, sends and receives must agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from chakra_et.arrays import rows_by_value
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.et.node_attributes import has, splits
from chakra_et.validate.table import ALL_RANKS, UNEVEN, File, Finding

RankFinding = tuple[int | None, Finding]
"""A finding in the file of a rank, or in the run as a whole (None)."""


def check_ranks(files: Mapping[int, File]) -> Iterator[RankFinding]:
    """All findings across the files (rank → file) of one run."""
    # The largest ``world_size`` in the metadata, or else the highest rank plus one.
    sizes = [file.trace.metadata_int("world_size") or 0 for file in files.values()]
    world = max(sizes) if max(sizes) > 0 else max(files) + 1
    yield from _check_world(files, world)
    for name, ranks in (next(iter(files.values())).comm_groups or {}).items():
        absent = [rank for rank in ranks if rank >= world]
        if absent:
            message = (
                f"group {name[:40]!r} in the comm-group file lists rank {absent[0]} of a run of {world} ranks"
            )
            yield None, Finding("group-rank-absent", [], message)
    yield from _check_collectives(files)
    yield from _check_messages(files, world)


def _check_world(files: Mapping[int, File], world: int) -> Iterator[RankFinding]:
    if world == 1:
        yield None, Finding("single-rank", [], "the run has one rank: ASTRA-sim needs at least two")
    missing = world - sum(rank < world for rank in files)
    if missing:
        first = next(rank for rank in range(world) if rank not in files)
        message = (
            f"{missing} of {world} ranks have no file, the first is rank {first}: convert it or name its file"
        )
        yield None, Finding("rank-missing", [], message)
    seen: dict[int, str] = {}
    for rank, file in files.items():
        recorded, size = file.trace.metadata_int("rank"), file.trace.metadata_int("world_size")
        if recorded is not None and recorded in seen:
            message = f"holds rank {recorded}, and so does {seen[recorded]}: convert each rank's own traces"
            yield rank, Finding("rank-twice", [], message)
        elif recorded is not None and recorded != rank:
            message = f"is rank {rank} by its name and rank {recorded} by its metadata"
            yield rank, Finding("rank-name", [], message)
        if recorded is not None:
            seen.setdefault(recorded, file.name)
        if size is not None and size != world:
            message = f"belongs to a run of {size} ranks, another file of the set to a run of {world}"
            yield rank, Finding("world-size", [], message)
        elif rank >= world:
            yield rank, Finding("world-size", [], f"is rank {rank}, but the run has {world} ranks")


def _check_collectives(files: Mapping[int, File]) -> Iterator[RankFinding]:
    """The nth collective of a group must be the same on all members: simulators match them by position."""
    rows = {rank: _collectives(file) for rank, file in files.items()}
    groups = next(iter(files.values())).comm_groups or {}
    none = np.zeros(0, np.int64)
    for group in sorted({group for of_rank in rows.values() for group in of_rank}):
        users = [rank for rank in files if group in rows[rank]]
        named = groups.get(str(group), files if group == ALL_RANKS else users)
        members = {rank: rows[rank].get(group, none) for rank in named if rank in files}
        if len(members) < 2:
            continue
        yield from _check_splits(files, members, f"group {group}")
        # Compare with the rank that has most, so that a missing collective is reported where it is missing.
        most = max(members, key=lambda rank: (len(members[rank]), -rank))
        name = "all ranks" if group == ALL_RANKS else f"group {group}"
        for rank in sorted(members.keys() - {most}):
            for finding in _compare(name, files[rank], members[rank], files[most], members[most]):
                yield rank, finding


def _check_splits(
    files: Mapping[int, File], members: Mapping[int, np.ndarray], group: str
) -> Iterator[RankFinding]:
    """What a rank sends another one in an uneven all-to-all must be what that one expects."""
    names = "comm_in_split", "comm_out_split"
    sent, got = ({rank: splits(files[rank].trace, name) for rank in members} for name in names)
    for number, rows in enumerate(zip(*members.values(), strict=False) if any(sent.values()) else ()):
        for at, rank in enumerate(members):
            for to, other in enumerate(members):
                mine, theirs = sent[rank].get(rows[at], []), got[other].get(rows[to], [])
                if len(mine) == len(theirs) == len(members) and mine[to] != theirs[at]:
                    text = f"collective {number + 1} of {group} sends {mine[to]} rows to rank {other}, which "
                    text += f"expects {theirs[at]} in {files[other].name}"
                    yield rank, Finding("collective-splits", members[rank][number : number + 1], text)
                    return


def _collectives(file: File) -> dict[int, np.ndarray]:
    """Group → the rows of its collectives in id order, in which simulators issue them."""
    rows = np.flatnonzero(file.of_type(NodeType.COMM_COLL) & (file.group_of >= 0))
    return rows_by_value(file.group_of, rows[np.argsort(file.trace.ids[rows], kind="stable")])


def _compare(
    group: str, file: File, rows: np.ndarray, other: File, other_rows: np.ndarray
) -> Iterator[Finding]:
    """How the collectives of a group in ``file`` differ from those in ``other``."""
    both = min(len(rows), len(other_rows))
    here, there = rows[:both], other_rows[:both]
    is_other_type = file.collective[here] != other.collective[there]
    is_other_size = file.size[here] != other.size[there]
    uneven = np.isin(file.collective[here], UNEVEN)

    def pair(at: int) -> str:
        described = _describe(file, int(rows[at])) if at < both else "missing"
        return (
            f"collective {at + 1} of {group} is {described} here and {_describe(other, int(other_rows[at]))} "
            f"in {other.name}"
        )

    if len(rows) != len(other_rows):
        at = int(np.argmax(np.append(is_other_type | is_other_size & ~uneven, True)))
        counts = f"has {len(rows)} collectives of {group}, {other.name} has {len(other_rows)}"
        where = rows[min(at, both - 1) :][:1]
        way_out = "; if a rank ended early, convert a step that all have: --step N"
        yield Finding("collective-count", where, f"{counts}: {pair(at)}{way_out}")
        return
    for rule, differ in (
        ("collective-type", is_other_type),
        ("collective-size", is_other_size & ~uneven),
        ("collective-size-uneven", is_other_size),
    ):
        differs = np.flatnonzero(differ)
        if len(differs):
            yield Finding(rule, rows[differs], pair(int(differs[0])))
            return


def _describe(file: File, row: int) -> str:
    kind = int(file.collective[row])
    what = CollectiveType(kind).name if kind in list(CollectiveType) else f"comm_type {kind}"
    return f"{what} of {file.size[row]} bytes (node {file.trace.ids[row]} {file.trace.names[row][:60]!r})"


def _check_messages(files: Mapping[int, File], world: int) -> Iterator[RankFinding]:
    """Each send needs a receive with the same source, target, tag and size, and vice versa."""
    found = []  # sends, and receives, of each rank: rows, and source, target, tag and size as int64[M, 4]
    for rank, file in files.items():
        for kind, peer, sign in ((NodeType.COMM_SEND, "comm_dst", 1), (NodeType.COMM_RECV, "comm_src", -1)):
            whole = has(file.trace, peer) & has(file.trace, "comm_tag") & has(file.trace, "comm_size")
            rows = np.flatnonzero(file.of_type(kind) & whole)
            peers = file.trace.column(peer, -1)[rows]
            wrong = (peers < 0) | (peers >= world) | (peers == rank)
            if wrong.any():
                number = peers[np.argmax(wrong)]
                message = f"has {peer} {number}, which is not another rank of this run of {world}"
                yield rank, Finding("p2p-rank", rows[wrong], message)
            rows = rows[np.isin(peers, list(files)) & (peers != rank)]
            ends = np.full(len(rows), rank), file.trace.column(peer)[rows]
            source, target = ends[::sign]
            sent = np.stack([source, target, file.trace.column("comm_tag")[rows], file.size[rows]], axis=1)
            found.append((rank, sign, rows, sent))
    _, key = np.unique(np.concatenate([each[-1] for each in found]), axis=0, return_inverse=True)
    of_each = np.split(key.reshape(-1), np.cumsum([len(rows) for _, _, rows, _ in found])[:-1])
    balance = np.zeros(len(key) + 1, np.int64)  # of each message: sends without a receive
    for (_, sign, *_), keys in zip(found, of_each, strict=True):
        np.add.at(balance, keys, sign)
    for (rank, sign, rows, sent), keys in zip(found, of_each, strict=True):
        lacking = np.sign(balance[keys]) == sign
        if lacking.any():
            source, target, tag, size = sent[lacking][0].tolist()
            peer = target if sign > 0 else source
            verb, back = ("sends to", "receive") if sign > 0 else ("receives from", "send")
            name = files[peer].name
            message = f"{verb} rank {peer} with tag {tag} and {size} bytes: {name} has no matching {back}"
            yield rank, Finding("p2p-unmatched", rows[lacking], message)
