"""Reading the record array of a trace in pieces that end anywhere."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chakra_et.errors import TraceError, UnreadableTrace
from chakra_et.traces import device as device_trace
from chakra_et.traces import host as host_trace
from chakra_et.traces.records import read_records
from tests.generator import Features, Layout, generate

PIECES = (1_000, 1_024, 4_099, 65_536, 1 << 24)
"""Piece sizes in bytes: below the longest record, odd ones, and the whole file at once."""


DAMAGED = "is not a readable trace|is damaged, or one record"


class Record(msgspec.Struct):
    id: int
    text: Any = None


class Document(msgspec.Struct):
    records: list[Record]
    head: Any = None
    foot: Any = None


class Collected:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.left_out: list[bytes] = []

    def take(self, records: list[Record]) -> None:
        self.records += records

    def leave_out(self, record: bytes) -> None:
        self.left_out.append(record)


def read(path: Path, piece_bytes: int, left_out: int = 0) -> tuple[list[Record], Document]:
    taken = Collected()
    document = read_records(path, "records", lambda head: Document, taken, piece_bytes=piece_bytes)
    assert len(taken.left_out) == left_out
    return taken.records, document


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


NASTY = [
    'a "quoted" word', '}, {"id": 7', '},\n  {"id": 8, "text": "x"}', '[{"id": 9}]', "\\", '\\"}, {"id": 1',
    "records\": [", "é 漢 \u0000 \u2028", "{" * 50, "}" * 50, "", "x" * 3_000,
]  # fmt: skip
RECORDS = [{"id": number, "text": NASTY[number % len(NASTY)]} for number in range(200)]
DOCUMENT = {"head": {"records of": "old"}, "records": RECORDS, "foot": [1, 2]}
TEXTS = {
    "one line": json.dumps(DOCUMENT),
    "compact": json.dumps(DOCUMENT, separators=(",", ":")),
    "indented": json.dumps(DOCUMENT, indent=2),
    "tabs": json.dumps(DOCUMENT, indent="\t", ensure_ascii=False),
    "a record a line": '{"head": {"records of": "old"}, "records": [\n'
    + ",\n".join(json.dumps(record) for record in RECORDS)
    + '\n],\n"foot": [1, 2]}\n',
    "comma first": '{"head": {"records of": "old"}, "records": [\n  '
    + "\n, ".join(json.dumps(record) for record in RECORDS)
    + '\n], "foot": [1, 2]}',
}


@pytest.mark.parametrize("piece_bytes", PIECES)
@pytest.mark.parametrize("name", TEXTS)
def test_the_same_records_wherever_pieces_end(name: str, piece_bytes: int, tmp_path: Path) -> None:
    found, document = read(write(tmp_path / "t.json", TEXTS[name]), piece_bytes)
    assert [(record.id, record.text) for record in found] == [(r["id"], r["text"]) for r in RECORDS]
    assert (document.head, document.foot, document.records) == ({"records of": "old"}, [1, 2], [])


@pytest.mark.parametrize("piece_bytes", (1_000, 1 << 24))
def test_gzip_is_recognised_by_content(piece_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(TEXTS["indented"].encode()))
    found, _ = read(path, piece_bytes)
    assert [record.id for record in found] == list(range(200))


def test_records_do_not_all_begin_with_the_same_field(tmp_path: Path) -> None:
    records = [{"id": n, "text": "t"} if n % 3 else {"text": "t", "id": n} for n in range(300)]
    found, _ = read(write(tmp_path / "t.json", json.dumps({"records": records})), 512)
    assert [record.id for record in found] == list(range(300))


@pytest.mark.parametrize("records", ([], [{"id": 1}]))
def test_few_records(records: list, tmp_path: Path) -> None:
    for indent in (None, 1):
        text = json.dumps({"records": records, "foot": 3}, indent=indent)
        found, document = read(write(tmp_path / "t.json", text), 64)
        assert len(found) == len(records) and document.foot == 3


def test_record_of_the_wrong_type_affects_only_itself(tmp_path: Path) -> None:
    records: list[Any] = [{"id": number, "text": "t"} for number in range(300)]
    records[7], records[150], records[299] = {"id": "seven"}, {"text": "no id"}, {"id": None}
    for indent in (None, 2):
        path = write(tmp_path / "t.json", json.dumps({"records": records, "foot": 3}, indent=indent))
        for piece_bytes in PIECES:
            found, document = read(path, piece_bytes, left_out=3)
            assert [record.id for record in found] == [n for n in range(300) if n not in (7, 150, 299)]
            assert document.foot == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", 'has no "records" array'),
        ("[1, 2]", 'has no "records" array'),
        ('{"head": 1}', 'has no "records" array'),
        ('{"records": 5}', 'has no "records" array'),
        (json.dumps({"head": "h" * 5_000, "records": RECORDS[:5]})[:3_000], 'has no "records" array'),
        (json.dumps(DOCUMENT)[:-200], DAMAGED),
        (json.dumps(DOCUMENT) * 2, DAMAGED),
        (json.dumps(DOCUMENT) + "}", DAMAGED),
        ('{"records": [{"id": 1}, {"id": }]}', DAMAGED),
        ('{"records": [' + "[" * 100_000, DAMAGED),
        (
            '{"records": [{"id": 1, "text": "' + "x" * 100_000,
            DAMAGED,
        ),
    ],
)
@pytest.mark.parametrize("piece_bytes", (1_000, 1 << 24))
def test_file_that_is_no_trace_is_rejected_in_one_sentence(
    text: str, sentence: str, piece_bytes: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "broken.json", text)
    with pytest.raises(UnreadableTrace, match=sentence) as caught:
        read(path, piece_bytes)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_gzip_and_missing_files_are_reported(tmp_path: Path) -> None:
    whole = gzip.compress(TEXTS["one line"].encode())
    for name, data in (("cut.json.gz", whole[: len(whole) // 2]), ("bad.json.gz", whole[:40] + b"\0" * 99)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UnreadableTrace, match=f"{name}: is a damaged gzip file"):
            read(tmp_path / name, 1_000)
    with pytest.raises(TraceError, match="absent.json: can't be read .No such file"):
        read(tmp_path / "absent.json", 1_000)
    with pytest.raises(TraceError, match="can't be read .Is a directory"):
        read(tmp_path, 1_000)


@pytest.mark.parametrize("layout", [Layout(), Layout(text="line", gz=True), Layout(host="1.0.1")], ids=str)
def test_generated_traces_read_in_pieces(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_path, device_path = generate(Features(seed=1, nccl=("allreduce",), steps=2), layout).write(tmp_path)
    whole_host, whole_device = host_trace.load(host_path), device_trace.load(device_path)
    for piece_bytes in (1_000, 10_007):
        defaults = (*read_records.__defaults__[:-1], piece_bytes)
        monkeypatch.setattr(read_records, "__defaults__", defaults)
        host, device = host_trace.load(host_path), device_trace.load(device_path)
        for column in ("rf_id", "seq_id", "tid"):
            assert (getattr(host, column) == getattr(whole_host, column)).all()
        assert [*map(list, host.inputs)] == [*map(list, whole_host.inputs)]
        assert host.communication == whole_host.communication
        assert host.header == whole_host.header and host.groups == whole_host.groups
        for column in ("start", "end", "category", "correlation", "stream", "rf_id", "sequence"):
            assert (getattr(device, column) == getattr(whole_device, column)).all()
        assert device.waits == whole_device.waits and device.findings == whole_device.findings
