"""benchmarks/corpus_benchmark.py on made-up traces, and the kept results of the public ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.corpus_benchmark import KEPT, Config, benchmark, differences
from chakra_et.errors import TraceError
from tests.generator.hand_made import annotation, call, kernel, op, write_kineto
from tests.shared import shared_path

KEPT_RESULTS = Path(__file__).with_name("kept.json")
ALL_REDUCE = {
    "Collective name": "allreduce", "In msg nelems": 4096, "dtype": "Float", "Process Group Name": "0",
    "Group size": 8,
}  # fmt: skip


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two folders; the trace in the lower one has a communication kernel of unknown kind."""
    step = [
        annotation("ProfilerStep#3", 0, 400), op("aten::mm", 5, 20), call("cudaLaunchKernel", 10, 5, 1),
        kernel("gemm", 20, 100, 1), call("cudaLaunchKernel", 30, 5, 2),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 125, 50, 2, 20, **ALL_REDUCE),
        call("cudaDeviceSynchronize", 40, 140, 3),
    ]  # fmt: skip
    write_kineto(tmp_path / "top.json", step, 0, 8)
    odd = [
        *step,
        call("cudaLaunchKernel", 190, 5, 4),
        kernel("ncclDevKernel_Novel_RING_LL(x)", 200, 50, 4, 20),
    ]
    write_kineto(tmp_path / "below" / "odd.json.gz", odd, 0, 8)
    (tmp_path / "below" / "result.json").write_text('{"no": "trace"}')
    return tmp_path


def test_one_row_for_each_trace(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark(Config(dirs=(str(traces),), json=True)) == 0
    rows = json.loads(capsys.readouterr().out)
    assert list(rows) == ["top.0", "below/odd.0"]
    top, odd = rows.values()
    assert top["communication"] == {"all_reduce": {"count": 1, "bytes": 16384}}
    assert top["guessed"] == 0 and odd["guessed"] > 0
    assert sum(each["count"] for each in odd["communication"].values()) == 2
    assert top["events"] == 7 and top["nodes_by_kind"]["kernel"] == 1
    assert set(top["error_percent"]) == {"device", "astra"}
    assert abs(top["error_percent"]["device"]) < 1
    assert set(KEPT) <= set(top)


def test_text_with_details(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark(Config(dirs=(str(traces),), details=True)) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()[:3]] == ["trace", "top.0", "below/odd.0"]
    assert "all_reduce: 1 nodes, 16,384 bytes" in text
    assert "nodes by kind: " in text and "edges by kind: " in text


def test_a_change_shows_as_a_difference(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = traces / "kept" / "kept.json"
    kept.parent.mkdir()
    assert benchmark(Config(dirs=(str(traces),), kept=str(kept), update=True)) == 0
    assert benchmark(Config(dirs=(str(traces),), kept=str(kept))) == 0
    assert "0 differences" in capsys.readouterr().err
    results = json.loads(kept.read_text())
    results["top.0"]["nodes"] -= 1
    kept.write_text(json.dumps(results))
    assert benchmark(Config(dirs=(str(traces),), kept=str(kept))) == 1
    nodes = results["top.0"]["nodes"]
    assert f"top.0 nodes: {nodes} → {nodes + 1}" in capsys.readouterr().err


def test_differences() -> None:
    before = {"a": {"n": 1, "same": 2}, "gone": {"n": 1}}
    after = {"a": {"n": 3, "same": 2}, "new": 4}
    assert differences(before, after) == ["a n: 1 → 3", "gone: several figures → nothing", "new: nothing → 4"]


def test_a_damaged_trace_is_a_row_and_fails(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (traces / "top.json").read_text()
    (traces / "bad.json").write_text(text.replace('"traceEvents": [', '"traceEvents": 5, "x": ['))
    assert benchmark(Config(dirs=(str(traces),))) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("bad"))
    assert "nothing to save" in line


def test_folders_without_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no traces in these folders"):
        benchmark(Config(dirs=(str(tmp_path),)))
    with pytest.raises(TraceError, match="no such folder"):
        benchmark(Config(dirs=(str(tmp_path / "gone"),)))
    with pytest.raises(ValueError, match="--update needs --kept"):
        Config(update=True)


@pytest.mark.slow
def test_the_public_traces_as_kept(repo_root: Path) -> None:
    """After a change that is meant: benchmarks/corpus_benchmark.py --kept tests/corpus/kept.json --update."""
    folder = shared_path("data/traces/public", "README.md", "pairs", "vllm_decode_full", "linear_2080ti")
    command = [sys.executable, "benchmarks/corpus_benchmark.py", folder, "--kept", KEPT_RESULTS]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
