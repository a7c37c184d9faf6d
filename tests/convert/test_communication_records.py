"""Records of communication alone become jobs: real dumps of gloo, and made ones in the formats of NCCL."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.convert.communication_records import UNKNOWN, communication_job, is_record, read_records
from chakra_et.convert.inputs import load_run
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType
from chakra_et.names import RunFiles

GLOO = Path(__file__).parents[1] / "fixtures" / "flight_recorder"
RANKS, CALLS = 4, 6
SIZE, WORK, TRANSFER = 1 << 20, (1_000, 1_500, 1_200, 900), 300  # µs


def _schedule() -> list[list[tuple[int, int]]]:
    """Start and end of each call of each rank in µs: it works, then all meet; a pair first, then all four."""
    now, calls = [0] * RANKS, [[] for _ in range(RANKS)]
    for number in range(CALLS):
        pairs = [(0, 1), (2, 3)] if number % 2 else [tuple(range(RANKS))]
        for members in pairs:
            ready = [now[rank] + WORK[rank] for rank in members]
            for rank, at in zip(members, ready, strict=True):
                calls[rank].append((at, max(ready) + TRANSFER))
                now[rank] = max(ready) + TRANSFER
    return calls


def _dump(rank: int, first: int = 0) -> dict[str, Any]:
    """What NCCL's flight recorder would write; ``first``: the oldest call that its ring still has."""
    pair = [0, 1] if rank < 2 else [2, 3]
    entries = []
    for number, (start, end) in enumerate(_schedule()[rank]):
        entries.append(
            {
                "record_id": number, "pg_id": number % 2,
                "process_group": ("0", "default_pg") if number % 2 == 0 else (str(1 + rank // 2), "pair"),
                "collective_seq_id": 1 + number // 2, "p2p_seq_id": 0, "op_id": number, "is_p2p": False,
                "profiling_name": "nccl:all_reduce" if number % 2 == 0 else "nccl:_all_gather_base",
                "time_created_ns": start * 1000, "time_discovered_started_ns": start * 1000 + 50,
                "time_discovered_completed_ns": end * 1000, "duration_ms": (end - start) / 1000,
                "input_sizes": [[SIZE // 2]], "input_dtypes": ["BFloat16"], "output_sizes": [[SIZE // 2]],
                "state": "completed", "retired": True, "timeout_ms": 600000,
            }
        )  # fmt: skip
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(RANKS)])}}
    groups[str(1 + rank // 2)] = {"name": str(1 + rank // 2), "desc": "pair", "ranks": str(pair)}
    return {"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": entries[first:]}


def _flight(folder: Path, kind: str = "pickle") -> list[Path]:
    for rank in range(RANKS):
        dump = _dump(rank)
        content = pickle.dumps(dump, 2) if kind == "pickle" else json.dumps(dump, sort_keys=True).encode()
        (folder / f"nccl_trace_rank_{rank}{'.json' if kind == 'json' else ''}").write_bytes(content)
    return sorted(folder.iterdir())


def _inspector(folder: Path, verbose: bool) -> list[Path]:
    for rank in range(RANKS):
        lines = []
        for number, (start, end) in enumerate(_schedule()[rank]):
            everyone = number % 2 == 0
            of: dict[str, Any] = {
                "coll": "AllReduce" if everyone else "ReduceScatter", "coll_sn": 1 + number // 2,
                "coll_msg_size_bytes": SIZE, "coll_exec_time_us": end - start,
            }  # fmt: skip
            if verbose:
                kernel = {"channel_id": 0, "kernel_start_ts": start, "kernel_stop_ts": end}
                of["event_trace_ts"] = {"coll_start_ts": start, "kernel_events": [kernel]}
            header = {"id": "0xa", "rank": rank, "n_ranks": RANKS, "nnodes": 2}
            if not everyone:
                header = {"id": f"0xb{rank // 2}", "rank": rank % 2, "n_ranks": 2, "nnodes": 1}
            about = {"dump_timestamp_us": end, "hostname": "host", "pid": 70 + rank}
            lines.append(json.dumps({"header": header, "metadata": about, "coll_perf": of}))
        (folder / f"host-pid{70 + rank}.log").write_text("\n".join(lines) + "\n")
    return sorted(folder.iterdir())


@pytest.mark.parametrize("of", ["pickle", "json", "verbose", "brief"])
def test_a_job_of_records_replays_as_it_ran(of: str, tmp_path: Path) -> None:
    (tmp_path / "dumps").mkdir()
    flight = of in ("pickle", "json")
    paths = (_flight if flight else _inspector)(tmp_path / "dumps", of if flight else of == "verbose")  # type: ignore[arg-type]
    assert all(map(is_record, paths))
    notes = communication_job(paths, RunFiles(tmp_path, "job"))
    assert f"one node each: {RANKS * CALLS}" in notes[-1]
    untimed = [note for note in notes if "without times" in note]
    assert untimed == [] if of != "brief" else untimed[0].endswith(f": {RANKS * CALLS}")
    run = load_run(str(tmp_path / "job"))
    assert run.graph.ranks == [*range(RANKS)] and len(run.members) == CALLS // 2 * 3
    assert sorted(map(len, run.comm_groups.values())) == [2, 2, RANKS]
    origin = min(start for calls in _schedule() for start, _ in calls)
    for rank, calls in enumerate(_schedule()):
        of_rank = (run.graph.trace_of == rank) & run.is_communication
        ends = np.sort(run.end_ns[of_rank]) // 1000
        assert ends == pytest.approx(np.array([end for _, end in calls]) - origin, abs=3)
        sizes = run.graph.attribute("comm_size", 0)[of_rank]
        assert set(sizes.tolist()) == ({SIZE} if flight else {SIZE, 2 * SIZE}), "what a rank contributes"


def test_rings_that_begin_at_other_calls_are_cut_to_what_all_have(tmp_path: Path) -> None:
    paths = _flight(tmp_path)
    paths[2].write_bytes(pickle.dumps(_dump(2, first=3)))
    found = read_records(paths)
    assert {rank: len(calls) for rank, calls in found.calls.items()} == {0: 4, 1: 4, 2: 3, 3: 3}
    assert found.lacking["others"] == 2 + 2 + 0 + 3


def test_real_dumps_of_gloo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(GLOO), "-o", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "whose end isn't recorded, taken to last 0 µs: 14" in printed.err
    assert "2 files written" in printed.out
    for rank in range(2):
        trace = et_file.read(tmp_path / f"flight_recorder.{rank}.et")
        kinds = trace.column("comm_type", -1)
        expected = [CollectiveType.ALL_REDUCE, CollectiveType.ALL_GATHER] * 3 + [CollectiveType.BARRIER]
        assert kinds[kinds >= 0].tolist() == expected
        assert trace.column("comm_size")[kinds >= 0].tolist() == [4 << 16, 4 << 10] * 3 + [0]
        assert [name for name in map(trace.names.__getitem__, range(len(trace))) if name == UNKNOWN]
    assert main(["replay", str(tmp_path / "flight_recorder"), "--semantics", "device"]) == 0
    assert main(["validate", str(tmp_path / "flight_recorder.0.et")]) == 0


def test_what_a_pickle_names_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    path = tmp_path / "trace_0"
    path.write_bytes(pickle.dumps({"pg_config": Evil()}, 2))
    with pytest.raises(TraceError, match="only plain values are read"):
        read_records([path])
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "content",
    [b"\x80\x02}q\x00X\x09\x00\x00\x00pg_config", b'{"collective_seq_id": [', b'{"coll_perf":\n'],
)
def test_cut_files_are_refused_in_a_sentence(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace_0").write_bytes(content)
    assert main(["convert", str(tmp_path)]) != 0
    error = capsys.readouterr().err
    assert "trace_0" in error and "Traceback" not in error and error.count("\n") <= 2
