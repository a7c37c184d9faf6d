"""Small rows of ``benchmarks/predict_benchmark.py``: predictions against runs that they never saw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import predict_runs
from benchmarks.predict_benchmark import MACHINE, gpu_rows, machine_rows
from benchmarks.predict_cases import PARTS
from benchmarks.predict_processes import cannot_shape
from tests.shared import shared_path


def test_the_simulated_gpu_machine_does_as_predicted() -> None:
    rows = machine_rows()
    assert len(rows) == 12
    assert max(abs(row.error) for row in rows) <= MACHINE
    # Some stay bound by launches: a tenth of the kernels' time is far from a tenth of the step's.
    assert any(row.measured > 3 * 0.1 * row.before for row in rows if "0.1" in row.name)


def test_gpu_pairs_are_compared() -> None:
    name = "timesformer-base-finetuned-k400.json.gz"
    folder = shared_path("data/traces/public/pairs", f"h100_{name}", f"mi300_{name}")
    rows = gpu_rows(folder, "timesformer")
    assert {"H100→MI300X", "MI300X→H100"} <= {word.rstrip(":") for row in rows for word in row.name.split()}
    whole = [row for row in rows if row.name.endswith("all kernels")]
    # Not the target for kernel classes, which is missed: see docs/PREDICT.md.
    assert len(whole) == 2 and max(abs(row.error) for row in whole) < 12


@pytest.mark.slow
def test_a_limited_network_is_as_slow_as_predicted(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    reason = cannot_shape()
    if reason:
        pytest.skip(reason)
    cases = [case for case in PARTS["network"].cases(tmp_path) if case.name in ("base", "200 Mbit/s")]
    effort = predict_runs.Effort(rounds=1)
    (row,) = predict_runs.rows(replace(PARTS["network"], cases=lambda _: cases), effort, tmp_path)
    # A step that lasts twice as long, within what one round on a busy machine can show.
    assert row.measured > 1.5 * row.before
    assert abs(row.error) <= 15
