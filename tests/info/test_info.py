"""``chakra-et info``: every figure, on a trace with known figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from chakra_et.__main__ import COMMANDS, main
from chakra_et.convert.graph.nodes import EdgeKind
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.node_attributes import EDGE_KINDS
from chakra_et.info.command import describe
from chakra_et.text import size
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace, recv, send

LANES = json.dumps(
    [
        {"kind": "cpu", "label": "main"},
        {"kind": "gpu", "label": "stream 7"},
        {"kind": "communication", "label": "gloo"},
    ]
)


def known(**more: int | str) -> ExecutionTrace:
    return make_trace(
        cpu(1, 10, start=100, lane=0, kind="operator", dep_kinds=""),
        cpu(2, 5, (1,), start=110, lane=0, kind="runtime", dep_kinds="P"),
        kernel(3, 40, (2,), start=120, lane=1, kind="kernel", dep_kinds="L"),
        collective(4, 7, (3, 2), start=160, lane=2, kind="collective", dep_kinds="SC", comm_size=64),
        collective(5, 7, (4,), start=170, lane=2, kind="collective", dep_kinds="C", comm_size=16),
        collective(6, 1, (5,), "2", start=180, lane=2, kind="collective", dep_kinds="C", comm_type=9),
        send(7, 1, 1, (6,), start=190, lane=2, kind="p2p", dep_kinds="P", comm_size=24),
        recv(8, 1, 1, start=190, ctrl=(6,), lane=2, kind="p2p", dep_kinds="", comm_size=40),
        **{"rank": 0, "world_size": 4, "lanes": LANES, **more},
    )


def test_every_figure_of_a_known_trace() -> None:
    answer = describe(known())
    assert answer == {
        "nodes": 8,
        "nodes_by_type": {"COMP": 3, "COMM_SEND": 1, "COMM_RECV": 1, "COMM_COLL": 3},
        "nodes_by_kind": {"operator": 1, "runtime": 1, "kernel": 1, "collective": 3, "p2p": 2},
        "edges": {
            "data": 7,
            "ctrl": 1,
            "by_kind": {"program order": 2, "launch": 1, "stream order": 1, "collective": 3},
        },
        "time": {
            "start_micros": 100,
            "end_micros": 191,
            "span_micros": 91,
            "longest_path_micros": 10 + 5 + 40 + 7 + 7 + 1 + 1,
        },
        "notes": [],
        "metadata": {"rank": 0, "world_size": 4, "lanes": json.loads(LANES)},
    }


def test_edge_letters_are_those_of_the_converter() -> None:
    assert [kind.name.lower().replace("_", " ") for kind in EdgeKind] == list(EDGE_KINDS.values())


def test_a_file_without_times_or_kinds_is_described() -> None:
    answer = describe(make_trace(cpu(1, 3, tid=5), kernel(2, 4, stream=20)))
    assert answer["time"]["span_micros"] is None
    assert answer["nodes_by_kind"] == answer["edges"]["by_kind"] == {}
    assert answer["notes"] == ["the file has no start times: convert with --timestamps to get a time span"]


def test_file_with_a_cycle_is_described() -> None:
    trace = known()
    trace.data_deps.values[0] = 3
    trace.types[0] = 99
    trace.duration_micros[0] = 2**64 - 1
    trace.attributes["comm_type"].values[0] = 77
    trace.metadata["lanes"] = "[" * 100_000
    answer = describe(trace)
    assert answer["time"]["longest_path_micros"] is None
    assert answer["notes"][0].startswith("no longest path: ")
    assert answer["nodes_by_type"]["type 99"] == 1
    empty = describe(make_trace())
    assert (empty["nodes"], empty["time"]["longest_path_micros"]) == (0, None)


# ---- the command ----


@pytest.fixture
def run(tmp_path: Path) -> str:
    for rank in range(2):
        et_file.write(tmp_path / f"job.{rank}.et", known(rank=rank, time="\x1b[31mred <b>한국어"))
    (tmp_path / "job_comm_groups.json").write_text('{"1": [0, 1, 2, 3]}')
    return str(tmp_path / "job")


def test_text_has_aligned_columns(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", f"{run}.0.et"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}.0.et: 8 nodes, 8 edges, {size(Path(f'{run}.0.et').stat().st_size)}"
    assert "  longest path   0.071 ms" in lines
    assert "  edge kinds     program order 2, launch 1, stream order 1, collective 3" in lines
    assert "time \\x1b[31mred <b>한국어" in "\n".join(lines), "control characters stay out of the terminal"


def test_json_lists_all_files_of_a_run(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", run, "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert [each["file"] for each in files] == [f"{run}.0.et", f"{run}.1.et"]
    assert files[1]["bytes"] == Path(f"{run}.1.et").stat().st_size
    assert files[1]["metadata"]["rank"] == 1


def test_an_unreadable_file_does_not_stop_the_others(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(f"{run}.0.et").write_bytes(b"\xff" * 40)
    assert main(["info", run]) == 1
    captured = capsys.readouterr()
    assert f"\nerror: {run}.0.et: byte 0" in captured.err
    assert f"{run}.1.et: 8 nodes" in captured.out
    assert main(["info", run, "--json"]) == 1
    files = json.loads(capsys.readouterr().out)["files"]
    assert list(files[0]) == ["file", "error"]


def test_what_the_run_lacks_is_a_warning(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run that lost files since its conversion, or hadn't finished, nothing was said."""
    Path(f"{run}_conversion.json").write_text('{"schema_version": 3, "complete": false}')
    assert main(["info", run]) == 0
    assert f"warning: {run}: its conversion hasn't finished" in capsys.readouterr().err
    main(["info", run, "--json"])
    assert any("hasn't finished" in note for note in json.loads(capsys.readouterr().out)["notes"])


def test_missing_path_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'none'}: neither a file nor")


# ---- chakra-et ----


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in COMMANDS)
    assert main([]) == 2
    assert main(["nope"]) == 2
    assert "no command 'nope'" in capsys.readouterr().err


def test_validate_imports_no_heavy_library(run: str, repo_root: Path) -> None:
    """numpy alone must be enough, and the start must be fast."""
    code = (
        "import sys; from chakra_et.__main__ import main; main(['validate', sys.argv[1]]);"
        "print([name for name in ('torch', 'scipy', 'tqdm', 'msgspec', 'google.protobuf', 'pandas')"
        " if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"{run}.0.et"], cwd=repo_root, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_closed_pipe_is_no_traceback(run: str, repo_root: Path) -> None:
    many = [f"{run}.0.et"] * 1 + [f"{run}.1.et"]
    for copy in range(300):
        path = f"{run}{copy}.0.et"
        Path(path).write_bytes(Path(many[0]).read_bytes())
        many.append(path)
    command = [sys.executable, "-m", "chakra_et", "info", *many]
    process = subprocess.Popen(
        command, cwd=repo_root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert {line.partition(" ")[0] for line in process.stderr} <= {"warning:"}  # one a run, until it notices
    process.stderr.close()
    assert process.wait(timeout=60) == 1


def test_types_outside_the_schema_have_a_name() -> None:
    trace = known()
    trace.types[:] = np.array([0, 1, 2, 3, 4, 5, 6, 200])
    names = list(describe(trace)["nodes_by_type"])
    assert names == [NodeType(value).name for value in range(7)] + ["type 200"]
