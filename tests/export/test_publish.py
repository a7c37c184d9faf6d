"""A report in TensorBoard and wandb, read back."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from tests.report.made_run import write_run


@pytest.mark.slow
def test_tensorboard_gets_scalars_and_the_trace(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_run(tmp_path)
    assert (
        main(["export", str(tmp_path / "made"), "--format", "tensorboard", "-o", str(tmp_path / "logs")]) == 0
    )
    events = accumulator.EventAccumulator(str(tmp_path / "logs" / "made" / "rank0"))
    events.Reload()
    found = {
        name: [(each.step, round(each.value, 6)) for each in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    assert found["step/measured_ms"] == [(5, 0.16)]
    assert found["time/wait_ms"] == [(5, 0.04)]
    trace = json.loads(gzip.decompress((tmp_path / "logs/made/made.pt.trace.json.gz").read_bytes()))
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 14


@pytest.mark.slow
def test_wandb_gets_the_page_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_run(tmp_path)
    assert main(["export", str(tmp_path / "made"), "--format", "wandb", "-o", "runs"]) == 0
    names = [path.name for path in (tmp_path / "wandb").rglob("*.table.json")]
    assert [any(name.startswith(table) for name in names) for table in ("steps", "entries", "modules")] == [
        True
    ] * 3
