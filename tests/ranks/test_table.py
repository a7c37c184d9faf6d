"""Step times and their parts by rank and step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.errors import TraceError
from chakra_et.ranks.table import step_table
from tests.convert.test_together import Machine
from tests.ranks.test_skeletons import converted
from tests.shared import shared_path

PARTS = ["compute_ns", "memory_ns", "communication_ns", "wait_ns", "rest_ns"]


@pytest.mark.parametrize("run", ["dlrm_8gpu", "made"])
def test_skeletons_give_the_table_of_whole_ranks(run: str, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    if run == "made":
        Machine([[300.0] * 3, [500.0] * 3], [0.0] * 2).write(traces)
    else:
        traces = shared_path("data") / "traces" / run
    name = converted(traces, tmp_path)
    full, kept = (step_table(name, skeletons=each) for each in ("off", "on"))
    assert list(full) == ["rank", "step", "total_ns", *PARTS]
    for column in ("rank", "step", "total_ns"):
        assert np.array_equal(full[column], kept[column])
    for found in (full, kept):
        assert np.array_equal(sum(found[part] for part in PARTS), found["total_ns"])
    for part in PARTS:  # of each rank's time
        assert np.abs(full[part] - kept[part]).max() < 0.05 * full["total_ns"].max()
    if run == "made":
        fast, slow = (full["wait_ns"][full["rank"] == rank].sum() for rank in range(2))
        assert fast > 500_000 > slow, "the fast rank waits for the slow one"


def test_a_run_without_start_times_has_no_table(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    traces = Machine([[300.0]], [0.0]).write(tmp_path / "traces")
    assert main(["convert", str(traces), "-o", str(tmp_path), "--no-timestamps"]) == 0
    (path,) = tmp_path.glob("*.0.et")
    with pytest.raises(TraceError, match="no start times"):
        step_table(str(path))
