"""The rules for a single .et file. Each function checks a few related ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chakra_et.et.columns import CollectiveType, NodeType, Strings
from chakra_et.et.edges import find_cycle, repeated
from chakra_et.et.node_attributes import has, lanes, texts
from chakra_et.et.sets import GROUP_ID
from chakra_et.validate.table import ALL_RANKS, SIMULATED, TEXT_GROUP, File, Finding, found

# Attributes that the feeders read, and the kind of value that they expect.
FEEDER_KINDS = {
    "is_cpu_op": "bool",
    **dict.fromkeys(("comm_type", "comm_size", "num_ops"), "int64"),
    **dict.fromkeys(("comm_src", "comm_dst", "comm_tag", "comm_priority"), "int32"),
    "tensor_size": "uint64",
    "pg_name": "string",
}
LONGEST_MICROS = 30 * 24 * 3600 * 10**6
LATEST_MICROS = 1 << 53


def check_file(file: File) -> Iterator[Finding]:
    """All findings in one file."""
    if not file.trace.has_metadata:
        yield Finding(
            "metadata-missing", [], "the first message is a node: write a GlobalMetadata message before it"
        )
    if not len(file.trace):
        yield Finding("no-nodes", [], "the file has no nodes: convert the trace again")
    for rule in (_ids, _dependencies, _order, _types, _kinds, _communication, _group_names, _times):
        yield from rule(file)


def _ids(file: File) -> Iterator[Finding]:
    order = np.argsort(file.trace.ids, kind="stable")
    again = np.zeros(len(order), bool)
    again[order[1:]] = np.diff(file.trace.ids[order]) == 0
    yield from found("duplicate-id", again, "another node has the same id")


def _dependencies(file: File) -> Iterator[Finding]:
    trace, edges = file.trace, file.edges
    absent = np.flatnonzero(edges.parent < 0)
    if len(absent):
        first = absent[np.argmin(edges.child[absent])]
        message = f"depends on node {edges.dependency[first]}, which is not in the file"
        yield Finding("absent-dependency", np.unique(edges.child[absent]), message)
    deps = trace.data_deps
    rows = repeated(deps)
    if len(rows):
        listed = deps.values[deps.offsets[rows[0]] : deps.offsets[rows[0] + 1]]
        values, counts = np.unique(listed, return_counts=True)
        message = f"lists dependency {values[counts > 1][0]} more than once"
        yield Finding("repeated-dependency", rows, message)
    itself = edges.parent == edges.child
    if itself.any():
        yield Finding("self-dependency", np.unique(edges.child[itself]), "depends on itself")


def _order(file: File) -> Iterator[Finding]:
    trace, parent, child = file.trace, file.edges.parent, file.edges.child
    known = (parent >= 0) & (parent != child)  # reported by _dependencies; the others may still form a cycle
    parent, child = parent[known], child[known]
    # Ids in the order of the dependencies, as most files have them, are quick to check.
    forward = bool((trace.ids[parent] < trace.ids[child]).all())
    if cycle := [] if forward else find_cycle(len(trace), parent, child):
        named = [str(trace.ids[row]) for row in cycle[:8]] + (["…"] if len(cycle) > 8 else [])
        path = " → ".join([*named, str(trace.ids[cycle[0]])])
        yield Finding("cycle", cycle, f"is on a dependency cycle of {len(cycle)} nodes ({path})")
    lane = lanes(trace)
    order = np.lexsort((trace.ids, lane))
    before, after = order[:-1], order[1:]
    early = after[(lane[after] == lane[before]) & (trace.start_micros[after] < trace.start_micros[before])]
    if len(early):
        yield Finding("id-order", early, "starts before the node of its lane with the next lower id")


def _types(file: File) -> Iterator[Finding]:
    types = file.trace.types
    known = np.isin(types, [kind for kind in NodeType if kind != NodeType.INVALID])
    message = f"has type {{}}: types are {NodeType.METADATA:d} to 7"
    yield from found("node-type", ~known, message, types)
    yield from found("metadata-node", types == NodeType.METADATA, "is a METADATA node: leave it out")
    unsized = file.of_type(NodeType.MEM_LOAD, NodeType.MEM_STORE) & ~has(file.trace, "tensor_size")
    yield from found("tensor-size-missing", unsized, "is a memory node without tensor_size")


def _kinds(file: File) -> Iterator[Finding]:
    for name, column in file.trace.attributes.items():
        name = name.partition("#")[0]  # a second kind of value
        kind = FEEDER_KINDS.get(name, column.kind)
        if column.kind != kind and len(column.rows):
            zero = not isinstance(column.values, Strings) and not column.values.any()
            message = f"has {name} as {column.kind}_val: write it as {kind}_val"
            yield Finding("attribute-kind-zero" if zero else "attribute-kind", column.rows, message)


def _communication(file: File) -> Iterator[Finding]:
    communicates, kind, size = file.communicates, file.collective, file.size
    is_collective, has_type = file.of_type(NodeType.COMM_COLL), has(file.trace, "comm_type")
    has_size, has_tag = has(file.trace, "comm_size"), has(file.trace, "comm_tag")
    yield from found("comm-type-missing", is_collective & ~has_type, "is a collective without comm_type")
    yield from found("comm-size-missing", communicates & ~has_size, "communicates without comm_size")
    unknown = is_collective & has_type & ~np.isin(kind, list(CollectiveType))
    yield from found("comm-type-unknown", unknown, "has comm_type {}, which is not a collective", kind)
    for other in CollectiveType:
        replayed = "replays it without waiting for other ranks"
        does = replayed if other == CollectiveType.BROADCAST else "throws"
        if other not in SIMULATED:
            message = f"is a {other.name}: ASTRA-sim {does}"
            yield from found("comm-type-unsupported", kind == other, message)
    # A barrier moves no data, and a broadcast is replayed by its duration.
    by_size = ~np.isin(kind, (CollectiveType.BARRIER, CollectiveType.BROADCAST))
    empty = communicates & has_size & by_size & (size <= 0)
    yield from found("comm-size-zero", empty, "has comm_size {}: simulators never finish it", size)
    on_cpu = communicates & (file.trace.column("is_cpu_op") != 0)
    yield from found("comm-on-cpu", on_cpu, "is a communication node with is_cpu_op=true: write false")
    for sent, peer in ((NodeType.COMM_SEND, "comm_dst"), (NodeType.COMM_RECV, "comm_src")):
        lacking = file.of_type(sent) & ~(has(file.trace, peer) & has_tag)
        yield from found("comm-peer-missing", lacking, f"is a {sent.name} without {peer} and comm_tag")


def _group_names(file: File) -> Iterator[Finding]:
    group, groups, communicates = file.group_of, file.comm_groups, file.communicates
    table, index = texts(file.trace, "pg_name")
    text = np.flatnonzero(communicates & (group == TEXT_GROUP))
    if len(text):
        message = f"has pg_name {table[index[text[0]]][:40]!r}: write the integer id of a group, 1 or more"
        yield Finding("pg-name-text", text, message)
    zero = communicates & np.array([*(name == "0" for name in table), False])[index]
    yield from found("pg-name-zero", zero, "has pg_name '0', which simulators take for all ranks")
    if file.trace.metadata.get("world_size") == 1:
        alone = communicates & (group == ALL_RANKS)
        yield from found("group-one-member", alone, "communicates with all ranks of a run of one rank")
    used = np.unique(group[communicates & (group > 0)]).tolist()
    if groups is None:
        if used:
            message = f"groups {', '.join(map(str, used[:8]))} are used, but there is no comm-group file"
            yield Finding("comm-groups-missing", [], message)
        return
    for name, ranks in groups.items():
        if not GROUP_ID.fullmatch(name) or len(set(ranks)) < len(ranks) or min(ranks, default=-1) < 0:
            message = (
                f"group {name[:40]!r} in the comm-group file: use ids from 1 on and distinct ranks from 0 on"
            )
            yield Finding("group-file", [], message)
    for number in used:
        members, here = groups.get(str(number)), communicates & (group == number)
        if members is None:
            message = f"has pg_name {number}, which is not in the comm-group file"
            yield from found("pg-name-unknown", here, message)
        elif len(members) == 1:
            message = f"communicates in group {number}, whose only member is rank {members[0]}"
            yield from found("group-one-member", here, message)
        elif file.rank is not None and file.rank not in members:
            message = f"communicates in group {number}, which does not include rank {file.rank}"
            yield from found("rank-not-in-group", here, message)


def _times(file: File) -> Iterator[Finding]:
    trace = file.trace
    for rule, what, column, most in (
        ("duration-bound", "lasts", trace.duration_micros, LONGEST_MICROS),
        ("start-bound", "starts at", trace.start_micros, LATEST_MICROS),
    ):
        # A negative number is read as one from 2^63 on.
        yield from found(rule, column > np.uint64(most), f"{what} {{}} µs", column.astype(np.int64))
    if file.of_type(NodeType.COMP).any() and not trace.duration_micros.any():
        yield Finding("no-durations", [], "all durations are 0: a replay of this file takes no time")
    rank, world = trace.metadata_int("rank"), trace.metadata_int("world_size")
    if rank is not None and world is not None and not 0 <= rank < world:
        yield Finding("rank-beyond-world", [], f"the metadata has rank {rank} and world_size {world}")
