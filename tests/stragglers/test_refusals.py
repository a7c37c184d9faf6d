"""Parquet traces and YAML files that can't be used end in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chakra_et.__main__ import main
from tests.stragglers.made_job import make_job

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra stragglers)")
    return make_job(dp=2, pp=2, microbatches=3, steps=2).rows()


def _meta(folder: Path, **changed: Any) -> Path:
    values = {"trial_name": "made", "run_id": 0, "dp_size": 2, "dsp_size": 1, "pp_size": 2, "tp_size": 1}
    values |= {"vpp_size": 1, "world_size": 4} | changed
    path = folder / "meta.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in values.items() if value is not None))
    return path


def _write(folder: Path, rows: Rows) -> Path:
    import pyarrow
    from pyarrow import parquet

    path = folder / "trace.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def _refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["stragglers", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


def test_the_made_up_job_itself_is_fine(
    tmp_path: Path, rows: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stragglers", str(_write(tmp_path, rows)), "--meta", str(_meta(tmp_path))]) == 0
    assert "4 ranks, dp 2 × pp 2" in capsys.readouterr().out


def _without(name: str) -> Callable[[Rows], Rows]:
    return lambda rows: [{key: value for key, value in row.items() if key != name} for row in rows]


def _with(name: str, value: object) -> Callable[[Rows], Rows]:
    """The value in the fourth row."""
    return lambda rows: [row | {name: value} if at == 3 else row for at, row in enumerate(rows)]


def _dropped(**of: object) -> Callable[[Rows], Rows]:
    return lambda rows: [row for row in rows if any(row[key] != value for key, value in of.items())]


TRACES: dict[str, tuple[Callable[[Rows], Rows], str]] = {
    "a column is missing": (_without("gmc"), "has no column gmc"),
    "no rows": (lambda rows: rows[:0], "has no column"),
    "a type that is not known": (
        _with("optype", "forward"),
        "optype 'forward' in row 3 (from 0) is not known",
    ),
    "a type that is missing": (_with("optype", None), "optype None in row 3"),
    "no start": (_with("start_ts", None), "column start_ts has no number in row 3"),
    "a start that is no number": (_with("start_ts", float("nan")), "column start_ts has no number in row 3"),
    "a negative duration": (_with("duration", -1.0), "lasts -1 s: durations must be 0 or more"),
    "text for a stage": (
        lambda rows: [row | {"stage": f"s{row['stage']}"} for row in rows],
        "column stage holds string, not integers",
    ),
    "an operation twice": (lambda rows: [*rows, rows[5]], "is there twice"),
    "an operation missing in one step": (
        _dropped(step=17, optype="forward-compute", seq_id=1, stage=0, dp_rank=1),
        "forward-compute 1 of step 17, dp_rank 1, stage 0 is missing",
    ),
    "a message missing in all steps": (
        _dropped(optype="forward-recv", stage=1, seq_id=2),
        "stage 0 has 3 forward-send for 2 forward-recv of stage 1",
    ),
    "a stage without backward": (
        _dropped(optype="backward-compute", stage=1),
        "stage 1 has no backward-compute",
    ),
    "a stage without its clip": (
        _dropped(optype="optimizer-clip-main-grad", stage=1),
        "stage 1 has no optimizer-clip-main-grad in step 10, but stage 0 has",
    ),
    "two ranks in one place": (_with("rank", 99), "are both dp_rank 0, stage 0"),
}


@pytest.mark.parametrize("change", TRACES)
def test_traces(change: str, tmp_path: Path, rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    alter, sentence = TRACES[change]
    trace = _write(tmp_path, alter(rows))
    refusal = _refusal(capsys, trace, "--meta", _meta(tmp_path))
    assert sentence in refusal
    assert str(trace) in refusal


METAS: dict[str, tuple[dict[str, Any], str]] = {
    "another dp_size": ({"dp_size": 4, "world_size": 8}, "but dp_size of the job is 4"),
    "another pp_size": ({"pp_size": 4, "world_size": 8}, "but pp_size of the job is 4"),
    "a world of another size": ({"world_size": 64}, "world_size is 64, but dp_size × pp_size × tp_size"),
    "a size of 0": ({"tp_size": 0}, "tp_size must be an integer from 1 on, not 0"),
    "text for a size": ({"tp_size": "four"}, "tp_size must be an integer from 1 on, not 'four'"),
    "a field that is not known": ({"ep_size": 2}, "ep_size is not a field of a job"),
    "no trial_name": ({"trial_name": None}, "is not the description of a job"),
    "broken YAML": ({"trial_name": "[1"}, "not YAML"),
}


@pytest.mark.parametrize("change", METAS)
def test_metas(change: str, tmp_path: Path, rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    values, sentence = METAS[change]
    trace, meta = _write(tmp_path, rows), _meta(tmp_path, **values)
    assert sentence in _refusal(capsys, trace, "--meta", meta)


def test_files_that_are_not_there(tmp_path: Path, rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    trace, meta = _write(tmp_path, rows), _meta(tmp_path)
    gone = tmp_path / "gone.parquet"
    assert f"{gone}: no such file" in _refusal(capsys, gone, "--meta", meta)
    assert "gone.yaml: can't be read: No such file" in _refusal(
        capsys, trace, "--meta", tmp_path / "gone.yaml"
    )
    assert "give its YAML file with --meta" in _refusal(capsys, trace)
    assert "--meta is for Parquet traces" in _refusal(capsys, tmp_path / "run", "--meta", meta)
    assert "neither a file nor the NAME" in _refusal(capsys, tmp_path / "run")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 not really PAR1", b"\0" * 100])
def test_a_file_that_is_not_parquet(
    content: bytes, tmp_path: Path, rows: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.parquet"
    trace.write_bytes(content)
    assert "can't be read as Parquet" in _refusal(capsys, trace, "--meta", _meta(tmp_path))


@pytest.mark.parametrize(("library", "word"), [("pyarrow", "Parquet"), ("yaml", "YAML")])
def test_without_a_reader(
    library: str,
    word: str,
    tmp_path: Path,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace, meta = _write(tmp_path, rows), _meta(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    refusal = _refusal(capsys, trace, "--meta", meta)
    assert f"reading {word} needs" in refusal
    assert "pip install 'mosim-llms[stragglers]'" in refusal


@pytest.mark.parametrize("threshold", ["-1", "nan", "inf"])
def test_a_threshold_out_of_range(threshold: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["stragglers", "run", "--threshold", threshold])
    assert "--threshold must be a slowdown such as 1.03" in capsys.readouterr().err
