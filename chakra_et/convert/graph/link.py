"""Match the events on the CPU with the nodes of the host trace, and check that both are of one process.

Both traces have the same record-function ids ("Record function id" = ``rf_id``). Traces without these ids
(schema 1.0.1) are matched by thread, order and name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from chakra_et.arrays import rows_by_value
from chakra_et.errors import TraceError
from chakra_et.et.edges import rows_of
from chakra_et.findings import Findings
from chakra_et.names import renamed
from chakra_et.traces.device import STEP, DeviceTrace, steps
from chakra_et.traces.device_format import ANNOTATION, CPU_OP
from chakra_et.traces.fields import MAX_RANKS
from chakra_et.traces.host import GROUP_RECORD, STRUCTURE, HostTrace

LOOK_AHEAD = 64
MIN_MATCH = 0.5


def rate_of(host: HostTrace, host_row: np.ndarray) -> float:
    """The part (0 to 1) of the host operators with a device record; 0 if there are no operators."""
    expected = _operators(host)
    found = np.zeros(len(expected), dtype=bool)
    found[host_row[host_row >= 0]] = True
    return int((found & expected).sum()) / max(int(expected.sum()), 1)


def link(host: HostTrace, device: DeviceTrace) -> np.ndarray:
    """The row of the host trace for each row of the same rank's device trace, -1 for none. Never fails."""
    on_cpu = operators_and_annotations(device)
    if not host.recorded:
        return np.where(on_cpu, np.cumsum(on_cpu) - 1, -1)
    expected = _operators(host)
    host_row = np.full(len(device), -1, dtype=np.int64)
    rows = np.flatnonzero(on_cpu & (device.rf_id > 0))
    host_rows = np.flatnonzero(expected)
    order = host_rows[np.argsort(host.rf_id[host_rows], kind="stable")]
    if len(rows):
        last_first = order[::-1]  # of nodes with one id the first counts
        at = rows_of(host.rf_id[last_first].astype(np.uint64), device.rf_id[rows].astype(np.uint64))
        host_row[rows] = np.append(last_first, -1)[at]
    else:
        # Pair each host thread with the device thread that has most names in common, then align in order.
        left = [
            (own, [device.names[code] for code in device.name[own].tolist()])
            for own in rows_by_value(device.thread, np.flatnonzero(on_cpu)).values()
        ]
        counts = [Counter(names) for _, names in left]
        for own in sorted(rows_by_value(host.tid, order).values(), key=len, reverse=True):
            names = [host.names[code] for code in host.name[own].tolist()]
            common = [(Counter(names) & count).total() for count in counts]
            if any(common):
                most = common.index(max(common))
                counts[most] = Counter()
                for a, b in aligned(names, left[most][1]):
                    host_row[left[most][0][b]] = own[a]
    return host_row


def operators_and_annotations(device: DeviceTrace) -> np.ndarray:
    """bool[rows]: whether each event is an operator or an annotation."""
    return (device.category == CPU_OP) | (device.category == ANNOTATION)


def _operators(host: HostTrace) -> np.ndarray:
    structure = [host.names.index(name) for name in (*STRUCTURE, GROUP_RECORD) if name in host.names]
    return ~np.isin(host.name, structure)


def aligned(first: Sequence[object], second: Sequence[object]) -> list[tuple[int, int]]:
    """The places of equal names in two sequences, in order: what both begin with, what both end with and, if
    names differ between them, skip on the side where the other's name comes sooner."""
    most = min(len(first), len(second))
    a = b = next((at for at in range(most) if first[at] != second[at]), most)
    back = next((at for at in range(most - a) if first[-1 - at] != second[-1 - at]), most - a)
    ends = len(first) - back, len(second) - back
    pairs = [(at, at) for at in range(a)]
    while a < ends[0] and b < ends[1]:
        for skip in range(LOOK_AHEAD):
            if a + skip < ends[0] and first[a + skip] == second[b]:
                a += skip
            elif b + skip < ends[1] and second[b + skip] == first[a]:
                b += skip
            else:
                continue
            pairs.append((a, b))
            break
        a, b = a + 1, b + 1
    return pairs + [(ends[0] + at, ends[1] + at) for at in range(back)]


def check(
    host: HostTrace, device: DeviceTrace, linked: np.ndarray, allow_unlinked: bool
) -> tuple[np.ndarray, Findings]:
    """The link without pairs of different names, and warnings.

    Raises ``TraceError`` if the traces are from two processes or have few operators in common, unless
    ``allow_unlinked``. One trace may cover more steps than the other.
    """
    if not host.recorded:
        return linked, Findings({"no-host-trace": 1})
    # Rows of the device trace whose host node has another name.
    numbers = {name: number for number, name in enumerate(host.names)}
    as_host = np.array([numbers.get(name, -1) for name in device.names], dtype=np.int64)
    rows = np.flatnonzero(linked >= 0)
    other = rows[as_host[device.name[rows]] != host.name[linked[rows]]]
    # Of the trace with fewer operators, the part that is also in the other trace.
    rate = (len(rows) - len(other)) / max(int(operators_and_annotations(device).sum()), 1)
    if not len(other):
        rate = max(rate, rate_of(host, linked))
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
    linked = linked.copy()
    linked[other] = -1
    return linked, Findings({"name-mismatch": len(other)} if len(other) else {})


def _first_difference(host: HostTrace, device: DeviceTrace, linked: np.ndarray, other: np.ndarray) -> str:
    host_steps = sorted(filter(STEP.fullmatch, host.names))
    device_steps = sorted(device.names[device.name[row]] for _, row in steps(device))
    if host_steps and device_steps and not set(host_steps) & set(device_steps):
        return f"the first covers {', '.join(host_steps[:4])} and the second {', '.join(device_steps[:4])}"
    on_cpu = operators_and_annotations(device)
    absent = np.flatnonzero(on_cpu & (linked < 0))
    if not len(other) and not len(absent):
        return f"{'the first' if on_cpu.any() else 'the second'} has none"
    row = [*other, *absent][0]
    name = repr(device.names[device.name[row]][:60])
    if not len(other):
        return f"{name} of the second is not in the first"
    in_host = host.names[host.name[linked[row]]][:60]
    return f"record function {device.rf_id[row]} is {in_host!r} in the first and {name} in the second"


def rank_and_world(
    path_rank: int, manifest_world: int, ranks_here: int, host: HostTrace, device: DeviceTrace
) -> tuple[int, int]:
    """Rank and number of ranks.

    The device trace, the file name (``path_rank``, -1: none) and the manifest (``manifest_world``, 0: none)
    must agree. Without a recorded number it is the default group's size, or ``ranks_here``. Raises
    ``TraceError``.
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
