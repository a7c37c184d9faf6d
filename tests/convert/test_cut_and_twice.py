"""A step whose recording was cut is left out, and an event that is in the trace twice counts once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chakra_et.convert.inputs import load_run
from chakra_et.convert.pair import PairOptions, convert_pair
from chakra_et.convert.rank import RankResult
from chakra_et.convert.runs import RunOptions, SetResult, convert_sets
from chakra_et.et import file as et_file
from chakra_et.simulate.measured_steps import step_rows
from chakra_et.traces import sets as trace_sets
from chakra_et.traces.sets import Pair
from tests.chakra_et.test_atomic import capture
from tests.generator.hand_made import annotation, call, kernel, op, write_kineto
from tests.simulate.replay_traces import cpu, make_trace


def steps(counts: list[int]) -> list[dict[str, Any]]:
    """A step of each number of operators, each of which launches a kernel."""
    events, now, number = [], 100.0, 1
    for step, count in enumerate(counts):
        events.append(annotation(f"ProfilerStep#{step}", now, 20.0 * count + 5))
        for _ in range(count):
            events += [
                op("aten::mm", now + 1, 10, number), call("cudaLaunchKernel", now + 2, 3, number),
                kernel("mm", now + 25, 8, number, **{"External id": number}),
            ]  # fmt: skip
            now, number = now + 20, number + 1
        now += 10
    return events


def converted(folder: Path) -> tuple[SetResult, RankResult]:
    (result,) = convert_sets(trace_sets.find(folder), PairOptions(), RunOptions(workers=0))
    rank = result.ranks[0]
    assert isinstance(rank, RankResult), rank
    return result, rank


@pytest.mark.parametrize(("counts", "left"), [([10, 10, 1], 2), ([10, 10, 6], 3), ([10], 1), ([10, 4, 3], 3)])
def test_a_last_step_with_a_small_part_of_the_operators_is_left_out(
    tmp_path: Path, counts: list[int], left: int
) -> None:
    """Of three steps of 438, 435 and 0.2 ms, the mean was 291."""
    write_kineto(tmp_path / "run_device.json", steps(counts))
    result, rank = converted(tmp_path)
    names, _ = step_rows(et_file.read(result.traces.et_file(0)))
    assert len(names) == left and rank.report.conserved()
    cut = len(counts) - left
    assert rank.report.warnings.get(f"steps-unfinished:{len(counts) - 1}", 0) == cut
    told = f"ProfilerStep#{len(counts) - 1} is left out, as its recording was cut"
    assert (told in load_run(str(tmp_path / "run_device.json")).notes) == bool(cut)
    kernels = rank.report.nodes_by_kind["kernel"]
    assert kernels == sum(counts[:left])


def test_the_step_that_the_manifest_names_is_left_out(tmp_path: Path) -> None:
    folder = capture(tmp_path / "run", "tiny_1gpu*")
    path = folder / "tiny_1gpu_manifest.json"
    manifest = json.loads(path.read_text())
    last = manifest["ranks"][0]["steps"][-1]
    manifest["ranks"][0]["unfinished_step"] = last
    path.write_text(json.dumps(manifest))
    result, rank = converted(folder)
    names, _ = step_rows(et_file.read(result.traces.et_file(0)))
    assert names == [f"ProfilerStep#{last - 1}"] and rank.report.warnings[f"steps-unfinished:{last}"] == 1


def test_events_that_are_in_the_trace_twice_count_once(tmp_path: Path) -> None:
    """A tenth of the device events twice gave hundreds of nodes more, and nobody said so."""
    events = steps([10, 10])
    for name, more in (("once", []), ("twice", events[1::3] + events[3::7])):
        write_kineto(tmp_path / name / "run_device.json", [*events, *more])
    (_, once), (_, twice) = converted(tmp_path / "once"), converted(tmp_path / "twice")
    assert twice.report.nodes == once.report.nodes and twice.report.edges == once.report.edges
    assert twice.report.losses["duplicate-event"] == len(events[1::3] + events[3::7])
    assert twice.report.conserved()
    assert twice.report.warnings["duplicate-events"] == twice.report.losses["duplicate-event"]
    assert "duplicate-events" not in once.report.warnings


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("other", [11, 99])
def test_a_call_that_is_on_two_threads_is_one_of_the_busier_thread(
    tmp_path: Path, other: int, first: bool
) -> None:
    """Its id is unique, so that it is no call of another thread; what has no id, or another one, may be."""
    events = [*steps([10, 10]), op("aten::add", 110.0, 5.0, 9000, tid=11)]
    copies = [
        each | {"tid": other} for each in events if each["tid"] == 10 and "ProfilerStep" not in each["name"]
    ]
    copies = copies[::4]
    alone = [op("aten::mm", 101.0, 10.0, 9001, tid=12), op("aten::mm", 101.0, 10.0, tid=13)]
    write_kineto(tmp_path / "once" / "run_device.json", [*events, *alone])
    both = [*copies, *events] if first else [*events, *copies]
    write_kineto(tmp_path / "twice" / "run_device.json", [*both, *alone])
    (_, once), (_, twice) = converted(tmp_path / "once"), converted(tmp_path / "twice")
    assert twice.report.warnings["duplicate-events"] == len(copies) == 10
    assert twice.report.nodes_by_kind == once.report.nodes_by_kind and twice.report.edges == once.report.edges
    assert "duplicate-events" not in once.report.warnings and twice.report.conserved()


@pytest.mark.parametrize(("lost", "warned"), [(2, 0), (3, 0), (4, 0), (5, 5)])
def test_a_few_launches_without_their_kernels_are_tolerated(lost: int, warned: int, tmp_path: Path) -> None:
    """2%, as launches at the end of a recording lose theirs."""
    events = [call("cudaLaunchKernel", 10 * at, 3, at + 1) for at in range(200)]
    events += [kernel("k", 10 * at + 5, 4, at + 1) for at in range(200 - lost)]
    converted = convert_pair(Pair(-1, None, write_kineto(tmp_path / "one.json", events)))
    assert converted.report.warnings.get("launch-without-work", 0) == warned


def test_equal_events_that_follow_each_other_are_two(tmp_path: Path) -> None:
    events = steps([3])
    events += [annotation("mark", 101.0, 0.0), annotation("mark", 101.0, 0.0)]
    write_kineto(tmp_path / "run_device.json", events)
    assert not any(key.startswith("duplicate") for key in converted(tmp_path)[1].report.findings)


FAKE = """
import sys
arguments = dict(zip(sys.argv[1:], sys.argv[2:]))
output = arguments.get("--output-file") or arguments["--output"]
def main():
    open(output, "wb").write(BYTES)
"""


def test_what_mlcommons_tools_wrote_is_ok_only_if_validate_accepts_it(tmp_path: Path) -> None:
    """The fakes stand in for both tools: the second writes a node that depends on one that isn't there."""
    folder = capture(tmp_path / "run", "tiny_1gpu*")
    et_file.write(tmp_path / "bad.et", make_trace(cpu(1, 5, (7,), start=1)))
    package = tmp_path / "fake" / "chakra" / "src"
    for name in ("trace_link", "converter"):
        (package / name).mkdir(parents=True)
        content = "{}" if name == "trace_link" else (tmp_path / "bad.et").read_bytes()
        content = content.encode() if isinstance(content, str) else content
        (package / name / f"{name}.py").write_text(FAKE.replace("BYTES", repr(content)))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "convert_to_et.py", "--dir", folder, "--engine", "mlcommons"],
        cwd=root, env={"PYTHONPATH": f"{package.parents[1]}", "PATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "invalid" in done.stdout and "depends on" in done.stderr, done.stderr


def test_a_failure_within_et_replay_is_not_taken_for_a_missing_package(tmp_path: Path) -> None:
    """A schema that PARAM's reader doesn't know: its file is in the traceback."""
    folder = capture(tmp_path / "run", "tiny_1gpu*")
    (tmp_path / "et_replay.py").write_text("def load(): raise ValueError('unknown schema 9')\n")
    package = tmp_path / "chakra" / "src" / "trace_link"
    package.mkdir(parents=True)
    (package / "trace_link.py").write_text("from et_replay import load\n\n\ndef main():\n    load()\n")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "convert_to_et.py", "--dir", folder, "--engine", "mlcommons"],
        cwd=root, env={"PYTHONPATH": str(tmp_path), "PATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "trace_link failed (ValueError: unknown schema 9)" in done.stderr, done.stderr
