"""Compare the converter's result for two generated traces with the true execution."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chakra_et.convert.graph import nodes as graph
from chakra_et.convert.graph import timeline
from chakra_et.convert.graph.build import build
from chakra_et.convert.graph.communication import Communications
from chakra_et.convert.graph.dependencies import find_dependencies
from chakra_et.convert.graph.linked import link_rank
from chakra_et.convert.graph.nodes import Dependencies, EdgeKind
from chakra_et.traces import device as device_trace
from chakra_et.traces import host as host_trace
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import CATEGORIES
from tests.generator import Generated
from tests.generator.layouts import PID, thread_ids, worker_id, zero_ns
from tests.generator.machine import Edge, Event, Lane, Run, run


@dataclass
class Converted:
    """The results of all stages for one generated pair, and the rows of the machine's events in them.

    ``row``: event number → row of the device trace; ``nodes``: event number → its nodes, in order of time.
    ``lanes``: lane of the timeline → the machine's lane. ``offset``: ns from the machine's clock to the
    trace's.
    """

    generated: Generated
    host: host_trace.HostTrace
    device: DeviceTrace
    linked: np.ndarray
    time: timeline.Timeline
    communication: Communications
    causes: Dependencies
    graph: graph.Graph
    row: dict[int, int]
    nodes: dict[int, list[int]]
    lanes: list[Lane]
    offset: int


def convert(generated: Generated, folder: Path) -> Converted:
    """Write the traces and run the stages up to the graph."""
    host_path, device_path = generated.write(folder)
    host, device = host_trace.load(host_path), device_trace.load(device_path)
    rank = link_rank(host, device, allow_unlinked=True)
    linked, time, communication = rank.host_row, rank.timeline, rank.communication
    found = find_dependencies(rank)
    made = build(rank, found)
    offset = zero_ns(generated.layout) - device.origin_ns
    row = _rows(generated, device, offset)
    of_row: dict[int, list[int]] = defaultdict(list)
    for node, event in enumerate(made.event.tolist()):
        if event >= 0:
            of_row[event].append(node)
    nodes = {number: of_row[at] for number, at in row.items()}
    lanes = _lanes(generated, communication, found)
    return Converted(
        generated, host, device, linked, time, communication, found, made, row, nodes, lanes, offset
    )


def _rows(generated: Generated, device: DeviceTrace, offset: int) -> dict[int, int]:
    """Event number → row, by name, category, place and times; equal events in order."""
    rows = defaultdict(list)
    for row in range(len(device)):
        thread = int(device.thread[row])
        place = device.threads[thread] if thread >= 0 else (int(device.device[row]), int(device.stream[row]))
        key = (device.names[device.name[row]], CATEGORIES[device.category[row]], str(place[0]), str(place[1]))
        rows[(*key, int(device.start[row]), int(device.end[row]))].append(row)
    tids = thread_ids(list(generated.program.threads))
    numbers = {group.name: at for at, group in enumerate(generated.program.groups)}
    found = {}
    for event in generated.run.events:
        if event.category == "python_function":
            continue
        if event.lane[0] == "gpu":
            place = event.lane[1:3]
        elif event.lane[0] == "comm":
            place = (
                PID,
                worker_id(numbers[event.lane[1]], event.thread) if event.thread >= 0 else tids["main"],
            )
        else:
            place = (PID, tids[event.lane[1]])
        key = (event.name, event.category, str(place[0]), str(place[1]))
        found[event.number] = rows[(*key, event.start + offset, event.end + offset)].pop(0)
    return found


def _lanes(generated: Generated, communication: Communications, found: Dependencies) -> list[Lane]:
    name_of = {tid: name for name, tid in thread_ids(list(generated.program.threads)).items()}
    lanes: list[Lane] = []
    for lane in found.lanes:
        if lane.kind == "gpu":
            lanes.append(("gpu", lane.device, lane.stream))
        elif lane.kind == "cpu":
            lanes.append(("cpu", name_of[int(lane.label)]))
        else:
            lanes.append(("comm",))
    for number, (lane, _, _) in found.placed.items():
        item = communication.items[number]
        ends = ()
        if item.collective is None:
            mine = generated.program.rank
            ends = ("send", mine, item.peer) if item.type.name == "COMM_SEND" else ("recv", item.peer, mine)
        lanes[lane] = ("comm", item.group.name, *ends)
    return lanes


def missing_edges(c: Converted, kinds: tuple[str, ...] = ()) -> list[Edge]:
    """True edges that the graph lacks, even as a path through nodes of duration 0."""
    into = defaultdict(list)
    for source, target in zip(c.graph.source.tolist(), c.graph.target.tolist(), strict=True):
        into[target].append(source)
    missing = []
    for edge in c.generated.run.edges:
        if kinds and edge.kind not in kinds:
            continue
        sources = _ends_at(c, edge.source, edge.source_event)
        targets = _starts_at(c, edge.target, edge.target_event)
        if sources and targets and not _reaches(c, into, sources, targets):
            missing.append(edge)
    return missing


def _reaches(c: Converted, into: dict[int, list[int]], sources: set[int], targets: set[int]) -> bool:
    pending, seen = list(targets), set(targets)
    if sources & targets:
        return True
    while pending:
        for before in into[pending.pop()]:
            if before in sources:
                return True
            if before not in seen and _takes_no_time(c, before):
                seen.add(before)
                pending.append(before)
    return False


def _ends_at(c: Converted, point: tuple[Lane, int], event: int) -> set[int]:
    if event >= 0:
        return {c.nodes[event][-1]}
    on_lane = _of_lane(c, point[0])
    moment = point[1] + c.offset
    found = set()
    for node in reversed(on_lane):
        if c.graph.end[node] > moment:
            continue
        found.add(node)
        if c.graph.end[node] > c.graph.start[node]:
            break
    return found


def _starts_at(c: Converted, point: tuple[Lane, int], event: int) -> set[int]:
    if event >= 0:
        return {c.nodes[event][0]}
    found = set()
    for node in _of_lane(c, point[0]):
        if c.graph.start[node] < point[1] + c.offset:
            continue
        found.add(node)
        if c.graph.end[node] > c.graph.start[node]:
            break
    return found


def _of_lane(c: Converted, lane: Lane) -> list[int]:
    index = c.lanes.index(lane)
    return np.flatnonzero(c.graph.lane == index).tolist()


def unexplained_edges(c: Converted) -> list[tuple[int, int]]:
    """Edges between lanes, as node numbers, without a true dependency on the machine."""
    leaving: dict[Lane, list[Edge]] = defaultdict(list)
    for edge in c.generated.run.edges:
        leaving[edge.source[0]].append(edge)
    next_on_lane = _next_on_lane(c)
    unexplained = []
    for source, target in zip(c.graph.source.tolist(), c.graph.target.tolist(), strict=True):
        lane_from, lane_to = c.lanes[c.graph.lane[source]], c.lanes[c.graph.lane[target]]
        if c.graph.lane[source] == c.graph.lane[target]:
            continue
        while _takes_no_time(c, target) and next_on_lane[target] >= 0:
            target = next_on_lane[target]
        reached = _reachable(leaving, lane_from, int(c.graph.end[source]) - c.offset)
        if reached.get(lane_to, c.graph.end.max()) > c.graph.start[target] - c.offset:
            unexplained.append((source, target))
    return unexplained


def _takes_no_time(c: Converted, node: int) -> bool:
    """Whether a node has duration 0 or is overhead in front of another node."""
    return bool(c.graph.event[node] < 0 or c.graph.start[node] == c.graph.end[node])


def _reachable(leaving: dict[Lane, list[Edge]], lane: Lane, moment: int) -> dict[Lane, int]:
    """The earliest time on each lane that depends on the end of work on ``lane`` at ``moment``."""
    reached = {lane: moment}
    pending = [lane]
    while pending:
        here = pending.pop()
        for edge in leaving[here]:
            there, at = edge.target
            if edge.source[1] >= reached[here] and at < reached.get(there, at + 1):
                reached[there] = at
                pending.append(there)
    return reached


def _next_on_lane(c: Converted) -> list[int]:
    following = [-1] * len(c.graph)
    last: dict[int, int] = {}
    for node, lane in enumerate(c.graph.lane.tolist()):
        if lane in last:
            following[last[lane]] = node
        last[lane] = node
    return following


def busy_of_lane(c: Converted, thread: str) -> int:
    """Total ns of the nodes of one CPU thread, from its first event."""
    nodes = np.array(_of_lane(c, ("cpu", thread)))
    first = int(np.argmax(c.graph.event[nodes] >= 0))
    return int((c.graph.end - c.graph.start)[nodes[first:]].sum())


def replay(c: Converted, changes: dict[int, int] | None = None) -> np.ndarray:
    """Start of each node, ns, from durations and edges alone; ``changes``: node → ns to add."""
    length = (c.graph.end - c.graph.start).tolist()
    for node, change in (changes or {}).items():
        length[node] += change
    start = [c.time.begin] * len(length)
    latency, gap = c.graph.launch_latency.tolist(), c.graph.stream_gap.tolist()
    for node in np.flatnonzero(c.graph.stream_gap >= 0).tolist():
        length[node] = gap[node]
    order = np.argsort(c.graph.target, kind="stable")
    columns = (c.graph.source, c.graph.target, c.graph.edge_kind)
    for source, target, kind in zip(*(column[order].tolist() for column in columns), strict=True):
        by_launch = latency[target] >= 0 and kind == EdgeKind.LAUNCH
        lag = latency[target] - max(gap[target], 0) if by_launch else 0
        start[target] = max(start[target], start[source] + length[source] + lag)
    return np.array(start, dtype=np.int64)


def what_if(c: Converted, changes: dict[str, int]) -> tuple[int, int]:
    """Change durations (key → ns to add) both on the machine and in the graph.

    Returns the largest difference of any start of device work, communication or annotation between the two,
    and how far the change moved the latest of them, both in ns.
    """
    again: Run = run(c.generated.program, changes)
    before = c.generated.run.by_key()
    in_graph = {}
    for key, change in changes.items():
        event = before[key]
        longest = max(c.nodes[event.number], key=lambda node: int(c.graph.end[node] - c.graph.start[node]))
        in_graph[longest] = change
    start = replay(c, in_graph)
    worst = moved = 0
    for old, new in zip(c.generated.run.events, again.events, strict=True):
        if not _compared(old):
            continue
        node = c.nodes[old.number][0]
        if old.lane[0] == "comm":
            predicted = (
                int(start[node]) + int(c.graph.end[node] - c.graph.start[node]) + in_graph.get(node, 0)
            )
            true, was = new.end, old.end
        else:
            predicted, true, was = int(start[node]), new.start, old.start
        worst = max(worst, abs(predicted - c.offset - true))
        moved = max(moved, abs(true - was))
    return worst, moved


def _compared(event: Event) -> bool:
    return event.lane[0] != "cpu" or event.category == "user_annotation"
