"""A step of a plan as Chakra execution traces, one for each rank, that a network simulator can replay."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from chakra_et.et import file as et_file
from chakra_et.et.columns import Attribute, ExecutionTrace, NodeType, Ragged, Strings
from chakra_et.files import write_text
from chakra_et.names import RunFiles
from fasop.errors import PlanError
from fasop.output.trace_nodes import Node, stage_nodes, stage_tp
from fasop.plans.plan import Plan
from fasop.schedule.events import Event, step_time

WORLD = "1"  # the group of all ranks


def write(plan: Plan, events: Sequence[Event], folder: Path, name: str) -> list[Path]:
    """Write NAME.RANK.et for every rank, and NAME_comm_groups.json; returns the .et files.

    Rank t + tp·d + tp·dp·stage, as the cost models number them. Raises ``OSError``, and ``PlanError`` for a
    plan whose communication within passes the traces would lack.
    """
    if plan.options.zero >= 2:
        raise PlanError(
            f"--et: a plan with --zero {plan.options.zero} can't be written: it communicates within every "
            "pass, which the traces don't hold; plan with --zero 0 or 1."
        )
    folder.mkdir(parents=True, exist_ok=True)
    run = RunFiles(folder, name)
    groups = _Groups(plan)
    whole, written = step_time(list(events)), []
    each = plan.tp * plan.dp
    progress = tqdm(total=each * plan.pp, unit="rank", disable=not sys.stderr.isatty())
    for stage in range(plan.pp):
        nodes = stage_nodes(plan, stage, _of_stage(events, stage))
        shared = _shared(plan, nodes, whole)
        for place in range(each):
            rank = stage * each + place
            written.append(run.et_file(rank))
            et_file.write(written[-1], _of_rank(shared, nodes, rank, stage, place, groups))
            progress.update()
    progress.close()
    write_text(run.groups_file, json.dumps(groups.ranks, indent=1) + "\n")
    return written


def _of_stage(events: Sequence[Event], stage: int) -> list[Event]:
    """The events of a stage, with ``after`` among themselves."""
    first = next((at for at, event in enumerate(events) if event.stage == stage), 0)
    own = [event for event in events if event.stage == stage]
    return [replace(event, after=tuple(one - first for one in event.after)) for event in own]


class _Groups:
    """Names of groups, and their ranks."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.each = plan.tp * plan.dp
        self.ranks: dict[str, list[int]] = {WORLD: list(range(self.each * plan.pp))}
        self._names: dict[tuple[str, int], str] = {}

    def name(self, kind: str, stage: int, place: int) -> str:
        """The number of a rank's group, the same on each of its ranks."""
        tp, first = stage_tp(self.plan, stage), stage * self.each
        if kind == "tensor":
            begin = first + place // tp * tp
            ranks = list(range(begin, begin + tp))
        elif kind == "data":
            ranks = list(range(first + place % tp, first + self.each, tp))
        elif kind == "experts":
            begin = place // tp // self.plan.ep * self.plan.ep
            ranks = [first + place % tp + tp * (begin + one) for one in range(self.plan.ep)]
        elif kind == "copies":
            begin = place // tp % self.plan.ep
            ranks = list(range(first + place % tp + tp * begin, first + self.each, tp * self.plan.ep))
        else:
            holders = self.plan.model.embedding_stages(self.plan.partition)
            ranks = [holder * self.each + place for holder in holders]
        key = (kind, ranks[0])
        if key not in self._names:
            self._names[key] = str(len(self._names) + 2)
            self.ranks[self._names[key]] = ranks
        return self._names[key]


def _shared(plan: Plan, nodes: list[Node], whole: float) -> ExecutionTrace:
    """What the traces of all ranks of a stage have in common."""
    start = np.array([round(node.start * 1e6) for node in nodes], dtype=np.int64)
    end = np.array([round(node.end * 1e6) for node in nodes], dtype=np.int64)
    rows = np.arange(len(nodes))
    offsets = np.concatenate(([0], np.cumsum([len(node.after) for node in nodes]))).astype(np.int64)
    sources = np.array([one + 1 for node in nodes for one in node.after], dtype=np.uint64)
    names = Strings([node.name.encode() for node in nodes], rows)
    communicates = rows[[node.size > 0 for node in nodes]]
    collective = rows[[node.collective is not None for node in nodes]]
    messages = rows[[node.size > 0 and node.collective is None for node in nodes]]
    attributes = {
        "is_cpu_op": Attribute("bool", rows, np.zeros(len(rows), dtype=np.int64)),
        "kind": _text(rows, [_kind(node) for node in nodes]),
        "lane": _numbers(rows, [node.lane for node in nodes]),
        "stream": _numbers(rows, [node.lane for node in nodes]),
        "micro_batch": _numbers(rows, [node.event.micro_batch for node in nodes]),
        "chunk": _numbers(rows, [node.event.chunk for node in nodes]),
        "comm_size": _numbers(communicates, [nodes[row].size for row in communicates.tolist()]),
        "comm_type": _numbers(collective, [int(nodes[row].collective or 0) for row in collective.tolist()]),
    }
    tags = [_tag(plan, nodes[row].event) for row in messages.tolist()]
    attributes["comm_tag"] = Attribute("int32", messages, np.array(tags, dtype=np.int64))
    return ExecutionTrace(
        ids=np.arange(1, len(nodes) + 1, dtype=np.uint64),
        names=names,
        types=np.array([_type(node) for node in nodes], dtype=np.uint8),
        start_micros=start.astype(np.uint64),
        duration_micros=(end - start).astype(np.uint64),
        data_deps=Ragged(offsets, sources),
        ctrl_deps=Ragged(np.zeros(len(nodes) + 1, dtype=np.int64), np.zeros(0, dtype=np.uint64)),
        attributes=attributes,
        metadata={
            "schema": "fasop",
            "world_size": plan.tp * plan.dp * plan.pp,
            "measured_end_micros": int(end.max(initial=0)),
            "clock_domain": plan.cluster.name,
            "trace_start_ns": 0,
            "planned_step_micros": round(whole * 1e6),
        },
    )


def _of_rank(
    shared: ExecutionTrace, nodes: list[Node], rank: int, stage: int, place: int, groups: _Groups
) -> ExecutionTrace:
    """The trace of one rank: its peers and groups."""
    attributes = dict(shared.attributes)
    messages = attributes["comm_tag"].rows
    each = groups.each
    ends = [
        (rank, nodes[row].event.peer * each + place)
        if nodes[row].event.kind == "send"
        else (nodes[row].event.peer * each + place, rank)
        for row in messages.tolist()
    ]
    for name, side in (("comm_src", 0), ("comm_dst", 1)):
        attributes[name] = Attribute(
            "int32", messages, np.array([pair[side] for pair in ends], dtype=np.int64)
        )
    rows = attributes["comm_size"].rows
    known = {
        # In an order that is the same each time: groups are numbered as they are asked for.
        kind: groups.name(kind, stage, place)
        for kind in sorted({nodes[row].group for row in rows.tolist()} - {""})
    }
    attributes["pg_name"] = _text(rows, [known.get(nodes[row].group, WORLD) for row in rows.tolist()])
    used = {name: attribute for name, attribute in attributes.items() if len(attribute.rows)}
    return replace(shared, attributes=used, metadata={**shared.metadata, "rank": rank})


def _numbers(rows: np.ndarray, values: Sequence[int]) -> Attribute:
    return Attribute("int64", rows, np.array(values, dtype=np.int64))


def _text(rows: np.ndarray, values: Sequence[str]) -> Attribute:
    table = sorted(set(values))
    number = {text: index for index, text in enumerate(table)}
    index = np.array([number[text] for text in values], dtype=np.int32)
    return Attribute("string", rows, Strings([text.encode() for text in table], index))


def _tag(plan: Plan, event: Event) -> int:
    """Different for all messages between two ranks."""
    return 2 * (event.chunk * plan.micro_batches + event.micro_batch) + event.up


def _type(node: Node) -> NodeType:
    if node.collective is not None:
        return NodeType.COMM_COLL
    return {"send": NodeType.COMM_SEND, "receive": NodeType.COMM_RECV}.get(node.event.kind, NodeType.COMP)


def _kind(node: Node) -> str:
    if node.collective is not None:
        return "collective"
    return "p2p" if node.size else "kernel"
