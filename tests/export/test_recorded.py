"""Exports of a run as it was recorded: all levels of its slices."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from chakra_et.__main__ import main
from tests.export.test_export import perfetto_trace
from tests.shared import shared_path

PUBLIC = (
    "a100_alexnet_cuda_sync.json.gz", "a100_nccl_rank0.json.gz", "b200_eager_rank0.json.gz",
    "mi250_minitoy.json.gz",
    "mi300_resnet_rank0.json.gz", "torch_compile_triton.json.gz", "sampled_rank0_of_128.json.gz",
    "sglang_qwen3_prefilldecode.json.gz", "linear_2080ti/linear_device.json.gz",
)  # fmt: skip


def slice_(name: str, start: float, length: float, tid: int, category: str, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 7,
        "tid": tid,
        "ts": start,
        "dur": length,
        "args": args,
    }


def trace() -> list[dict[str, Any]]:
    """A frame holds an operator, that a runtime call, which launches a kernel; a second one overlaps it."""
    launch = {"External id": 1, "correlation": 5}
    return [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0, "args": {"name": "python3"}},
        slice_("train.py(3): step", 0, 100, 1, "python_function"),
        slice_("aten::add", 10, 50, 1, "cpu_op", **{"External id": 1, "Input Dims": [[2, 3], []]}),
        slice_("cudaLaunchKernel", 20, 10, 1, "cuda_runtime", **launch),
        slice_("add_kernel", 40, 30, 2, "kernel", **launch, stream=2, device=0),
        slice_("late_kernel", 60, 30, 2, "kernel", **launch | {"correlation": 6}, stream=2, device=0),
        {"ph": "s", "id": 5, "pid": 7, "tid": 1, "ts": 20, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 5, "pid": 7, "tid": 2, "ts": 40, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    ]


def converted(folder: Path, events: list[dict[str, Any]]) -> Path:
    (folder / "run_rank0.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    assert main(["convert", "--dir", str(folder), "--allow-missing-ranks"]) == 0
    return folder / "run"


def nesting(path: Path) -> tuple[int, int]:
    """(number of slices, depth) of a Perfetto trace."""
    count = deepest = 0
    depth: dict[int, int] = {}
    for packet in perfetto_trace(path).packet:
        if packet.HasField("track_event") and packet.track_event.type in (1, 2):
            begins, track = packet.track_event.type == 1, packet.track_event.track_uuid
            depth[track] = depth.get(track, 0) + (1 if begins else -1)
            assert depth[track] >= 0
            count, deepest = count + begins, max(deepest, depth[track])
    assert not any(depth.values())
    return count, deepest


def depth_of(events: list[dict[str, Any]]) -> int:
    """The most slices of a thread that lie within each other; those that only overlap don't count."""
    threads: dict[Any, list[tuple[int, int]]] = {}
    for event in events:
        if event.get("ph") == "X":
            start, length = round(float(event["ts"]) * 1000), round(float(event.get("dur") or 0) * 1000)
            threads.setdefault((event["pid"], event["tid"]), []).append((start, -length))
    deepest = 0
    for slices in threads.values():
        ends: list[int] = []
        for start, minus in sorted(slices):
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or start - minus <= ends[-1]:
                ends.append(start - minus)
                deepest = max(deepest, len(ends))
    return deepest


def test_perfetto_keeps_levels_arguments_and_flows(tmp_path: Path) -> None:
    name = converted(tmp_path, trace())
    assert main(["export", str(name)]) == 0
    path = tmp_path / "run.pftrace"
    assert nesting(path) == (5, 3)
    events = [p.track_event for p in perfetto_trace(path).packet if p.HasField("track_event")]
    begun = [event for event in events if event.type == 1]
    assert [len(event.flow_ids) + len(event.terminating_flow_ids) for event in begun] == [0, 0, 1, 1, 0]
    shapes = [a.string_value for event in begun for a in event.debug_annotations if a.string_value]
    assert "[[2, 3], []]" in shapes
    assert len({event.track_uuid for event in begun}) == 3  # the kernel that overlaps has a lane of its own


def test_chrome_keeps_every_event_with_its_rank(tmp_path: Path) -> None:
    name = converted(tmp_path, trace())
    assert main(["export", str(name), "--format", "chrome"]) == 0
    found = json.loads(gzip.decompress((tmp_path / "run_trace.json.gz").read_bytes()))["traceEvents"]
    assert len(found) == len(trace()) and {event["pid"] for event in found} == {1000}
    assert found[0]["args"]["name"] == "rank 0: python3"
    assert {event["id"] for event in found if event["ph"] in "sf"} == {"0:5"}


def test_a_trace_that_has_changed_or_gone_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    name = converted(tmp_path, trace())
    path = tmp_path / "run_rank0.json"
    path.write_text(path.read_text() + " ")
    assert main(["export", str(name)]) == 0
    assert "run_rank0.json, has changed since the conversion" in capsys.readouterr().err
    path.unlink()
    assert main(["export", str(name)]) == 0
    out, err = capsys.readouterr()
    assert (
        "run_rank0.json, is gone: the nodes of the .et files are written" in err and "that are nodes" in out
    )


def test_what_is_wrong_with_the_et_files_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The campaign's command 57 of seed 515: with --allow-missing-ranks, a changed file passed in silence."""
    run = converted(tmp_path, trace())
    path = Path(f"{run}.0.et")
    path.write_bytes(path.read_bytes()[:-40])
    assert main(["export", str(run), "--allow-missing-ranks", "-o", str(tmp_path / "e")]) == 0
    assert f"warning: {path} isn't the file that the conversion wrote" in capsys.readouterr().err


@pytest.mark.parametrize("file", PUBLIC)
def test_public_traces_keep_slices_and_depth(tmp_path: Path, file: str) -> None:
    source = shared_path("data/traces/public", file) / file
    path = tmp_path / f"run_rank0.json{'.gz' if file.endswith('.gz') else ''}"
    shutil.copyfile(source, path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    slices = sum(event.get("ph") == "X" for event in events)
    assert main(["export", str(path), "-o", str(tmp_path / "run.pftrace")]) == 0
    assert nesting(tmp_path / "run.pftrace") == (slices, depth_of(events))


def test_ranks_that_are_missing_are_named_in_what_was_recorded(tmp_path: Path) -> None:
    (tmp_path / "run_rank1.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": trace()}))
    assert main(["convert", "--dir", str(tmp_path), "--allow-missing-ranks"]) == 0
    output = tmp_path / "run.pftrace"
    assert main(["export", str(tmp_path / "run"), "-o", str(output)]) == 0
    found = [packet.track_descriptor.process for packet in perfetto_trace(output).packet]
    (process,) = (each for each in found if each.process_name)
    assert process.process_name == "rank 1: python3"
    assert "1 of 2 ranks (without 0)" in process.process_labels[0]
