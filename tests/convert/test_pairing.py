"""Traces that do not belong together are reported with both files and the first difference."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from chakra_et.convert.pair import PairOptions, convert_pair
from chakra_et.convert.runs import RunOptions, SetResult, convert_sets
from chakra_et.errors import TraceError
from chakra_et.traces import sets as trace_sets
from chakra_et.traces.sets import Pair
from tests.generator import Features, generate

GLOO = {"gloo": ("allreduce", "broadcast", "allreduce"), "devices": 0, "operators": 2, "depth": 2}


def write(folder: Path, rank: int = 0, world_size: int = 2, **features) -> tuple[Path, Path]:
    made = generate(Features(**({"seed": 3, "rank": rank, "world_size": world_size} | GLOO | features)))
    made.host["pid"] = 1000 + rank
    for event in made.device["traceEvents"]:
        if isinstance(event.get("pid"), int):
            event["pid"] = 1000 + rank
    return made.write(folder)


def convert(folder: Path, **options) -> SetResult:
    pair = PairOptions(allow_unlinked=options.pop("allow_unlinked", False))
    (result,) = convert_sets(trace_sets.find(folder), pair, RunOptions(workers=0, **options))
    return result


def edit(path: Path, change: Callable[[dict], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def two_ranks(folder: Path) -> dict[int, tuple[Path, Path]]:
    return {rank: write(folder, rank) for rank in (0, 1)}


def only_problem(result: SetResult) -> str:
    assert result.failed and len(result.problems) == 1, result.problems
    return result.problems[0]


def test_two_ranks_of_one_run_pass(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    result = convert(tmp_path)
    assert not result.failed and result.problems == [] and len(result.good) == 2


def test_host_and_device_of_two_processes(tmp_path: Path) -> None:
    host, device = write(tmp_path)
    edit(host, lambda document: document.update(pid=77))
    with pytest.raises(TraceError) as caught:
        convert_pair(Pair(0, host, device))
    text = str(caught.value)
    assert str(host) in text and str(device) in text
    assert "host trace is from process 77, the device trace from process 1000" in text
    converted = convert_pair(Pair(0, host, device), PairOptions(allow_unlinked=True))
    assert converted.report.link_rate == 1.0


def test_host_and_device_of_two_steps(tmp_path: Path) -> None:
    host, device = write(tmp_path)

    def another_step(document: dict) -> None:
        for node in document["nodes"]:
            node["name"] = node["name"].replace("ProfilerStep#", "ProfilerStep#9")
            for attr in node["attrs"]:
                if attr["name"] == "rf_id" and attr["value"]:
                    attr["value"] += 10**6

    edit(host, another_step)
    with pytest.raises(
        TraceError, match=r"the first covers ProfilerStep#9\d* and the second ProfilerStep#\d"
    ):
        convert_pair(Pair(0, host, device))


def test_equal_ids_with_different_names_report_the_first_difference(tmp_path: Path) -> None:
    host, device = write(tmp_path)

    def rename(document: dict) -> None:
        for node in document["nodes"]:
            if node["name"].startswith("aten::"):
                node["name"] = "other::" + node["name"]

    edit(host, rename)
    match = r"record function \d+ is 'other::aten::\w+' in the first and 'aten::\w+' in the second"
    with pytest.raises(TraceError, match=match):
        convert_pair(Pair(0, host, device))


def test_ranks_that_differ_in_the_number_of_collectives(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1, gloo=("allreduce", "broadcast"))
    sentence = only_problem(convert(tmp_path))
    assert "run.0.et" in sentence and "run.1.et" in sentence and "[collective-count]" in sentence


def test_ranks_that_differ_in_the_order_of_collectives(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1, gloo=("allreduce", "allreduce", "broadcast"))
    sentence = " ".join(convert(tmp_path).problems)
    assert re.search(
        r"run\.1\.et: node \d+ 'gloo:broadcast': collective \d of group 1 is BROADCAST", sentence
    )
    assert re.search(r"ALL_REDUCE of \d+ bytes \(node \d+ 'gloo:all_reduce'\) in .*run\.0\.et", sentence)
    assert "run.0.et" in sentence and "run.1.et" in sentence


def test_ranks_that_differ_in_the_size_of_a_collective(tmp_path: Path) -> None:
    paths = two_ranks(tmp_path)
    edit(paths[1][0], lambda document: _halve_tensors(document))
    sentence = " ".join(convert(tmp_path).problems)
    assert "[collective-size]" in sentence and "run.0.et" in sentence and "run.1.et" in sentence


def _halve_tensors(document: dict) -> None:
    def halve(value):
        if isinstance(value, list):
            if len(value) == 6 and isinstance(value[5], str):  # a tensor; its fourth number are its elements
                return [*value[:3], max(1, value[3] // 2), *value[4:]]
            return [halve(inner) for inner in value]
        return value

    for node in document["nodes"]:
        node["inputs"]["values"] = halve(node["inputs"]["values"])


def test_ranks_that_differ_in_a_group(tmp_path: Path) -> None:
    paths = two_ranks(tmp_path)
    for rank, members in ((0, [0, 1]), (1, [0, 1, 2])):
        for path in paths[rank]:
            edit(path, lambda document, m=members: _set_groups(document, m))
    sentences = " ".join(convert(tmp_path, allow_missing_ranks=True).problems)
    assert "process group '0' has ranks" in sentences and "not from one run" in sentences
    assert all(path.name in sentences for path in (paths[0][1], paths[1][1]))


def _set_groups(document: dict, members: list[int]) -> None:
    group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cpu:gloo", "ranks": members,
             "group_size": len(members), "group_count": 1}  # fmt: skip
    if "traceEvents" in document:
        document["distributedInfo"] |= {"world_size": len(members), "pg_config": [group]}
    else:
        for node in document["nodes"]:
            if node["name"] == "## process_group:init ##":
                node["inputs"]["values"] = [json.dumps([group])]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_rank(tmp_path: Path, missing: int) -> None:
    for path in two_ranks(tmp_path)[missing]:
        path.unlink()
    sentence = only_problem(convert(tmp_path))
    assert f"of 2 ranks, the traces of {missing} are missing" in sentence
    result = convert(tmp_path, allow_missing_ranks=True)
    assert not result.failed and any(f"of {missing} are missing" in note for note in result.notes)


def test_a_rank_with_only_one_of_its_traces(tmp_path: Path) -> None:
    paths = two_ranks(tmp_path)
    paths[1][1].unlink()
    result = convert(tmp_path)
    assert "rank 1 has no device trace beside it" in str(result.ranks[1]) and result.failed
    assert not convert(tmp_path, allow_missing_ranks=True).failed


def test_the_same_rank_twice(tmp_path: Path) -> None:
    """A copy of rank 0 under the name of rank 1, with and without a rank inside."""
    host, device = write(tmp_path)
    for path in (host, device):
        kind = path.name.rsplit("_", 1)[1]
        shutil.copy(path, tmp_path / f"run_rank1_{kind}")
    result = convert(tmp_path)
    assert "is rank 1 by its name and rank 0 by its distributedInfo" in str(result.ranks[1])
    for path in (device, tmp_path / "run_rank1_device.json"):
        edit(path, lambda document: document["distributedInfo"].pop("rank"))
    result = convert(tmp_path)
    assert any("traces of the same process, 1000" in problem for problem in result.problems)


def test_a_host_trace_of_our_scheme_beside_one_of_pytorch(tmp_path: Path) -> None:
    """run_host.json with run.pt.trace.json was a rank without a device trace, and another run left out."""
    host, device = write(tmp_path, world_size=1)
    device = device.rename(tmp_path / "run.pt.trace.json")
    result = convert(tmp_path)
    assert not result.failed and not result.warnings and result.traces.name == "run"
    assert result.traces.pairs[0].files == [host, device]
    assert result.good[0].report.link_rate == 1.0


def test_two_files_for_one_trace(tmp_path: Path) -> None:
    host, _ = write(tmp_path, world_size=1)
    shutil.copy(host, tmp_path / "run_rank0_host.json")
    sentence = " ".join(convert(tmp_path).problems)
    assert "are both the host trace of rank 0; remove one" in sentence


def test_world_sizes_that_differ(tmp_path: Path) -> None:
    write(tmp_path, 0, world_size=2)
    write(tmp_path, 1, world_size=4)
    sentences = " ".join(convert(tmp_path, allow_missing_ranks=True).problems)
    assert "from a run of 4 ranks" in sentences and "a run of 2" in sentences


def test_a_manifest_of_another_run(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    manifest = tmp_path / "run_manifest.json"
    manifest.write_text(json.dumps({"world_size": 2, "ranks": [{"rank": 1, "pid": 5}]}))
    sentence = only_problem(convert(tmp_path))
    assert "run_manifest.json lists process 5 for rank 1" in sentence and "process 1001" in sentence
    manifest.write_text(json.dumps({"world_size": 8}))
    result = convert(tmp_path)
    for refused in result.ranks.values():
        assert "world size is 2 in its distributedInfo and 8 in the manifest" in str(refused)
