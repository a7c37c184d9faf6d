"""Gloo's operators name no group; our traces do, so that conversion gives each collective its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from chakra_et.__main__ import main
from chakra_et.capture import gloo
from chakra_et.capture.tracer import ChakraTracer
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, NodeType

ROOT = Path(__file__).resolve().parents[2]


def test_collectives_and_sends_of_several_gloo_groups(torchrun, tmp_path: Path) -> None:
    done = torchrun(2, Path(__file__).with_name("group_worker.py"), "out", timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "out"
    command = [sys.executable, str(ROOT / "convert_to_et.py"), "--dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    groups = json.loads((folder / "groups_comm_groups.json").read_text())
    assert groups["1"] == groups["2"] == groups["3"] == [0, 1]
    for rank in (0, 1):
        trace = et_file.read(folder / f"groups.{rank}.et")
        rows = np.flatnonzero(trace.types == NodeType.COMM_COLL)
        of_row = trace.attributes["pg_name"]
        names = {
            int(row): of_row.values[at]
            for at, row in enumerate(of_row.rows)
            if int(row) in set(rows.tolist())
        }
        kinds = trace.column("comm_type", -1)
        found = [(names[int(row)], CollectiveType(int(kinds[row])).name) for row in rows]
        # Two steps; the collective of one rank alone is compute.
        kind = {"1": "ALL_REDUCE", "2": "ALL_REDUCE", "3": "BROADCAST"}
        assert (
            found == [*((name, kind[name]) for name in "123"), ("3", "ALL_REDUCE"), ("2", "ALL_REDUCE")] * 2
        )
        assert trace.column("comm_size", 0)[rows].tolist() == [400, 200, 400, 1, 400] * 2
        p2p = np.flatnonzero((trace.types == NodeType.COMM_SEND) | (trace.types == NodeType.COMM_RECV))
        assert len(p2p) == 2
        assert set(trace.column("comm_src")[p2p]) == {0} and set(trace.column("comm_dst")[p2p]) == {1}
        assert set(trace.column("comm_size")[p2p]) == {40}


@pytest.mark.slow
def test_each_dimension_of_a_mesh_has_its_own_groups(torchrun, tmp_path: Path) -> None:
    done = torchrun(4, Path(__file__).with_name("mesh_worker.py"), "out", timeout=180)
    assert done.returncode == 0, done.stdout
    folder = tmp_path / "out"
    command = [sys.executable, str(ROOT / "convert_to_et.py"), "--dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    ranks_of = json.loads((folder / "mesh_comm_groups.json").read_text())
    for rank in range(4):
        trace = et_file.read(folder / f"mesh.{rank}.et")
        kinds, of_row = trace.column("comm_type", -1), trace.attributes["pg_name"]
        found = {
            CollectiveType(int(kinds[int(row)])).name: ranks_of[of_row.values[at]]
            for at, row in enumerate(of_row.rows)
            if trace.types[int(row)] == NodeType.COMM_COLL
        }
        data, tensor = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found == {"ALL_GATHER": data, "REDUCE_SCATTER": data, "ALL_REDUCE": tensor}


def test_process_groups_are_left_as_they_were() -> None:
    before = dict(vars(ProcessGroup))
    with gloo.named_groups(lambda name: None):
        assert vars(ProcessGroup)["allreduce"] is not before["allreduce"]
    assert {name: vars(ProcessGroup)[name] for name in before} == before


def test_untraced_steps_call_groups_without_labels(tmp_path: Path) -> None:
    """Labels made the untraced steps of a pipeline of 5 ms 17% slower, and with them the graph's step."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain, labelled = ProcessGroup.allreduce, []
    try:
        with ChakraTracer(tmp_path, "run", wait_steps=2, active_steps=1, strict=True) as tracer:
            for _ in range(5):
                labelled.append(ProcessGroup.allreduce is not plain)
                dist.all_reduce(torch.ones(4))
                tracer.step()
    finally:
        dist.destroy_process_group()
    # Two to wait for, the structure step, the timed one, and one after them.
    assert labelled == [False, False, True, True, False]


def test_a_group_that_is_destroyed_before_the_end_is_in_the_manifest(tmp_path: Path) -> None:
    """Its collectives had a group that no file listed, and the conversion ended with status 1."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ChakraTracer(tmp_path, "run", wait_steps=0, active_steps=2, strict=True) as tracer:
            for step in range(3):
                group = dist.new_group([0], group_desc=f"of step {step}")
                dist.all_reduce(torch.ones(4), group=group)
                dist.destroy_process_group(group)
                tracer.step()
    finally:
        dist.destroy_process_group()
    groups = json.loads((tmp_path / "run_manifest.json").read_text())["process_groups"]
    assert [(group["description"], group["ranks"]) for group in groups] == [
        ("default_pg", [0]), ("of step 0", [0]), ("of step 1", [0]), ("of step 2", [0]),
    ]  # fmt: skip
    assert main(["convert", str(tmp_path)]) == 0


def test_the_names_agree_with_the_converter() -> None:
    from chakra_et.convert.graph.communication_arguments import GROUP_MARK

    found = GROUP_MARK.fullmatch(f"{gloo.PREFIX}a (b) (3 bytes)")
    assert found and found.groups() == ("a (b)", "3")
