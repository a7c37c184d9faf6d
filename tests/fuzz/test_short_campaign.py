"""A short run of the campaign, and that its judge and its mutations are awake."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from random import Random

import pytest

from chakra_et.convert import rank as convert_rank
from chakra_et.et import file as et_file
from tests.fuzz import bases, campaign, judge, kills, mutations
from tests.fuzz.campaign import CampaignConfig


def test_no_mutated_run_ends_in_anything_but_a_file_or_a_sentence() -> None:
    outcomes, wrongs = campaign.campaign(CampaignConfig(inputs=60, seed=1, workers=2))
    assert wrongs == []
    assert sum(outcomes.values()) == 60 and outcomes["converted"] > 10 and outcomes["refused"] > 2


@pytest.mark.slow
def test_a_longer_campaign() -> None:
    _, wrongs = campaign.campaign(CampaignConfig(inputs=3_000, seed=2, workers=2))
    assert wrongs == []


def test_an_input_is_known_by_its_number(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        campaign.make(5, 17, tmp_path / folder)
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / f).iterdir()} for f in ("one", "two"))
    assert one == two and one


@pytest.mark.parametrize(
    "change", [*mutations.BYTES, *mutations.FIELDS, *mutations.FILES], ids=lambda f: f.__name__
)
def test_every_mutation_changes_something(change) -> None:
    """Not in each draw: a flag or a place may leave the text as it was."""
    name, run = bases.bases()[0]
    for draw in range(20):
        mutated = dict(run)
        if change in mutations.FILES:
            change(Random(draw), mutated)
        elif change in mutations.BYTES:
            mutated["run_host.json"] = change(Random(draw), mutated["run_host.json"])
        else:
            document = json.loads(mutated["run_device.json"])
            change(Random(draw), document)
            mutated["run_device.json"] = json.dumps(document).encode()
            if document == json.loads(run["run_device.json"]):
                continue
        if mutated != run:
            return
    # Only fields of host nodes hold parents.
    assert change is mutations.cyclic_parents, name


@pytest.fixture
def good_run(tmp_path: Path) -> Path:
    for name, text in dict(bases.bases())["original_stream"].items():
        (tmp_path / name).write_bytes(text)
    return tmp_path


def test_the_judge_finds_nothing_in_a_good_run(good_run: Path) -> None:
    assert judge.judge(good_run, allow=True) == ("converted", "")


def test_the_judge_takes_device_work_of_an_unknown_category_for_work(good_run: Path) -> None:
    path = good_run / "run_device.json"
    # The judge counts the device's work only where no communication and no event left out blur the count.
    text = path.read_bytes().replace(b"nccl", b"work").replace(b"news_of_2031", b"overhead")
    path.write_bytes(text.replace(b'"kernel"', b'"npu_core"', 1))
    assert judge.judge(good_run, allow=True) == ("converted", "")


@pytest.mark.parametrize("defect", ["shorter", "lost event", "longer", "internal error"])
def test_the_judge_sees_a_defect(good_run: Path, defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converter with each kind of defect is found out."""
    write = et_file.write

    def bad_write(path, trace):
        if defect == "shorter":
            trace.duration_micros[len(trace) // 2 :] = 0
        if defect == "longer":
            trace.duration_micros *= 3
        write(path, trace)

    def bad_result(job, trace, report, groups):
        if defect == "lost event":
            report.events_in -= 1
            report.events_kept -= 1
        if defect == "internal error":
            raise KeyError("a defect")
        return result(job, trace, report, groups)

    result = convert_rank._result
    monkeypatch.setattr(et_file, "write", bad_write)
    monkeypatch.setattr(convert_rank, "_result", bad_result)
    _, wrong = judge.judge(good_run, allow=True)
    assert wrong


def test_damaged_inputs_of_the_other_commands_end_in_a_result_or_a_sentence() -> None:
    outcomes, wrongs = campaign.campaign(CampaignConfig(of="commands", inputs=50, seed=4, processes=2))
    assert wrongs == []
    assert sum(outcomes.values()) == 50 and outcomes["exit status 0"] > 4 < outcomes["exit status 2"]


def test_killed_commands_leave_old_files_or_new_ones() -> None:
    assert kills.kills(kills.KillsConfig(kills=2, seed=3)) == []


def test_a_killed_conversion_of_records_leaves_nothing_after_the_next(tmp_path: Path) -> None:
    """Its hidden folder stayed, as only conversions of traces removed those of killed processes."""
    words = ["convert", str(kills.RECORDS), "-o", str(tmp_path)]
    assert kills.in_a_fork(words, last=8)[0] == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert kills.in_a_fork(words)[0] == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert kills.content(tmp_path)


@pytest.mark.parametrize("defect", ["half a file", "a part of the run", "lost"])
def test_the_judge_of_kills_sees_a_defect(defect: str) -> None:
    old, new = {"run.0.et": b"1"}, {"run.0.et": b"2", "run.1.et": b"3"}
    left = {
        "half a file": {"run.0.et": b""},
        "a part of the run": {"run.0.et": b"1", "run.1.et": b"3"},
        "lost": {},
    }[defect]
    assert kills.wrong(left, old, new, lambda: 0)
    assert not kills.wrong(new, old, new, lambda: 0) and not kills.wrong(old, old, new, lambda: 0)


@pytest.mark.parametrize(("works", "outcome"), [(0, "hung"), (1, "converted")])
def test_a_run_that_gets_on_is_not_given_up(
    works: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the campaign called 4 runs of 430 hung that were only slow."""

    def slow() -> tuple[str, str]:
        for _ in range(30):
            time.sleep(0.1 if works else 10)
            sum(range(1_000_000 * works))
        return "converted", ""

    monkeypatch.setattr(campaign, "PATIENCE", 0.5)
    monkeypatch.setattr(campaign, "prepare", lambda *_: ("slow", slow))
    (found,) = campaign.results(CampaignConfig(inputs=1, seconds=4))
    assert found[1] == outcome
