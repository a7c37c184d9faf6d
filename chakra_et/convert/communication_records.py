"""A job from what large runs record of their communication anyway: two formats, a file per rank or process.

    chakra-et convert dumps -o outputs

PyTorch's flight recorder dumps (``TORCH_FR_BUFFER_SIZE``; FlightRecorder.cpp, versions 2.x), as pickle, which
is read without running anything that it names, or as JSON; the file names end with the rank. NCCL inspector's
JSON lines (NVIDIA/nccl, plugins/profiler/inspector, versions 4 and 5): a rank is that of the process in its
largest communicator.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.convert.emit import strings
from chakra_et.convert.graph.communication import operation_named
from chakra_et.errors import TraceError, reason
from chakra_et.et import file as et_file
from chakra_et.et import record
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType, Ragged, item_bytes
from chakra_et.et.node_attributes import set_integers, set_texts, with_integers, with_texts
from chakra_et.files import folder_lock, open_regular, read_bytes, scratch_folder, write_json
from chakra_et.names import RunFiles

MOST_BYTES = 1 << 30
_SIGNS = re.compile(rb'^\x80.*pg_config|"collective_seq_id"|"(coll|p2p)_perf"', re.DOTALL)
_MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
UNKNOWN = "not recorded"
"""The name of what a rank does between two communications."""
NOT_RECORDED = {
    "kind": "calls of a kind that isn't known, left out",
    "end": "communication whose end isn't recorded, taken to last 0 µs",
    "start": "communication without times, placed before the moment at which it was written",
    "size": "communication without a size, taken as 0 bytes",
    "others": "communication that not all of its ranks recorded, left out",
    "members": "groups of which some ranks have no file",
}


@dataclass(frozen=True)
class RecordedCall:
    """One communication of a rank. ``end_ns`` is ``start_ns`` where it isn't known; ``sequence``: which of
    its group; ``peer``: of a message, a global rank, else -1."""

    name: str
    operation: CollectiveType | NodeType
    size: int
    group: str
    sequence: int
    start_ns: int
    end_ns: int
    peer: int = -1


@dataclass
class Recorded:
    """The calls of each rank, the ranks of each group, and how many of what isn't recorded."""

    calls: dict[int, list[RecordedCall]] = field(default_factory=lambda: defaultdict(list))
    groups: dict[str, list[int]] = field(default_factory=dict)
    world: int = 1
    lacking: Counter[str] = field(default_factory=Counter)


def is_record(path: Path) -> bool:
    """Whether a file begins as one of the two formats does."""
    try:
        with open_regular(path) as file:
            return bool(_SIGNS.search(file.read(4096)))
    except OSError:
        return False


def read_records(paths: Sequence[Path]) -> Recorded:
    """What ``paths`` hold. Raises ``TraceError`` for a file that is cut or isn't of either format, for two
    files of one rank, and for ranks that have no communication in common."""
    found = Recorded()
    lines: list[tuple[Path, dict[str, Any]]] = []
    for path in sorted(paths):
        try:
            content = read_bytes(path, MOST_BYTES)
            if content[:1] != b"\x80" and b'_perf"' in content[:4096]:
                lines += ((path, json.loads(line)) for line in content.splitlines() if line.strip())
            else:
                _flight(path, _document(content), found)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise TraceError(f"{path}: is no complete record of communication: it {reason(error)}") from None
    if lines:
        _inspector(lines, found)
    found.world = max([found.world, *(rank + 1 for rank in found.calls)])
    for rank, calls in found.calls.items():
        found.calls[rank] = [each for each in calls if each.group in found.groups]
    _keep_common(found)
    if not any(found.calls.values()):
        raise TraceError(f"{paths[0].parent}: the records share no communication: give those of one run")
    return found


class _Plain(pickle.Unpickler):
    """Containers, text and numbers; whatever else a pickle names is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only plain values are read")


def _document(content: bytes) -> dict[str, Any]:
    try:
        document = _Plain(io.BytesIO(content)).load() if content[:1] == b"\x80" else json.loads(content)
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # pickle: whatever damaged bytes lead to
        raise ValueError(f"it is cut or damaged ({error})") from None
    if not isinstance(document, dict):
        raise ValueError("it holds no dump of a flight recorder")
    return document


def _flight(path: Path, document: dict[str, Any], found: Recorded) -> None:
    number = re.search(r"(\d+)(?:\.[a-z]+)?$", path.name)
    if number is None:
        raise TraceError(f"{path}: the name of a flight recorder dump must end with the rank: rename it")
    rank = int(number[1])
    if rank in found.calls:
        raise TraceError(f"{path}: is a second file of rank {rank}: keep one")
    calls, key = found.calls[rank], {}
    for config in document.get("pg_config", {}).values():
        members = json.loads(config["ranks"]) if isinstance(config["ranks"], str) else config["ranks"]
        if members:  # names alone may be those of other groups on other ranks
            key[str(config["name"])] = f"{config['name']} {members}"
            found.groups[key[str(config["name"])]] = [int(each) for each in members]
    for entry in document["entries"]:
        group, name = str(entry["process_group"][0]), str(entry["profiling_name"])
        group = key.get(group, group)
        message = _MESSAGE.search(name)
        operation = operation_named(name)
        if operation is None or isinstance(operation, NodeType) and message is None:
            found.lacking["kind"] += 1
            continue
        created = int(entry["time_created_ns"])
        start = int(entry.get("time_discovered_started_ns") or created)
        end = int(entry.get("time_discovered_completed_ns") or 0)
        if lasted := entry.get("duration_ms"):
            start = max(end - int(lasted * 1e6), created) if end else start
            end = end or start + int(lasted * 1e6)
        found.lacking["end"] += not end
        types = entry.get("input_dtypes") or [""] * len(entry["input_sizes"])
        shapes = zip(entry["input_sizes"], types, strict=False)
        size = sum(math.prod(shape) * item_bytes(kind) for shape, kind in shapes)
        members = found.groups.get(group, [])
        peer = int(message[3]) if message else -1
        peer = members[peer] if message and members else peer
        sequence = int(entry["p2p_seq_id" if message else "collective_seq_id"])
        calls.append(RecordedCall(name, operation, size, group, sequence, start, max(start, end), peer))
    for call in calls:  # gloo's dumps list no ranks of groups: whoever uses one is in it
        members = found.groups.setdefault(call.group, [])
        if rank not in members:
            members.append(rank)


def _inspector(lines: list[tuple[Path, dict[str, Any]]], found: Recorded) -> None:
    processes: dict[tuple[str, int], dict[str, tuple[int, int]]] = defaultdict(dict)
    of_process: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for path, line in lines:
        try:
            header, about = line["header"], line["metadata"]
            process = str(about["hostname"]), int(about["pid"])
            processes[process][str(header["id"])] = int(header["n_ranks"]), int(header["rank"])
            of_process[process].append(line)
        except (LookupError, TypeError, ValueError) as error:
            raise TraceError(f"{path}: has a line that isn't NCCL inspector's: it {reason(error)}") from None
    ranks: dict[tuple[str, int], int] = {}
    for process, groups in sorted(processes.items()):
        size, ranks[process] = max(groups.values(), key=lambda each: each[0])
        found.world = max(found.world, size)
    if len(set(ranks.values())) < len(ranks):
        raise TraceError("two processes of the largest communicator are one rank: give files of one run")
    member: dict[str, dict[int, int]] = defaultdict(dict)
    sizes: dict[str, int] = {}
    for process, groups in processes.items():
        for group, (size, own) in groups.items():
            member[group][own], sizes[group] = ranks[process], size
    for group, known in member.items():
        found.groups[group] = [known[own] for own in sorted(known)]
        found.lacking["members"] += len(known) < sizes[group]
    for process, own_lines in of_process.items():
        calls, before = [], None
        for line in reversed(own_lines):
            call, before = _inspected(line, member[str(line["header"]["id"])], before, found.lacking)
            calls += [call] if call else []
        found.calls[ranks[process]] = calls[::-1]


def _inspected(
    line: dict[str, Any], member: dict[int, int], before: int | None, lacking: Counter[str]
) -> tuple[RecordedCall | None, int | None]:
    """The call of a line, and its start; ``before``: that of the process's next one."""
    side = "coll" if "coll_perf" in line else "p2p"
    of, group = line[f"{side}_perf"], str(line["header"]["id"])
    operation = operation_named(str(of[side]))
    peer = member.get(int(of.get("p2p_peer", -1)), -1)
    if operation is None or side == "p2p" and peer < 0:
        lacking["kind"] += 1
        return None, before
    lasted = int(float(of[f"{side}_exec_time_us"]) * 1000)
    kernels = of.get("event_trace_ts", {}).get("kernel_events", [])
    if kernels:
        end = max(int(each["kernel_stop_ts"]) for each in kernels) * 1000
    else:
        lacking["start"] += 1
        written = int(line["metadata"]["dump_timestamp_us"]) * 1000
        end = written if before is None else min(written, before)
    size = int(of[f"{side}_msg_size_bytes"])
    if operation is CollectiveType.REDUCE_SCATTER:  # the inspector's is that of what a rank receives
        size *= int(line["header"]["n_ranks"])
    name, sequence = f"nccl:{of[side]}", int(of[f"{side}_sn"])
    return RecordedCall(name, operation, size, group, sequence, end - lasted, end, peer), end - lasted


def _keep_common(found: Recorded) -> None:
    """Keep of each group the calls that all its ranks recorded, as rings of a few thousand calls begin and
    end at another one on each rank, and those of messages whose peer has a file."""
    numbers: dict[str, dict[int, set[int]]] = defaultdict(dict)
    for rank, calls in found.calls.items():
        for call in calls:
            if isinstance(call.operation, CollectiveType):
                numbers[call.group].setdefault(rank, set()).add(call.sequence)
    common = {group: set.intersection(*of.values()) for group, of in numbers.items()}
    for rank, calls in found.calls.items():
        kept = [
            call
            for call in calls
            if not isinstance(call.operation, CollectiveType) or call.sequence in common[call.group]
        ]
        found.lacking["others"] += len(calls) - len(kept)
        found.lacking["size"] += sum(
            not call.size and call.operation is not CollectiveType.BARRIER for call in kept
        )
        found.calls[rank] = sorted(kept, key=lambda call: call.start_ns)


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
        notes.append(f"gaps between communication, whose work isn't recorded: one node each: {between}")
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
    deps: list[tuple[int, int]] = []  # rows: what is waited for, and what waits
    ended: list[tuple[int, int]] = []  # when, and the number of the row
    free: dict[str, int] = {}
    host, since = -1, origin
    for call in calls:
        at = bisect_right(ended, (call.start_ns, len(rows)))
        before = {host} | ({ended[at - 1][1]} if at else set())
        begin = max(since, ended[at - 1][0] if at else origin)
        deps += [*((row, len(rows)) for row in before - {-1}), (len(rows), len(rows) + 1)]
        host, since = len(rows), call.start_ns
        start = max(call.start_ns, free.get(call.group, 0))  # a stream has one at a time
        free[call.group] = max(call.end_ns, start)
        rows += [(UNKNOWN, 0, begin, call.start_ns), (call.name, lanes[call.group], start, free[call.group])]
        insort(ended, (free[call.group], len(rows) - 1))
    names, *columns = zip(*rows, strict=True)
    lane, begins, ends = map(np.array, columns)
    started = (begins - origin) // 1000
    waited, waiting = np.array(deps).T
    by_row = dict(zip(range(1, len(rows), 2), calls, strict=True))  # each behind what lies before it
    types = np.full(len(rows), NodeType.COMP, np.uint8)
    for row, call in by_row.items():
        types[row] = call.operation if isinstance(call.operation, NodeType) else NodeType.COMM_COLL
    trace = ExecutionTrace(
        ids=np.arange(1, len(rows) + 1, dtype=np.uint64),
        names=strings(list(names)),
        types=types,
        start_micros=(started + 1).astype(np.uint64),
        duration_micros=((ends - origin) // 1000 - started).astype(np.uint64),
        data_deps=Ragged.of_edges(waited, waiting, len(rows)),
        ctrl_deps=Ragged.empty(len(rows)),
        metadata={"rank": rank, "world_size": found.world, "trace_start_ns": origin},
    )
    everywhere = np.ones(len(rows), bool)
    trace = set_integers(trace, "is_cpu_op", "bool", (lane == 0).astype(np.int64), everywhere)
    trace = set_integers(trace, "lane", "int64", lane, everywhere)
    trace = set_texts(trace, "kind", ["operator", "collective"], (lane != 0).astype(np.int64))
    trace = with_integers(trace, "comm_size", {row: call.size for row, call in by_row.items()})
    trace = with_texts(trace, "pg_name", {row: _number(call.group, found) for row, call in by_row.items()})
    texts = {row: call.group.partition(" ")[0] for row, call in by_row.items()}
    trace = with_texts(trace, "pg_original_name", texts)
    for of, name in ((NodeType.COMM_SEND, "comm_dst"), (NodeType.COMM_RECV, "comm_src")):
        peers = {row: call.peer for row, call in by_row.items() if call.operation is of}
        trace = with_integers(trace, name, peers)
    joint = {row: call for row, call in by_row.items() if isinstance(call.operation, CollectiveType)}
    trace = with_integers(trace, "comm_type", {row: int(call.operation) for row, call in joint.items()})
    return with_integers(trace, "comm_sequence", {row: call.sequence for row, call in joint.items()})


def _number(group: str, found: Recorded) -> str:
    """The name of a group in the files, a number as ASTRA-sim wants it."""
    return str(1 + sorted(found.groups).index(group))
