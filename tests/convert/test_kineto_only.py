"""Kineto traces without a host trace: found under any name, converted with everything they record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chakra_et.__main__ import main
from chakra_et.convert.pair import Converted, convert_pair
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.traces.sets import Pair
from tests.generator.hand_made import annotation, call, event, frame, kernel, op, write_host, write_kineto


def step() -> list[dict[str, Any]]:
    """One step: a matrix product in a module, then an all-reduce of 1,024 floats over two ranks."""
    shapes = {"Input Dims": [[8, 16], [16, 4]], "Input type": ["float", "float"], "Concrete Inputs": ["", ""]}
    group = {
        "Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "dtype": "Float",
        "Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]",
    }  # fmt: skip
    return [
        annotation("ProfilerStep#0", 0, 400),
        frame("nn.Module: Net_0", 5, 100),
        frame("train.py(7): forward", 8, 90),
        frame("nn.Module: Linear_0", 10, 80),
        op("aten::mm", 20, 40, External=1, **shapes),
        call("cudaLaunchKernel", 30, 5, correlation=1),
        kernel("ampere_sgemm", 50, 30, correlation=1, grid=[2, 1, 1], block=[128, 1, 1]),
        annotation("nccl:all_reduce", 150, 20),
        call("cudaLaunchKernel", 155, 5, correlation=2),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 170, 100, 2, stream=20, **group),
        call("cudaDeviceSynchronize", 180, 100, correlation=3),
    ]


def read(folder: Path, name: str) -> ExecutionTrace:
    return et_file.read(folder / f"{name}.et")


@pytest.mark.parametrize(
    "names",
    [
        ("host7_1234.pt.trace.json", "host8_1235.pt.trace.json"),
        ("worker0.1700000000.pt.trace.json.gz", "worker1.1700000001.pt.trace.json.gz"),
        ("rank-0.json.gz", "rank-1.json.gz"),
        ("trace_rank_0.json", "trace_rank_1.json"),
    ],
)
def test_files_of_any_name_are_converted_by_their_content(names: tuple[str, str], tmp_path: Path) -> None:
    files = [
        str(write_kineto(tmp_path / "in" / name, step(), rank, 2, baseTimeNanoseconds=10**18 + rank))
        for rank, name in enumerate(names)
    ]
    assert main(["convert", *files, "-o", str(tmp_path / "out")]) == 0
    written = sorted(path.name for path in (tmp_path / "out").glob("*.?.et"))
    assert len(written) == 2 and written[0].replace(".0.", ".1.") == written[1]
    groups = json.loads(next((tmp_path / "out").glob("*_comm_groups.json")).read_text())
    assert groups == {"1": [0, 1]}
    # The folder alone is enough, too.
    assert main(["convert", "--dir", str(tmp_path / "in")]) == 0
    assert len(list((tmp_path / "in").glob("*.et"))) == 3


def test_a_rank_comes_from_the_name_where_the_trace_has_none(tmp_path: Path) -> None:
    write_kineto(tmp_path / "run_rank3.json", [op("aten::add", 1, 5, rf=1)])
    (tmp_path / "other.json").write_text('{"metrics": [1, 2]}')
    assert main(["convert", "--dir", str(tmp_path), "--allow-missing-ranks"]) == 0
    assert [path.name for path in tmp_path.glob("*.et")] == ["run.3.et"]


def test_ranks_without_a_trace_may_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_kineto(tmp_path / "rank1.json", step(), 1, 4)
    assert main(["convert", str(path), "-o", str(tmp_path / "out")]) == 0
    assert "of 4 ranks, the traces of 0, 2-3 are missing" in capsys.readouterr().err


def test_a_named_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = write_kineto(tmp_path / "a.json", [op("aten::add", 1, 5, rf=1)])
    host = write_host(tmp_path, [])
    arguments = ["convert", str(host), str(device), "-o", str(tmp_path / "out")]
    assert main(arguments) == 1
    assert "are not from the same run" in capsys.readouterr().err
    assert main([*arguments, "--allow-unlinked"]) == 0


def one(folder: Path, events: list[dict[str, Any]]) -> Converted:
    return convert_pair(Pair(-1, None, write_kineto(folder / "one.json", events)))


def test_file_has_everything_that_kineto_records(tmp_path: Path) -> None:
    converted = one(tmp_path, step())
    trace = converted.trace
    row = {trace.names[row]: row for row in range(len(trace)) if not trace.column("segment")[row]}
    product, collective = row["ampere_sgemm"], row["ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"]
    assert trace.inputs is not None
    inputs = dict(
        zip(
            trace.inputs.rows.tolist(), zip(trace.inputs.shapes, trace.inputs.types, strict=True), strict=True
        )
    )
    for node in (row["aten::mm"], product):
        assert [json.loads(text) for text in inputs[node]] == [
            [[8, 16], [16, 4]], ["Tensor(float)", "Tensor(float)"]
        ]  # fmt: skip
    assert trace.types[collective] == NodeType.COMM_COLL
    assert trace.column("comm_size")[collective] == 4096
    module = trace.attributes["module"]
    modules = dict(zip(module.rows.tolist(), module.values, strict=True))
    assert modules[row["aten::mm"]] == modules[product] == "Net_0/Linear_0"
    assert collective not in modules
    # What only a host trace has is reported as absent once; frames are counted.
    assert converted.report.notes["no-host-trace"] == 1
    assert converted.report.losses["python-frame"] == 3
    assert not converted.report.warnings and converted.report.conserved()


def test_unknown_categories_are_a_warning(tmp_path: Path) -> None:
    converted = one(tmp_path, [*step(), event("npu_kernel", "matmul", 60, 20, 3)])
    assert converted.report.warnings["unknown-events"] == 1
    assert converted.report.losses["unknown-category:npu_kernel"] == 1


def test_the_et_file_names_the_gpu_that_it_was_measured_on(tmp_path: Path) -> None:
    for name, gpus in (("known", [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]), ("unknown", [])):
        path = write_kineto(tmp_path / f"{name}.json", step(), deviceProperties=gpus)
        assert main(["convert", str(path), "-o", str(tmp_path)]) == 0
        found = read(tmp_path, name).metadata.get("device_name")
        assert found == (gpus[0]["name"] if gpus else None)
