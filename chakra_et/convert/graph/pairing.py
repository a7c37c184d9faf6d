"""Check that a host and a device trace are from the same process, and determine its rank."""

from __future__ import annotations

import datetime

import numpy as np

from chakra_et.arrays import unique
from chakra_et.convert.graph import timeline
from chakra_et.convert.graph.link import Link
from chakra_et.convert.graph.timeline import STEP
from chakra_et.errors import TraceError
from chakra_et.findings import Findings
from chakra_et.names import renamed
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import ANNOTATION, CPU_OP
from chakra_et.traces.fields import MAX_RANKS
from chakra_et.traces.host import HostTrace

MIN_MATCH = 0.5
CLOCK_SECONDS = 5.0


def check(host: HostTrace, device: DeviceTrace, linked: Link, allow_unlinked: bool) -> tuple[Link, Findings]:
    """The link without pairs of different names, and warnings.

    Raises ``TraceError`` if the traces are from two processes or have few operators in common, unless
    ``allow_unlinked``. One trace may cover more steps than the other.
    """
    if not host.recorded:
        return linked, Findings({"no-host-trace": 1})
    other = _other_name(host, device, linked)
    rate = _match_rate(host, device, linked, other)
    reason = _other_process(host, device)
    if reason is None and rate < MIN_MATCH:
        difference = _first_difference(host, device, linked, other)
        reason = f"only {rate:.0%} of their operators match: {difference}"
    if reason is not None and not allow_unlinked:
        raise TraceError(
            f"{host.path} and {device.path} are not from the same run: {reason}; pair the right files, or "
            "use --allow-unlinked."
        )
    findings = Findings()
    findings.add("name-mismatch", len(other))
    findings.add("clock-gap", _clock_gap(host, device))
    host_row = linked.host_row.copy()
    host_row[other] = -1
    unmatched = unique(np.concatenate((linked.unmatched, linked.host_row[other])))
    return Link(host_row, unmatched, linked.how), findings


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


def _other_process(host: HostTrace, device: DeviceTrace) -> str | None:
    processes = sorted({str(pid) for pid, _ in device.threads})
    pid = host.header["pid"]
    if not _whole(pid, 0) or not processes or str(pid) in processes:
        return None
    named = ", ".join(process[:20] for process in processes[:3])
    return f"the host trace is from process {pid}, the device trace from process {named}"


def _on_cpu(device: DeviceTrace) -> np.ndarray:
    on_cpu: np.ndarray = (device.category == CPU_OP) | (device.category == ANNOTATION)
    return on_cpu


def _other_name(host: HostTrace, device: DeviceTrace, linked: Link) -> np.ndarray:
    """Rows of the device trace whose host node has another name."""
    numbers = {name: number for number, name in enumerate(host.names)}
    as_host = np.array([numbers.get(name, -1) for name in device.names], dtype=np.int64)
    rows = np.flatnonzero(linked.host_row >= 0)
    other: np.ndarray = rows[as_host[device.name[rows]] != host.name[linked.host_row[rows]]]
    return other


def _match_rate(host: HostTrace, device: DeviceTrace, linked: Link, other: np.ndarray) -> float:
    """Of the trace with fewer operators, the part (0 to 1) that is also in the other trace."""
    matched = int((linked.host_row >= 0).sum()) - len(other)
    of_device = matched / max(int(_on_cpu(device).sum()), 1)
    return max(of_device, linked.rate(host) if not len(other) else 0.0)


def _first_difference(host: HostTrace, device: DeviceTrace, linked: Link, other: np.ndarray) -> str:
    host_steps = sorted({name for name in host.names if name.startswith(STEP)})
    device_steps = sorted({STEP + str(number) for number, _ in timeline.steps(device)})
    if host_steps and device_steps and not set(host_steps) & set(device_steps):
        return f"the first covers {', '.join(host_steps[:4])} and the second {', '.join(device_steps[:4])}"
    absent = np.flatnonzero(_on_cpu(device) & (linked.host_row < 0))
    if len(other):
        row = int(other[0])
        name = host.names[host.name[linked.host_row[row]]]
        return (
            f"record function {device.rf_id[row]} is {name[:60]!r} in the first and "
            f"{device.names[device.name[row]][:60]!r} in the second"
        )
    if not len(absent):
        return f"{'the second' if not _on_cpu(device).any() else 'the first'} has none"
    row = int(absent[0])
    number = f", record function {device.rf_id[row]}," if device.rf_id[row] >= 0 else ""
    return f"{device.names[device.name[row]][:60]!r}{number} of the second is not in the first"


def _clock_gap(host: HostTrace, device: DeviceTrace) -> int:
    """Seconds between the recordings of the two traces, 0 if they overlap or have no times.

    The host trace has local time in an unknown time zone, so the gap is only known modulo 15 minutes.
    """
    try:
        local = datetime.datetime.fromisoformat(str(host.header["time"]))
        began = local.replace(tzinfo=datetime.timezone.utc).timestamp()
        length = float(host.header["finish_ts"] - host.header["start_ts"]) / 1000
    except (ValueError, TypeError, OverflowError):
        return 0
    first, last = device.origin_ns / 1e9, (device.origin_ns + int(device.end.max(initial=0))) / 1e9
    if first < 1e9 or not 0 <= length < 900:
        return 0
    after = (first - began) % 900
    if after <= length + CLOCK_SECONDS or 900 - after <= last - first + CLOCK_SECONDS:
        return 0
    return round(min(after - length, 900 - after))
