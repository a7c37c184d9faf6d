"""Hostile traces that try to exhaust the converter, and names that try to escape the folder."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chakra_et.convert.pair import Converted, PairOptions, convert_pair
from chakra_et.convert.runs import RunOptions, convert_sets
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.traces import sets as trace_sets
from chakra_et.traces.sets import Pair
from tests.generator import Features, generate

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"seed": 4, "operators": 2, "depth": 2, "resolution": 1_000, "world_size": 1}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return generate(Features(**SMALL)).write(tmp_path)


def edit(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    document = json.loads(path.read_text())
    change(document.get("nodes") or document["traceEvents"])
    path.write_text(json.dumps(document))


def command(folder: Path, *flags: str, megabytes: int = 0) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if megabytes:
            resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    line = [sys.executable, str(ROOT / "convert_to_et.py"), "--dir", str(folder), *flags]
    return subprocess.run(line, capture_output=True, text=True, preexec_fn=limit, timeout=120)


def refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    """One sentence with ``words``, a non-zero status, and no file."""
    assert done.returncode in (1, 2) and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr


def events(converted: Converted) -> int:
    return converted.report.events_kept


def spans(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record.get("ph") == "X" and record.get("cat") == "cpu_op"]


@pytest.mark.parametrize("field", ["ts", "dur"])
@pytest.mark.parametrize("value", [2**53 + 1, -(2**60), 1e300, "soon", None, [1], {"a": 1}, True])
def test_absurd_times_affect_only_their_event(pair: tuple[Path, Path], field: str, value: object) -> None:
    whole = convert_pair(Pair(0, *pair))
    edit(pair[1], lambda records: spans(records)[3].update({field: value}))
    converted = convert_pair(Pair(0, *pair))
    assert converted.report.conserved() and converted.report.events_in == whole.report.events_in
    assert events(converted) >= events(whole) - 1
    if events(converted) < events(whole):
        assert sum(converted.report.losses.values()) == sum(whole.report.losses.values()) + 1


def test_negative_durations_are_set_to_nothing_and_listed(pair: tuple[Path, Path]) -> None:
    edit(pair[1], lambda records: spans(records)[3].update(dur=-4.0))
    assert convert_pair(Pair(0, *pair)).report.repairs["negative-duration"] == 1


@pytest.mark.parametrize("field", ["External id", "Record function id", "correlation", "stream", "device"])
@pytest.mark.parametrize("value", [2**64, -(2**70), 10**400, 0.5, "x", "9" * 5_000, [1], None], ids=range(8))
def test_ids_beyond_64_bits(pair: tuple[Path, Path], field: str, value: object) -> None:
    whole = convert_pair(Pair(0, *pair)).report

    def change(records: list[dict[str, Any]]) -> None:
        next(record for record in records if field in record.get("args", {}))["args"][field] = value

    edit(pair[1], change)
    (result,) = convert_sets(trace_sets.find(pair[0].parent), PairOptions(), RunOptions(workers=0))
    assert not result.failed, (result.problems, result.ranks)
    report = json.loads((pair[1].parent / "run_conversion.json").read_text())["ranks"]["0"]
    assert report["events_in"] + len(report["repairs"]) >= whole.events_in


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_a_hundred_thousand_brackets(pair: tuple[Path, Path], side: int, brackets: str) -> None:
    deep = ("[" if brackets == "[]" else '{"a":') * 100_000 + "1" + brackets[1] * 100_000
    text = pair[side].read_text()
    at = text.index('"name":', len(text) // 2)
    pair[side].write_text(text[:at] + f'"odd": {deep}, ' + text[at:])
    done = command(pair[0].parent)
    assert done.returncode == 0, done.stderr
    report = json.loads((pair[0].parent / "run_conversion.json").read_text())["ranks"]["0"]
    assert any("depth" in repair["text"] or "nest" in repair["text"] for repair in report["repairs"]), report[
        "repairs"
    ]


def test_a_call_tree_a_hundred_thousand_deep(tmp_path: Path) -> None:
    depth = 100_000
    nodes = [{"id": 1, "name": "[pytorch|profiler|execution_trace|process]", "ctrl_deps": 1}]
    nodes += [{"id": 2, "name": "[pytorch|profiler|execution_trace|thread]", "ctrl_deps": 1}]
    empty = {"values": [], "shapes": [], "types": []}
    trace = []
    for n in range(depth):
        attrs = [{"name": "rf_id", "type": "uint64", "value": n + 1}]
        ids = {"External id": n + 1, "Record function id": n + 1}
        nodes.append({"id": n + 3, "name": "aten::add", "ctrl_deps": n + 2, "inputs": empty, "attrs": attrs})
        trace.append({"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 5, "tid": 5, "ts": 1000 + n,
                      "dur": 2 * (depth - n), "args": ids})  # fmt: skip
    (tmp_path / "deep_host.json").write_text(json.dumps({"schema": "1.1.1", "pid": 5, "nodes": nodes}))
    (tmp_path / "deep_device.json").write_text(json.dumps({"traceEvents": trace}))
    done = command(tmp_path)
    assert done.returncode == 0, done.stderr
    made = et_file.read(tmp_path / "deep.0.et")
    assert int(made.duration_micros.sum()) == pytest.approx(2 * depth, abs=2)


def test_a_gzip_bomb(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """Two gigabytes of spaces in two megabytes."""
    bomb = tmp_path / "run_host.json.gz"
    pair[0].unlink()
    # gzip members may follow one another, so one is compressed and then repeated.
    bomb.write_bytes(gzip.compress(b'{"nodes": [') + gzip.compress(b" " * (1 << 20)) * 2048)
    refused(command(tmp_path, megabytes=1_500), "run_host.json.gz")
    assert not list(tmp_path.glob("*.et"))


def test_limits_are_flags(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    refused(command(tmp_path, "--max-bytes", "1000"), "--max-bytes")
    for path in pair:
        path.with_suffix(".json.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert command(tmp_path, "--max-bytes", "100000000").returncode == 0


NAMES = [
    "with space",
    "q'uote\"s",
    "한국어",
    "new\nline",
    "-dash",
    "$(touch x)",
    "%s{0}",
    "<b>",
    ".hidden",
    "*",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_runs_may_be_anything(tmp_path: Path, name: str) -> None:
    for path in generate(Features(**SMALL)).write(tmp_path):
        path.rename(tmp_path / path.name.replace("run", name))
    done = command(tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("*.et")} | {path.name for path in tmp_path.glob(".*.et")} == {
        f"{name}.et",
        f"{name}.0.et",
    }


def test_names_inside_files_name_no_file(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """traceName and a manifest that point elsewhere are not followed."""
    outside = tmp_path / "outside"
    inside = tmp_path / "inside"
    inside.mkdir()
    for path in pair:
        path.rename(inside / path.name)
    device = inside / pair[1].name
    document = json.loads(device.read_text()) | {"traceName": "../outside/x.json"}
    device.write_text(json.dumps(document))
    (inside / "run_manifest.json").write_text(
        json.dumps({"name": "../outside/y", "ranks": [{"rank": 0, "host_trace": "../outside/z"}]})
    )
    assert command(inside).returncode == 0
    assert not outside.exists() and {path.name for path in tmp_path.iterdir()} == {"inside"}


def test_output_does_not_follow_a_symbolic_link(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run.0.et").symlink_to(victim)
    (tmp_path / "run_conversion.json").symlink_to(victim)
    assert command(tmp_path).returncode == 0
    assert victim.read_text() == "precious" and not (tmp_path / "run.0.et").is_symlink()


def test_traces_behind_symbolic_links_are_read_and_left(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    for path in pair:
        (folder / path.name).symlink_to(path)
    assert command(folder).returncode == 0
    assert (folder / "run.0.et").exists() and not (tmp_path / "run.0.et").exists()
    (folder / "loop_host.json").symlink_to(folder / "loop_host.json")
    (folder / "loop_device.json").symlink_to(folder / "nowhere")
    assert command(folder).returncode == 0


def test_pipes_and_folders_are_no_traces(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    os.mkfifo(tmp_path / "pipe_host.json")
    (tmp_path / "folder_device.json").mkdir()
    assert command(tmp_path).returncode == 0


def test_html_in_names_stays_text(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    """The .et file has the name unchanged; printing escapes control characters."""
    odd = "<script>alert(1)</script>\x1b[31m\x00\n"
    edit(pair[1], lambda records: spans(records)[3].update(name=odd))
    assert command(tmp_path, "--allow-unlinked").returncode == 0
    made = et_file.read(tmp_path / "run.0.et")
    assert odd in [made.names[row] for row in range(len(made))]
    info = [sys.executable, "-m", "chakra_et", "info", str(tmp_path / "run.0.et")]
    shown = subprocess.run(info, capture_output=True, text=True, cwd=ROOT)
    assert shown.returncode == 0 and "\x1b" not in shown.stdout and "\x00" not in shown.stdout


def test_node_columns_have_no_wrapped_numbers(pair: tuple[Path, Path]) -> None:
    """2**63 in a field of 64 bits would turn negative."""

    def change(records: list[dict[str, Any]]) -> None:
        for record in records:
            for attr in record.get("attrs", []):
                if attr["name"] in ("seq_id", "scope", "tid", "fw_tid", "fw_parent"):
                    attr["value"] = 2**63 + 5

    edit(pair[0], change)
    trace = convert_pair(Pair(0, *pair)).trace
    assert (trace.ids > 0).all() and (trace.duration_micros < 10**9).all()
    assert not any(np.any(trace.column(name, 0) < -1) for name in ("seq_id", "scope", "tid", "fw_tid"))


def test_a_process_group_record_with_a_deep_payload(pair: tuple[Path, Path]) -> None:
    """Found by the mutation campaign: the JSON inside the string was too deep to decode."""

    def change(records: list[dict[str, Any]]) -> None:
        record = next(record for record in records if record["name"] == "## process_group:init ##")
        record["inputs"]["values"] = ["[" * 100_000 + "]" * 100_000]

    edit(pair[0], change)
    assert convert_pair(Pair(0, *pair)).report.repairs["bad-group-record"] == 1


def test_a_tensor_of_more_bytes_than_there_are(tmp_path: Path) -> None:
    """Found by the mutation campaign: its size did not fit into the file's integers."""
    host, device = generate(Features(gloo=("allreduce",), devices=0, world_size=2)).write(tmp_path)
    text = host.read_text()
    found = re.search(r'\[\d+, ?\d+, ?\d+, ?(\d+), ?4, ?"cpu"\]', text[text.index("gloo:all_reduce") :])
    assert found
    host.write_text(text.replace(found.group(0), found.group(0).replace(found.group(1), "9" * 30)))
    report = convert_pair(Pair(0, host, device)).report
    assert report.warnings["communication-size"] >= 1


def test_a_process_number_without_end_is_cut_in_the_sentence(pair: tuple[Path, Path]) -> None:
    """Found by the mutation campaign."""

    def change(records: list[dict[str, Any]]) -> None:
        for record in records:
            record["pid"] = "9" * 5_000

    edit(pair[1], change)
    with pytest.raises(TraceError) as caught:
        convert_pair(Pair(0, *pair))
    assert len(str(caught.value)) < 1_000


def test_a_device_trace_of_synchronisations_alone(pair: tuple[Path, Path]) -> None:
    """Found by the mutation campaign: there was nothing to take the first time from."""
    sync = {"ph": "X", "cat": "cuda_sync", "name": "Event Sync", "pid": 0, "tid": 7, "ts": 5, "dur": 1}
    pair[1].write_text(json.dumps({"traceEvents": [sync]}))
    with pytest.raises(TraceError, match="has no operator, runtime call or kernel with a usable time stamp"):
        convert_pair(Pair(0, *pair))
