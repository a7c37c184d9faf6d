"""The page of very many ranks: who stands out, where in the mesh, and that it stays small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.convert.inputs import load_run
from chakra_et.diagnose.verdict import diagnose
from chakra_et.names import RunFiles
from chakra_et.report.many import many_content
from chakra_et.report.page import PackedColumns, make_page
from tests.report.made_run import write_run
from tests.report.page_data import unpack

TP = 8


def made_table(ranks: int, steps: int) -> dict[str, np.ndarray]:
    """Steps in which rank 100 computes 20% longer, and rank 200 does nothing for 30 ms of every fifth."""
    noise = np.random.default_rng(1)
    rank, step = (each.reshape(-1) for each in np.mgrid[:ranks, :steps])
    compute = 80e6 * noise.normal(1, 0.005, len(rank))
    compute[rank == 100] *= 1.2
    rest = 5e6 * noise.normal(1, 0.01, len(rank))
    rest[(rank == 200) & (step % 5 == 0)] += 30e6
    longest = np.array([(compute + rest)[step == each].max() for each in range(steps)])[step]
    columns = {
        "rank": rank,
        "step": step,
        "total_ns": longest + 10e6,
        "compute_ns": compute,
        "memory_ns": np.full(len(rank), 1e6),
        "communication_ns": np.full(len(rank), 9e6),
        "wait_ns": longest - compute - rest,
        "rest_ns": rest,
    }
    return {name: np.asarray(values).astype(np.int64) for name, values in columns.items()}


def run_files(folder: Path, ranks: int) -> RunFiles:
    files = RunFiles(folder, "job")
    groups = {str(at): list(range(at * TP, at * TP + TP)) for at in range(ranks // TP)}
    groups |= {f"d{at}": list(range(at, ranks, TP)) for at in range(TP)}
    files.groups_file.write_text(json.dumps(groups))
    return files


def made_content(folder: Path, ranks: int) -> tuple[dict[str, Any], PackedColumns]:
    """The diagnosis is that of a small run."""
    write_run(folder)
    diagnosis = diagnose(load_run(str(folder / "made")))
    return many_content(run_files(folder, ranks), made_table(ranks, 20), diagnosis)


def test_slow_ranks_stand_out(tmp_path: Path) -> None:
    found, columns = made_content(tmp_path, 512)
    assert found["headline"][0] == "512 ranks, 20 steps: 160 µs per step."
    assert found["headline"][1].startswith("Bound by") and found["diagnosis"]["slow_rank"] == 1
    slow, sometimes = found["outliers"]
    assert (slow["rank"], slow["steps"], slow["mostly"]) == (100, 20, "compute")
    assert slow["place"] == "tp 4, dp 12, pp 0"
    assert slow["excess"] == pytest.approx(16 / 86, abs=0.01)
    assert (sometimes["rank"], sometimes["steps"], sometimes["mostly"]) == (200, 4, "rest")
    assert found["mesh"] == "tp 8 × dp 64 × pp 1"
    (tp,) = [each["ns"] for each in found["axes"] if each["axis"] == "tp"]
    assert len(tp) == TP and int(np.argmax(tp)) == 4
    assert [each["rank"] for each in found["beside"] if not each["typical"]][0] == 100
    _, own = unpack(columns.pack({}))
    assert own["own"].reshape(512, 20)[100].min() > 1.1 * np.median(own["own"])


def test_a_page_of_4096_ranks_is_small(tmp_path: Path) -> None:
    page = make_page("many", "job", *made_content(tmp_path, 4096))
    assert len(page) < 15_000_000 / 10


def test_skeletons_asked_for_or_many_ranks_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    write_run(tmp_path)
    assert main(["report", str(tmp_path / "made"), "--skeletons", "on", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == [0, 1] and len(found["beside"]) > 1
