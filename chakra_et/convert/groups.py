"""Groups across ranks that no trace records: which communicator of one rank is which of another's.

A rank tells its unnamed communicators apart by their streams, and ranks may use theirs in another order. The
collectives of one communicator have the same kinds and sizes in the same order on all of its ranks, each
overlaps in time with itself on the others, and all end together.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chakra_et.convert.emit_columns import strings
from chakra_et.convert.graph.communication import BY_STREAM, Group, group_number
from chakra_et.et.columns import ExecutionTrace

if TYPE_CHECKING:
    from chakra_et.convert.runs import SetResult

BY_OVERLAP = "by size, order and overlap in time"
LEAST_ALIKE = 0.9
"""Of two communicators that are one, the least part of collectives of one kind and size, and that overlap."""
TOGETHER_US, TOGETHER = 20, 0.1
"""How far apart their ends are at most, typically; the latter as a part of a collective's duration."""


@dataclass(eq=False)
class _Communicator:
    """An unnamed communicator of a rank: type and size of its collectives, and their times in µs."""

    rank: int
    number: int
    clock: str
    kinds: np.ndarray
    start: np.ndarray
    end: np.ndarray


def match_groups(result: SetResult, world: int) -> dict[int, dict[str, Group]]:
    """Give the communicators without a record the same group on all ranks of a run, with a warning.

    Changes groups and communication of the ranks that have another guess so far; returns, for these ranks,
    the group in place of each id in their files. Of the members that were assumed, the ranks whose traces are
    here and don't have the group are none. ``world``: the number of all ranks.
    """
    found = [each for rank in result.good for each in _communicators(result, rank)]
    groups: list[list[_Communicator]] = []
    for rank in sorted({each.rank for each in found}):
        own = [each for each in found if each.rank == rank]
        pairs = [(_likeness(g[0], c), a, b) for a, g in enumerate(groups) for b, c in enumerate(own)]
        of_own: dict[int, int] = {}
        for likeness, at, number in sorted(pairs, key=lambda pair: (-pair[0], *pair[1:])):
            if likeness and at not in of_own.values():
                of_own.setdefault(number, at)
        for number, each in enumerate(own):
            if number in of_own:
                groups[of_own[number]].append(each)
            else:
                groups.append([each])
    renamed: dict[int, dict[str, Group]] = {}
    for at, members in enumerate(groups):
        for each in members:
            _, _, ranks = result.good[each.rank].groups[each.number]
            if len(result.good) < world or len(members) > 1:
                have = {member.rank for member in members}
                ranks = tuple(rank for rank in ranks if rank in have or rank not in result.good)
            group = Group(f"communicator {at}", BY_OVERLAP, ranks)
            if group_number(group) != each.number:
                renamed.setdefault(each.rank, {})[str(each.number)] = group
    for rank, changes in renamed.items():
        r = result.good[rank]
        kept = {number: group for number, group in r.groups.items() if str(number) not in changes}
        new = {group_number(g): (g.name, g.description, g.ranks) for g in changes.values()}
        r.groups = dict(sorted((kept | new).items()))
        if r.communication is not None:
            r.communication = with_groups(r.communication, changes)
    if renamed:
        count = sum(len(each.kinds) for members in groups if len(members) > 1 for each in members)
        result.warnings.append(
            f"{result.prefix}: {count} collectives without a recorded group were matched between ranks by "
            "size, order and overlap in time. Record the run with chakra_et.capture, which names the groups."
        )
    return renamed


def with_groups(trace: ExecutionTrace, changes: Mapping[str, Group]) -> ExecutionTrace:
    """``trace`` with other groups in its attributes and metadata. ``changes``: id → the new group."""
    attributes, metadata = dict(trace.attributes), dict(trace.metadata)
    ids = attributes["pg_name"].values
    groups = [changes.get(ids[at]) for at in range(len(attributes["pg_name"].rows))]
    text: dict[str, Callable[[Group], str]] = {
        "pg_name": lambda group: str(group_number(group)),
        "pg_original_name": lambda group: group.name,
        "pg_description": lambda group: group.description,
    }
    for name, of in text.items():
        old = attributes[name].values
        values = [str(old[at]) if group is None else of(group) for at, group in enumerate(groups)]
        attributes[name] = dataclasses.replace(attributes[name], values=strings(values))
    if "process_groups" in metadata:
        known = json.loads(str(metadata["process_groups"]))
        for number, group in changes.items():
            known.pop(number, None)
            known[str(group_number(group))] = (group.name, group.description, group.ranks)
        metadata["process_groups"] = json.dumps(known, separators=(",", ":"))
    return dataclasses.replace(trace, attributes=attributes, metadata=metadata)


def _communicators(result: SetResult, rank: int) -> list[_Communicator]:
    """Those of a rank whose groups aren't recorded, in the order of their first collectives."""
    r = result.good[rank]
    trace = r.communication
    guessed = {number for number, group in r.groups.items() if group[1] in (BY_STREAM, BY_OVERLAP)}
    if trace is None or not guessed or not trace.start_micros.any():
        return []
    kinds = trace.column("comm_type", -1) * (1 << 51) + trace.column("comm_size", 0)
    start = trace.start_micros.astype(np.int64) + (trace.metadata_int("trace_start_ns") or 0) // 1000
    end = start + trace.duration_micros.astype(np.int64)
    of_row = np.array([int(trace.attributes["pg_name"].values[row]) for row in range(len(trace))])
    found = []
    for number in dict.fromkeys(of_row.tolist()):
        if number in guessed:
            rows = np.flatnonzero(of_row == number)
            found.append(_Communicator(rank, number, r.process[0], kinds[rows], start[rows], end[rows]))
    return found


def _likeness(one: _Communicator, other: _Communicator) -> float:
    """How much two communicators are one: the part (0 to 1) of their collectives that are alike and overlap
    in time; 0 below the limits."""
    common = min(len(one.kinds), len(other.kinds))
    part = (one.kinds[:common] == other.kinds[:common]).sum() / max(len(one.kinds), len(other.kinds))
    apart = one.end[:common] - other.end[:common]
    offset = 0 if one.clock and one.clock == other.clock else int(np.median(apart))
    first = np.maximum(one.start[:common], other.start[:common] + offset)
    last = np.minimum(one.end[:common], other.end[:common] + offset)
    overlap = float((first < last).mean())
    typical = float(np.median((one.end - one.start)[:common]))
    if np.median(np.abs(apart - offset)) > max(TOGETHER_US, TOGETHER * typical):
        return 0.0
    return float(part) * overlap if min(float(part), overlap) >= LEAST_ALIKE else 0.0
