"""``chakra-et validate``: files, runs, exit statuses and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import (
    ExecutionTrace,
)
from chakra_et.et.sets import find_rank_sets
from tests.convert.good_traces import (
    GROUPS,
    REDUCE,
    good,
    put,
    run_of_two,
)


def save(folder: Path, run: dict[int, ExecutionTrace], groups: dict | None = None, name: str = "job") -> str:
    for rank, trace in run.items():
        et_file.write(folder / f"{name}.{rank}.et", trace)
    if groups is not None:
        (folder / f"{name}_comm_groups.json").write_text(json.dumps(groups))
    return str(folder / name)


def test_valid_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = save(tmp_path, run_of_two(), GROUPS)
    assert main(["validate", name, "--strict"]) == 0
    assert capsys.readouterr().out == "2 files: valid (0 errors, 0 warnings)\n"
    assert main(["validate", f"{name}.0.et", f"{name}.1.et"]) == 0
    assert main(["validate", f"{name}.1.et"]) == 0, "one file of a run is checked by itself"


def test_invalid_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of_two()
    put(run[1], "comm_size", REDUCE, 32)
    name = save(tmp_path, run, GROUPS)
    assert main(["validate", name]) == 1
    out = capsys.readouterr().out
    assert out.startswith(
        f"error: {name}.1.et: node 3 'op': collective 1 of group 1 is ALL_REDUCE of 32 bytes"
    )
    assert out.endswith("2 files: not valid (1 error, 0 warnings)\n")


def test_json_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of_two()
    run[1].names.table[0] = "<script>\n한국어".encode()
    run[1].types[0] = 1
    name = save(tmp_path, run, GROUPS)
    assert main(["validate", name, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["valid"] is False
    assert answer["files"] == [f"{name}.0.et", f"{name}.1.et"]
    assert [problem for problem in answer["problems"] if problem["severity"] != "note"] == [
        {
            "severity": "error",
            "file": f"{name}.1.et",
            "rank": 1,
            "node": 1,
            "name": "<script>\n한국어",
            "rule": "metadata-node",
            "message": "is a METADATA node: leave it out",
            "count": 1,
        }
    ]


def test_warnings_fail_only_with_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = save(tmp_path, run_of_two())
    assert main(["validate", name]) == 0
    assert "[comm-groups-missing]" in capsys.readouterr().out
    assert main(["validate", name, "--strict"]) == 1


def test_an_unreadable_file_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of_two()
    run[0].types[0] = 1
    name = save(tmp_path, run, GROUPS)
    Path(f"{name}.1.et").write_bytes(b'{"schema": 1}')
    assert main(["validate", name, "--json"]) == 1
    rules = [problem["rule"] for problem in json.loads(capsys.readouterr().out)["problems"]]
    assert rules == ["metadata-node", "unreadable"]


@pytest.mark.parametrize("arguments", [[], ["none.et"], ["--nope"]])
def test_bad_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["validate", *arguments])
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert status == 2
    assert "rror: " in captured.err.splitlines()[-1]
    assert captured.out == ""


@pytest.mark.parametrize("content", ["[]", "{", '{"1": 3}', '{"1": ["a"]}', "[" * 100_000, "\udcff"])
def test_malformed_comm_group_file_exits_with_2(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = save(tmp_path, run_of_two())
    Path(f"{name}_comm_groups.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert main(["validate", name]) == 2
    assert f"error: {name}_comm_groups.json: " in capsys.readouterr().err


def test_output_encoding_without_the_characters_is_no_traceback(tmp_path: Path, repo_root: Path) -> None:
    trace = good()
    trace.types[0] = 1
    trace.names.table[0] = "한국어".encode()
    et_file.write(tmp_path / "é.et", trace)
    done = subprocess.run(
        [sys.executable, "-m", "chakra_et", "validate", str(tmp_path / "é.et")],
        cwd=repo_root, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    assert r"\xe9.et: node 1 '\ud55c\uad6d\uc5b4': is a METADATA node" in done.stdout


def test_runs_are_found_by_name(tmp_path: Path) -> None:
    for name in ("a.0.et", "a.1.et", "a.b.0.et", "a.et", "a [x].0.et", "b.et"):
        (tmp_path / name).write_bytes(b"")
    (run,) = find_rank_sets([str(tmp_path / "a")])
    assert (list(run.files), run.is_run) == ([0, 1], True)
    (run,) = find_rank_sets([str(tmp_path / "a [x]")])
    assert (list(run.files), run.is_run) == ([0], True)
    sets = find_rank_sets([str(tmp_path / name) for name in ("a.1.et", "a.et", "a.0.et", "b.et")])
    assert [(list(each.files), each.is_run) for each in sets] == [([0, 1], True), ([0], False)]
    (run,) = find_rank_sets([str(tmp_path / "b")])
    assert (list(run.files), run.alone, run.name) == ([0], True, str(tmp_path / "b"))
    (tmp_path / "a.00.et").write_bytes(b"")
    with pytest.raises(TraceError, match="both rank 0"):
        find_rank_sets([str(tmp_path / "a")])


def test_singular_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = save(tmp_path, {0: good()}, GROUPS)
    assert main(["validate", f"{name}.0.et"]) == 0
    assert capsys.readouterr().out.endswith("1 file: valid (0 errors, 0 warnings)\n")
    run = run_of_two()
    put(run[1], "comm_size", REDUCE, 128)
    main(["validate", save(tmp_path, run, GROUPS, "larger")])
    (error,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("error"))
    assert "ALL_REDUCE of 128 bytes" in error and "(and" not in error
