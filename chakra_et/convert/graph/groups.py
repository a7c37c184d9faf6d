"""Process groups: their ranks, and the group of each communication."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from chakra_et.convert.graph.communication import BY_STREAM, Group
from chakra_et.convert.graph.communication_arguments import LAUNCHERS, Around, Facts, started_by
from chakra_et.findings import Findings
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.fields import MAX_RANKS, as_number
from chakra_et.traces.host import HostTrace


def read_ranks(value: Any) -> tuple[int, ...]:
    """Ranks from a list or its text; empty for other values and for text that the profiler truncated."""
    if isinstance(value, str):
        value = [] if "..." in value else [int(part) for part in re.findall(r"[0-9]{1,9}", value)]
    are_ranks = isinstance(value, list) and all(type(each) is int and 0 <= each < MAX_RANKS for each in value)
    return tuple(value) if are_ranks and len(set(value)) == len(value) else ()


class Groups:
    """The process groups of a rank, and the lookup of a communication's group.

    ``declared``: groups in a manifest or process-group record; ``by_name``: these and groups that only occur
    in single events. ``of_launcher``: launching operator → its group. ``are_listed``: whether there is a
    record of groups; otherwise the default group is assumed. ``streams``: (device, stream) of the
    communication kernels → its number in the order of first use. ``of_thread``: gloo thread → its group.
    ``buckets``: the manifest's ``ddp_buckets``.
    """

    def __init__(self, around: Around, kernels: np.ndarray, manifest: Sequence[dict[str, Any]]) -> None:
        """``kernels``: rows of communication kernels; ``manifest``: the groups in the run's manifest."""
        self.around, device, host = around, around.device, around.host
        self.declared = declared_groups(host, device, manifest)
        # And those in single events.
        single = [(a.group_name, a.group_description, a.group_ranks) for a in device.communication.values()]
        single += [(a.get("pg_name"), a.get("pg_desc"), None) for a in host.communication.values()]
        single += [(name, "", None) for name, _ in around.marks.values()]
        found: dict[str, Group] = {}
        for name, description, ranks in single:
            group = Group("" if name is None else str(name), str(description or ""), read_ranks(ranks))
            if group.name not in found or (group.ranks and not found[group.name].ranks):
                found[group.name] = group
        self.by_name = self.declared | {n: g for n, g in found.items() if n and n not in self.declared}
        self.default = self.by_name.get("0") or next(iter(self.by_name.values()), Group("0"))
        self.of_launcher = {at: of for at in around.launchers.tolist() if (of := self._named_by(at))}
        self.are_listed = bool(manifest or device.distributed.get("pg_config") or host.groups)
        streams = zip(device.device[kernels].tolist(), device.stream[kernels].tolist(), strict=True)
        self.streams = {stream: number for number, stream in enumerate(dict.fromkeys(streams))}
        self.rank = int(as_number(device.distributed.get("rank"), -1))
        self.of_thread = {at: self.declared[of] for at, of in gloo_threads(device, manifest).items()}
        lists = ((str(record["pg_name"]), record["buckets"]) for record in manifest)
        self.buckets = {name: sizes for name, sizes in lists if isinstance(sizes, list)}

    def _named_by(self, launch: int) -> Group | None:
        """The group of a launcher: by our tracer's annotation around it, or by the last text argument of a
        functional collective."""
        around = self.around
        if launch in around.marks:
            return self.by_name.get(around.marks[launch][0])
        for at in around.chain(launch):
            name = around.name(at)
            if name.startswith(LAUNCHERS[1]):
                texts = [value for value in around.values(at) if isinstance(value, str | int)]
                last = texts[-1] if texts else True
                # Kineto writes the group "1" like the number 1.
                is_text = isinstance(last, str) or not (around.host.recorded or isinstance(last, bool))
                if is_text and (group := self.by_name.get(str(last))):
                    return group
        return None

    def of_kernel(self, row: int, facts: Facts, chain: list[int], findings: Findings) -> Group:
        """The group of a device kernel."""
        named = self.by_name.get(facts.group) if facts.group else None
        known = named or next((self.of_launcher[at] for at in chain if at in self.of_launcher), None)
        if known is not None:
            return known
        shared = [group for group in self.declared.values() if len(group.ranks) != 1]
        if self.are_listed and len(shared) == 1:
            return shared[0]
        device = self.around.device
        if len(self.streams) > 1:
            # NCCL uses one stream per communicator, and ranks use their communicators in the same order.
            findings.add("group-by-stream")
            number = self.streams[int(device.device[row]), int(device.stream[row])]
            return Group(f"communicator {number}", BY_STREAM, self.default.ranks)
        findings.add("group-default")
        return self.default

    def of_backend(self, rows: np.ndarray, findings: Findings) -> list[tuple[int, int, Group]]:
        """(row, row of its launcher or -1, group) of each event ``rows`` of a CPU backend.

        Gloo's operators do not record their group, our tracer does: by threads, of which each group has its
        own, and around the call. Without it the default group is assumed.
        """
        device, names = self.around.device, {at: group.name for at, group in self.of_thread.items()}
        starts = started_by(device, rows, names, self.around.marks)[rows].tolist()
        by_thread = map(self.of_thread.get, device.thread[rows].tolist())
        groups = [of or self.of_launcher.get(start) for of, start in zip(by_thread, starts, strict=True)]
        mine = [each for each in self.declared.values() if not each.ranks or self.rank in (-1, *each.ranks)]
        findings.add("group-default", groups.count(None) if len(mine) > 1 else 0)
        return list(zip(rows.tolist(), starts, [group or self.default for group in groups], strict=True))


def gloo_threads(device: DeviceTrace, manifest: Sequence[dict[str, Any]]) -> dict[int, str]:
    """Index of each of gloo's threads → the name of its group, where our tracer recorded it."""
    of_tid = dict[int, str]()
    for record in manifest:
        if isinstance(tids := record["threads"], list):
            of_tid |= {tid: str(record["pg_name"]) for tid in tids if type(tid) is int}
    return {
        at: of_tid[tid] for at, (_, tid) in enumerate(device.threads) if type(tid) is int and tid in of_tid
    }


def declared_groups(
    host: HostTrace, device: DeviceTrace, manifest: Sequence[dict[str, Any]] = ()
) -> dict[str, Group]:
    """The recorded process groups, by name.

    Sources in order of precedence: the run's manifest, Kineto's distributedInfo, the host trace's record. If
    the ranks of the default group are not recorded, they are all ranks.
    """
    world = int(as_number(device.distributed.get("world_size"), 0) or 0)
    found: dict[str, Group] = {}
    config = device.distributed.get("pg_config")
    for record in (*manifest, *(config if isinstance(config, list) else ()), *host.groups):
        if not isinstance(record, dict) or "pg_name" not in record:
            continue
        name = str(record["pg_name"])
        known = found.get(name, Group(name))
        description = known.description or str(record.get("pg_desc") or "")
        found[name] = Group(name, description, known.ranks or read_ranks(record.get("ranks")))
        if name == "0" and not world:  # the host trace has only the size of the default group
            world = min(int(as_number(record.get("group_size"), 0)), MAX_RANKS)
    if world and not found:
        found["0"] = Group("0", "default_pg")
    everyone = tuple(range(min(world, MAX_RANKS)))
    for name, group in found.items():
        if not group.ranks and (group.description == "default_pg" or name == "0"):
            found[name] = Group(name, group.description, everyone)
    return found
