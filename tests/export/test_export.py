"""``chakra-et export``: each format is read back by another program's reader and compared with the run."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import IO

import pytest

from chakra_et.__main__ import main
from chakra_et.export import command as export_command
from chakra_et.export import tables
from chakra_et.export.tables import SHEETS, TABLES, dictionary
from tests.report.made_run import made_run, write_run


def exported(folder: Path, form: str, name: str, *flags: str, memory: bool = False) -> Path:
    write_run(folder, memory=memory)
    output = folder / name
    assert main(["export", str(folder / "made"), "--format", form, "-o", str(output), *flags]) == 0
    return output


def perfetto_trace(path: Path):  # type: ignore[no-untyped-def]
    pytest.importorskip("perfetto", reason="perfetto's Python package is not installed")
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    return trace


def test_perfetto_has_every_node_as_a_slice(tmp_path: Path) -> None:
    trace = perfetto_trace(exported(tmp_path, "perfetto", "made.pftrace"))
    tracks, names, open_at = {}, {}, {}
    slices, flows = [], defaultdict(list)
    for packet in trace.packet:
        for name in packet.interned_data.event_names:
            names[name.iid] = name.name
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        event = packet.track_event
        if event.type == 1:
            # No slice begins within another one of its thread, and every one ends before the next begins.
            assert event.track_uuid not in open_at
            open_at[event.track_uuid] = (packet.timestamp, names[event.name_iid])
            for flow in (*event.flow_ids, *event.terminating_flow_ids):
                flows[flow].append(names[event.name_iid])
        elif event.type == 2:
            start, name = open_at.pop(event.track_uuid)
            process = tracks[tracks[event.track_uuid].parent_uuid].process
            slices.append((process.process_name, name, start, packet.timestamp))
    assert not open_at
    assert len(slices) == 14
    assert ("rank 1, device", "gemm", 30_000, 120_000) in slices
    assert ("rank 0, device", "ncclAllReduce", 80_000, 140_000) in slices
    assert all(len(ends) == 2 for ends in flows.values())
    assert ["aten::mm", "gemm"] in [sorted(ends) for ends in flows.values()]


def counter_values(path: Path) -> list[tuple[str, int, int]]:
    """(name of the counter, time, value) of a Perfetto trace."""
    trace = perfetto_trace(path)
    names = {packet.track_descriptor.uuid: packet.track_descriptor.name for packet in trace.packet}
    return [
        (names[packet.track_event.track_uuid], packet.timestamp, packet.track_event.counter_value)
        for packet in trace.packet
        if packet.track_event.type == 4
    ]


def test_perfetto_counts_work_that_is_queued(tmp_path: Path) -> None:
    values = counter_values(exported(tmp_path, "perfetto", "made.pftrace"))
    assert {name for name, _, _ in values} == {"launched, not started"}
    assert ("launched, not started", 40_000, 1) in values
    assert ("launched, not started", 120_000, 0) in values


def test_perfetto_counts_memory(tmp_path: Path) -> None:
    values = counter_values(exported(tmp_path, "perfetto", "made.pftrace", memory=True))
    assert [(time, value) for name, time, value in values if name == "gpu 0 memory allocated"] == [
        (10_000, 9_000_000), (30_000, 8_000_000), (140_000, 8_000_000), (160_000, 6_000_000),
    ]  # fmt: skip
    assert ("gpu 0 memory reserved", 10_000, 16_000_000) in values


def trace_processor() -> str | None:
    """Its binary: on the PATH, or where the Python package keeps the one that it downloads on first use."""
    kept = (Path.home() / ".local/share/perfetto/prebuilts").glob("trace_processor_shell*")
    return shutil.which("trace_processor_shell") or next((str(path) for path in kept if path.is_file()), None)


@pytest.mark.skipif(trace_processor() is None, reason="no trace_processor_shell, and tests download nothing")
def test_the_trace_processor_reads_perfetto(tmp_path: Path) -> None:
    path = exported(tmp_path, "perfetto", "made.pftrace")
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    config = TraceProcessorConfig(bin_path=trace_processor())
    with TraceProcessor(trace=str(path), config=config) as processor:
        assert [row.n for row in processor.query("select count(*) as n from slice")] == [14]
        assert [
            row.n for row in processor.query("select count(*) as n from process where name = 'rank 1'")
        ] == [1]


def test_chrome_events(tmp_path: Path) -> None:
    path = exported(tmp_path, "chrome", "made.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    gemm = next(event for event in slices if event["name"] == "gemm" and event["pid"] == 3)
    assert (gemm["ts"], gemm["dur"], gemm["cat"]) == (30, 90, "kernel")
    assert len(slices) == 14
    assert len({event["pid"] for event in slices}) == 4


def test_csv_tables(tmp_path: Path) -> None:
    exported(tmp_path, "csv", "made")
    with open(tmp_path / "made_nodes.csv", newline="") as file:
        nodes = list(csv.DictReader(file))
    assert len(nodes) == 14
    gemm = next(node for node in nodes if node["name"] == "gemm" and node["rank"] == "1")
    assert (gemm["start_ns"], gemm["duration_ns"], gemm["parent"], gemm["on_critical_path"]) == (
        "30000", "90000", "2", "True",
    )  # fmt: skip
    with open(tmp_path / "made_edges.csv", newline="") as file:
        edges = {(edge["source"], edge["target"], edge["kind"]) for edge in csv.DictReader(file)}
    assert ("2", "3", "launch") in edges


def test_tables_are_there_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = tables.WRITERS["csv"], []

    def write_three(table: tables.Table, file: IO[bytes]) -> None:
        written.append(table)
        if len(written) == 3:
            raise OSError("the disk is full")
        write(table, file)

    monkeypatch.setitem(tables.WRITERS, "csv", write_three)
    write_run(tmp_path)
    assert main(["export", str(tmp_path / "made"), "--format", "csv"]) == 2
    assert len(written) == 3 and not list(tmp_path.glob("*made_*.csv")) and not list(tmp_path.glob(".*"))


def test_tables_of_two_exports_are_never_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between two renames left some tables of the new export beside old ones."""
    write_run(tmp_path)
    command = ["export", str(tmp_path / "made"), "--format", "csv"]
    assert main(command) == 0
    old = {path: path.stat().st_ino for path in tmp_path.glob("made_*.csv")}
    assert len(old) == len(tables.TABLES)

    moved: list[Path] = []

    def move_two(source: Path, target: Path) -> None:
        if len(moved) == 2:
            raise OSError("killed")
        moved.append(source.replace(target))

    monkeypatch.setattr(export_command, "move", move_two)
    assert main(command) == 2
    left = list(tmp_path.glob("made_*.csv"))
    assert len(left) == 2 and all(path.stat().st_ino != old[path] for path in left)


def test_parquet_tables(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    exported(tmp_path, "parquet", "made")
    table = parquet.read_table(tmp_path / "made_nodes.parquet").to_pydict()
    assert len(table["id"]) == 14
    assert table["comm_size"].count(1000) == 2
    for file in tmp_path.glob("made_*.parquet"):
        for column in parquet.read_schema(file):
            assert column.metadata[b"description"], (file.name, column.name)
    assert len(list(tmp_path.glob("made_*.parquet"))) == len(TABLES)


def test_every_column_is_described_and_every_description_used(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    found = [table(run) for table in TABLES.values()]
    assert {name for table in found for name in table.columns} == set(dictionary())


def test_a_workbook_has_the_tables(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl", reason="pip install openpyxl")
    write_run(tmp_path, gemm_name="=1+1")
    path = tmp_path / "made.xlsx"
    command = ["report", str(tmp_path / "made"), "-o", str(tmp_path / "made.html"), "--xlsx", str(path)]
    assert main(command) == 0
    book = openpyxl.load_workbook(path)
    assert book.sheetnames == ["summary", *SHEETS, "columns"]
    operators = list(book["operators"].values)
    assert "'=1+1" in {row[operators[0].index("name")] for row in operators}, "a name is no formula"
    assert len(list(book["steps"].values)) == 3
    assert ("of_peak", dictionary()["of_peak"]) in set(book["columns"].values)


MISSING = "1 of 2 ranks (without 0)"


def partial_run(folder: Path) -> str:
    write_run(folder)
    (folder / "made.0.et").unlink()
    return str(folder / "made")


@pytest.mark.parametrize("form", ["perfetto", "chrome"])
def test_ranks_that_are_missing_are_named_beside_each_process(tmp_path: Path, form: str) -> None:
    output = tmp_path / "made.out"
    assert main(["export", partial_run(tmp_path), "--format", form, "-o", str(output)]) == 0
    if form == "perfetto":
        found = [packet.track_descriptor.process for packet in perfetto_trace(output).packet]
        labels = [" ".join(process.process_labels) for process in found if process.process_name]
    else:
        events = json.loads(output.read_bytes())["traceEvents"]
        labels = [each["args"]["labels"] for each in events if each["name"] == "process_labels"]
    assert len(labels) == 2 and all(MISSING in label for label in labels)


def test_ranks_that_are_missing_are_named_in_a_table(tmp_path: Path) -> None:
    assert main(["export", partial_run(tmp_path), "--format", "csv"]) == 0
    with open(tmp_path / "made_notes.csv", newline="") as file:
        assert any(MISSING in row["note"] for row in csv.DictReader(file))


def test_ranks_that_are_missing_are_named_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    board = tmp_path / "board"
    assert main(["export", partial_run(tmp_path), "--format", "tensorboard", "-o", str(board)]) == 0
    (path,) = board.rglob("events.out.tfevents.*")
    assert MISSING.encode() in path.read_bytes()
