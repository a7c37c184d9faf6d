"""Communicators that no trace records are matched between ranks, whose streams don't tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chakra_et.__main__ import main
from chakra_et.et import file as et_file
from tests.generator.hand_made import annotation, call, kernel, write_kineto

NAME = "ncclKernel_AllReduce_RING_LL_Sum_float(x)"


def rank_with(
    collectives: list[tuple[float, float, int, int]], rank: int, world: int, folder: Path, clock: float = 0.0
) -> None:
    """A rank's trace as PyTorch before 2.2 wrote it. ``collectives``: start, end, elements and stream."""
    events: list[dict[str, Any]] = []
    for number, (start, end, elements, stream) in enumerate(collectives, 1):
        shapes = {"Input Dims": [[elements]], "Input type": ["float"]}
        events += [
            annotation("nccl:all_reduce", start - 20, 10) | {"args": shapes},
            call("cudaLaunchKernel", start - 18, 5, number),
            kernel(NAME, start, end - start, number, stream=stream),
        ]
    for event in events:
        event["ts"] += clock
        event["pid"] = event["pid"] if event["cat"] == "kernel" else 100 + rank
    write_kineto(folder / f"run_rank{rank}.json", events, rank, world, baseTimeNanoseconds=10**18)


def groups_of(folder: Path, rank: int) -> list[tuple[str, str]]:
    """(id, name) of the group of each collective, by time."""
    trace = et_file.read(folder / f"run.{rank}.et").communication()
    columns = (trace.attributes[name].values for name in ("pg_name", "pg_original_name"))
    return list(zip(*([column[row] for row in range(len(trace))] for column in columns), strict=True))


@pytest.mark.parametrize("clock", [0.0, 5e6], ids=["one clock", "clocks 5 s apart"])
def test_sampled_ranks_0_and_1_of_128_whose_streams_differ(
    clock: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has its first collective on stream 84 with rank 1, rank 1 an earlier one with ranks not here."""
    pair = [(1000.0 + 500 * at, 1300.0 + 500 * at, 4096) for at in range(6)]
    others = [(1350.0 + 500 * at, 1450.0 + 500 * at, 64) for at in range(6)]
    zero = sorted([(*each, 84) for each in pair] + [(*each, 88) for each in others])
    one = sorted(
        [(s + 60, e, n, 88) for s, e, n in pair] + [(s - 390, e - 390, 512, 84) for s, e, _ in others]
    )
    rank_with(zero, 0, 128, tmp_path)
    rank_with(one, 1, 128, tmp_path, clock)
    assert main(["convert", str(tmp_path), "--allow-missing-ranks"]) == 0
    assert "12 collectives without a recorded group were matched between ranks" in capsys.readouterr().err
    of_zero, of_one = groups_of(tmp_path, 0), groups_of(tmp_path, 1)
    assert of_zero[::2] == of_one[1::2] and {name for _, name in of_zero[::2]} == {"communicator 0"}
    assert not set(of_zero[1::2]) & set(of_one[::2])
    recorded = json.loads((tmp_path / "run_comm_groups.json").read_text())
    assert {number for number, _ in (*of_zero, *of_one)} <= set(recorded)
    # What is converted already has its groups: nothing changes.
    before = (tmp_path / "run.1.et").read_bytes()
    assert main(["convert", str(tmp_path), "--allow-missing-ranks"]) == 0
    assert (tmp_path / "run.1.et").read_bytes() == before


def test_pairs_of_four_ranks_have_their_members(tmp_path: Path) -> None:
    """Tensor parallelism of ranks 0, 1 and of 2, 3: equal sizes, told apart by when they end."""
    everyone = [(900.0 + 1000 * at, 1100.0 + 1000 * at, 8192) for at in range(4)]
    for rank in range(4):
        later = [float(rank // 2) * each for each in (30, 90, -20, 150)]
        pair = [(s - 500 + d, e - 500 + d, 4096) for (s, e, _), d in zip(everyone, later, strict=True)]
        streams = (20, 24) if rank % 2 else (24, 20)
        rank_with(
            sorted([(*each, streams[0]) for each in everyone] + [(*each, streams[1]) for each in pair]),
            rank, 4, tmp_path,
        )  # fmt: skip
    assert main(["convert", str(tmp_path)]) == 0
    groups = json.loads((tmp_path / "run_comm_groups.json").read_text())
    for rank, members in enumerate(([0, 1], [0, 1], [2, 3], [2, 3])):
        of_rank = [groups[number] for number, _ in groups_of(tmp_path, rank)]
        assert of_rank[0::2] == [members] * 4 and of_rank[1::2] == [[0, 1, 2, 3]] * 4
    assert main(["replay", str(tmp_path / "run")]) == 0
    assert main(["validate", str(tmp_path / "run")]) == 0


def test_a_communicator_of_one_rank_alone_keeps_the_ranks_that_were_assumed(tmp_path: Path) -> None:
    """With the traces of all ranks there, nothing tells who its other members are."""
    for rank, (elements, stream) in enumerate(((64, 24), (512, 28))):
        alone = 1400.0 + 500 * rank
        rank_with([(1000, 1300, 4096, 20), (alone, alone + 100, elements, stream)], rank, 2, tmp_path)
    main(["convert", str(tmp_path)])
    groups = json.loads((tmp_path / "run_comm_groups.json").read_text())
    assert len(groups) > 2 and set(map(tuple, groups.values())) == {(0, 1)}


@pytest.mark.parametrize(("guessing", "named"), [(3, "run, all ranks"), (2, "run, ranks 0-1")])
def test_a_warning_names_the_ranks_that_it_is_of(
    guessing: int, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(3):
        rank_with([(1000, 1300, 4096, 20)] if rank < guessing else [], rank, 3, tmp_path)
    main(["convert", str(tmp_path)])
    assert f"{named}: communication without a recorded group" in capsys.readouterr().err


def test_equal_guesses_stay_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        rank_with([(1000, 1300, 4096, 20), (1400, 1500, 64, 24)], rank, 2, tmp_path)
    assert main(["convert", str(tmp_path)]) == 0
    assert "were matched between ranks" not in capsys.readouterr().err
    assert groups_of(tmp_path, 0) == groups_of(tmp_path, 1)
