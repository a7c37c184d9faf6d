"""Which axis of a mesh a process group stands for: by its description, else by what it does in a step.

>>> axes_of("TENSOR_MODEL_PARALLEL_GROUP"), axes_of("mesh_dp_shard")
(frozenset({'tp'}), frozenset({'dp'}))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import in_phase, parents, texts
from chakra_et.text import plural

# Words of process groups' descriptions: torch.distributed's DeviceMesh (``mesh_dp_shard``), megatron-core's
# parallel_state (``TENSOR_MODEL_PARALLEL_GROUP``) and DeepSpeed's utils.groups (``ep_size_2``, ``zero``).
WORDS = {
    "tp": ("tp", "tensor", "etp"),
    "dp": ("dp", "data", "fsdp", "ddp", "hsdp", "replicate", "shard", "zero", "edp"),
    "pp": ("pp", "pipeline", "pipe"),
    "cp": ("cp", "context", "sp", "sequence", "ulysses"),
    "ep": ("ep", "expert", "moe"),
    "embedding": ("embedding",),
}
_AXIS = {word: axis for axis, words in WORDS.items() for word in words}

# Data parallelism that communicates in the forward pass: gathered shards, statistics of batch normalization.
_OF_DATA = re.compile(r"FSDP|FullySharded|SyncBatchNorm|zero.*param|DeepSpeedZero", re.IGNORECASE)
_SHARES_WORK = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.ALL_TO_ALL,
    CollectiveType.ALL_GATHER,
)
# A few numbers, as a loss or a metric, are reduced in the forward pass under data parallelism too.
_METRIC_BYTES = 64


def axes_of(description: str) -> frozenset[str]:
    """The axes (keys of ``WORDS``) that a group's description names; empty where it names none.

    ``DATA_PARALLEL_GROUP_WITH_CP`` is of dp and cp, ``default_pg`` of none.
    """
    words = re.findall(r"[a-z]+", description.lower())
    return frozenset(_AXIS[word] for word in words if word in _AXIS)


def described_groups(trace: ExecutionTrace) -> list[tuple[str, list[int]]]:
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


def forward_uses(traces: Iterable[ExecutionTrace]) -> dict[str, str]:
    """Group number → a sentence on its collectives in forward passes, which data parallelism doesn't have.

    Left out are groups whose description names data parallelism, what FSDP, ZeRO and synchronized batch
    normalization do, and up to 64 bytes, as a loss has.
    """
    found: dict[str, str] = {}
    for trace in traces:
        rows = np.flatnonzero((trace.types == NodeType.COMM_COLL) & in_phase(trace, b"forward"))
        kinds = trace.column("comm_type", -1)
        rows = rows[np.isin(kinds[rows], _SHARES_WORK) & (trace.column("comm_size", 0)[rows] > _METRIC_BYTES)]
        if not len(rows):
            continue
        (names, group), (described, about) = texts(trace, "pg_name"), texts(trace, "pg_description")
        of_sharding = _within(trace, _OF_DATA)
        counted: dict[str, list[int]] = {}
        for row in rows.tolist():
            of_data = about[row] >= 0 and "dp" in axes_of(described[about[row]])
            if group[row] >= 0 and not of_data and not of_sharding[row]:
                counted.setdefault(names[group[row]], []).append(row)
        for name, users in counted.items():
            kind = CollectiveType(int(kinds[users[0]])).name.lower().replace("_", "-")
            found.setdefault(name, f"group {name} has {plural(len(users), kind)} inside the forward pass")
    return found


def _within(trace: ExecutionTrace, names: re.Pattern[str]) -> np.ndarray:
    """bool[N]: nodes in or below an operator or annotation with such a name."""
    chosen = [bool(names.search(name.decode("utf-8", "replace"))) for name in trace.names.table]
    found, above = np.array(chosen, bool)[trace.names.index], parents(trace)
    for _ in range(len(trace).bit_length()):  # twice as many levels up each time
        found = found | (found[above] & (above >= 0))
        above = np.where(above >= 0, above[above], -1)
    return np.asarray(found)


def stages_of(traces: Sequence[ExecutionTrace], ranks: Sequence[int]) -> dict[int, int]:
    """Rank → its place in its pipeline group; 0 for a rank in none."""
    stages = dict.fromkeys(ranks, 0)
    for trace in traces:
        for description, members in described_groups(trace):
            if axes_of(description) == {"pp"}:
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
