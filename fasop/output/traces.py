"""A step of a plan as Chakra execution traces, one for each rank, that a network simulator can replay."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from chakra_et.et import file as et_file
from chakra_et.et.columns import Attribute, CollectiveType, ExecutionTrace, NodeType, Ragged, Strings
from chakra_et.files import write_text
from chakra_et.names import RunFiles
from fasop.plans.plan import Plan
from fasop.schedule.events import Event, step_time

BYTES = 2  # of a number in a message, as the cost models count them
TYPES = {"send": NodeType.COMM_SEND, "receive": NodeType.COMM_RECV, "all-reduce": NodeType.COMM_COLL,
         "embedding": NodeType.COMM_COLL}  # fmt: skip
RECENT = 12  # nodes before a node that it can directly wait for


def write(plan: Plan, events: Sequence[Event], folder: Path, name: str) -> list[Path]:
    """Write NAME.RANK.et for every rank, and NAME_comm_groups.json; returns the .et files.

    Rank t + tp·d + tp·dp·stage, as the cost models number them. Messages and all-reduces have the sizes of
    the model's activations and parameters. Raises ``OSError``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = RunFiles(folder, name)
    groups: dict[str, list[int]] = {"1": list(range(plan.tp * plan.dp * plan.pp))}
    of_stage = [[event for event in events if event.stage == stage] for stage in range(plan.pp)]
    files = []
    for rank in tqdm(range(len(groups["1"])), unit="rank", disable=not sys.stderr.isatty()):
        stage, place = divmod(rank, plan.tp * plan.dp)
        trace = _trace(plan, of_stage[stage], rank, stage, place, groups, step_time(list(events)))
        files.append(run.et_file(rank))
        et_file.write(files[-1], trace)
    write_text(run.groups_file, json.dumps(groups, indent=1) + "\n")
    return files


def _trace(
    plan: Plan, events: list[Event], rank: int, stage: int, place: int, groups: dict[str, list[int]],
    whole: float,
) -> ExecutionTrace:  # fmt: skip
    each = plan.tp * plan.dp
    start = np.array([round(event.start * 1e6) for event in events], dtype=np.int64)
    end = np.array([round(event.end * 1e6) for event in events], dtype=np.int64)
    rows = np.arange(len(events))
    offsets, sources = _dependencies(events)
    talks = np.array([event.kind in TYPES for event in events], dtype=bool)
    attributes: dict[str, Attribute] = {}

    def add(name: str, kind: str, at: np.ndarray, values: Sequence[int] | np.ndarray) -> None:
        if len(at):
            attributes[name] = Attribute(kind, at, np.array(values, dtype=np.int64))

    def add_text(name: str, at: np.ndarray, values: Sequence[str]) -> None:
        if len(at):
            attributes[name] = Attribute(
                "string", at, Strings([v.encode() for v in values], np.arange(len(at)))
            )

    add("is_cpu_op", "bool", rows, np.zeros(len(rows), dtype=np.int64))
    add_text("kind", rows, [_kind(event) for event in events])
    # Messages run beside computation, each direction on a stream of its own.
    lane = [
        0 if event.kind in ("forward", "backward") else 1 + 2 * (not event.up) + (event.kind == "receive")
        for event in events
    ]
    add("lane", "int64", rows, lane)
    add("stream", "int64", rows, lane)
    add("micro_batch", "int64", rows, [event.micro_batch for event in events])
    talking = [event for event in events if event.kind in TYPES]
    add("comm_size", "int64", rows[talks], [_bytes(plan, event) for event in talking])
    p2p = np.array([event.kind in ("send", "receive") for event in events], dtype=bool)
    pairs = [
        (rank, event.peer * each + place) if event.kind == "send" else (event.peer * each + place, rank)
        for event in events
        if event.kind in ("send", "receive")
    ]
    add("comm_src", "int32", rows[p2p], [source for source, _ in pairs])
    add("comm_dst", "int32", rows[p2p], [target for _, target in pairs])
    tags = [2 * (event.chunk * plan.micro_batches + event.micro_batch) + event.up for event in events]
    add("comm_tag", "int32", rows[p2p], np.array(tags, dtype=np.int64)[p2p])
    together = rows[talks & ~p2p]
    add("comm_type", "int64", together, [CollectiveType.ALL_REDUCE] * len(together))
    names = {row: _group(plan, events[row], stage, place, groups) for row in together.tolist()}
    add_text("pg_name", rows[talks], [names.get(row, "1") for row in rows[talks].tolist()])
    return ExecutionTrace(
        ids=np.arange(1, len(events) + 1, dtype=np.uint64),
        names=Strings([_name(event).encode() for event in events], rows),
        types=np.array([TYPES.get(event.kind, NodeType.COMP) for event in events], dtype=np.uint8),
        start_micros=start.astype(np.uint64),
        duration_micros=(end - start).astype(np.uint64),
        data_deps=Ragged(offsets, sources),
        ctrl_deps=Ragged(np.zeros(len(events) + 1, dtype=np.int64), np.zeros(0, dtype=np.uint64)),
        attributes=attributes,
        metadata={
            "schema": "fasop",
            "rank": rank,
            "world_size": len(groups["1"]),
            "measured_end_micros": int(end.max(initial=0)),
            "clock_domain": plan.cluster.name,
            "trace_start_ns": 0,
            "planned_step_micros": round(whole * 1e6),
        },
    )


def _dependencies(events: list[Event]) -> tuple[np.ndarray, np.ndarray]:
    """Each node waits for those that ended by its start, but for what those waited for."""
    covered = [float("inf")] * len(events)  # when the first node that waits for this one ends
    offsets, sources = [0], []
    for row, event in enumerate(events):
        close = event.start + 1e-12
        for before in range(max(0, row - RECENT), row):
            if events[before].end <= close and covered[before] > close:
                sources.append(before + 1)
                covered[before] = min(covered[before], event.end)
        offsets.append(len(sources))
    return np.array(offsets, dtype=np.int64), np.array(sources, dtype=np.uint64)


def _group(plan: Plan, event: Event, stage: int, place: int, groups: dict[str, list[int]]) -> str:
    """The number of an all-reduce's group, the same on each of its ranks; noted in ``groups``."""
    tensor, each = place % plan.tp, plan.tp * plan.dp
    if event.kind == "all-reduce":
        name = 2 + stage * plan.tp + tensor
        ranks = [stage * each + data * plan.tp + tensor for data in range(plan.dp)]
    else:
        name = 2 + plan.pp * plan.tp + place
        ranks = [holder * each + place for holder in plan.model.embedding_stages(plan.partition)]
    groups[str(name)] = ranks
    return str(name)


def _bytes(plan: Plan, event: Event) -> int:
    """Bytes that a rank puts into a message or an all-reduce.

    Parameters of a layer: 12h² + 13h, shared by the tensor-parallel ranks; of the embedding hV.
    """
    model = plan.model
    embedding = model.hidden * model.vocab // plan.tp
    if event.kind in ("send", "receive"):
        return plan.mbs * model.seq * model.hidden * BYTES
    if event.kind == "embedding":
        return embedding * BYTES
    layers = plan.layers[event.stage] * (12 * model.hidden**2 + 13 * model.hidden) // plan.tp
    holds = event.stage in model.embedding_stages(plan.partition)
    return (layers + embedding * holds) * BYTES


def _kind(event: Event) -> str:
    if event.kind in ("forward", "backward"):
        return "kernel"
    return "p2p" if event.kind in ("send", "receive") else "collective"


def _name(event: Event) -> str:
    parts: list[str] = [event.kind]
    if event.micro_batch >= 0:
        parts.append(str(event.micro_batch))
    if event.kind in ("send", "receive"):
        parts.append("activations" if event.up else "gradients")
    return " ".join(parts)
