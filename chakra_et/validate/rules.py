"""The rules for a single .et file. Each function checks a few related ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from chakra_et.et.byte_strings import ByteStrings
from chakra_et.et.columns import CollectiveType, NodeType, Ragged, Strings, Texts
from chakra_et.et.edges import Edges, forward_position, repeated, short_cycle, widest_ready_set
from chakra_et.validate.table import ALL_RANKS, INTEGER, TEXT_GROUP, File, Finding

# Attributes that the feeders read, and the kind of value that they expect.
FEEDER_KINDS = {
    "is_cpu_op": "bool",
    "comm_type": "int64",
    "comm_size": "int64",
    "num_ops": "int64",
    "comm_src": "int32",
    "comm_dst": "int32",
    "comm_tag": "int32",
    "comm_priority": "int32",
    "tensor_size": "uint64",
    "pg_name": "string",
}
# Further attributes, and the kind of value that MLCommons' converter writes.
USUAL_KINDS = dict.fromkeys(("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "stream"), "int64")
USUAL_KINDS["op_schema"] = "string"
SIMULATED = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
    CollectiveType.ALL_TO_ALL,
)
LONGEST_MICROS = 30 * 24 * 3600 * 10**6
LATEST_MICROS = 1 << 53
NEGATIVE = 1 << 63
WIDE_READY_SET = 1000
# Rules whose findings may have no rows.
WHOLE_FILE = frozenset(
    {"no-root", "unknown-field", "group-file", "comm-groups-missing", "no-durations", "rank-beyond-world"}
)


def check_file(file: File) -> Iterator[Finding]:
    """All findings in one file."""
    if not file.trace.has_metadata:
        yield Finding(
            "metadata-missing", [], "the first message is a node: write a GlobalMetadata message before it"
        )
    if not len(file.trace):
        yield Finding("no-nodes", [], "the file has no nodes: convert the trace again")
    for rule in (
        _ids,
        _dependencies,
        _order,
        _types,
        _kinds,
        _text,
        _collectives,
        _peers,
        _group_names,
        _times,
    ):
        for finding in rule(file):
            if len(finding.rows) or finding.rule in WHOLE_FILE:
                yield finding


def _where(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(mask)


def _ids(file: File) -> Iterator[Finding]:
    order = np.argsort(file.trace.ids, kind="stable")
    ids = file.trace.ids[order]
    again = np.sort(order[1:][ids[1:] == ids[:-1]])
    yield Finding("duplicate-id", again, "another node has the same id")


def _dependencies(file: File) -> Iterator[Finding]:
    trace, edges = file.trace, file.edges
    absent = _where(edges.parent < 0)
    if len(absent):
        first = absent[np.argmin(edges.child[absent])]
        message = f"depends on node {edges.dependency[first]}, which is not in the file"
        yield Finding("absent-dependency", np.unique(edges.child[absent]), message)
    for rule, deps in (
        ("repeated-dependency", trace.data_deps),
        ("repeated-ctrl-dependency", trace.ctrl_deps),
    ):
        rows = repeated(deps)
        if len(rows):
            yield Finding(rule, rows, f"lists dependency {_twice(deps, int(rows[0]))} more than once")
    itself = edges.parent == edges.child
    yield Finding("self-dependency", np.unique(edges.child[itself]), "depends on itself")
    rooted = np.ones(len(trace), bool)
    rooted[edges.child] = False
    if len(trace) and not rooted.any():
        yield Finding("no-root", [], "every node depends on another node: none can run first")


def _twice(deps: Ragged, row: int) -> int:
    values, counts = np.unique(deps.values[deps.offsets[row] : deps.offsets[row + 1]], return_counts=True)
    return int(values[counts > 1][0])


def _order(file: File) -> Iterator[Finding]:
    trace, edges = file.trace, file.edges
    itself = edges.parent == edges.child
    if itself.any():  # reported by _dependencies; the other edges may still form a cycle
        edges = Edges(
            edges.child[~itself], edges.parent[~itself], edges.dependency[~itself], edges.is_ctrl[~itself]
        )
        file.position = forward_position(trace, edges)
    if file.position is None:
        cycle = short_cycle(len(trace), edges)
        named = [str(trace.ids[row]) for row in cycle[:8]] + (["…"] if len(cycle) > 8 else [])
        path = " → ".join([*named, str(trace.ids[cycle[0]])])
        yield Finding("cycle", cycle, f"is on a dependency cycle of {len(cycle)} nodes ({path})")
    elif len(trace):
        width, row = widest_ready_set(trace, edges, file.position)
        wide = [row] if width > WIDE_READY_SET else []
        yield Finding(
            "ready-set", wide, f"{width} nodes are ready at once when it runs: add edges for program order"
        )
    order = np.argsort(trace.ids, kind="stable")
    start = trace.start_micros[order]
    early = order[1:][start[1:] < start[:-1]]
    yield Finding("id-order", early, "starts before the node with the next lower id")


def _types(file: File) -> Iterator[Finding]:
    types = file.trace.types
    known = np.isin(types, [kind for kind in NodeType if kind != NodeType.INVALID])
    wrong = _where(~known)
    if len(wrong):
        yield Finding("node-type", wrong, f"has type {types[wrong[0]]}: types are {NodeType.METADATA:d} to 7")
    yield Finding("metadata-node", _where(types == NodeType.METADATA), "is a METADATA node: leave it out")
    unsized = file.of_type(NodeType.MEM_LOAD, NodeType.MEM_STORE) & ~file.has("tensor_size")
    yield Finding("tensor-size-missing", _where(unsized), "is a memory node without tensor_size")


def _kinds(file: File) -> Iterator[Finding]:
    for rule, kinds in (("attribute-kind", FEEDER_KINDS), ("attribute-kind-unusual", USUAL_KINDS)):
        for name, kind in kinds.items():
            for column in file.columns(name):
                if column.kind != kind:
                    yield Finding(
                        rule, column.rows, f"has {name} as {column.kind}_val: write it as {kind}_val"
                    )
    if file.trace.unread_fields:
        message = f"{file.trace.unread_fields} fields are unknown or duplicate and were ignored"
        yield Finding("unknown-field", [], message)


def _text(file: File) -> Iterator[Finding]:
    trace = file.trace
    columns: list[tuple[str, np.ndarray | None, Strings]] = [("name", None, trace.names)]
    for name, attribute in trace.attributes.items():
        if attribute.kind == "string" and isinstance(attribute.values, Strings):
            columns.append((f"attribute {name}", attribute.rows, attribute.values))
    for what, rows, strings in columns:
        bad = [at for at, text in enumerate(strings.table) if not _is_utf8(text)]
        if bad:
            hit = _where(np.isin(strings.index, bad))
            yield Finding(
                "text-encoding", hit if rows is None else rows[hit], f"its {what} is not valid UTF-8"
            )
    for what, tensors in (("inputs", trace.inputs), ("outputs", trace.outputs)):
        if tensors is None:
            continue
        bad_rows: set[int] = set()
        for column in (tensors.values, tensors.shapes, tensors.types):
            if not _all_utf8(column):
                bad_rows |= {int(tensors.rows[at]) for at, text in enumerate(column) if not _is_utf8(text)}
        yield Finding("text-encoding", sorted(bad_rows), f"its {what} are not valid UTF-8")


def _all_utf8(column: Sequence[bytes]) -> bool:
    """Whether all texts are valid; False may also be due to others in the same buffer."""
    if isinstance(column, ByteStrings):
        return column.is_utf8()
    # No character spans a zero byte: if the joined text is valid, so is each part.
    return _is_utf8(b"\0".join(column.table if isinstance(column, Texts) else column))


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _collectives(file: File) -> Iterator[Finding]:
    is_collective, kind = file.of_type(NodeType.COMM_COLL), file.collective
    has_type, has_size = file.has("comm_type"), file.has("comm_size")
    yield Finding("comm-type-missing", _where(is_collective & ~has_type), "is a collective without comm_type")
    yield Finding(
        "comm-size-missing", _where(file.communicates & ~has_size), "communicates without comm_size"
    )
    known = np.isin(kind, list(CollectiveType))
    unknown = _where(is_collective & has_type & ~known)
    if len(unknown):
        yield Finding(
            "comm-type-unknown", unknown, f"has comm_type {kind[unknown[0]]}, which is not a collective"
        )
    for other in CollectiveType:
        rows = _where(kind == other)
        if len(rows) and other not in SIMULATED:
            does = (
                "replays it without waiting for other ranks"
                if other == CollectiveType.BROADCAST
                else "throws"
            )
            yield Finding("comm-type-unsupported", rows, f"is a {other.name}: ASTRA-sim {does}")
    # A barrier moves no data, and a broadcast is replayed by its duration.
    by_size = ~np.isin(kind, (CollectiveType.BARRIER, CollectiveType.BROADCAST))
    empty = _where(file.communicates & has_size & by_size & (file.size <= 0))
    if len(empty):
        yield Finding("comm-size-zero", empty, f"has comm_size {file.size[empty[0]]}: it never finishes")
    small = (kind == CollectiveType.ALL_GATHER) & (file.size > 0) & (file.size < file.dataset_splits)
    if small.any():
        size = file.size[_where(small)[0]]
        message = (
            f"gathers {size} bytes, fewer than preferred-dataset-splits ({file.dataset_splits}): it hangs"
        )
        yield Finding("all-gather-small", _where(small), message)
    on_cpu = file.communicates & (file.integer("is_cpu_op", 0) != 0)
    yield Finding("comm-on-cpu", _where(on_cpu), "is a communication node with is_cpu_op=true: write false")


def _peers(file: File) -> Iterator[Finding]:
    has_tag = file.has("comm_tag")
    for kind, peer in ((NodeType.COMM_SEND, "comm_dst"), (NodeType.COMM_RECV, "comm_src")):
        lacking = file.of_type(kind) & ~(file.has(peer) & has_tag)
        yield Finding("comm-peer-missing", _where(lacking), f"is a {kind.name} without {peer} and comm_tag")


def _group_names(file: File) -> Iterator[Finding]:
    group, groups = file.group_of, file.comm_groups
    named = file.trace.attributes.get("pg_name")
    if named is not None and isinstance(named.values, Strings):
        rows = named.rows[file.communicates[named.rows] & (group[named.rows] == TEXT_GROUP)]
        if len(rows):
            name = named.values[int(np.searchsorted(named.rows, rows[0]))]
            yield Finding(
                "pg-name-text", rows, f"has pg_name {name[:40]!r}: write the integer id of a group, 1 or more"
            )
        zero = [at for at, text in enumerate(named.values.table) if text == b"0"]
        rows = named.rows[file.communicates[named.rows] & np.isin(named.values.index, zero)]
        yield Finding("pg-name-zero", rows, "has pg_name '0', which means all ranks, whatever the group was")
    if file.trace.metadata.get("world_size") == 1:
        rows = _where(file.communicates & (group == ALL_RANKS))
        yield Finding("group-one-member", rows, "communicates with all ranks of a run of one rank")
    used = np.unique(group[file.communicates & (group > 0)]).tolist()
    if groups is None:
        if used:
            message = f"groups {', '.join(map(str, used[:8]))} are used, but there is no comm-group file"
            yield Finding("comm-groups-missing", [], message)
        return
    for name, ranks in groups.items():
        if not INTEGER.fullmatch(name.encode()) or len(set(ranks)) < len(ranks) or min(ranks, default=-1) < 0:
            message = (
                f"group {name[:40]!r} in the comm-group file: ids are integers from 1 on, ranks are distinct"
            )
            yield Finding("group-file", [], message)
    for number in used:
        rows = _where(file.communicates & (group == number))
        members = groups.get(str(number))
        if members is None:
            message = f"has pg_name {number}, which is not in the comm-group file"
            yield Finding("pg-name-unknown", rows, message)
        elif len(members) == 1:
            message = f"communicates in group {number}, whose only member is rank {members[0]}"
            yield Finding("group-one-member", rows, message)
        elif file.rank is not None and file.rank not in members:
            message = f"communicates in group {number}, which does not include rank {file.rank}"
            yield Finding("rank-not-in-group", rows, message)


def _times(file: File) -> Iterator[Finding]:
    trace = file.trace
    for rule, what, column, most in (
        ("duration-bound", "lasts", trace.duration_micros, LONGEST_MICROS),
        ("start-bound", "starts at", trace.start_micros, LATEST_MICROS),
    ):
        rows = _where(column > np.uint64(most))
        if len(rows):
            value = int(column[rows[0]])
            yield Finding(rule, rows, f"{what} {value - (1 << 64) if value >= NEGATIVE else value} µs")
    computes = file.of_type(NodeType.COMP)
    if computes.any() and not trace.duration_micros.any():
        yield Finding("no-durations", [], "all durations are 0: a replay of this file takes no time")
    rank, world = trace.metadata_int("rank"), trace.metadata_int("world_size")
    if rank is not None and world is not None and not 0 <= rank < world:
        yield Finding("rank-beyond-world", [], f"the metadata has rank {rank} and world_size {world}")
