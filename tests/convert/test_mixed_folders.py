"""Folders with damaged, missing, doubled and foreign traces: nothing is dropped or joined without a word."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from chakra_et.__main__ import main
from chakra_et.convert.inputs import find_run
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.traces import discovery
from chakra_et.traces import sets as trace_sets
from tests.convert.test_together import HOST_PROCESS, STEPS, Machine
from tests.generator.hand_made import op, write_kineto

BASE_NS = 1_700_000_000 * 10**9
RANKS = 4


def machine(ranks: int = RANKS, steps: int = STEPS) -> Machine:
    return Machine([[100.0 + 10 * rank] * steps for rank in range(ranks)], [0.0] * ranks)


def write_run(
    folder: Path, names: list[str], seconds: float = 0, steps: int = STEPS, **header: Any
) -> list[Path]:
    """One run, recorded ``seconds`` after the first; rank N's trace is ``names[N]``, "" for none."""
    base = BASE_NS + int(seconds * 1e9)
    written = []
    for rank, (name, events) in enumerate(zip(names, machine(len(names), steps).events, strict=True)):
        if name:
            own = [event | {"pid": event["pid"] + HOST_PROCESS * rank} for event in events]
            header |= {"baseTimeNanoseconds": base, "traceName": name}
            written.append(write_kineto(folder / name, own, rank, len(names), **header))
    return written


def names(ranks: int = RANKS) -> list[str]:
    return [f"rank{rank}_trace.json.gz" for rank in range(ranks)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path, names())
    return tmp_path


def convert(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, list[str]]:
    """Exit status, text on stderr, and the .et files by rank."""
    status = main(["convert", str(folder), *flags])
    written = sorted(path.name for path in folder.glob("*.[0-9].et"))
    return status, capsys.readouterr().err, written


@pytest.mark.parametrize(("count", "named"), [(5, "a, b, c, d, e)"), (6, "a, b, c, d, e, …)")])
def test_of_many_runs_five_are_named(count: int, named: str, tmp_path: Path) -> None:
    for name in "abcdef"[:count]:
        write_kineto(tmp_path / f"{name}.json", [op("aten::mm", 0, 5)])
    with pytest.raises(TraceError) as caught:
        find_run([str(tmp_path)])
    assert f"files of {count} runs ({named}: give one" in str(caught.value)


@pytest.mark.parametrize("damage", ["empty", "cut at 100 bytes", "cut in its text", "unreadable", "no trace"])
def test_a_bad_file_of_one_rank_is_named(
    folder: Path, damage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = folder / "rank3_trace.json.gz"
    if damage == "unreadable":
        real = discovery.open_trace

        def refuse(path: Path) -> Any:
            if path.name == bad.name:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        monkeypatch.setattr(discovery, "open_trace", refuse)
    elif damage == "no trace":
        bad.write_text("<html>404</html>")
    else:
        length = {"empty": 0, "cut at 100 bytes": 100, "cut in its text": bad.stat().st_size // 2}[damage]
        bad.write_bytes(bad.read_bytes()[:length])
    status, text, written = convert(folder, capsys)
    assert status == 1 and "rank3_trace.json.gz: " in text
    words = {"empty": "is empty", "unreadable": "can't be read (Permission denied)", "no trace": "is neither"}
    assert words.get(damage, "") in text
    assert {f"trace.{rank}.et" for rank in range(3)} <= set(written)


def test_a_bad_tensorboard_file_without_a_rank_in_its_name_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_run(tmp_path, [f"node_{rank + 70}.17{rank}.pt.trace.json" for rank in range(3)])
    files[2].write_bytes(b"")
    status, text, written = convert(tmp_path, capsys)
    assert status == 1 and "node_72.172.pt.trace.json: is empty" in text and len(written) == 2


def test_other_json_files_are_no_problem(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "empty.json").write_text("")
    (folder / "metrics_rank9.json").write_text('{"loss": 1}')
    assert convert(folder, capsys)[0] == 0


def test_missing_ranks_of_a_run_without_host_traces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rank2_trace.json.gz").unlink()
    status, text, written = convert(folder, capsys)
    assert status == 1 and "of 4 ranks, the traces of 2 are missing" in text and len(written) == 3
    assert convert(folder, capsys, "--allow-missing-ranks")[0] == 0
    for rank in (0, 3):
        (folder / f"rank{rank}_trace.json.gz").unlink()
    status, text, _ = convert(folder, capsys)
    assert status == 0 and "note: " in text and "of 4 ranks, the traces of 0, 2-3 are missing" in text


def test_an_unpacked_copy_beside_its_gzip_does_not_split_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = folder / "rank3_trace.json.gz"
    (folder / "rank3_trace.json").write_bytes(gzip.decompress(packed.read_bytes()))
    status, text, written = convert(folder, capsys)
    assert status == 1 and written == [f"trace.{rank}.et" for rank in range(4)]
    assert "rank3_trace.json.gz are both the device trace of rank 3" in text and "remove one" in text


def test_a_rank_copied_under_the_name_of_another_does_not_split_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(folder / "rank1_trace.json.gz", folder / "rank2_trace.json.gz")
    status, text, written = convert(folder, capsys)
    assert status == 1 and written == ["trace.0.et", "trace.1.et", "trace.3.et"]
    assert "rank2_trace.json.gz are both the device trace of rank 1" in text
    assert "the traces of 2 are missing" in text


def test_two_different_traces_of_one_rank_are_a_problem(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(folder, ["", "", "", "rank3_trace.json"], seconds=0.001)
    status, text, written = convert(folder, capsys)
    assert status == 1 and len(written) == 4
    assert "rank3_trace.json.gz are both the device trace of rank 3" in text and "remove one" in text


def test_two_cycles_of_the_tensorboard_handler_are_two_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for cycle in (0, 1):
        named = [f"node_{70 + rank}.17{cycle}{rank}.pt.trace.json" for rank in range(RANKS)]
        write_run(tmp_path, named, seconds=20 * cycle)
    status, text, written = convert(tmp_path, capsys)
    assert status == 0 and len(written) == 2 * RANKS and "missing" not in text
    starts = {path.name: et_file.read(path).metadata["trace_start_ns"] for path in tmp_path.glob("*.?.et")}
    first = {name: start for name, start in starts.items() if start < BASE_NS + 10**9}
    assert len(first) == RANKS and len({name.rsplit(".", 2)[0] for name in first}) == 1


def test_a_second_cycle_that_lacks_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, [f"node_{70 + rank}.170{rank}.pt.trace.json" for rank in range(3)])
    write_run(
        tmp_path, ["", "node_71.1711.pt.trace.json", "node_72.1712.pt.trace.json"], seconds=20
    )  # fmt: skip
    status, text, written = convert(tmp_path, capsys)
    assert status == 1 and len(written) == 5 and "of 3 ranks, the traces of 0 are missing" in text


def test_the_same_file_given_twice_is_one_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = trace_sets.of_files([folder / "rank0_trace.json.gz", folder / "." / "rank0_trace.json.gz"])
    assert sorted(found.pairs) == [0]


def test_nodes_with_names_of_their_own_are_one_run(tmp_path: Path) -> None:
    write_run(tmp_path, ["n1_rank0.json", "n1_rank1.json", "n2_rank2.json", "n2_rank3.json"])
    (found,) = trace_sets.find(tmp_path)
    assert sorted(found.pairs) == [0, 1, 2, 3]


def test_two_whole_runs_of_one_size_stay_apart(tmp_path: Path) -> None:
    write_run(tmp_path, ["expA_rank0.json", "expA_rank1.json"])
    write_run(tmp_path, ["expB_rank0.json", "expB_rank1.json"], seconds=30)
    assert {found.name: sorted(found.pairs) for found in trace_sets.find(tmp_path)} == {
        "expA": [0, 1],
        "expB": [0, 1],
    }


def test_replicas_that_are_all_rank_0_of_1_stay_apart(tmp_path: Path) -> None:
    for replica in range(2):
        write_kineto(tmp_path / f"rank{replica}.json", machine(1).events[0], 0, 1, traceName=str(replica))
    assert [found.name for found in trace_sets.find(tmp_path)] == ["rank0", "rank1"]


def test_a_named_file_that_is_no_trace_is_refused(folder: Path) -> None:
    (folder / "metrics_rank9.json").write_text('{"loss": 1}')
    with pytest.raises(TraceError, match="metrics_rank9.json: is neither"):
        trace_sets.of_files(sorted(folder.iterdir()))


def test_bare_names_are_one_run_without_a_recorded_world_size(tmp_path: Path) -> None:
    for rank in range(3):
        write_kineto(tmp_path / f"rank-{rank}.json", [op("aten::add", 1, 5, rf=1)], traceName=str(rank))
    (found,) = trace_sets.find(tmp_path)
    assert sorted(found.pairs) == [0, 1, 2] and found.name == "rank"


def test_traces_of_two_runs_on_one_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As expA_rank0.json and expB_rank1.json, recorded 16 s apart by the same clock."""
    write_run(tmp_path, ["expA_rank0.json", ""], host_name="vm")
    write_run(tmp_path, ["", "expB_rank1.json"], seconds=16, host_name="vm")
    status, text, written = convert(tmp_path, capsys)
    assert status == 1 and len(written) == 2
    assert "expA_rank0.json and " in text and "expB_rank1.json were recorded 16 s apart on the same" in text


def test_ranks_that_do_not_wait_for_each_other_record_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As processes that talk by remote procedure calls only: 0.03 s apart."""
    write_run(tmp_path, ["a_rank0.json", ""], host_name="vm")
    write_run(tmp_path, ["", "a_rank1.json"], seconds=0.5, host_name="vm")
    status, text, _ = convert(tmp_path, capsys)
    assert status == 0 and "apart" not in text


@pytest.mark.parametrize(("steps", "expected"), [(STEPS, 0), (STEPS - 2, 1)])
def test_traces_apart_on_other_hosts_are_a_problem_only_with_other_collectives(
    steps: int, expected: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, ["a_rank0.json", ""], host_name="n0")
    write_run(tmp_path, ["", "a_rank1.json"], seconds=16, steps=steps, host_name="n1")
    status, text, _ = convert(tmp_path, capsys)
    assert status == expected and "were recorded 16 s apart" in text
    assert ("and their collectives differ" in text) == bool(expected)


def test_traces_years_apart_are_not_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, ["b200_eager_rank0.json", ""])
    write_run(tmp_path, ["", "dlrm_rank1.json"], seconds=800 * 86_400)
    status, text, _ = convert(tmp_path, capsys)
    assert status == 1 and "were recorded 800 days apart" in text and "not of one run" in text


def test_a_pair_left_out_by_name_is_not_found_by_content(tmp_path: Path) -> None:
    """gpt2_device.json was converted as a run gpt2_device, without its host trace."""
    for run in ("gpt2", "gpt2_quick"):
        write_run(tmp_path, [f"{run}_device.json"])
        (tmp_path / f"{run}_host.json").write_text('{"schema": "1.1.1", "nodes": []}')
    assert [traces.name for traces in trace_sets.find(tmp_path, "gpt2_*")] == ["gpt2_quick"]


def test_names_that_begin_with_the_rank_are_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, [f"rank{rank}_device.json.gz" for rank in range(RANKS)])
    status, _, written = convert(tmp_path, capsys)
    assert status == 0 and written == [f"rank.{rank}.et" for rank in range(RANKS)]


def test_a_name_without_the_rank_says_which_name_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, ["", "node1_device.json.gz"])
    status, text, _ = convert(tmp_path, capsys)
    assert status == 1 and "rename the file to node1_rank1_device.json.gz" in text


@pytest.mark.parametrize(("ranks", "status"), [("99", 2), ("4-9", 2), ("2-9", 0), ("7/16", 0)])
def test_ranks_that_are_not_there(
    folder: Path, ranks: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(folder), "--ranks", ranks]) == status
    assert ("run convert_remaining.py once all ranks are there" in capsys.readouterr().out) == (not status)
    assert main(["convert", str(folder)]) == 0
    assert "convert_remaining.py" not in capsys.readouterr().out


def test_ranks_in_the_wrong_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["convert", str(folder), "--ranks", "3-1"])
    assert stopped.value.code == 2 and "as 1-3, not 3-1" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e30"])
def test_events_without_a_usable_duration_are_a_warning(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_kineto(tmp_path / "a.json", [op("aten::add", 10 * at, 5, rf=at) for at in range(50)])
    whole = json.loads(path.read_text())
    for event in whole["traceEvents"][::7]:
        event["dur"] = "HERE"
    path.write_text(json.dumps(whole).replace('"HERE"', value))
    status, text, _ = convert(tmp_path, capsys)
    assert status == 0 and "warning: " in text and "events left out for an unusable time stamp" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["k1", "k2"], "is a folder; give files only, or one folder alone"),
        ([""], "the name of a file or folder is empty"),
        (["k1", "--dir", "k2"], "--dir k2 doesn't go with files or a folder"),
        (["k1/bad.json"], "can't be read (Permission denied)"),
        (["k1/none.json"], "no such file"),
    ],
)
def test_odd_arguments_get_one_sentence(
    given: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("k1", "k2"):
        write_run(tmp_path / name, ["bad.json"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(discovery, "open_trace", refuse)
    try:
        status: Any = main(["convert", *given])
    except SystemExit as stopped:
        status = stopped.code
    text = capsys.readouterr().err
    assert status == 2 and words in text and text.count("\n") == 1


def test_a_rank_of_seven_digits_is_not_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_kineto(tmp_path / "a.json", machine(1).events[0], 10**6, 10**7)
    status, text, _ = convert(tmp_path, capsys)
    assert status == 1 and "is rank 1000000 of 10000000; ranks must be below" in text


@pytest.mark.parametrize("command", ["replay", "report"])
def test_et_files_of_other_ranks_are_not_one_run(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(folder)]) == 0
    for name, rank in (("a.0", 0), ("a.1", 0), ("b.0", 1), ("b.1", 0)):
        shutil.copy(folder / f"trace.{rank}.et", folder / f"{name}.et")
    for name in ("a", "b"):
        assert main([command, str(folder / name)]) == 2
    text = capsys.readouterr().err
    assert "the file of rank 1 holds rank 0" in text and "the file of rank 0 holds rank 1" in text
