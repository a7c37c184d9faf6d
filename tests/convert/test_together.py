"""All ranks together: clocks are aligned by common collectives, and wait is separated from transfer."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.convert.together import _Communicator, _likeness, joint_times, with_times
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType
from tests.generator.hand_made import annotation, call, kernel, op, write_kineto
from tests.simulate.replay_traces import collective, cpu, make_trace, replay_device

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
TRANSFER = 100.0
STEPS = 9
HOST_PROCESS = 10


class Machine:
    """Ranks that alternate computation and all-reduce; ``work[rank][step]`` is µs of computation.

    The truth that the converter has to find: a collective begins on each rank when that rank is ready and
    ends on all of them ``TRANSFER`` after the last. Each rank's clock is off by ``clock[rank]`` µs.
    """

    def __init__(self, work: list[list[float]], clock: list[float], jitter: float = 0.0) -> None:
        self.work, self.clock = work, clock
        noise = random.Random(3)
        self.events: list[list[dict[str, Any]]] = [[] for _ in work]
        now = [50.0] * len(work)
        self.waited: list[list[float]] = [[] for _ in work]
        for step in range(len(work[0])):
            ready = []
            for rank, events in enumerate(self.events):
                start, busy = now[rank], work[rank][step]
                number = 10 * step + 1
                events += [
                    op("aten::mm", start, 8), call("cudaLaunchKernel", start + 1, 3, number),
                    kernel(f"mm{step}", start + 10, busy, number),
                    annotation("nccl:all_reduce", start + 12, 8),
                    call("cudaStreamWaitEvent", start + 13, 1, number + 1),
                    call("cudaLaunchKernel", start + 15, 3, number + 2),
                ]  # fmt: skip
                ready.append(start + 10 + busy + 2)
            end = max(ready) + TRANSFER
            for rank, events in enumerate(self.events):
                number = 10 * step + 3
                ends = end + noise.uniform(-jitter, jitter)
                metadata = {
                    "Collective name": "allreduce", "In msg nelems": 4096, "dtype": "Float",
                    "Process Group Name": "0", "Group size": len(work),
                }  # fmt: skip
                events += [
                    kernel(NCCL, ready[rank], ends - ready[rank], number, 20, **metadata),
                    call("cudaDeviceSynchronize", now[rank] + 22, ends + 3 - now[rank] - 22, number + 1),
                ]
                self.waited[rank].append(max(ready) - ready[rank])
                now[rank] = ends + 5

    def write(self, folder: Path, host_names: list[str] | None = None) -> Path:
        for rank, events in enumerate(self.events):
            header: dict[str, Any] = {} if host_names is None else {"host_name": host_names[rank]}
            moved = [
                event
                | {"ts": event["ts"] + self.clock[rank]}
                | {"pid": HOST_PROCESS + rank if event["pid"] == HOST_PROCESS else event["pid"]}
                for event in events
            ]
            write_kineto(
                folder / f"run_rank{rank}.json", moved, rank, len(self.events),
                baseTimeNanoseconds=10**18, traceName=str(rank), **header,
            )  # fmt: skip
        return folder


def converted(folder: Path) -> list[ExecutionTrace]:
    assert main(["convert", str(folder)]) == 0
    return [et_file.read(path) for path in sorted(folder.glob("run.[0-9].et"))]


def collectives(trace: ExecutionTrace) -> np.ndarray:
    return np.flatnonzero(trace.types == NodeType.COMM_COLL)


def errors(traces: list[ExecutionTrace], groups: dict[str, list[int]]) -> list[float]:
    """Replayed / measured time of each rank - 1, from its first node to its last."""
    result = replay_device(traces, comm_groups=groups)
    return [
        (int(end.max()) - release) / 1000 / int(trace.metadata["measured_end_micros"]) - 1
        for trace, end, release in zip(traces, result.end_ns, result.release_ns, strict=True)
    ]


CLOCKS = {
    "one clock": [0.0, 0.0, 0.0],
    "milliseconds apart": [0.0, 7300.0, -4100.0],
    "a minute apart": [0.0, 0.0, 6e7],
}


@pytest.mark.parametrize("names", [None, ["a", "a", "b"]])
@pytest.mark.parametrize("clock", CLOCKS)
def test_wait_is_separated_from_transfer_on_any_clocks(
    clock: str, names: list[str] | None, tmp_path: Path
) -> None:
    noise = random.Random(1)
    work = [[noise.uniform(200, 900) for _ in range(STEPS)] for _ in range(3)]
    machine = Machine(work, CLOCKS[clock], jitter=1)
    traces = converted(machine.write(tmp_path, names))
    for trace, waited, off in zip(traces, machine.waited, CLOCKS[clock], strict=True):
        rows = collectives(trace)
        assert np.abs(trace.column("wait_micros")[rows] - waited).max() <= 5
        assert np.abs(trace.column("transfer_micros")[rows] - TRANSFER).max() <= 5
        assert abs(int(trace.metadata["clock_offset_ns"]) / 1000 + off - CLOCKS[clock][0]) <= 2
        assert 0 <= int(trace.metadata["clock_spread_ns"]) <= 3000
    assert max(map(abs, errors(traces, {"1": [0, 1, 2]}))) < 0.01


def test_clock_of_one_host_is_used_as_it_is(tmp_path: Path) -> None:
    machine = Machine([[300.0] * STEPS, [500.0] * STEPS], [0.0, 0.0])
    traces = converted(machine.write(tmp_path, ["a", "a"]))
    assert [int(trace.metadata["clock_offset_ns"]) for trace in traces] == [0, 0]


@pytest.mark.parametrize(
    ("domains", "offsets"), [(("a", "a"), [0, 0]), (("a", "b"), [0, -7_000]), (("", ""), [0, -7_000])]
)
def test_clocks_are_aligned_unless_they_are_one(domains: tuple[str, str], offsets: list[int]) -> None:
    """Rank 1 ends each collective 7 µs after rank 0."""
    traces = {
        rank: make_trace(
            *(collective(at, 20, start=100 * at + 7 * rank, comm_type=0, comm_size=4) for at in (1, 2, 3)),
            clock_domain=domain,
        )
        for rank, domain in enumerate(domains)
    }
    found = joint_times(traces, {"1": [0, 1]})
    assert [offset for offset, _, _ in found.values()] == offsets
    waits = 0 if offsets[1] else 7
    assert found[0][2].tolist() == [waits] * 3 and found[1][2].tolist() == [0] * 3


def test_straggler_does_not_affect_clock_offsets(tmp_path: Path) -> None:
    """One rank is late in every step, but its collectives end with the others."""
    machine = Machine([[200.0] * STEPS, [200.0] * STEPS, [2000.0] * STEPS], [0.0, 900.0, 0.0], jitter=1)
    traces = converted(machine.write(tmp_path))
    offsets = [int(trace.metadata["clock_offset_ns"]) / 1000 for trace in traces]
    assert max(abs(offset - true) for offset, true in zip(offsets, (0, -900, 0), strict=True)) <= 2
    assert traces[2].column("wait_micros")[collectives(traces[2])].max() <= 4
    assert traces[0].column("wait_micros")[collectives(traces[0])].min() >= 1790


def test_edited_durations_replay_as_on_the_machine(tmp_path: Path) -> None:
    """No recorded start times are used: a faster straggler shortens the waits of all others."""
    slow = [[200.0] * STEPS, [200.0] * STEPS, [2000.0] * STEPS]
    traces = converted(Machine(slow, [0.0, 900.0, 0.0], jitter=1).write(tmp_path))
    quick = [*slow[:2], [300.0] * STEPS]
    true = Machine(quick, [0.0, 0.0, 0.0])
    true_end = max(event["ts"] + event["dur"] for event in true.events[2]) - 50
    straggler = traces[2]
    for row in range(len(straggler)):
        if straggler.names[row].startswith("mm"):
            straggler.duration_micros[row] = 300
    result = replay_device(traces, comm_groups={"1": [0, 1, 2]})
    ends = [int(end.max()) - release for end, release in zip(result.end_ns, result.release_ns, strict=True)]
    assert all(abs(end / 1000 / true_end - 1) < 0.02 for end in ends)


def test_ranks_without_a_common_collective_get_no_joint_times(tmp_path: Path) -> None:
    for rank in range(2):
        write_kineto(tmp_path / f"run_rank{rank}.json", [op("aten::mm", 1, 5)], rank, 2,
                     baseTimeNanoseconds=10**18 + rank)  # fmt: skip
    traces = converted(tmp_path)
    assert all("clock_offset_ns" not in trace.metadata for trace in traces)


def test_the_report_of_the_run_and_the_commands_show_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine([[200.0] * STEPS, [700.0] * STEPS], [0.0, 50.0])
    converted(machine.write(tmp_path))
    report = json.loads((tmp_path / "run_conversion.json").read_text())
    assert report["schema_version"] == 3
    waits = [report["ranks"][str(rank)]["busy_us"]["wait"] for rank in range(2)]
    assert abs(waits[0] - sum(machine.waited[0])) <= 2 * STEPS and waits[1] <= 2 * STEPS
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "run"), "--json"]) == 0
    [job] = json.loads(capsys.readouterr().out)["jobs"]
    assert [rank["busy_us"]["wait"] for rank in job["replays"]["device"]] == waits


def test_communicators_are_alike_by_their_collectives_and_when_these_run() -> None:
    start = np.arange(0, 1000, 100)
    one = _Communicator(0, 7, "a", np.arange(10), start, start + 50)
    assert _likeness(one, replace(one, rank=1)) == 1.0
    # Of two hosts, whose clocks differ.
    later = replace(one, rank=1, clock="b", start=start + 3333, end=start + 3383)
    assert _likeness(one, later) == 1.0 and _likeness(one, replace(later, clock="a")) == 0.0
    eight = np.where(np.arange(10) < 8, np.arange(10), 99)
    nine = np.where(np.arange(10) < 9, np.arange(10), 99)
    assert (_likeness(one, replace(one, kinds=eight)), _likeness(one, replace(one, kinds=nine))) == (0.0, 0.9)


def test_who_comes_last_waits_for_nobody() -> None:
    trace = make_trace(cpu(1, 5), *(collective(number, 50) for number in (2, 3, 4)))
    made = with_times(trace, (7, 1, np.array([0, 20, -1])))
    for name, expected in (("wait_micros", [-1, 0, 20, -1]), ("transfer_micros", [-1, 50, 30, -1])):
        assert made.column(name, -1).tolist() == expected
        assert name not in trace.attributes
    assert made.metadata["clock_offset_ns"] == 7 and "clock_offset_ns" not in trace.metadata
    again = with_times(made, (7, 1, np.array([-1, -1, -1])))
    assert "wait_micros" not in again.attributes
