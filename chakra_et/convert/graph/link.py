"""Match the events on the CPU with the nodes of the host trace.

Both traces have the same record-function ids ("Record function id" = ``rf_id``). Traces without these ids
(schema 1.0.1) are matched by thread, order and name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from chakra_et.arrays import unique
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import ANNOTATION, CPU_OP
from chakra_et.traces.host import GROUP_RECORD, STRUCTURE, HostTrace

LOOK_AHEAD = 64


How = Literal["record-function id", "thread, order and name", "no host trace"]


@dataclass(eq=False, repr=False)
class Link:
    """The match of the two traces.

    ``host_row[i]``: the row of the host trace for row i of the device trace, -1 for none. ``unmatched``: host
    rows without an event, except for the roots and the process-group record, which have none. ``how``: the
    method of matching.
    """

    host_row: np.ndarray
    unmatched: np.ndarray
    how: How

    def rate(self, host: HostTrace) -> float:
        """The part (0 to 1) of the host operators with a device record; 0 if there are no operators."""
        expected = int(_operators(host).sum())
        return 1.0 - len(self.unmatched) / expected if expected else 0.0


def link(host: HostTrace, device: DeviceTrace) -> Link:
    """Match the two traces of one rank. Never fails: the result lists unmatched rows."""
    on_cpu = (device.category == CPU_OP) | (device.category == ANNOTATION)
    if not host.recorded:
        host_row = np.where(on_cpu, np.cumsum(on_cpu) - 1, -1)
        return Link(host_row, np.zeros(0, dtype=np.int64), "no host trace")
    expected = _operators(host)
    rows = np.flatnonzero(on_cpu & (device.rf_id > 0))
    how: How
    if len(rows):
        host_row = _by_id(host, device, rows, np.flatnonzero(expected))
        how = "record-function id"
    else:
        host_row = _by_order(host, device, np.flatnonzero(on_cpu), expected)
        how = "thread, order and name"
    expected[host_row[host_row >= 0]] = False
    return Link(host_row, np.flatnonzero(expected), how)


def _operators(host: HostTrace) -> np.ndarray:
    structure = [host.names.index(name) for name in (*STRUCTURE, GROUP_RECORD) if name in host.names]
    return ~np.isin(host.name, structure)


def _by_id(host: HostTrace, device: DeviceTrace, rows: np.ndarray, host_rows: np.ndarray) -> np.ndarray:
    result = np.full(len(device), -1, dtype=np.int64)
    order = host_rows[np.argsort(host.rf_id[host_rows], kind="stable")]
    ids = host.rf_id[order]
    at = np.searchsorted(ids, device.rf_id[rows])
    found = at < len(ids)
    found[found] = ids[at[found]] == device.rf_id[rows[found]]
    result[rows[found]] = order[at[found]]
    return result


def _by_order(host: HostTrace, device: DeviceTrace, rows: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Pair each host thread with the device thread that has most names in common, then align in order."""
    result = np.full(len(device), -1, dtype=np.int64)
    host_threads = []
    for tid in unique(host.tid[expected]).tolist():
        of_thread = np.flatnonzero(expected & (host.tid == tid))
        host_threads.append(of_thread[np.argsort(host.rf_id[of_thread], kind="stable")])
    device_threads = [rows[device.thread[rows] == thread] for thread in unique(device.thread[rows])]
    likeness = []
    for h, host_rows in enumerate(host_threads):
        host_counts = _name_counts([host.names[n] for n in host.name[host_rows]])
        for d, device_rows in enumerate(device_threads):
            device_counts = _name_counts([device.names[n] for n in device.name[device_rows]])
            common = sum(min(count, device_counts.get(name, 0)) for name, count in host_counts.items())
            likeness.append((-common, h, d))
    used_host: set[int] = set()
    used_device: set[int] = set()
    for common, h, d in sorted(likeness):
        if common and h not in used_host and d not in used_device:
            used_host.add(h)
            used_device.add(d)
            _align(host, device, host_threads[h], device_threads[d], result)
    return result


def _align(
    host: HostTrace, device: DeviceTrace, host_rows: np.ndarray, device_rows: np.ndarray, result: np.ndarray
) -> None:
    """Align two sequences. If names differ, skip on the side where the other's name comes sooner."""
    h_names = [host.names[n] for n in host.name[host_rows]]
    d_names = [device.names[n] for n in device.name[device_rows]]
    for h, d in aligned(h_names, d_names):
        result[device_rows[d]] = host_rows[h]


def aligned(first: list[str], second: list[str]) -> list[tuple[int, int]]:
    """The places of equal names in two sequences, in order."""
    if first == second:
        return [(place, place) for place in range(len(first))]
    pairs = []
    a = b = 0
    while a < len(first) and b < len(second):
        if first[a] == second[b]:
            pairs.append((a, b))
            a, b = a + 1, b + 1
            continue
        skip_first = _distance(first, a, second[b])
        skip_second = _distance(second, b, first[a])
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


def _name_counts(names: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts
