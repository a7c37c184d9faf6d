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
    path, busy, unexplained = found
    assert {kind: micros for kind, micros in path.items() if micros} == {
        "operator": 10, "kernel": 90, "transfer": 30, "wait": 20,
    }  # fmt: skip
    assert busy["operator"] == 71 and overhead_part(path) == 0 and unexplained == 0
    assert shares(make_trace(cpu(1, 10))) is None


def test_gaps_of_the_host_are_python_unless_they_are_long() -> None:
    trace = make_trace(
        cpu(1, 900, start=1, kind="host-overhead"),
        cpu(2, 1100, (1,), start=901, kind="host-overhead"),
        kernel(3, 30, (2,), start=2001, kind="device-overhead"),
        kernel(4, 70, (3,), start=2031, kind="kernel"),
    )
    path, _, unexplained = shares(trace) or ({}, {}, 0)
    assert overhead_part(path) == 2030 / 2100 and unexplained == 1130


def test_a_cycle_of_a_foreign_file_has_an_end() -> None:
    trace = make_trace(cpu(1, 10, (2,), start=1), cpu(2, 10, (1,), start=11))
    assert critical_path(trace).tolist() == [1, 0]
