"""What DistributedDataParallel adds to a step that was captured on one CPU process without it.

Copies of gradients into buckets and back, and the all-reduces, at the places where PyTorch 2.x records them
(torch/csrc/distributed/c10d/reducer.cpp).
"""

from __future__ import annotations

import numpy as np

from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.rearrange import New, insert
from chakra_et.job.buckets import FIRST_MIB, OTHERS_MIB
from chakra_et.transform.bucket_size import plan_buckets, size_of
from chakra_et.transform.ddp import BACK, INTO_BUCKET, Backward, find_backward
from chakra_et.transform.elementwise_rate import Elementwise

_CPU = {"kind": "operator"}
# As the reducer of PyTorch 2.x records them with their operators inside: nodes, self time between each.
_INTO_NODES, _LAUNCH_NODES, _BACK_NODES = 11, 2, 6


def with_ddp(
    trace: ExecutionTrace, rank: int, group: str, bucket_mb: float | None
) -> tuple[ExecutionTrace, np.ndarray, list[str]]:
    """The trace with DDP's nodes, the row that each node is a copy of, and notes. All-reduces of ``group``
    last 1 µs. ``bucket_mb``: DDP's bucket_cap_mb, None for its default. Raises ``TraceError`` where no
    gradients are recorded."""
    steps = find_backward(trace, rank, "--dp")
    first, others = (FIRST_MIB, OTHERS_MIB) if bucket_mb is None else (bucket_mb, bucket_mb)
    rate, new = Elementwise(trace), []
    for step in steps:
        if step.finish >= 0:
            new += _reduction(trace, step, plan_buckets(step, others, first), rate, group)
    made = insert(trace, np.zeros(len(trace), bool), new)
    behind = np.array(sorted((node.after, at) for at, node in enumerate(new))).reshape(-1, 2)
    like = np.array([new[at].like for at in behind[:, 1].tolist()], dtype=np.int64)
    source = np.insert(np.arange(len(trace)), behind[:, 0] + 1, like)
    buckets = sum(node.collective is not None for node in new)
    gradients = sum(len(step.gradients) for step in steps)
    return (
        made,
        source,
        [
            f"{buckets:,} all-reduces in {len(steps):,} steps are assumed as DDP makes them, with buckets of "
            f"{first:g} MB and then {others:g} MB",
            f"{gradients:,} copies of gradients to buckets and as many back are assumed, at the rate of "
            "elementwise operators; all ranks compute as the measured one",
        ],
    )


def _reduction(
    trace: ExecutionTrace, step: Backward, plan: list[list[int]], rate: Elementwise, group: str
) -> list[New]:
    """The nodes of one step's reduction."""
    texts = {
        "kind": "collective",
        "pg_name": group,
        "pg_description": "data parallel",
        "comm_dtype": step.gradients[0].type,
    }
    lane = int(trace.column("lane", -1).max()) + 1
    new: list[New] = []
    back: list[New] = []
    end = max(step.gradients[-1].rows)
    for part in plan:
        for at in part:
            rows, moved = step.gradients[at].rows, 2 * step.gradients[at].size
            into = New(max(rows), rows[0], rate.micros(moved, _INTO_NODES), INTO_BUCKET, parent=rows[0])
            new.append(into)
            back.append(New(end, step.finish, rate.micros(moved, _BACK_NODES), BACK, texts=_CPU))
        size, rows = size_of(step, part), step.gradients[part[-1]].rows
        micros = rate.micros(0, _LAUNCH_NODES)
        launch = New(max(rows), rows[0], micros, "c10d::allreduce_", parent=rows[0])
        reduce = New(max(rows), rows[0], 1.0)
        reduce.name, reduce.needs, reduce.parent = "gloo:all_reduce", [launch], launch
        reduce.collective, reduce.lane, reduce.texts = size, lane, texts
        back[-len(part)].needs.append(reduce)
        new += [launch, reduce]
    return [*new, *back]
