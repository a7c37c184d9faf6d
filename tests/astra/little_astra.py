"""A small ASTRA-sim for tests: takes the flags of the real one, passes every message of every ring and prints
the lines that the real one prints. It shares no arithmetic with chakra_et.cost: what it finds is
counted."""

from __future__ import annotations

import heapq
import itertools
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import yaml

from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.edges import edges_of

GIB = 2**30


class Network:
    def __init__(self, path: str, memory: float):
        content = yaml.safe_load(Path(path).read_text())
        self.kinds, self.sizes = content["topology"], content["npus_count"]
        self.rates, self.latencies = content["bandwidth"], content["latency"]
        self.ranks, self.memory = int(np.prod(self.sizes)), memory

    def place(self, rank: int) -> list[int]:
        place = []
        for size in self.sizes:
            place.append(rank % size)
            rank //= size
        return place

    def delay(self, source: int, target: int, size: float) -> float:
        a, b = self.place(source), self.place(target)
        at = next(at for at in range(len(a)) if a[at] != b[at])
        apart = abs(a[at] - b[at])
        hops = {"Switch": 2, "FullyConnected": 1, "Ring": min(apart, self.sizes[at] - apart)}[self.kinds[at]]
        return hops * self.latencies[at] + size / (self.rates[at] * GIB / 1e9)

    def reduce(self, size: float) -> float:
        return 3 * size / self.memory


def ring(
    network: Network, members: list[int], ready: dict[int, float], sizes: list[tuple[float, bool]]
) -> None:
    """One message per member and step; ``ready`` moves on to when each member has its last one."""
    for size, reduced in sizes:
        sent = {rank: ready[rank] for rank in members}
        for source, target in itertools.pairwise([*members, members[0]]):
            arrived = sent[source] + network.delay(source, target, size)
            ready[target] = max(ready[target], arrived) + (network.reduce(size) if reduced else 0)


def collective(
    network: Network, kind: int, size: float, members: list[int], starts: dict[int, float]
) -> dict:
    ready = dict(starts)
    if len(members) < network.ranks:
        ring(network, members, ready, steps(kind, size, len(members)))
        return ready
    dims = range(len(network.sizes))
    scatter, gather = CollectiveType.REDUCE_SCATTER, CollectiveType.ALL_GATHER
    plan: list[tuple[int, int]] = []
    if kind == CollectiveType.ALL_REDUCE:
        plan = (
            [(scatter, d) for d in dims[:-1]]
            + [(kind, dims[-1])]
            + [(gather, d) for d in reversed(dims[:-1])]
        )
    else:
        plan = [(kind, d) for d in (reversed(dims) if kind == gather else dims)]
    for phase, dim in plan:
        for group in lines(network, dim):
            ring(network, group, ready, steps(phase, size, len(group), exchange=True))
        if phase == scatter:
            size /= network.sizes[dim]
        elif phase == gather:
            size *= network.sizes[dim]
    return ready


def lines(network: Network, dim: int) -> list[list[int]]:
    found = defaultdict(list)
    for rank in range(network.ranks):
        place = network.place(rank)
        found[tuple(place[:dim] + place[dim + 1 :])].append(rank)
    return list(found.values())


def steps(kind: int, size: float, count: int, exchange: bool = False) -> list[tuple[float, bool]]:
    part = size / count
    if kind == CollectiveType.ALL_REDUCE:
        return [(part, True)] * (count - 1) + [(part, False)] * (count - 1)
    if kind == CollectiveType.ALL_GATHER:
        return [(size, False)] * (count - 1)
    if kind == CollectiveType.REDUCE_SCATTER:
        return [(part, True)] * (count - 1)
    # A ring passes everybody's parts on from rank to rank; an exchange has a message for each pair.
    return [(part, False)] * (count - 1 if exchange else count * (count - 1) // 2)


class Rank:
    def __init__(self, trace: ExecutionTrace):
        edges = edges_of(trace)
        self.trace, self.end = trace, 0
        self.parents = np.bincount(edges.child, minlength=len(trace)).tolist()
        self.children: dict[int, list[int]] = defaultdict(list)
        for parent, child in zip(edges.parent.tolist(), edges.child.tolist(), strict=True):
            self.children[parent].append(child)
        self.ready = [row for row, count in enumerate(self.parents) if not count]
        self.busy = [False] * 3
        names = trace.attributes.get("pg_name")
        table = [] if names is None else [names.values.table[at].decode() for at in names.values.index]
        self.group = {} if names is None else dict(zip(names.rows.tolist(), table, strict=True))
        columns = ("comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "is_cpu_op")
        self.column = {name: trace.column(name, -1).tolist() for name in columns}

    def slot(self, row: int) -> int:
        kind = self.trace.types[row]
        return 2 if kind >= NodeType.COMM_SEND else 0 if self.column["is_cpu_op"][row] == 1 else 1


def simulate(ranks: list[Rank], groups: dict[str, list[int]], network: Network) -> None:
    events: list[tuple[int, int, int, int]] = []  # ns, order of scheduling, rank, row
    scheduled = itertools.count()
    waiting: dict[tuple, dict[int, tuple[float, int]]] = defaultdict(dict)
    issued: dict[tuple, int] = defaultdict(int)

    def issue(number: int, now: int) -> None:
        rank = ranks[number]
        for row in sorted(rank.ready):
            kind, slot = rank.trace.types[row], rank.slot(row)
            receives = kind == NodeType.COMM_RECV
            if rank.busy[slot] and not receives:
                continue
            rank.ready.remove(row)
            rank.busy[slot] = rank.busy[slot] or not receives
            broadcast = rank.column["comm_type"][row] == CollectiveType.BROADCAST
            if slot < 2 or broadcast:
                lasts = max(1, int(rank.trace.duration_micros[row]) * 1000)
                heapq.heappush(events, (now + lasts, next(scheduled), number, row))
            else:
                communicate(number, row, now)

    def communicate(number: int, row: int, now: int) -> None:
        rank = ranks[number]
        column = {name: values[row] for name, values in rank.column.items()}
        if rank.trace.types[row] == NodeType.COMM_COLL:
            members = groups.get(rank.group.get(row, "0"), list(range(network.ranks)))
            channel: tuple = ("group", rank.group.get(row, "0"))
        else:
            members = [column["comm_src"], column["comm_dst"]]
            channel = (*members, column["comm_tag"], column["comm_size"])
        key = (*channel, issued[channel, number])
        issued[channel, number] += 1
        waiting[key][number] = (now, row)
        if len(waiting[key]) == len(members):
            arrived = waiting.pop(key)
            starts = {member: time for member, (time, _) in arrived.items()}
            if channel[0] == "group":
                size = column["comm_size"]
                if column["comm_type"] != CollectiveType.ALL_GATHER:
                    size = max(size, network.ranks)
                ends = collective(network, column["comm_type"], size, members, starts)
            else:
                end = max(starts.values()) + network.delay(*members, column["comm_size"])
                ends = dict.fromkeys(members, end)
            for member, (_, at) in arrived.items():
                heapq.heappush(events, (int(ends[member]), next(scheduled), member, at))

    for number in range(len(ranks)):
        issue(number, 0)
    while events:
        now, _, number, row = heapq.heappop(events)
        rank = ranks[number]
        rank.end = now
        if rank.trace.types[row] != NodeType.COMM_RECV:
            rank.busy[rank.slot(row)] = False
        for child in rank.children[row]:
            rank.parents[child] -= 1
            if not rank.parents[child]:
                rank.ready.append(child)
        issue(number, now)
    for number, rank in enumerate(ranks):
        if not rank.ready and not any(rank.parents):
            print(
                f"[workload] [info] sys[{number}] finished, {round(rank.end)} cycles, exposed communication "
                "0 cycles."
            )


def main() -> None:
    flags = dict(each.removeprefix("--").split("=", 1) for each in sys.argv[1:])
    system = json.loads(Path(flags["system-configuration"]).read_text())
    network = Network(flags["network-configuration"], system["local-mem-bw"])
    assert system["preferred-dataset-splits"] == 1
    assert json.loads(Path(flags["remote-memory-configuration"]).read_text())
    for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        assert len(system[f"{name}-implementation"]) == len(network.sizes)
    groups = json.loads(Path(flags["comm-group-configuration"]).read_text())
    prefix = flags["workload-configuration"]
    ranks = [Rank(et_file.read(f"{prefix}.{rank}.et")) for rank in range(network.ranks)]
    simulate(ranks, groups, network)


if __name__ == "__main__":
    main()
