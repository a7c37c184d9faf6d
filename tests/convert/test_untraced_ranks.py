"""Traces of two ranks and the communication of all become one job, which behaves as that of all traces."""

from __future__ import annotations

import pickle
import shutil
from typing import Any

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.convert.inputs import load_run
from chakra_et.diagnose.gains import Faster
from chakra_et.diagnose.node_classes import ON_DEVICE, node_classes
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.sets import read_comm_groups
from chakra_et.predict.predict import predict
from chakra_et.simulate.run import Run
from tests.shared import shared_path

TRACED = (0, 1)
NAMES = {CollectiveType.ALL_REDUCE: "all_reduce", CollectiveType.ALL_TO_ALL: "all_to_all"}


def _dump(trace: ExecutionTrace, groups: dict[str, list[int]], before: int, late_ns: int) -> dict[str, Any]:
    """What the flight recorder would have written on this rank, whose clock is ``late_ns`` off; its ring also
    holds ``before`` earlier calls."""
    origin = trace.metadata_int("trace_start_ns") or 0
    rows = np.flatnonzero(trace.types == NodeType.COMM_COLL)
    rows = rows[np.argsort(trace.start_micros[rows], kind="stable")]
    kind, size = trace.column("comm_type"), trace.column("comm_size")
    made, number = [], dict.fromkeys(groups, before)
    columns = trace.attributes["pg_name"]
    name_of = {int(row): str(columns.values[at]) for at, row in enumerate(columns.rows)}
    for row in rows.tolist():
        start = origin + int(trace.start_micros[row]) * 1000 + late_ns
        group = name_of[row]
        number[group] += 1
        made.append(
            {
                "process_group": (group, "any"), "collective_seq_id": number[group], "p2p_seq_id": 0,
                "profiling_name": f"nccl:{NAMES[CollectiveType(int(kind[row]))]}",
                "time_created_ns": start - 30_000, "time_discovered_started_ns": start,
                "time_discovered_completed_ns": start + int(trace.duration_micros[row]) * 1000,
                "input_sizes": [[int(size[row])]], "input_dtypes": ["Byte"], "state": "completed",
            }
        )  # fmt: skip
    earlier = [
        dict(made[0], collective_seq_id=1 + at, time_created_ns=0, input_sizes=[[8]],
             time_discovered_started_ns=at * 1000, time_discovered_completed_ns=at * 1000 + 1)
        for at in range(before)
    ]  # fmt: skip
    config = {name: {"name": name, "desc": "any", "ranks": str(ranks)} for name, ranks in groups.items()}
    return {"version": "2.10", "pg_config": config, "entries": earlier + made}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The job of eight traces, and that of two traces and eight dumps."""
    source, folder = shared_path("data") / "traces" / "dlrm_8gpu", tmp_path_factory.mktemp("run")
    assert main(["convert", str(source), "-o", str(folder / "all")]) == 0
    groups = read_comm_groups(folder / "all" / "dlrm_8gpu_comm_groups.json")
    some = folder / "some"
    some.mkdir()
    for rank in range(8):
        trace = et_file.read(folder / "all" / f"dlrm_8gpu.{rank}.et")
        dump = _dump(trace, groups, 3, 10**9 * (rank % 3))
        (some / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, 2))
        if rank in TRACED:
            for path in source.glob(f"*_rank{rank}_*"):
                shutil.copy(path, some)
    assert main(["convert", str(some), "-o", str(folder / "filled")]) == 0
    return load_run(str(folder / "all" / "dlrm_8gpu")), load_run(str(folder / "filled" / "dlrm_8gpu"))


def test_the_step_is_that_of_all_traces(runs: tuple[Run, Run]) -> None:
    assert runs[0].graph.ranks == runs[1].graph.ranks == [*range(8)]
    assert len(runs[0].members) == len(runs[1].members)
    for factor in (0.5, 1.0, 2.0):
        steps = []
        for run in runs:
            change = Faster(np.isin(node_classes(run), ON_DEVICE), factor)
            steps.append(predict(run, [change], explain=False).after_ms)
        assert steps[1] == pytest.approx(steps[0], rel=0.01)
