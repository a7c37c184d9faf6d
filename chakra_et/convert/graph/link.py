"""Match the events on the CPU with the nodes of the host trace, and check that both are of one process.

Both traces have the same record-function ids ("Record function id" = ``rf_id``). Traces without these ids
(schema 1.0.1) are matched by thread, order and name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from chakra_et.arrays import rows_by_value
from chakra_et.convert.graph.timeline import STEP, steps
from chakra_et.errors import TraceError
from chakra_et.findings import Findings
from chakra_et.names import renamed
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import ANNOTATION, CPU_OP
from chakra_et.traces.fields import MAX_RANKS
from chakra_et.traces.host import GROUP_RECORD, STRUCTURE, HostTrace

LOOK_AHEAD = 64
MIN_MATCH = 0.5


@dataclass(eq=False, repr=False)
class Link:
    """The match of the two traces.

    ``host_row[i]``: the row of the host trace for row i of the device trace, -1 for none. ``by_id``: whether
    that is by record-function ids.
    """

    host_row: np.ndarray
    by_id: bool = False

    def rate(self, host: HostTrace) -> float:
        """The part (0 to 1) of the host operators with a device record; 0 if there are no operators."""
        expected = _operators(host)
        found = np.zeros(len(expected), dtype=bool)
        found[self.host_row[self.host_row >= 0]] = True
        return int((found & expected).sum()) / max(int(expected.sum()), 1)


def link(host: HostTrace, device: DeviceTrace) -> Link:
    """Match the two traces of one rank. Never fails: rows may stay without a match."""
    on_cpu = operators_and_annotations(device)
    if not host.recorded:
        return Link(np.where(on_cpu, np.cumsum(on_cpu) - 1, -1))
    expected = _operators(host)
    host_row = np.full(len(device), -1, dtype=np.int64)
    rows = np.flatnonzero(on_cpu & (device.rf_id > 0))
    by_id = len(rows) > 0
    host_rows = np.flatnonzero(expected)
    order = host_rows[np.argsort(host.rf_id[host_rows], kind="stable")]
    if by_id:
        found, at = places_of(device.rf_id[rows], host.rf_id[order])
        host_row[rows[found]] = order[at]
    else:
        # Pair each host thread with the device thread that has most names in common, then align in order.
        of_host = rows_by_value(host.tid, order).values()
        of_device = rows_by_value(device.thread, np.flatnonzero(on_cpu)).values()
        sides = [
            [(own, [host.names[code] for code in host.name[own]]) for own in of_host],
            [(own, [device.names[code] for code in device.name[own]]) for own in of_device],
        ]
        counts = [[Counter(names) for _, names in side] for side in sides]
        likeness = [
            (-sum((mine & theirs).values()), h, d)
            for h, mine in enumerate(counts[0])
            for d, theirs in enumerate(counts[1])
        ]
        paired: dict[int, int] = {}
        for common, h, d in sorted(likeness):
            if common and h not in paired and d not in paired.values():
                paired[h] = d
                (host_rows, host_names), (device_rows, device_names) = sides[0][h], sides[1][d]
                for a, b in aligned(host_names, device_names):
                    host_row[device_rows[b]] = host_rows[a]
    return Link(host_row, by_id)


def operators_and_annotations(device: DeviceTrace) -> np.ndarray:
    """bool[rows]: whether each event is an operator or an annotation."""
    return (device.category == CPU_OP) | (device.category == ANNOTATION)


def places_of(values: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bool[values]: whether each is among ``known``, ascending; the first place there of those that are)."""
    at = np.searchsorted(known, values)
    found = at < len(known)
    found[found] = known[at[found]] == values[found]
    return found, at[found]


def _operators(host: HostTrace) -> np.ndarray:
    structure = [host.names.index(name) for name in (*STRUCTURE, GROUP_RECORD) if name in host.names]
    return ~np.isin(host.name, structure)


def aligned(first: list[str], second: list[str]) -> list[tuple[int, int]]:
    """The places of equal names in two sequences, in order. If names differ, skip on the side where the
    other's name comes sooner."""
    pairs = []
    a = b = 0
    while a < len(first) and b < len(second):
        if first[a] == second[b]:
            pairs.append((a, b))
            a, b = a + 1, b + 1
            continue
        skip_first, skip_second = _distance(first, a, second[b]), _distance(second, b, first[a])
        if skip_first <= skip_second and skip_first < LOOK_AHEAD:
            a += skip_first
        elif skip_second < LOOK_AHEAD:
            b += skip_second
        else:
            a, b = a + 1, b + 1
    return pairs


def _distance(names: list[str], start: int, wanted: str) -> int:
    try:
        return names.index(wanted, start, start + LOOK_AHEAD) - start
    except ValueError:
        return LOOK_AHEAD


def check(host: HostTrace, device: DeviceTrace, linked: Link, allow_unlinked: bool) -> tuple[Link, Findings]:
    """The link without pairs of different names, and warnings.

    Raises ``TraceError`` if the traces are from two processes or have few operators in common, unless
    ``allow_unlinked``. One trace may cover more steps than the other.
    """
    if not host.recorded:
        return linked, Findings({"no-host-trace": 1})
    # Rows of the device trace whose host node has another name.
    numbers = {name: number for number, name in enumerate(host.names)}
    as_host = np.array([numbers.get(name, -1) for name in device.names], dtype=np.int64)
    rows = np.flatnonzero(linked.host_row >= 0)
    other = rows[as_host[device.name[rows]] != host.name[linked.host_row[rows]]]
    # Of the trace with fewer operators, the part that is also in the other trace.
    rate = (len(rows) - len(other)) / max(int(operators_and_annotations(device).sum()), 1)
    if not len(other):
        rate = max(rate, linked.rate(host))
    processes = sorted({str(pid) for pid, _ in device.threads})
    pid = host.header["pid"]
    reason = ""
    if _whole(pid, 0) and processes and str(pid) not in processes:
        named = ", ".join(process[:20] for process in processes[:3])
        reason = f"the host trace is from process {pid}, the device trace from process {named}"
    elif rate < MIN_MATCH:
        difference = _first_difference(host, device, linked, other)
        reason = f"only {rate:.0%} of their operators match: {difference}"
    if reason and not allow_unlinked:
        raise TraceError(
            f"{host.path} and {device.path} are not from the same run: {reason}; pair the right files, or "
            "use --allow-unlinked."
        )
    findings = Findings()
    findings.add("name-mismatch", len(other))
    host_row = linked.host_row.copy()
    host_row[other] = -1
    return Link(host_row, linked.by_id), findings


def _first_difference(host: HostTrace, device: DeviceTrace, linked: Link, other: np.ndarray) -> str:
    host_steps = sorted({name for name in host.names if name.startswith(STEP)})
    device_steps = sorted({STEP + str(number) for number, _ in steps(device)})
    if host_steps and device_steps and not set(host_steps) & set(device_steps):
        return f"the first covers {', '.join(host_steps[:4])} and the second {', '.join(device_steps[:4])}"
    on_cpu = operators_and_annotations(device)
    absent = np.flatnonzero(on_cpu & (linked.host_row < 0))
    if not len(other) and not len(absent):
        return f"{'the first' if on_cpu.any() else 'the second'} has none"
    row = [*other, *absent][0]
    name = repr(device.names[device.name[row]][:60])
    if not len(other):
        return f"{name} of the second is not in the first"
    in_host = host.names[host.name[linked.host_row[row]]][:60]
    return f"record function {device.rf_id[row]} is {in_host!r} in the first and {name} in the second"


def rank_and_world(
    path_rank: int, manifest_world: int, ranks_here: int, host: HostTrace, device: DeviceTrace
) -> tuple[int, int]:
    """Rank and number of ranks.

    The device trace, the file name (``path_rank``, -1: none) and the manifest (``manifest_world``, 0: none)
    must agree. Without a recorded number of ranks it is the size of the default group, or ``ranks_here``.
    Raises ``TraceError``.
    """
    rank = _whole(device.distributed.get("rank"), -1)
    if rank >= 0 and path_rank >= 0 and rank != path_rank:
        right = renamed(device.path.name, rank) or f"a name with rank{rank}"
        without = "" if "rank" in device.path.name else " (which has no rankN)"
        raise TraceError(
            f"{device.path}: is rank {path_rank} by its name{without} and rank {rank} by its "
            f"distributedInfo; rename the file to {right}, and its host trace likewise."
        )
    rank = rank if rank >= 0 else max(path_rank, 0)
    world = _whole(device.distributed.get("world_size"), 0)
    if manifest_world and world and world != manifest_world:
        raise TraceError(
            f"{device.path}: the world size is {world} in its distributedInfo and {manifest_world} in the "
            "manifest; convert traces of one run together."
        )
    default = [group.get("group_size") for group in host.groups if str(group.get("pg_name")) == "0"]
    world = world or manifest_world or max(_whole(next(iter(default), 0), 0), ranks_here, rank + 1)
    if not rank < world <= MAX_RANKS:
        raise TraceError(
            f"{device.path}: is rank {rank} of {world}; ranks must be below the number of ranks (at most "
            f"{MAX_RANKS})."
        )
    return rank, world


def _whole(value: object, missing: int) -> int:
    return value if type(value) is int and value >= 0 else missing
