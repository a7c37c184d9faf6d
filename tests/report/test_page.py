"""``chakra-et report``: which runs it takes, what is in its page, and what it refuses."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.arrays import stacked
from chakra_et.convert.graph.linked import WORK_BEFORE
from chakra_et.convert.inputs import files_of, find_run
from chakra_et.errors import TraceError
from chakra_et.et.sets import RankSet
from chakra_et.report.page import PackedColumns
from tests.report.made_run import HOSTILE, write_run
from tests.report.page_data import page_data, unpack
from tests.shared import shared_path

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def test_a_page_holds_every_node_and_dependency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert main(["report", str(tmp_path / "made")]) == 0
    assert "2 ranks, 1 step: 160 µs per step" in capsys.readouterr().out
    content, columns = page_data(tmp_path / "made_report.html")
    assert content["name"] == "made"
    tables = content["timeline"]
    fields = [columns[name].tolist() for name in ("row", "name", "start", "length")]
    nodes = [
        (tables["rows"][row][0], tables["names"][name], start, length)
        for row, name, start, length in zip(*fields, strict=True)
    ]
    assert len(nodes) == 14
    assert (1, "gemm", 30, 90) in nodes
    assert (0, "ncclAllReduce", 80, 60) in nodes
    target = np.repeat(np.arange(len(nodes)), columns["degree"])
    source = (target - columns["edge"].astype(np.int64)) % (1 << 32)
    kinds = [tables["edge_kinds"][kind] for kind in columns["edge_kind"].tolist()]
    edges = {
        (nodes[a][0], nodes[a][1], nodes[b][1], kind)
        for a, b, kind in zip(source, target, kinds, strict=True)
    }
    assert (0, "aten::mm", "gemm", "launch") in edges
    assert (1, "gemm", "ncclAllReduce", "collective") in edges
    assert len(edges) == 14


def test_a_page_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert main(["report", str(tmp_path / "made")]) == 0
    page = (tmp_path / "made_report.html").read_text()
    assert not re.findall(
        r"""(?:src|href)\s*=\s*["']?(?!data:|#)[a-z]""",
        re.sub(r"<script>.*</script>", "", page, flags=re.DOTALL),
    )
    assert not re.findall(r"https?://|@import|fetch\(|XMLHttpRequest|import\(", page)


def test_names_from_traces_are_never_markup(tmp_path: Path) -> None:
    write_run(tmp_path, name="made", gemm_name=HOSTILE)
    assert main(["report", str(tmp_path / "made")]) == 0
    path = tmp_path / "made_report.html"
    assert "<img" not in path.read_text()
    assert HOSTILE in page_data(path)[0]["timeline"]["names"]


def test_the_title_is_escaped(tmp_path: Path) -> None:
    name = "a<b>&c"
    write_run(tmp_path, name=name)
    assert main(["report", str(tmp_path / name)]) == 0
    assert "<title>a&lt;b&gt;&amp;c: report</title>" in (tmp_path / f"{name}_report.html").read_text()


def test_the_files_of_a_run_name_it(tmp_path: Path) -> None:
    write_run(tmp_path)
    shutil.copy(tmp_path / "made.0.et", tmp_path / "made.et")
    (tmp_path / "made_manifest.json").write_text("{}")
    assert main(["report", str(tmp_path / "made")]) == 0
    for words in (["made"], ["made.0.et", "made.1.et"], ["made.0.et", "made.1.et", "made.et"], ["."]):
        found = find_run([str(tmp_path / word) for word in words])
        assert files_of(found).name == "made"
        assert isinstance(found, RankSet) and list(found.files) == [0, 1]


def test_files_of_two_runs_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "a")
    write_run(tmp_path, "b")
    with pytest.raises(TraceError, match="files of 2 runs .*`compare` them"):
        find_run(sorted(map(str, tmp_path.glob("*.et"))))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["absent"], "neither a file nor the NAME of NAME.0.et"),
        (["notes.txt"], "give traces of PyTorch's profiler"),
        (["empty.0.et"], "the file is empty"),
        ([], "the following arguments are required: NAME"),
    ],
)
def test_bad_names_get_one_sentence(
    tmp_path: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty.0.et").touch()
    try:
        status = main(["report", *(str(tmp_path / word) for word in words)])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    files = write_run(tmp_path)
    files.et_file(1).unlink()
    assert main(["report", str(tmp_path / "made")]) == 0
    lacks = " ".join(page_data(tmp_path / "made_report.html")[0]["lacks"])
    assert "1 of 2 ranks (without 1)" in lacks


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"ranks": []}',
        '{"ranks": {"0": 1, "1": {"notes": 3, "losses": [1, {}]}}, "run": 5, "versions": [1]}',
    ],
)
def test_strange_files_beside_a_run_do_no_harm(tmp_path: Path, content: str) -> None:
    files = write_run(tmp_path)
    files.report_file.write_text(content)
    files.manifest_file.write_text(content)
    damaged = True  # its "ranks" aren't what a conversion writes
    assert main(["report", str(tmp_path / "made")]) == (2 if damaged else 0)
    assert main(["report", str(tmp_path / "made"), "--allow-missing-ranks"]) == 0
    lacks = " ".join(page_data(tmp_path / "made_report.html")[0]["lacks"])
    assert ("can't be read" in lacks) == (not content.startswith('{"'))


def test_traces_are_converted_on_the_way(tmp_path: Path) -> None:
    folder = FIXTURES / "traces" / "no_profiler_step"
    assert main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    content, columns = page_data(tmp_path / "page.html")
    assert len(columns["row"]) > 0
    assert any("no ProfilerStep" in text for text in content["lacks"])
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    write_run(tmp_path)
    for name in ("a.html", "b.html"):
        assert main(["report", str(tmp_path / "made"), "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_columns_come_back_as_they_were() -> None:
    columns = PackedColumns()
    values = {
        "small": np.array([3, 0, 255]), "large": np.array([0, 1 << 31]), "falling": np.array([9, 3, 70_000]),
        "halves": np.array([0.5, -2.25]), "none": np.zeros(0, np.int64),
    }  # fmt: skip
    for name, column in values.items():
        columns.add(name, column, delta=name == "falling")
    content, found = unpack(columns.pack({"text": "ü"}))
    assert content["text"] == "ü"
    assert {name: column.tolist() for name, column in found.items()} == {
        name: column.tolist() for name, column in values.items()
    }


def test_overlapping_spans_get_rows_of_their_own() -> None:
    start, end = np.array([0, 5_000, 10_000, 40_000]), np.array([30_000, 20_000, 12_000, 50_000])
    assert stacked(start, end).tolist() == [0, 1, 2, 0]
    assert stacked(np.array([0, 999, 2_000]), np.array([999, 2_000, 3_000])).tolist() == [0, 0, 0]


def test_memory_is_a_table_and_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, memory=True)
    assert main(["report", str(tmp_path / "made")]) == 0
    content, columns = page_data(tmp_path / "made_report.html")
    (row,) = content["memory"]
    assert (row["rank"], row["device"], row["peak_bytes"], row["peak_ns"]) == (1, "gpu 0", 9_000_000, 10_000)
    assert (row["peak_name"], row["reserved_bytes"]) == ("aten::mm", 16_000_000)
    assert content["timeline"]["memory"] == [
        [1, "gpu 0 memory", 0, 4, True],
        [0, "launched, not started", 4, 7, False],
        [1, "launched, not started", 7, 10, False],
    ]
    moments = zip(columns["memory_time"].tolist(), columns["memory_allocated"].tolist(), strict=True)
    assert list(moments)[:4] == [(10, 9e6), (30, 8e6), (140, 8e6), (160, 6e6)]
    assert "Peak memory: 9.00 MB allocated, 16.0 MB reserved, on rank 1, gpu 0." in content["headline"]
    assert not any(text.startswith("no memory") for text in content["lacks"])
    write_run(tmp_path)
    assert main(["report", str(tmp_path / "made")]) == 0
    content, columns = page_data(tmp_path / "made_report.html")
    assert content["memory"] == []
    assert {label for _, label, *_ in content["timeline"]["memory"]} == {"launched, not started"}
    assert any(text.startswith("no memory") for text in content["lacks"])


def union_micros(spans: list[tuple[int, int]]) -> int:
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def test_the_breakdown_is_that_of_the_recorded_kernels(tmp_path: Path) -> None:
    """Counted from Kineto's JSON by other means than the converter's and the report's."""
    folder = shared_path(
        "data/traces/dlrm_8gpu", *(f"dlrm_8gpu_rank{rank}_device.json.gz" for rank in (0, 1))
    )
    for rank in (0, 1):
        for side in ("host", "device"):
            shutil.copy(folder / f"dlrm_8gpu_rank{rank}_{side}.json.gz", tmp_path)
    assert main(["report", str(tmp_path / "dlrm_8gpu")]) == 0
    page = tmp_path / "dlrm_8gpu_report.html"
    content, _ = page_data(page)
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1]
    assert json.dumps(content["lacks"]).count("2 of 8 ranks (without 2-7)") == 1
    assert page.stat().st_size < 3_000_000
    for rank, _, _, _, parts, _, _, _ in content["steps"]:
        trace = json.loads(gzip.decompress((folder / f"dlrm_8gpu_rank{rank}_device.json.gz").read_bytes()))
        spans: dict[str, list[tuple[int, int]]] = {"kernel": [], "nccl": [], "copy": []}
        for event in trace["traceEvents"]:
            kind = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}.get(event.get("cat"))
            if kind:
                kind = "nccl" if "nccl" in event["name"] else kind
                spans[kind].append((event["ts"], event["ts"] + event["dur"]))
        found = {name: ns / 1000 for name, ns in zip(content["activities"], parts, strict=True)}
        # What the device did before the recording counts as compute; no event shows it.
        before = sum(each[6][rank] for each in content["entries"] if each[1] == WORK_BEFORE) / 1000
        compute, copies = union_micros(spans["kernel"]), union_micros(spans["kernel"] + spans["copy"])
        busy = union_micros([span for kind in spans.values() for span in kind])
        assert compute <= found["compute"] <= compute + before
        assert copies <= found["compute"] + found["memory"] <= copies + before
        shown = found["compute"] + found["memory"] + found["communication"] + found["wait"]
        assert busy <= shown <= busy + before and found["compute"] >= before


def test_tables_can_be_read_without_scripts(tmp_path: Path) -> None:
    write_run(tmp_path, gemm_name="a<b>")
    assert main(["report", str(tmp_path / "made")]) == 0
    (plain,) = re.findall("<noscript>(.*)</noscript>", (tmp_path / "made_report.html").read_text(), re.DOTALL)
    assert "Bound by " in plain
    assert "<td>kernel</td><td>a&lt;b&gt;</td><td>2</td>" in plain
    assert {"steps", "entries", "collectives"} <= set(re.findall("<h2>(.*?)</h2>", plain))
