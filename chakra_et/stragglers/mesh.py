"""Which pipeline stage a rank belongs to, from the process groups that its file records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from chakra_et.et.columns import ExecutionTrace

# The descriptions of pipeline groups: megatron-core's ``parallel_state`` and the dimension ``pp`` of a
# ``torch.distributed`` DeviceMesh.
PIPELINE_GROUPS = ("PIPELINE_MODEL_PARALLEL_GROUP", "mesh_pp")


def stages_of(traces: Sequence[ExecutionTrace], ranks: Sequence[int]) -> dict[int, int]:
    """Rank → its place in its pipeline group; 0 for a rank in none."""
    stages = dict.fromkeys(ranks, 0)
    for trace in traces:
        for description, members in _groups(trace):
            if description in PIPELINE_GROUPS:
                stages |= {rank: place for place, rank in enumerate(members) if rank in stages}
    return stages


def dp_ranks_of(stages: dict[int, int]) -> dict[int, int]:
    """Rank → its place among the ranks of its stage, in the order of ranks."""
    seen: dict[int, int] = {}
    places = {}
    for rank in sorted(stages):
        places[rank] = seen.get(stages[rank], 0)
        seen[stages[rank]] = places[rank] + 1
    return places


def _groups(trace: ExecutionTrace) -> list[tuple[str, list[int]]]:
    """(description, ranks) of the process groups in the file's metadata, which other writers leave out."""
    text = trace.metadata.get("process_groups")
    try:
        content: Any = json.loads(text) if isinstance(text, str) else {}
    except (ValueError, RecursionError):
        return []
    found = []
    for group in content.values() if isinstance(content, dict) else ():
        if isinstance(group, list) and len(group) == 3 and isinstance(group[2], list):
            found.append((str(group[1]), [rank for rank in group[2] if type(rank) is int]))
    return found
