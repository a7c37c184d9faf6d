"""Rules of ASTRA-sim for files that are otherwise valid: ``chakra-et validate --for astra-sim``.

From astra-sim/workload/Workload.cc and the analytical network: there is no remote memory for memory nodes;
collectives other than all-reduce, all-gather, reduce-scatter, all-to-all and broadcast throw; roofline mode
skips GPU compute without a ``tensor_size``; a run with several groups on one dimension aborts at its end; the
congestion-aware network aborts on a Ring of two. network.yml and system.json beside the files are read too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import texts
from chakra_et.files import read_bytes, read_json
from chakra_et.simulate.collective_order import missing_order
from chakra_et.simulate.joint import build_graph
from chakra_et.simulate.matching import match
from chakra_et.validate.table import LARGEST_MESSAGE, SIMULATED, Finding, found

_ROW = re.compile(r"^\s*(\w+)\s*:\s*\[([^\]]*)\]", re.MULTILINE)
_COLUMN = re.compile(r"^(\w+)\s*:[ \t]*\n((?:[ \t]*-.*\n?)+)", re.MULTILINE)
_ENTRY = re.compile(r"-[^\n]*")
_NUMBER = r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
# What the entries of a list of network.yml are, and how they are written.
_FIELDS = {
    "topology": ("Ring, FullyConnected or Switch", "Ring|FullyConnected|Switch"),
    "npus_count": ("a number of ranks from 2 on", "[2-9]|[1-9][0-9]+"),
    "bandwidth": ("a number of GiB/s above 0", rf"(?=[^eE]*[1-9]){_NUMBER}"),
    "latency": ("a number of ns from 0 on", _NUMBER),
}
_LISTS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def check_file_for_astra(
    trace: ExecutionTrace, groups: Mapping[str, list[int]] | None, ranks: int, system: Mapping[str, Any]
) -> Iterator[Finding]:
    """Findings in one file of a run of ``ranks``. ``system``: the content of system.json."""
    yield from check_sizes(trace, groups or {}, ranks)
    is_memory = np.isin(trace.types, (NodeType.MEM_LOAD, NodeType.MEM_STORE))
    yield from found("astra-memory-node", is_memory, "is a memory node: no remote memory is modelled")
    kind = np.where(trace.types == NodeType.COMM_COLL, trace.column("comm_type", -1), -1)
    other = (kind >= 0) & ~np.isin(kind, (*SIMULATED, CollectiveType.BROADCAST))
    first = int(kind[np.argmax(other)]) if other.any() else -1
    name = CollectiveType(first).name if first in set(CollectiveType) else f"collective of type {first}"
    yield from found("astra-collective", other, f"is a {name}: make a bundle of it with chakra-et astra")
    compute = (trace.types == NodeType.COMP) & (trace.column("is_cpu_op") == 0)
    skipped = compute & (trace.column("tensor_size") <= 0) & (trace.duration_micros > 0)
    message = "has a duration and no tensor_size: with roofline-enabled it takes no time"
    yield from found("astra-roofline", skipped & bool(system.get("roofline-enabled")), message)
    splits, size = system.get("preferred-dataset-splits"), trace.column("comm_size")
    small = (kind == CollectiveType.ALL_GATHER) & (size > 0) & (size < (splits if type(splits) is int else 1))
    message = f"gathers {{}} bytes, fewer than preferred-dataset-splits ({splits}): it hangs"
    yield from found("astra-all-gather", small, message, size)


def check_sizes(trace: ExecutionTrace, groups: Mapping[str, list[int]], ranks: int) -> Iterator[Finding]:
    """A finding where messages are too large. ``ranks``: of the whole run."""
    table, index = texts(trace, "pg_name")
    members = np.array([*(len(groups.get(name, ())) or ranks for name in table), ranks])[index]
    kind = trace.column("comm_type", CollectiveType.ALL_GATHER)  # sends are as large as they say, too
    part = trace.column("comm_size", 0) // np.where(kind == CollectiveType.ALL_GATHER, 1, members)
    too_large = (part > LARGEST_MESSAGE) & (trace.types >= NodeType.COMM_SEND)
    yield from found(
        "astra-size", too_large, "has messages of {:,} bytes: ASTRA-sim's have less than 2 GiB", part
    )


def check_run_for_astra(
    folder: Path, name: str, groups: Mapping[str, list[int]] | None, ranks: int
) -> Iterator[Finding]:
    """Findings in the run of ``ranks`` files and in the network.yml and system.json beside it, if any."""
    if not groups:
        yield Finding("astra-group-file", [], "there is no comm-group file, and ASTRA-sim needs it")
    if "empty" in f"{name}_comm_groups.json":
        yield Finding("astra-group-file", [], "its name has 'empty' in it: ASTRA-sim ignores the group file")
    network = read_network(folder)
    if network is None:
        if (folder / "network.yml").exists():
            yield Finding("astra-network", [], "network.yml can't be read as text")
        return
    yield from _network(network, groups or {}, ranks)
    system = read_system(folder)
    if system is not None:
        yield from _system(system, len(network.get("npus_count") or network.get("topology") or ()))
    elif (folder / "system.json").exists():
        yield Finding("astra-system", [], "system.json can't be read as JSON")


def check_order(
    traces: Mapping[int, ExecutionTrace], groups: Mapping[str, list[int]] | None
) -> Iterator[Finding]:
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


def read_network(folder: Path) -> dict[str, list[str]] | None:
    """The lists in network.yml, on one line or an entry per line; None if there is no such file."""
    try:
        content = read_bytes(folder / "network.yml").decode()
    except (OSError, UnicodeDecodeError):
        return None
    content = re.sub(r"(?m)(^|\s)#.*$", "", content)
    lists = {key: row.split(",") if row.strip() else [] for key, row in _ROW.findall(content)}
    lists |= {key: [each[1:] for each in _ENTRY.findall(rows)] for key, rows in _COLUMN.findall(content)}
    return {key: [each.strip(" \t\n\"'") for each in row] for key, row in lists.items()}


def read_system(folder: Path) -> dict[str, Any] | None:
    """The content of system.json; None if there is no readable one."""
    try:
        loaded = read_json(folder / "system.json")
    except (OSError, ValueError, RecursionError):
        return None
    return loaded if isinstance(loaded, dict) else None


def _network(
    network: Mapping[str, list[str]], groups: Mapping[str, list[int]], ranks: int
) -> Iterator[Finding]:
    broken = list(_fields(network))
    yield from (Finding("astra-network", [], f"network.yml: {message}") for message in broken)
    if broken:
        return
    counts = [int(each) for each in network["npus_count"]]
    if math.prod(counts) != ranks:
        yield Finding("astra-network", [], f"network.yml has {math.prod(counts)} ranks, the set {ranks}")
    several = sum(1 < len(members) < ranks for members in groups.values()) > 1
    if several and len(counts) == 1:
        divides = any(counts[0] % size == 0 for size in range(2, math.isqrt(counts[0]) + 1))
        message = "several groups of fewer than all ranks on one dimension: write two (GPUs per node, nodes)"
        yield Finding("astra-network" if divides else "astra-dimensions", [], message)
    if ("Ring", 2) in zip(network["topology"], counts, strict=True):
        message = "two ranks on a Ring make ASTRA-sim abort: write FullyConnected"
        yield Finding("astra-network", [], message)


def _fields(network: Mapping[str, list[str]]) -> Iterator[str]:
    """What is wrong with the four lists, a sentence each."""
    dimensions = max((len(network.get(key, ())) for key in _FIELDS), default=0)
    for key, (unit, good) in _FIELDS.items():
        values = network.get(key)
        if values is None:
            yield f"there is no list {key}: write one entry per dimension, {unit}"
        elif not values:
            yield f"{key} is empty: write one entry per dimension, {unit}"
        elif len(values) != dimensions:
            yield f"{key} has {len(values)} of {dimensions} entries: write one per dimension"
        else:
            bad = next((each for each in values if not re.fullmatch(good, each)), None)
            if bad is not None:
                yield f"{key} has {bad[:40]!r}, which isn't {unit}"


def _system(system: Mapping[str, Any], dimensions: int) -> Iterator[Finding]:
    for name in _LISTS:
        algorithms = system.get(f"{name}-implementation")
        if not isinstance(algorithms, list) or len(algorithms) != dimensions:
            message = f"system.json needs {dimensions} entries in {name}-implementation, one per dimension"
            yield Finding("astra-system", [], message)
    splits = system.get("preferred-dataset-splits")
    if type(splits) is not int or splits < 1:
        yield Finding("astra-system", [], "system.json needs preferred-dataset-splits of 1 or more")
