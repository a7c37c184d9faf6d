"""Grouping trace files by run and rank, the choice of ranks, and manifests."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from chakra_et.convert import rank as convert_rank
from chakra_et.convert.pair import PairOptions
from chakra_et.convert.rank import RankJob
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.files import MOST_BYTES
from chakra_et.traces import sets as trace_sets
from tests.generator import Features, generate


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("", [0, 1, 2, 3]), ("1", [1]), ("0-1, 3", [0, 1, 3]), ("1/2", [1, 3]), ("0/1", [0, 1, 2, 3])],
)
def test_rank_choice(text: str, ranks: list[int]) -> None:
    chosen = trace_sets.rank_choice(text)
    assert [rank for rank in range(4) if chosen(rank)] == ranks


@pytest.mark.parametrize("text", ["x", "3/3", "1-", "-1", "1/0", "0-2;5", "1/2/3", "٣"])
def test_invalid_rank_choice(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        trace_sets.rank_choice(text)


def named(folder: Path, *names: str) -> list[trace_sets.TraceSet]:
    for name in names:
        (folder / name).write_text("{}")
    return trace_sets.find(folder)


def test_run_and_rank_from_file_names(tmp_path: Path) -> None:
    names = ("a_host.json", "a_device.json.gz", "a_rank3_host.json", "a_rank3_device.json", "b.json")
    (one,) = named(tmp_path, *names)
    assert one.name == "a" and sorted(one.pairs) == [0, 3] and one.ranks_here == 4
    assert one.et_file(3).name == "a.3.et" and one.first_et_file.name == "a.et"


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such folder"):
        trace_sets.find(tmp_path / "none")
    with pytest.raises(TraceError, match="no trace matches"):
        trace_sets.find(tmp_path)
    named(tmp_path, "a_host.json")
    with pytest.raises(TraceError, match="no trace matches 'b'"):
        trace_sets.find(tmp_path, "b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "Expected `object`, got `array`"),
        ("{", "not a readable manifest"),
        ("[" * 100_000, "not a readable manifest"),
    ],
)
def test_invalid_manifest_is_reported(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a_manifest.json").write_text(text)
    (one,) = named(tmp_path, "a_host.json", "a_device.json")
    assert len(one.problems) == 1 and words in one.problems[0] and "remove it" in one.problems[0]
    assert one.manifest == trace_sets.Manifest() and not one.manifest.groups(0)


def test_huge_manifest_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a_manifest.json").open("wb") as file:
        file.write(b'{"world_size": 2}')
        file.truncate(MOST_BYTES + 1)
    (one,) = named(tmp_path, "a_host.json", "a_device.json")
    assert "is larger than 64 MiB" in one.problems[0] and one.manifest.world_size == 0


def test_values_of_the_wrong_type_in_a_manifest_are_not_used(tmp_path: Path) -> None:
    manifest = {
        "world_size": "2",
        "process_groups": [{"name": "0", "ranks": [0]}, {"no": "name"}, 7],
        "ranks": [{"rank": 0, "host": "n0", "pid": 5}, {"rank": "1", "host": 3}, None],
    }
    (tmp_path / "a_manifest.json").write_text(json.dumps(manifest))
    (one,) = named(tmp_path, "a_host.json", "a_device.json")
    found = one.manifest
    assert found.world_size == 0 and [group["pg_name"] for group in found.groups(0)] == ["0"]
    assert [found.of_rank(rank, "host", str, "") for rank in (0, 1)] == ["n0", ""]
    assert found.of_rank(0, "pid", int, 0) == 5 and found.of_rank(0, "pid", str, "") == ""


@pytest.fixture
def job(tmp_path: Path) -> RankJob:
    generate(Features(seed=1, operators=2, depth=2, world_size=1)).write(tmp_path)
    (traces,) = trace_sets.find(tmp_path)
    return RankJob(traces.pairs[0], traces.et_file(0), tmp_path, PairOptions(), keep=True)


def test_a_valid_file_of_these_traces_is_kept(job: RankJob) -> None:
    first = convert_rank.convert_rank(job)
    again = convert_rank.convert_rank(job)
    assert not first.kept and again.kept
    assert again.report.as_dict() == first.report.as_dict() and again.groups == first.groups


@pytest.mark.parametrize("change", ["flags", "newer trace", "other trace", "damaged", "older version"])
def test_any_other_file_is_converted_again(job: RankJob, change: str) -> None:
    convert_rank.convert_rank(job)
    if change == "flags":
        job = dataclasses.replace(job, options=PairOptions(timestamps=False))
    elif change == "newer trace":
        os.utime(job.pair.host, (2e9, 2e9))
    elif change == "other trace":
        times = job.pair.host.stat()
        job.pair.host.write_bytes(job.pair.host.read_bytes() + b" ")
        os.utime(job.pair.host, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif change == "damaged":
        job.output.write_bytes(job.output.read_bytes()[:-3])
    elif change == "older version":
        trace = et_file.read(job.output)
        del trace.metadata["trace_bytes"]
        et_file.write(job.output, trace)
    assert not convert_rank.convert_rank(job).kept
