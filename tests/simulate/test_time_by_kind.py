"""Where the time of a rank's file goes, by its recorded times."""

from __future__ import annotations

from chakra_et.simulate.time_by_kind import critical_path, overhead_part, shares
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace


def test_the_critical_path_goes_back_from_the_end_by_what_ended_last() -> None:
    trace = make_trace(
        cpu(1, 10, start=1, kind="operator"),
        kernel(2, 90, (1,), start=11, kind="kernel"),
        cpu(3, 60, (1,), start=11, kind="operator"),
        collective(4, 50, (2, 3), start=101, wait_micros=20),
        cpu(5, 1, (3,), start=140, kind="operator"),
    )
    assert critical_path(trace).tolist() == [3, 1, 0]
    found = shares(trace)
    assert found is not None
    path, busy = found
    assert {kind: micros for kind, micros in path.items() if micros} == {
        "operator": 10, "kernel": 90, "transfer": 30, "wait": 20,
    }  # fmt: skip
    assert busy["operator"] == 71 and overhead_part(path) == 0
    assert shares(make_trace(cpu(1, 10))) is None


def test_a_cycle_of_a_foreign_file_has_an_end() -> None:
    trace = make_trace(cpu(1, 10, (2,), start=1), cpu(2, 10, (1,), start=11))
    assert critical_path(trace).tolist() == [1, 0]
