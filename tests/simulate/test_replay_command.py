"""``chakra-et replay``: files in, report and exit status out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chakra_et.__main__ import main as chakra_et
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.simulate.command import main
from chakra_et.simulate.measured_steps import measured_times, step_rows
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace


def one_step(step: int, begin: int, wait: int = 0) -> list[dict]:
    """100 µs on the CPU and 50 on the device, after ``wait`` µs that no node accounts for."""
    first = 10 * step
    previous = (first - 9,) if step else ()
    return [
        cpu(first, 10, previous, start=begin + wait, name=f"ProfilerStep#{step + 3}"),
        cpu(first + 1, 90, (first,), start=begin + wait + 10, name="forward"),
        kernel(first + 2, 50, (first + 1,), start=begin + wait + 100, name="kernel"),
    ]


def two_steps(wait: int = 0, **metadata: int) -> ExecutionTrace:
    return make_trace(*one_step(0, 1000), *one_step(1, 1100, wait), **metadata)


def save(path: Path, trace: ExecutionTrace) -> str:
    et_file.write(path, trace)
    return str(path)


def run_json(capsys: pytest.CaptureFixture, *argv: str) -> tuple[int, dict]:
    status = main([*argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_exact_replay(tmp_path, capsys):
    status, answer = run_json(capsys, save(tmp_path / "a.et", two_steps()), "--max-error", "0")
    assert status == answer["status"] == 0
    (job,) = answer["jobs"]
    assert set(job["replays"]) == {"device", "astra"}
    for (rank,) in job["replays"].values():
        assert rank["nodes"] == 6 and rank["measured_us"] == rank["simulated_us"] == 250
        assert rank["error_percent"] == 0 and rank["start_error_us"] == {"median": 0, "p95": 0}
        steps = [(s["name"], s["measured_us"], s["simulated_us"]) for s in rank["steps"]]
        assert steps == [("ProfilerStep#3", 150, 150), ("ProfilerStep#4", 100, 100)]


def test_unexplained_time_exceeds_max_error(tmp_path, capsys):
    # 25 µs before the second step are in the measurement (275 µs) and not in the graph (250 µs).
    name = save(tmp_path / "a.et", two_steps(wait=25))
    status, answer = run_json(capsys, name, "--semantics", "device", "--max-error", "9")
    (rank,) = answer["jobs"][0]["replays"]["device"]
    assert status == 1 and rank["error_percent"] == pytest.approx(-100 * 25 / 275)
    assert [step["measured_us"] for step in rank["steps"]] == [150, 125]
    assert rank["start_error_us"] == {"median": 12.5, "p95": 25}
    assert "rank 0 (device) is off by -9.09%, more than 9%" in answer["jobs"][0]["notes"]
    assert main([name, "--max-error", "9.2"]) == 0
    assert main([name]) == 0


def test_text_report(tmp_path, capsys):
    assert main([save(tmp_path / "a.et", two_steps(wait=25)), "--max_error=1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("a.et:") and lines[1].split()[:2] == ["semantics", "rank"]
    times = ["0.275", "0.250", "-9.09", "-20.00", "12.5", "(25.0)"]
    assert lines[2].split() == ["device", "0", "6", *times, "0.000", "0.000", "0.0"]
    assert lines[3].split() == ["ProfilerStep#3", "0.150", "0.150", "+0.00"]
    assert lines[5].split()[0] == "astra"
    assert "note: rank 0 (astra) is off by -9.09%, more than 1%" in lines


def test_module_command(tmp_path, repo_root):
    name = save(tmp_path / "a.et", two_steps(wait=25))
    command = [sys.executable, "-m", "chakra_et", "replay", name, "--max-error"]
    assert subprocess.run([*command, "10"], cwd=repo_root, capture_output=True).returncode == 0
    assert subprocess.run([*command, "9"], cwd=repo_root, capture_output=True).returncode == 1
    assert subprocess.run([*command, "x"], cwd=repo_root, capture_output=True).returncode == 2


def test_measured_end_from_the_metadata(tmp_path, capsys):
    name = save(tmp_path / "a.et", two_steps(measured_end_micros=1300))
    _, answer = run_json(capsys, name)
    assert answer["jobs"][0]["replays"]["astra"][0]["measured_us"] == 300


def test_trace_without_steps_is_one_span(tmp_path, capsys):
    _, answer = run_json(
        capsys, save(tmp_path / "a.et", make_trace(cpu(1, 5, start=7), cpu(2, 9, (1,), start=12)))
    )
    (rank,) = answer["jobs"][0]["replays"]["device"]
    assert rank["steps"] == [] and rank["measured_us"] == rank["simulated_us"] == 14


def test_file_without_start_times(tmp_path, capsys):
    nodes = [{**node, "start": 0} for node in one_step(0, 0)]
    name = save(tmp_path / "a.et", make_trace(*nodes))
    status, answer = run_json(capsys, name)
    (rank,) = answer["jobs"][0]["replays"]["device"]
    assert status == 0 and rank["measured_us"] is None and rank["simulated_us"] == 150
    assert any("no start times" in note for note in answer["jobs"][0]["notes"])
    # Nothing measured is no proof.
    assert main([name, "--max-error", "5"]) == 1
    assert "no measured time" in capsys.readouterr().out


def rank_files(folder: Path, prefix: str = "run") -> list[str]:
    """Two ranks; rank 1 is 40 µs late, so rank 0's collective lasted 45 µs and rank 1's 5 µs."""

    def rank(work: int, wait: int) -> ExecutionTrace:
        return make_trace(cpu(1, work, start=1), collective(2, wait, (1,), start=1 + work))

    return [save(folder / f"{prefix}.{r}.et", t) for r, t in enumerate([rank(10, 45), rank(50, 5)])]


@pytest.mark.parametrize("by", ["prefix", "files"])
def test_ranks_with_one_prefix_are_replayed_together(tmp_path, capsys, by):
    files = rank_files(tmp_path)
    status, answer = run_json(capsys, *([str(tmp_path / "run")] if by == "prefix" else files))
    (job,) = answer["jobs"]
    assert status == 0 and list(job["files"]) == ["0", "1"]
    for ranks in job["replays"].values():
        assert [(rank["rank"], rank["simulated_us"], rank["error_percent"]) for rank in ranks] == [
            (0, 55, 0),
            (1, 55, 0),
        ]


def test_copy_of_rank_0_is_not_replayed_twice(tmp_path, capsys):
    files = rank_files(tmp_path)
    copy = tmp_path / "run.et"
    copy.write_bytes(Path(files[0]).read_bytes())
    _, answer = run_json(capsys, str(copy), *files)
    assert len(answer["jobs"]) == 1
    save(copy, two_steps())
    _, answer = run_json(capsys, str(copy), *files)
    assert len(answer["jobs"]) == 2


def test_prefix_of_a_single_file(tmp_path, capsys):
    save(tmp_path / "only.et", two_steps())
    assert main([str(tmp_path / "only")]) == 0


def test_comm_groups_beside_the_files_are_used(tmp_path, capsys):
    rank_files(tmp_path)
    groups = tmp_path / "run_comm_groups.json"
    groups.write_text('{"1": [0, 1, 2, 3]}')
    _, answer = run_json(capsys, str(tmp_path / "run"))
    assert any("not given" in note for note in answer["jobs"][0]["notes"])
    groups.write_text('{"1": [0, 1]}')
    _, answer = run_json(capsys, str(tmp_path / "run"))
    assert not any("not given" in note for note in answer["jobs"][0]["notes"])


def test_ranks_that_disagree_are_reported(tmp_path, capsys):
    files = rank_files(tmp_path)
    save(Path(files[1]), make_trace(cpu(1, 10)))
    (tmp_path / "run_comm_groups.json").write_text('{"1": [0, 1]}')
    assert main([str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "collective 1 of group 1 (rank 0 at node 2 'n2') waits for rank 1, which has 0 of them" in error
    assert error.count("\n") == 1


def test_a_gap_between_operators_launches_no_work_from_before_the_recording(tmp_path, capsys):
    """Of three steps of 80 ms, two took 0: gloo took up an all-reduce of the last one after its call."""
    nodes = [
        cpu(1, 50, start=1, name="ProfilerStep#3"),
        collective(2, 20, (1,), start=51, lane=8),
        cpu(3, 50, (1,), start=51, name="forward"),
        cpu(4, 10, (3,), start=101, name="ProfilerStep#4"),
        cpu(5, 40, (4,), start=111, kind="host-overhead"),
        collective(6, 50, (5,), start=151, lane=8),
        cpu(7, 50, (5,), start=151, name="forward"),
    ]
    _, answer = run_json(capsys, save(tmp_path / "a.et", make_trace(*nodes)), "--semantics", "device")
    (rank,) = answer["jobs"][0]["replays"]["device"]
    assert [step["measured_us"] for step in rank["steps"]] == [100, 100]


def test_ranks_that_only_astra_sim_cannot_replay_still_have_the_replay_of_the_device(tmp_path, capsys):
    """gloo's threads took up the all-reduces of two groups in one order on rank 0, in the other on rank 1."""
    for rank, numbers in enumerate([("1", "2"), ("2", "1")]):
        nodes = [collective(at, 10, (), number, stream=at) for at, number in enumerate(numbers, 1)]
        save(tmp_path / f"run.{rank}.et", make_trace(*nodes))
    (tmp_path / "run_comm_groups.json").write_text('{"1": [0, 1], "2": [0, 1]}')
    name = str(tmp_path / "run")
    status, answer = run_json(capsys, name)
    (job,) = answer["jobs"]
    assert status == 0 and [rank["simulated_us"] for rank in job["replays"]["device"]] == [10, 10]
    assert set(job["replays"]) == {"device"}
    (note,) = (note for note in job["notes"] if note.startswith("no replay as ASTRA-sim issues nodes"))
    assert "waits for rank 1, which never gets there" in note and "chakra-et astra, give them one" in note
    for asked in (["--semantics", "astra"], ["--max-error", "5"]):
        assert main([name, *asked]) == 2
        assert "they issue them in different orders" in capsys.readouterr().err


def test_one_bad_file_does_not_stop_the_others(tmp_path, capsys):
    (tmp_path / "bad.et").write_bytes(b"\xff" * 40)
    status, answer = run_json(capsys, str(tmp_path / "bad.et"), save(tmp_path / "good.et", two_steps()))
    assert status == 2
    assert "error" in answer["jobs"][0] and answer["jobs"][1]["replays"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: NAME"),
        (["x", "--max-error", "nan"], "--max-error"),
        (["x", "--max-error", "-1"], "--max-error"),
        (["x", "--semantics", "other"], "--semantics"),
    ],
)
def test_bad_arguments(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[1]", '{"1": []}', '{"1": ["a"]}', '{"1": 3}', "[" * 100_000])
def test_bad_comm_groups(tmp_path, capsys, content):
    rank_files(tmp_path)
    (tmp_path / "run_comm_groups.json").write_text(content)
    assert chakra_et(["replay", str(tmp_path / "run")]) == 2
    assert "groups.json" in capsys.readouterr().err


def test_unusable_names(tmp_path, capsys):
    assert chakra_et(["replay", str(tmp_path / "absent")]) == 2
    assert "neither a file nor the NAME" in capsys.readouterr().err
    rank_files(tmp_path)
    (tmp_path / "run.01.et").write_bytes((tmp_path / "run.1.et").read_bytes())
    assert chakra_et(["replay", str(tmp_path / "run")]) == 2
    assert "both rank 1" in capsys.readouterr().err


def test_names_with_odd_characters(tmp_path, capsys):
    folder = tmp_path / "a [b] 한글"
    folder.mkdir()
    rank_files(folder, "run*?")
    _, answer = run_json(capsys, str(folder / "run*?"))
    assert len(answer["jobs"][0]["files"]) == 2


def test_step_begins_with_its_first_node():
    step = "ProfilerStep#12"
    trace = make_trace(
        cpu(5, 1, start=30, name=step),
        cpu(1, 1, start=10, name=step),
        cpu(2, 1, start=5, name="ProfilerStep#7"),
    )
    names, rows = step_rows(trace)
    assert names == ["ProfilerStep#7", "ProfilerStep#12"] and rows.tolist() == [2, 1]
    starts, end = measured_times(trace)
    assert starts.tolist() == [25_000, 5_000, 0] and end == 26_000


# ---- files of other writers ----


def write_foreign(path: Path, nodes: list[dict]) -> str:
    """An .et file made by mlc-chakra's own protobuf classes."""
    schema = pytest.importorskip(
        "chakra.schema.protobuf.et_def_pb2", reason="mlc-chakra is not installed: ./run_tests.sh installs it"
    )
    varint = pytest.importorskip("google.protobuf.internal.encoder")._VarintBytes
    messages = [schema.GlobalMetadata(version="0.0.4")]
    for fields in nodes:
        node = schema.Node()
        for name in ("id", "name", "type", "duration_micros"):
            setattr(node, name, fields[name])
        node.data_deps.extend(fields.get("data_deps", ()))
        node.ctrl_deps.extend(fields.get("ctrl_deps", ()))
        for name, (kind, value) in fields.get("attr", {}).items():
            setattr(node.attr.add(name=name), kind, value)
        messages.append(node)
    payloads = [message.SerializeToString() for message in messages]
    path.write_bytes(b"".join(varint(len(payload)) + payload for payload in payloads))
    return str(path)


def foreign_ranks(folder: Path) -> None:
    for rank in range(2):
        on_cpu = {"is_cpu_op": ("bool_val", True), "tid": ("int64_val", 3)}
        on_gpu = {"is_cpu_op": ("bool_val", False), "stream": ("int64_val", 7)}
        comm = {
            **on_gpu,
            "comm_type": ("int64_val", 0),
            "comm_size": ("uint64_val", 64),
            "pg_name": ("string_val", "0"),
        }
        nodes = [
            {"id": 7, "name": "op", "type": NodeType.COMP, "duration_micros": 20, "attr": on_cpu},
            {
                "id": 3,
                "name": "k",
                "type": NodeType.COMP,
                "duration_micros": 5,
                "data_deps": [7],
                "attr": on_gpu,
            },
            {
                "id": 9,
                "name": "c",
                "type": NodeType.COMM_COLL,
                "duration_micros": 30 - rank,
                "ctrl_deps": [3],
                "attr": comm,
            },
        ]
        write_foreign(folder / f"foreign.{rank}.et", nodes)


def test_foreign_files(tmp_path, capsys):
    foreign_ranks(tmp_path)
    status, answer = run_json(capsys, str(tmp_path / "foreign"))
    assert status == 0
    for ranks in answer["jobs"][0]["replays"].values():
        assert [rank["simulated_us"] for rank in ranks] == [54, 54]
    assert any("no start times" in note for note in answer["jobs"][0]["notes"])
