"""Process groups: their ranks, their numbers in the files, and which one a communication belongs to."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chakra_et.traces.device import KERNEL, MAX_RANKS, DeviceTrace
from chakra_et.traces.fields import as_number
from chakra_et.traces.host import HostTrace

GROUP_MARK = "process_group:"
LAUNCHERS = ("c10d::", "_c10d_functional::")
"""Operators that start communication."""


@dataclass
class Group:
    """A process group: its name and description in PyTorch, and the global ranks (empty: not recorded)."""

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()


def groups_of(
    host: HostTrace, device: DeviceTrace, manifest: Sequence[dict[str, Any]] = ()
) -> dict[str, Group]:
    """The process groups that this rank knows, by name.

    Taken from the run's manifest, Kineto's distributedInfo and the host trace's record, in this order; the
    default group's ranks are all ranks where none of them lists them.
    """
    world = int(as_number(device.distributed.get("world_size"), 0) or 0)
    groups: dict[str, Group] = {}
    config = device.distributed.get("pg_config")
    for record in (*manifest, *(config if isinstance(config, list) else ()), *host.groups):
        if not isinstance(record, dict) or "pg_name" not in record:
            continue
        name = str(record["pg_name"])
        known = groups.setdefault(name, Group(name))
        known.description = known.description or str(record.get("pg_desc") or "")
        known.ranks = known.ranks or read_ranks(record.get("ranks"))
        if name == "0" and not world:  # the host trace lists no ranks of the default group, only how many
            world = min(int(as_number(record.get("group_size"), 0)), MAX_RANKS)
    if world and not groups:
        groups["0"] = Group("0", "default_pg", tuple(range(world)))
    for group in groups.values():
        if not group.ranks and (group.description == "default_pg" or group.name == "0"):
            group.ranks = tuple(range(world))
    return groups


def mentioned_groups(host: HostTrace, device: DeviceTrace, known: dict[str, Group]) -> dict[str, Group]:
    """The groups that single events name and no record lists, by name."""
    found: dict[str, Group] = {}
    for args in device.communication.values():
        if args.group_name is not None and (name := str(args.group_name)) not in known:
            ranks = read_ranks(args.group_ranks)
            found.setdefault(name, Group(name, str(args.group_description or ""), ranks))
    for attributes in host.communication.values():
        name = str(attributes.get("pg_name") or "0")
        if name not in known:
            found.setdefault(name, Group(name, str(attributes.get("pg_desc") or "")))
    for event in device.names:
        if event.startswith(GROUP_MARK) and (name := event.removeprefix(GROUP_MARK)) not in known:
            found.setdefault(name, Group(name))
    return found


def group_number(group: Group) -> int:
    """The integer ≥ 1 that stands for a group in the files, the same on every rank.

    PyTorch names groups by a counter from 0, so the default group becomes 1; a name that is no number gets
    a number from its hash.
    """
    if group.name.isascii() and group.name.isdigit() and len(group.name) < 9:
        return int(group.name) + 1
    text = f"{group.name} {group.ranks}".encode()
    return 500_000_000 + zlib.crc32(text) % 499_999_999


def named_groups(
    device: DeviceTrace, parent: np.ndarray, launchers: list[int], groups: dict[str, Group]
) -> dict[int, Group]:
    """Launcher → the group that an enclosing ``process_group:NAME`` names, as our tracer writes it."""
    codes = {code: name for code, name in enumerate(device.names) if name.startswith(GROUP_MARK)}
    found = {}
    for launch in launchers if codes else ():
        at = launch
        while at >= 0 and int(device.name[at]) not in codes:
            at = int(parent[at])
        if at >= 0:
            name = codes[int(device.name[at])].removeprefix(GROUP_MARK)
            found[launch] = groups[name]
    return found


def group_of_thread(
    device: DeviceTrace, rows: list[int], groups: dict[str, Group], notes: dict[str, int]
) -> dict[int, Group]:
    """Which group a gloo worker thread belongs to.

    Gloo's operators do not name their group, but each group makes threads of its own when it is made, so
    threads with neighbouring ids belong together and come in the order of the groups.
    """
    rank = int(as_number(device.distributed.get("rank"), -1))
    mine = [group for group in groups.values() if not group.ranks or rank < 0 or rank in group.ranks]
    if len(mine) < 2:
        return {}
    main_like = {thread for thread, _ in enumerate(device.threads) if _is_python_thread(device, thread)}
    tids = sorted({(device.threads[t][1], t) for t in device.thread[rows].tolist()
                   if t not in main_like and isinstance(device.threads[t][1], int)})  # fmt: skip
    clusters: list[list[int]] = []
    previous = None
    for tid, thread in tids:
        if previous is None or tid - previous > 1:
            clusters.append([])
        clusters[-1].append(thread)
        previous = tid
    if len(clusters) != len(mine):
        if len(clusters) > 0:
            notes["group of gloo operators not told by their threads: taken as the default group"] = len(rows)
        return {}
    notes["group of gloo operators told by their worker threads"] = len(rows)
    return {thread: group for cluster, group in zip(clusters, mine, strict=True) for thread in cluster}


def _is_python_thread(device: DeviceTrace, thread: int) -> bool:
    """Sends and receives are recorded on the thread that asked for them."""
    ops = device.name[(device.thread == thread) & (device.category < KERNEL)]
    return any(device.names[code].startswith(LAUNCHERS) for code in np.unique(ops).tolist())


def global_rank(rank: int, group: Group) -> int:
    return group.ranks[rank] if 0 <= rank < len(group.ranks) else rank


def read_ranks(value: Any) -> tuple[int, ...]:
    """Ranks from a list or its text; none where it is anything else, or cut short by the profiler."""
    if isinstance(value, str):
        value = [] if "..." in value else [int(part) for part in re.findall(r"[0-9]{1,9}", value)]
    if not isinstance(value, list) or not all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in value):
        return ()
    return tuple(value) if len(set(value)) == len(value) else ()
