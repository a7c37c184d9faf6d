"""The attributes of communication nodes."""

from __future__ import annotations

from typing import Literal

import numpy as np

from chakra_et.convert.columns import Add, strings
from chakra_et.convert.graph.communication import Communication
from chakra_et.convert.graph.groups import group_number
from chakra_et.convert.graph.nodes import Graph
from chakra_et.et.columns import CollectiveType, NodeType, ValueKind

CommTypes = Literal["schema", "astra-sim"]
# The substitutes for collectives that ASTRA-sim does not simulate.
NEAREST_IN_ASTRA_SIM = {
    CollectiveType.BARRIER: CollectiveType.ALL_REDUCE,
    CollectiveType.REDUCE: CollectiveType.ALL_REDUCE,
    CollectiveType.GATHER: CollectiveType.ALL_GATHER,
    CollectiveType.SCATTER: CollectiveType.BROADCAST,
    CollectiveType.REDUCE_SCATTER_BLOCK: CollectiveType.REDUCE_SCATTER,
}


def communicating(graph: Graph, items: list[Communication], comm_types: CommTypes) -> np.ndarray:
    """The nodes that communicate with other ranks; for ASTRA-sim, only those that it can simulate."""
    nodes = np.flatnonzero(graph.item >= 0)
    of_node = (items[number] for number in graph.item[nodes].tolist())
    kept = [not item.is_local and (comm_types == "schema" or _is_complete(item)) for item in of_node]
    communication: np.ndarray = nodes[np.array(kept, dtype=bool)]
    return communication


def _is_complete(item: Communication) -> bool:
    """Whether size and peer or type are known, which a simulator needs."""
    return item.size > 0 and (item.peer >= 0 if item.is_message else item.collective is not None)


def _type_and_size(item: Communication, comm_types: CommTypes) -> tuple[CollectiveType | None, int]:
    if item.collective is None or comm_types == "schema" or item.collective not in NEAREST_IN_ASTRA_SIM:
        return item.collective, item.size
    size = item.size
    if item.collective is CollectiveType.SCATTER and item.is_root and item.group.ranks:
        size = max(1, size // len(item.group.ranks))  # the root's input is the output of all ranks
    return NEAREST_IN_ASTRA_SIM[item.collective], size


def add_communication(
    nodes: np.ndarray, of_node: list[Communication], rank: int, comm_types: CommTypes, add: Add
) -> None:
    """Add the attributes of the communication ``nodes``; ``of_node`` has one entry per node.

    An unknown type or size is left out. ``comm_types``: "schema" keeps the collective types, "astra-sim"
    substitutes those that ASTRA-sim does not simulate (``comm_operator`` has the actual operator).
    """

    def add_known(name: str, kind: ValueKind, values: list[int | None]) -> None:
        known = [value for value in values if value is not None]
        at = nodes[np.array([value is not None for value in values], dtype=bool)]
        add(name, kind, at, np.array(known, dtype=np.int64))

    typed = [_type_and_size(item, comm_types) for item in of_node]
    add_known("comm_type", "int64", [None if kind is None else int(kind) for kind, _ in typed])
    add_known("comm_size", "int64", [size or None for _, size in typed])
    text = {
        "pg_name": [str(group_number(item.group)) for item in of_node],
        "pg_original_name": [item.group.name for item in of_node],
        "pg_description": [item.group.description for item in of_node],
        "comm_dtype": [item.dtype for item in of_node],
        "comm_operator": [item.api for item in of_node],
    }
    for name, values in text.items():
        add(name, "string", nodes, strings(values))
    add_known("comm_sequence", "int64", [item.sequence if item.sequence >= 0 else None for item in of_node])
    add_known("comm_async", "bool", [item.asynchronous for item in of_node])
    sends = [item.type is NodeType.COMM_SEND for item in of_node]
    ends = list(zip(of_node, sends, strict=True))
    source = [None if not item.is_message else rank if send else item.peer for item, send in ends]
    target = [None if not item.is_message else item.peer if send else rank for item, send in ends]
    add_known("comm_src", "int32", source)
    add_known("comm_dst", "int32", target)
    add_known("comm_tag", "int32", [item.tag if item.is_message else None for item in of_node])
