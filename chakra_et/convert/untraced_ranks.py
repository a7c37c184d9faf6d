"""Ranks of which only the communication is recorded, beside ranks that were traced in full, as one job.

A rank without a trace does what a rank with one does whose communication is alike: calls of the same kinds
and sizes in groups as large, as where both have the same place in the model. It gets that rank's nodes, with
groups, peers and times of communication of its own: a call, and the work before it, begins earlier or later
by as much as the records of both ranks differ. How long work takes is the other rank's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from chakra_et.convert.communication_records import Recorded, RecordedCall, read_records
from chakra_et.convert.graph.communication import Group, group_number
from chakra_et.convert.together import joint_times, with_times
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et import record
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import texts, with_integers, with_metadata, with_texts, without
from chakra_et.et.sets import Groups, read_comm_groups
from chakra_et.files import folder_lock, link, read_json, scratch_folder, write_json
from chakra_et.names import RunFiles

_OF_ITS_OWN = ("wait_micros", "transfer_micros", "recorded_start_micros", "recorded_micros")
_Calls = list[tuple[str, np.ndarray, str, list[RecordedCall]]]
"""By group of a trace: its name there, rows, and in a rank's record the group and the calls that they are."""


def add_untraced(paths: list[Path], run: RunFiles) -> list[str]:
    """Add to the .et files of ``run`` those of ranks that only the records at ``paths`` have; what to tell
    the user, one sentence each. Raises ``OSError``, ``TraceError`` as ``read_records`` does, and for a rank
    whose communication is like that of none with a trace."""
    found, groups = read_records(paths), read_comm_groups(run.groups_file)
    full = {rank: et_file.read(path) for rank, path in run.et_files()}
    traces, like_of = dict(full), Counter[int]()
    for rank in sorted(found.calls.keys() - full):
        calls = ((like, _calls(trace, rank, found, groups)) for like, trace in full.items())
        like, own = next(((like, own) for like, own in calls if own), (-1, []))
        theirs = _calls(full[like], like, found, groups) if own else []
        if not theirs:
            raise TraceError(
                f"rank {rank} communicates like no rank that has a trace: trace one rank of its stage, too"
            )
        traces[rank] = _filled(full[like], theirs, own, found, groups)
        traces[rank].metadata |= {"rank": rank, "filled_from": like}
        like_of[like] += 1
    times = joint_times({rank: trace.communication() for rank, trace in sorted(traces.items())}, groups)
    with folder_lock(run.folder, False, lambda: None), scratch_folder(run.folder / run.name) as scratch:
        inner = RunFiles(scratch, run.name)
        for rank, trace in traces.items():
            timed = with_times(trace, times[rank]) if rank in times else trace
            et_file.write(inner.et_file(rank), timed)
        if 0 in traces:
            link(inner.et_file(0), inner.first_et_file)
        write_json(inner.groups_file, groups)
        of = ", ".join(f"{count} as rank {like}" for like, count in sorted(like_of.items()))
        nodes = sum(len(trace) for rank, trace in traces.items() if rank not in full)
        notes = [f"nodes of ranks without a trace, copied from ranks that communicate alike ({of}): {nodes}"]
        known = read_json(run.report_file)
        about = {key: known[key] for key in ("name", "engine", "options", "device_traces", "ranks")}
        record.commit(scratch, run, found.world, about | {"notes": [*known["notes"], *notes]})
    return notes


def _calls(trace: ExecutionTrace, rank: int, found: Recorded, groups: Groups) -> _Calls:
    """The communication of ``trace`` in the record of ``rank``: group by group, in the order of their first
    calls, where kinds and sizes are the same in the same order; of several such places the one nearest in
    time. Empty where it isn't all there."""
    roles: dict[tuple[str, bool], list[RecordedCall]] = defaultdict(list)  # messages count by themselves
    for call in sorted(found.calls[rank], key=lambda call: call.start_ns):
        roles[call.group, isinstance(call.operation, NodeType)].append(call)
    names, index = texts(trace, "pg_name")
    collective = trace.types == NodeType.COMM_COLL
    kind = np.where(collective, trace.column("comm_type", -1), trace.types)
    size = np.where(collective & (kind == CollectiveType.BARRIER), 0, trace.column("comm_size", 0))
    start = trace.start_micros.astype(np.int64) * 1000 + (trace.metadata_int("trace_start_ns") or 0)
    rows = np.flatnonzero(trace.types >= NodeType.COMM_SEND)
    rows = rows[np.argsort(start[rows], kind="stable")]
    key = index * 2 + collective
    result: _Calls = []
    for group in dict.fromkeys(key[rows].tolist()):
        own = rows[key[rows] == group]
        name, wanted = names[group // 2], list(zip(kind[own].tolist(), size[own].tolist(), strict=True))
        for (recorded, messages), calls in roles.items():
            given = [(int(call.operation), call.size) for call in calls]
            ends = range(len(own), len(given) + 1)
            places = [end - len(own) for end in ends if given[end - len(own) : end] == wanted]
            same = messages != group % 2 and len(groups[name]) == len(found.groups[recorded])
            if same and places:
                first = min(places, key=lambda each: abs(calls[each].start_ns - int(start[own[0]])))
                result.append((name, own, recorded, calls[first : first + len(own)]))
                del roles[recorded, messages]
                break
        else:
            return []
    return result


def _filled(
    trace: ExecutionTrace, theirs: _Calls, own: _Calls, found: Recorded, groups: Groups
) -> ExecutionTrace:
    """The nodes of ``trace``, whose calls are ``theirs``, with ``own`` calls; adds their groups."""
    rows = np.concatenate([each for _, each, _, _ in own])
    times = (
        np.array([(call.start_ns, call.end_ns) for *_, calls in of for call in calls]) for of in (own, theirs)
    )
    later = np.subtract(*times)
    later = (later - np.median(later[:, 0]).astype(np.int64)) // 1000  # clocks of hosts differ
    start, lasting = trace.start_micros.astype(np.int64), trace.duration_micros.astype(np.int64)
    lasting[rows] = np.maximum(lasting[rows] + later[:, 1] - later[:, 0], 0)
    order = np.argsort(start[rows], kind="stable")
    following = np.minimum(np.searchsorted(start[rows][order], start), len(order) - 1)
    start += later[order[following], 0]
    before = min(int(start.min()) - 1, 0)
    made = replace(
        trace, start_micros=(start - before).astype(np.uint64), duration_micros=lasting.astype(np.uint64)
    )
    for known, at, recorded, calls in own:
        members = sorted(found.groups[recorded])
        same = (name for name in (known, *groups) if sorted(groups[name]) == members)
        name = next(same, None) or str(group_number(Group(recorded, ranks=tuple(members))))
        groups[name] = members
        made = with_texts(made, "pg_name", dict.fromkeys(at.tolist(), name))
        for kind, peer in ((NodeType.COMM_SEND, "comm_dst"), (NodeType.COMM_RECV, "comm_src")):
            chosen = zip(at.tolist(), calls, strict=True)
            peers = {row: call.peer for row, call in chosen if call.operation is kind}
            made = with_integers(made, peer, peers)
    made = without(made, _OF_ITS_OWN, np.ones(len(made), bool))
    gone = dict.fromkeys(("conversion_report", "process_groups", "measured_end_micros"))
    origin = (trace.metadata_int("trace_start_ns") or 0) + before * 1000
    return with_metadata(made, **gone, trace_start_ns=origin)
