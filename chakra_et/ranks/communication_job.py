"""The .et files of a job of which only communication is recorded: see ``communication``."""

from __future__ import annotations

from bisect import bisect_right, insort
from pathlib import Path

import numpy as np

from chakra_et.et import file as et_file
from chakra_et.et import record
from chakra_et.et.columns import Attribute, CollectiveType, ExecutionTrace, NodeType, Ragged, Strings
from chakra_et.files import folder_lock, scratch_folder, write_json
from chakra_et.names import RunFiles
from chakra_et.ranks.communication import NOT_RECORDED, Recorded, read_records

UNKNOWN = "not recorded"
"""The name of what a rank does between two communications."""


def communication_job(paths: list[Path], run: RunFiles) -> list[str]:
    """Write the run's .et files from records, all at once; what to tell the user, one sentence each. Raises
    ``TraceError`` as ``read_records`` does, and ``OSError``."""
    found = read_records(paths)
    ranks = sorted(rank for rank, calls in found.calls.items() if calls)
    between = 0
    notes = [f"{what}: {found.lacking[key]}" for key, what in NOT_RECORDED.items() if found.lacking[key]]
    if absent := found.world - len(ranks):
        notes.append(f"ranks without a record: {absent}")
    with folder_lock(run.folder, False, lambda: None), scratch_folder(run.folder / run.name) as scratch:
        inner = RunFiles(scratch, run.name)
        for rank in ranks:
            trace = _trace(rank, found)
            between += int((trace.types == NodeType.COMP).sum())
            et_file.write(inner.et_file(rank), trace)
        notes.append(f"stretches between communication whose work isn't recorded, one node each: {between}")
        groups = {_number(name, found): sorted(members) for name, members in found.groups.items()}
        write_json(inner.groups_file, groups)
        about = {"name": run.name, "engine": "communication", "notes": notes}
        record.commit(scratch, run, found.world, about)
    return notes


def _trace(rank: int, found: Recorded) -> ExecutionTrace:
    """Communication on a lane for each group, and on the lane of the host what lies before each: from the
    last event that this rank recorded to the start of the communication."""
    calls, lanes = found.calls[rank], {name: int(_number(name, found)) for name in found.groups}
    origin = min(call.start_ns for call in calls)
    rows: list[tuple[str, int, int, int]] = []  # name, lane, start and end in ns
    deps: list[list[int]] = []
    ended: list[tuple[int, int]] = []  # when, and the number of the row
    of_call: list[int] = []
    free: dict[str, int] = {}
    host, since = -1, origin
    for call in calls:
        at = bisect_right(ended, (call.start_ns, len(rows)))
        before = {host} | ({ended[at - 1][1]} if at else set())
        begin = max(since, ended[at - 1][0] if at else origin)
        deps += [sorted(before - {-1}), [len(rows)]]
        host, since = len(rows), call.start_ns
        of_call.append(len(rows) + 1)
        start = max(call.start_ns, free.get(call.group, 0))  # a stream has one at a time
        free[call.group] = max(call.end_ns, start)
        rows += [(UNKNOWN, 0, begin, call.start_ns), (call.name, lanes[call.group], start, free[call.group])]
        insort(ended, (free[call.group], len(rows) - 1))
    names, lane, begins, ends = zip(*rows, strict=True)
    started = (np.array(begins) - origin) // 1000
    lasting = (np.array(ends) - origin) // 1000 - started
    nodes, communication = np.arange(len(rows)), np.array(of_call)

    def integers(values: list[int], at: np.ndarray) -> Attribute:
        return Attribute("int64", at, np.array(values, np.int64))

    def strings(values: list[str], at: np.ndarray) -> Attribute:
        return Attribute("string", at, _strings(values))

    attributes = {
        "is_cpu_op": Attribute("bool", nodes, (np.array(lane) == 0).astype(np.int64)),
        "lane": integers(list(lane), nodes),
        "kind": strings(["operator" if each == 0 else "collective" for each in lane], nodes),
        "comm_size": integers([call.size for call in calls], communication),
        "pg_name": strings([_number(call.group, found) for call in calls], communication),
        "pg_original_name": strings([call.group.partition(" ")[0] for call in calls], communication),
    }
    types = np.full(len(rows), NodeType.COMP, np.uint8)
    types[communication] = [
        call.operation if isinstance(call.operation, NodeType) else NodeType.COMM_COLL for call in calls
    ]
    for of, name in ((NodeType.COMM_SEND, "comm_dst"), (NodeType.COMM_RECV, "comm_src")):
        attributes[name] = integers(
            [call.peer for call in calls if call.operation is of], np.flatnonzero(types == of)
        )
    collectives = [call for call in calls if isinstance(call.operation, CollectiveType)]
    joint = np.flatnonzero(types == NodeType.COMM_COLL)
    attributes["comm_type"] = integers([int(call.operation) for call in collectives], joint)
    attributes["comm_sequence"] = integers([call.sequence for call in collectives], joint)
    offsets = np.concatenate(([0], np.cumsum([len(each) for each in deps])))
    return ExecutionTrace(
        ids=(nodes + 1).astype(np.uint64),
        names=_strings(list(names)),
        types=types,
        start_micros=(started + 1).astype(np.uint64),
        duration_micros=lasting.astype(np.uint64),
        data_deps=Ragged(offsets, np.array([row + 1 for each in deps for row in each], np.uint64)),
        ctrl_deps=Ragged(np.zeros(len(rows) + 1, np.int64), np.zeros(0, np.uint64)),
        attributes={name: each for name, each in attributes.items() if len(each.rows)},
        metadata={"rank": rank, "world_size": found.world, "trace_start_ns": origin},
    )


def _number(group: str, found: Recorded) -> str:
    """The name of a group in the files, a number as ASTRA-sim wants it."""
    return str(1 + sorted(found.groups).index(group))


def _strings(values: list[str]) -> Strings:
    table = {text: at for at, text in enumerate(dict.fromkeys(values))}
    return Strings([text.encode() for text in table], np.array([table[text] for text in values], np.int32))
