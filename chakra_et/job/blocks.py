"""The repeated blocks of a model (its transformer layers) in captured ranks: which node belongs to which.

In a forward pass the blocks are sibling modules of one class (attribute ``module``), or else what repeats one
after the other in the names of the outermost operators. A backward operator belongs to the block whose
forward operator has its autograd number; what follows it without a number (the accumulation of gradients,
host overhead) to the same. Device work and communication belong where they were launched.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.edges import edges_of
from chakra_et.et.node_attributes import texts
from chakra_et.job.operators import ENGINE, Operators

LEAST_OPERATORS, LEAST_SHARE = 4, 0.4
"""A block has so many outermost operators, and blocks are so much of a forward pass."""
_ENDS = re.compile(r"embedding|c10d::(send|recv)|nll_loss|cross_entropy", re.IGNORECASE)
"""Operators that no repeated block has: they end the search for repeats."""
_MODULE = re.compile(r"(.+)_(\d+)")

Pass = tuple[list[int], int]
"""A forward pass: the first rows of its blocks, and that of the first outermost operator after them."""


@dataclass(frozen=True)
class Blocks:
    """Of each row: ``group``, a forward or backward pass (numbers from 0), ``block``, the place of its block
    in that pass (from 0, in order of the layers), both -1 outside of blocks; int64[N]. ``is_backward``: of
    each group. ``held``: blocks of each forward pass. ``source``: what they were recognised by."""

    group: np.ndarray
    block: np.ndarray
    is_backward: list[bool]
    held: int
    source: str


def find_blocks(of_rank: Mapping[int, Operators], where: str) -> dict[int, Blocks]:
    """The blocks of each rank. Raises ``TraceError``, naming what was looked for, where there are none."""
    passes = {rank: _module_passes(each) for rank, each in of_rank.items()}
    source = "modules"
    if not all(passes.values()):
        unit = _unit(
            [[each.name[row] for row in rows] for each in of_rank.values() for rows in _stretches(each)]
        )
        passes = {rank: _unit_passes(each, unit) for rank, each in of_rank.items()}
        source = "repeated operators"
    empty = next((rank for rank, found in passes.items() if not found), None)
    if empty is not None:
        raise TraceError(
            f"{where}: no repeated blocks were recognised on rank {empty}: neither sibling modules of one "
            "class (attribute module) nor outermost operators that repeat one after the other in a forward "
            "pass"
        )
    return {rank: _filled(each, passes[rank], source, f"{where}.{rank}") for rank, each in of_rank.items()}


def _stretches(operators: Operators) -> list[list[int]]:
    """Outermost operators of forward passes, without any that ends a stretch between them."""
    found: list[list[int]] = []
    for rows in operators.tops.values():
        found.append([])
        for row in rows:
            ends = operators.phase[row] not in ("", "forward") or _ENDS.search(operators.name[row])
            if found[-1] and ends:
                found.append([])
            elif not ends and operators.phase[row]:  # such as the seeds that checkpoints keep belong to none
                found[-1].append(row)
    return [rows for rows in found if len(rows) >= LEAST_OPERATORS]


def _unit(stretches: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The names of the operators of a block: the shortest sequence that repeats over the longest part of a
    stretch; empty for none."""
    best: tuple[int, int, tuple[str, ...]] = (0, 0, ())
    for names in dict.fromkeys(map(tuple, stretches)):
        number = {name: at for at, name in enumerate(dict.fromkeys(names))}
        codes = np.array([number[name] for name in names])
        for period in range(LEAST_OPERATORS, len(codes) // 2 + 1):
            same = np.concatenate(([False], codes[period:] == codes[:-period], [False]))
            edges = np.flatnonzero(np.diff(same.astype(np.int8)))
            begins, lengths = edges[::2], edges[1::2] - edges[::2]
            if not len(lengths):
                continue
            at = int(lengths.argmax())
            covered = int(lengths[at]) + period
            whole = covered // period * period
            if lengths[at] >= period and whole >= LEAST_SHARE * len(codes) and (whole, -period) > best[:2]:
                begin = int(begins[at])
                best = whole, -period, tuple(names[begin : begin + period])
    return best[2]


def _unit_passes(operators: Operators, unit: Sequence[str]) -> list[Pass]:
    """The longest run of whole units in each stretch that has any."""
    found: list[Pass] = []
    if not unit:
        return found
    length = len(unit)
    for rows in _stretches(operators):
        names = [operators.name[row] for row in rows]
        runs: list[list[int]] = [[]]
        at = 0
        while at + length <= len(names):
            if tuple(names[at : at + length]) == tuple(unit):
                if runs[-1] and runs[-1][-1] + length != at:
                    runs.append([])
                runs[-1].append(at)
                at += length
            else:
                at += 1
        longest = max(runs, key=len)
        if longest:
            last = rows[longest[-1] + length - 1]
            found.append(([rows[begin] for begin in longest], _next_top(operators, last)))
    return found


def _module_passes(operators: Operators) -> list[Pass]:
    """Forward passes through sibling modules of the class that has most of the outermost operators."""
    table, index = texts(operators.trace, "module")
    if not table:
        return []
    forward = [[row for row in rows if operators.phase[row] == "forward"] for rows in operators.tops.values()]
    of_path = _family(table, Counter(int(index[row]) for rows in forward for row in rows))
    if not of_path:
        return []
    found: list[Pass] = []
    for rows in forward:
        starts: dict[str, int] = {}  # the first row of each module
        previous: str | None = None
        for row in rows:
            member = of_path.get(int(index[row]))
            if starts and (member is None or (member != previous and member in starts)):
                found.append(([*starts.values()], row))
                starts = {}
            if member is not None:
                starts.setdefault(member, row)
            previous = member
        if starts:
            found.append(([*starts.values()], _next_top(operators, rows[-1])))
    return found


def _family(table: Sequence[str], uses: Counter[int]) -> dict[int, str]:
    """The repeated module that each path lies in, by the path's number; empty where there are none."""
    # By depth and name of the modules' class, the module of each path that lies in one.
    families: dict[tuple[int, str], dict[int, str]] = defaultdict(dict)
    for at, text in enumerate(table):
        parts = text.split("/")
        for depth, part in enumerate(parts):
            if named := _MODULE.fullmatch(part):
                key = depth, "/".join([*parts[:depth], named[1]])
                families[key][at] = "/".join(parts[: depth + 1])
    least = LEAST_SHARE * sum(uses.values())
    repeated = [
        key
        for key, of in families.items()
        if len({of[at] for at in of if uses[at]}) > 1 and sum(uses[at] for at in of) >= least
    ]
    return families[min(repeated)] if repeated else {}


def _next_top(operators: Operators, row: int) -> int:
    """The outermost operator after ``row`` on its lane; the number of rows where there is none."""
    rows = operators.tops[int(operators.lane[row])]
    at = bisect_right(rows, row)
    return rows[at] if at < len(rows) else len(operators.trace)


def _filled(operators: Operators, passes: Sequence[Pass], source: str, where: str) -> Blocks:
    """The blocks of all rows, from the places of the blocks of the forward passes."""
    count = len(operators.trace)
    group, block = np.full(count, -1), np.full(count, -1)
    held = {len(starts) for starts, _ in passes}
    if len(held) > 1:
        raise TraceError(
            f"{where}: its forward passes have {min(held)} to {max(held)} repeated blocks (several chunks of "
            "layers, or another model beside it): capture passes with the same blocks"
        )
    lanes = {lane: np.flatnonzero(operators.lane == lane) for lane in operators.tops}
    limits: list[tuple[int, int, int]] = []
    for number, (starts, after) in enumerate(passes):
        rows = lanes[int(operators.lane[starts[0]])]
        for at, (begin, end) in enumerate(zip(starts, [*starts[1:], after], strict=True)):
            inside = rows[np.searchsorted(rows, begin) : np.searchsorted(rows, end)]
            group[inside], block[inside] = number, at
            limits.append((operators.sequence.get(begin, -1), number, at))
        end = operators.sequence.get(after, -1) if after < count else -1
        # An operator without a number, such as a send, doesn't show where the last block's numbers end.
        numbers = operators.trace.column("seq_id", -1)[inside]
        limits.append((end if end >= 0 else int(numbers.max()) + 1, -1, -1))
    limits.sort()
    for lane, tops in operators.tops.items():
        _fill_backward(operators, lanes[lane], tops, limits, len(passes), group, block)
    _inherit(operators, group, block)
    flags = [False] * len(passes) + [True] * len(passes)
    return Blocks(group, block, flags, held.pop(), source)


def _fill_backward(
    operators: Operators,
    rows: np.ndarray,
    tops: Sequence[int],
    limits: Sequence[tuple[int, int, int]],
    passes: int,
    group: np.ndarray,
    block: np.ndarray,
) -> None:
    """Give the operators of the autograd engine on a lane the block of their forward operators."""
    numbers = [limit[0] for limit in limits]
    here = (-1, -1)
    for row, after in zip(tops, [*tops[1:], len(operators.trace)], strict=True):
        if operators.phase[row] != "backward":
            here = (-1, -1)
            continue
        if operators.name[row].startswith(ENGINE) and row in operators.sequence:
            at = bisect_right(numbers, operators.sequence[row]) - 1
            here = limits[at][1:] if at >= 0 else (-1, -1)
        if here[0] >= 0:
            inside = rows[np.searchsorted(rows, row) : np.searchsorted(rows, after)]
            group[inside], block[inside] = here[0] + passes, here[1]


def _inherit(operators: Operators, group: np.ndarray, block: np.ndarray) -> None:
    """Give device work and communication the block of the operator that launched it."""
    trace = operators.trace
    elsewhere = ~np.isin(operators.lane, list(operators.tops))
    launcher = np.where(elsewhere, operators.parent, -1)
    without = np.flatnonzero(elsewhere & (launcher < 0))
    if len(without):
        edges = edges_of(trace)
        wanted = np.isin(edges.child, without) & (edges.parent >= 0)
        for child, parent in zip(edges.child[wanted].tolist(), edges.parent[wanted].tolist(), strict=True):
            if not elsewhere[parent]:
                launcher[child] = parent
    rows = np.flatnonzero(launcher >= 0)
    group[rows], block[rows] = group[launcher[rows]], block[launcher[rows]]
