"""``--json`` of convert, report and compare says what the text, the report file and the page say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from tests.report.made_run import write_run

CAPTURE = Path(__file__).resolve().parents[1] / "fixtures/captures/torch-2.13"


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path, status: int = 0) -> dict:
    assert main([*map(str, words), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_convert_and_its_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in CAPTURE.glob("tiny_1gpu_*"):
        shutil.copy(path, tmp_path)
    (tmp_path / "bad_host.json").write_text("no trace")
    (tmp_path / "bad_device.json").write_text("{}")
    found = answer(capsys, "convert", tmp_path, status=1)
    assert found["status"] == 1
    bad, good = sorted(found["runs"], key=lambda run: run["name"])
    assert str(tmp_path / "bad_") in bad["ranks"]["0"]["error"]
    rank = good["ranks"]["0"]
    assert rank["file"] == str(tmp_path / "tiny_1gpu.0.et")
    assert rank["bytes"] == Path(rank["file"]).stat().st_size
    written = json.loads((tmp_path / "tiny_1gpu_conversion.json").read_text())["ranks"]["0"]
    assert written.items() <= rank.items()


def test_report_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "before")
    write_run(tmp_path, "after", slow=50)
    page = answer(capsys, "report", tmp_path / "before")
    assert Path(page["page"]).is_file() and page["page"].endswith("before_report.html")
    (gemm,) = (entry for entry in page["entries"] if entry["name"] == "gemm")
    assert gemm["self_ns"] / len(page["steps"]) == pytest.approx(70_000)
    both = answer(capsys, "compare", tmp_path / "before", tmp_path / "after")
    (changed,) = (entry for entry in both["entries"] if entry["name"] == "gemm")
    assert changed["self_ns"] == [70_000, 50_000] and both["page"] is None
    assert [run["name"] for run in both["runs"]] == ["before", "after"]
