"""The time of a rank by kind: along its critical path, and over all its threads and streams."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import numpy as np

from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.edges import edges_of
from chakra_et.et.node_attributes import communicates, texts

# In the order in which tables show them.
KINDS = ("operator", "runtime", "kernel", "copy", "transfer", "wait", "host-overhead", "device-overhead")
OVERHEAD = ("host-overhead", "device-overhead")
LONG_NS = 1e6
"""Who does so long nothing that was recorded, isn't launching."""
_CALLED = {"annotation": "operator", "memcpy": "copy", "memset": "copy"}
_CALLED |= {"collective": "transfer", "p2p": "transfer"}
"""What the attribute ``kind`` calls otherwise."""


def overhead_part(path: Mapping[str, int]) -> float:
    """The part (0 to 1) of a critical path, µs by kind, in which no operator, call, kernel or communication
    runs."""
    total = sum(path.values())
    return sum(path[kind] for kind in OVERHEAD) / total if total else 0.0


def shares(trace: ExecutionTrace) -> tuple[dict[str, int], dict[str, int], int] | None:
    """µs by kind in ``KINDS`` of one rank's file, along its critical path and summed over all nodes; and the
    µs of that path which nothing explains: overhead of devices, and of the host from ``LONG_NS`` on (shorter
    one is Python, or the engine of autograd, between two operators). None for a file without start times.

    The critical path is traced back from the node that ends last, from each node to its dependency that ends
    last. Communication counts as transfer, except for ``wait_micros``, which counts as wait.
    """
    if not len(trace) or not trace.start_micros.any():
        return None
    kind = node_kinds(trace)
    duration = trace.duration_micros.astype(np.int64)
    wait = np.minimum(trace.column("wait_micros"), duration)
    path = critical_path(trace)
    on_host, on_device = (kind[path] == KINDS.index(each) for each in OVERHEAD)
    unexplained = int(duration[path][on_device | on_host & (duration[path] * 1000 >= LONG_NS)].sum())
    return _by_kind(kind[path], duration[path], wait[path]), _by_kind(kind, duration, wait), unexplained


def critical_path(trace: ExecutionTrace) -> np.ndarray:
    """The rows of the critical path by recorded times, from its last node to its first, int64."""
    end = trace.start_micros.astype(np.int64) + trace.duration_micros.astype(np.int64)
    edges = edges_of(trace)
    child, parent = edges.child, edges.parent
    del edges  # here a conversion takes most memory
    known = parent >= 0
    if not known.all():
        child, parent = child[known], parent[known]
    # Of each row's dependencies, take the one that ends last; of several such, the last in the file.
    ready = np.full(len(trace), np.iinfo(np.int64).min)
    np.maximum.at(ready, child, end[parent])
    last = np.flatnonzero(end[parent] == ready[child])
    latest = np.full(len(trace), -1, dtype=np.int64)
    latest[child[last]] = parent[last]
    row, path = int(np.argmax(end)), array("q")
    before = latest.data  # its elements are Python's integers, which is faster
    for _ in range(len(trace)):  # a foreign file may have a cycle
        if row < 0:
            break
        path.append(row)
        row = before[row]
    return np.array(path, dtype=np.int64)


def node_kinds(trace: ExecutionTrace) -> np.ndarray:
    """int64[N]: index into ``KINDS``, by the attribute ``kind``, or else by node type and ``is_cpu_op``."""
    place = {name: at for at, name in enumerate(KINDS)}
    on_cpu = trace.column("is_cpu_op") != 0
    kind = np.where(on_cpu, place["operator"], place["kernel"])
    kind[(trace.types == NodeType.MEM_LOAD) | (trace.types == NodeType.MEM_STORE)] = place["copy"]
    names, index = texts(trace, "kind")
    recorded = np.array([place.get(_CALLED.get(name, name), -1) for name in [*names, ""]])[index]
    kind = np.where(recorded >= 0, recorded, kind)
    kind[communicates(trace)] = place["transfer"]
    return kind


def _by_kind(kind: np.ndarray, duration: np.ndarray, wait: np.ndarray) -> dict[str, int]:
    counts = np.bincount(kind, duration - wait, len(KINDS)).astype(np.int64)
    counts[KINDS.index("wait")] += int(wait.sum())
    return {name: int(counts[at]) for at, name in enumerate(KINDS)}
