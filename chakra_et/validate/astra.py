"""Rules of ASTRA-sim for files that are otherwise valid: ``chakra-et validate --for astra-sim``.

From astra-sim/workload/Workload.cc and the analytical network: there is no remote memory for memory nodes;
collectives other than all-reduce, all-gather, reduce-scatter, all-to-all and broadcast throw; a run with
several groups on one dimension aborts at its end, and a Ring of two at its beginning. Of a network.yml beside
the files, ``topology`` and ``npus_count`` are checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from chakra_et.cost.topology import divisor
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import texts
from chakra_et.et.sets import Groups
from chakra_et.files import read_bytes
from chakra_et.names import RunFiles
from chakra_et.simulate.joint import build_graph
from chakra_et.simulate.matching import match
from chakra_et.simulate.replays import missing_order
from chakra_et.validate.table import LARGEST_MESSAGE, SIMULATED, Finding, found

_LIST = r"(?m)^\s*{}\s*:\s*\[([^\]]*)\]"
_DIMENSION = re.compile("[A-Za-z]+ [1-9][0-9]{0,8}")


def check_file_for_astra(trace: ExecutionTrace, groups: Groups, ranks: int) -> Iterator[Finding]:
    """Findings in one file of a run of ``ranks``."""
    yield from check_sizes(trace, groups, ranks)
    is_memory = np.isin(trace.types, (NodeType.MEM_LOAD, NodeType.MEM_STORE))
    yield from found("astra-memory-node", is_memory, "is a memory node: ASTRA-sim has no remote memory here")
    kind = np.where(trace.types == NodeType.COMM_COLL, trace.column("comm_type", -1), -1)
    other = (kind >= 0) & ~np.isin(kind, (*SIMULATED, CollectiveType.BROADCAST))
    first = int(kind[np.argmax(other)]) if other.any() else -1
    name = CollectiveType(first).name if first in set(CollectiveType) else f"collective of type {first}"
    yield from found("astra-collective", other, f"is a {name}: make a bundle of it with chakra-et astra")


def check_sizes(trace: ExecutionTrace, groups: Groups, ranks: int) -> Iterator[Finding]:
    """A finding where messages are too large. ``ranks``: of the whole run."""
    table, index = texts(trace, "pg_name")
    members = np.array([*(len(groups.get(name, ())) or ranks for name in table), ranks])[index]
    kind = trace.column("comm_type", CollectiveType.ALL_GATHER)  # sends are as large as they say, too
    part = trace.column("comm_size", 0) // np.where(kind == CollectiveType.ALL_GATHER, 1, members)
    too_large = (part > LARGEST_MESSAGE) & (trace.types >= NodeType.COMM_SEND)
    yield from found("astra-size", too_large, "has messages of {:,} bytes: ASTRA-sim takes under 2 GiB", part)


def check_run_for_astra(run: RunFiles, groups: Groups, ranks: int) -> Iterator[Finding]:
    """Findings in the run of ``ranks`` files and in the network.yml beside it, if any."""
    yield from (Finding("astra-group-file", [], message) for message in group_file_problems(run.name, groups))
    path = run.folder / "network.yml"
    if path.exists():
        messages = _network(path, groups, ranks)
        yield from (Finding("astra-network", [], f"network.yml: {message}") for message in messages)


def group_file_problems(name: str, groups: Groups) -> Iterator[str]:
    """What keeps ASTRA-sim from reading the groups of set ``name``."""
    if not groups:
        yield "no comm-group file, which ASTRA-sim needs: convert the traces again"
    if "empty" in name:
        yield "ASTRA-sim ignores a group file whose name has 'empty' in it: rename the set"


def _network(path: Path, groups: Groups, ranks: int) -> Iterator[str]:
    """What is wrong with the dimensions of the network."""
    try:
        content = read_bytes(path).decode()
    except (OSError, UnicodeDecodeError):
        yield "it can't be read as text"
        return
    rows = (re.search(_LIST.format(key), content) for key in ("topology", "npus_count"))
    kinds, sizes = ([word.strip(" \t\n\"'") for word in row[1].split(",")] if row else [] for row in rows)
    each = map(" ".join, zip(kinds, sizes, strict=False))
    if not kinds or len(kinds) != len(sizes) or not all(map(_DIMENSION.fullmatch, each)):
        yield "topology and npus_count must be lists like [ Switch, Switch ] and [ 8, 4 ], one per dimension"
        return
    counts = [int(size) for size in sizes]
    if math.prod(counts) != ranks:
        yield f"it has {math.prod(counts)} ranks, the set {ranks}"
    several = sum(1 < len(members) < ranks for members in groups.values()) > 1
    if several and len(counts) == 1 and divisor(counts[0]):
        yield "several groups of fewer than all ranks on one dimension: write two (GPUs per node, nodes)"
    if ("Ring", 2) in zip(kinds, counts, strict=True):
        yield "two ranks on a Ring make ASTRA-sim abort: write FullyConnected"


def check_order(traces: Mapping[int, ExecutionTrace], groups: Groups) -> Iterator[Finding]:
    """A finding where collectives of groups that overlap can be issued in different orders by different
    ranks, or by no rank at all."""
    try:
        graph = build_graph(list(traces.values()), list(traces))
        pairs = missing_order(graph, match(graph, groups))
    except TraceError as error:
        yield Finding("astra-order", [], str(error))
        return
    if len(pairs):
        first, second = pairs[0].tolist()
        message = (
            f"{len(pairs):,} pairs of collectives or sends can run in either order, the first on rank "
            f"{graph.rank(first)}: {graph.describe(first)} and {graph.describe(second)}"
        )
        yield Finding("astra-order", [], message)
