"""Runs of our own .et files: made-up GPUs whose every kernel is known, stages, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.stragglers.analyse import Stragglers, find_stragglers
from tests.simulate.replay_traces import cpu, make_trace, recv, send
from tests.stragglers.gpu_job import FIRST_STEP, step_s, write_job

RANKS, STEPS = 4, 5


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, np.ndarray, np.ndarray]:
    """A run whose rank 2 is slow in its forward pass: NAME, and the kernels' times in µs."""
    random = np.random.default_rng(5)
    forward = random.uniform(2000, 3000, (RANKS, STEPS)).round()
    backward = random.uniform(5000, 6000, (RANKS, STEPS)).round()
    forward[2] *= 2
    return write_job(tmp_path_factory.mktemp("job"), forward, backward), forward, backward


def test_the_slowdowns_of_known_kernels(job: tuple[str, np.ndarray, np.ndarray]) -> None:
    name, forward, backward = job
    found = find_stragglers(name)
    analysis = found
    typical_forward, typical_backward = (np.full_like(each, each.mean()) for each in (forward, backward))
    ideal = step_s(typical_forward, typical_backward)

    def slowdown(keeps: np.ndarray) -> float:
        """If only the chosen ranks × steps keep their kernels' times."""
        times = step_s(np.where(keeps, forward, typical_forward), np.where(keeps, backward, typical_backward))
        return float(times.mean() / ideal.mean())

    assert list(analysis.step_t_base) == [FIRST_STEP + step for step in range(STEPS)]
    for times in (analysis.step_t_base, analysis.step_t_nodelay):
        assert list(times.values()) == pytest.approx(step_s(forward, backward), rel=1e-3)
    assert list(analysis.step_t_noblk.values()) == pytest.approx(ideal, rel=1e-3)
    assert analysis.blocking_slowdown == pytest.approx(slowdown(forward > 0), abs=1e-3)
    rows = np.arange(RANKS)[:, None] + np.zeros((RANKS, STEPS))
    expected = {rank: slowdown(rows == rank) for rank in range(RANKS)}
    assert found.worker_slowdown == pytest.approx(expected, abs=1e-3)
    assert analysis.blocking_decompose_by_optype is not None
    of_forward = float(step_s(forward, typical_backward).mean() / ideal.mean())
    assert analysis.blocking_decompose_by_optype["kernel"] == pytest.approx(of_forward, abs=1e-3)
    of_backward = float(step_s(typical_forward, backward).mean() / ideal.mean())
    assert analysis.blocking_decompose_by_optype["backward-kernel"] == pytest.approx(of_backward, abs=1e-3)
    assert found.worker_slowdown is not None and next(iter(found.worker_slowdown)) == 2
    assert found.rank_by_step is not None
    alone = step_s(
        np.where(rows == 2, forward, typical_forward), np.where(rows == 2, backward, typical_backward)
    )
    assert found.rank_by_step.slowdown.shape == (RANKS, STEPS)
    assert found.rank_by_step.slowdown[2] == pytest.approx(alone / ideal, abs=1e-3)


def test_text_and_json(job: tuple[str, np.ndarray, np.ndarray], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stragglers", job[0]]) == 0
    text = capsys.readouterr().out
    assert "4 ranks, dp 4 × pp 1" in text
    assert "\nRank 2 is slow" in text
    assert main(["stragglers", job[0], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["heatmap"]["rank_by_step"]["ranks"] == [0, 1, 2, 3]
    assert np.shape(answer["heatmap"]["rank_by_step"]["slowdown"]) == (RANKS, STEPS)
    assert answer["diagnosis"]["slow_ranks"] == [2]


def test_a_job_without_slow_ranks_attributes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = write_job(tmp_path, np.full((RANKS, STEPS), 2500.0), np.full((RANKS, STEPS), 5500.0))
    found = find_stragglers(name)
    assert found.worker_slowdown is None and found.rank_by_step is None
    assert found.blocking_decompose_by_stage is None
    assert main(["stragglers", name]) == 0
    assert "Below 1.03" in capsys.readouterr().out


def _pipeline(folder: Path, work: list[list[int]]) -> Stragglers:
    """Two stages: rank 0 sends to rank 1 what it has computed, for each microbatch; ``work[rank]`` in µs."""
    groups = {"1": ["1", "PIPELINE_MODEL_PARALLEL_GROUP", [0, 1]]}
    for rank in range(2):
        nodes = []
        for at, busy in enumerate(work[rank]):
            number = 2 * at + 1
            if rank == 0:
                nodes.append(cpu(number, busy, (number - 1,) if at else ()))
                nodes.append(send(number + 1, 10, 1, (number,), comm_tag=at))
            else:
                nodes.append(recv(number, 10, 0, (), comm_tag=at))
                nodes.append(cpu(number + 1, busy, (number,)))
        trace = make_trace(*nodes, process_groups=json.dumps(groups), world_size=2)
        et_file.write(folder / f"pipe.{rank}.et", trace)
    return find_stragglers(str(folder / "pipe"))


def test_a_long_last_stage(tmp_path: Path) -> None:
    """By hand: messages take 10 µs; the second stage starts with the first one and is never idle again."""
    found = _pipeline(tmp_path, [[100, 100, 100], [200, 200, 200]])
    assert (found.job_meta["pp_size"], found.job_meta["dp_size"]) == (2, 1)
    recorded, ideal = 110 + 3 * 200, 3 * 160 + 150
    assert found.blocking_slowdown == pytest.approx(recorded / ideal)
    first, second = (110 + 3 * 150) / ideal, (160 + 3 * 200) / ideal
    assert found.blocking_decompose_by_stage == pytest.approx({0: first, 1: second})
    assert any("no start times" in note for note in found.notes)


def test_a_rank_without_others_is_refused(tmp_path: Path, job: tuple[str, np.ndarray, np.ndarray]) -> None:
    with pytest.raises(TraceError, match="one rank has no others to compare it with"):
        find_stragglers(f"{job[0]}.0.et")


def test_ranks_of_a_larger_run_are_compared_with_each_other(
    tmp_path: Path, job: tuple[str, np.ndarray, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    """The groups are known, and have members without a file: it refused them for lack of communication."""
    for rank in (1, 2):
        (tmp_path / f"job.{rank}.et").write_bytes(Path(f"{job[0]}.{rank}.et").read_bytes())
    (tmp_path / "job_comm_groups.json").write_text(json.dumps({"1": [0, 1, 2, 3]}))
    assert main(["stragglers", str(tmp_path / "job")]) == 0
    text = capsys.readouterr().out
    assert "2 of 4 ranks (without 0, 3)" in text and "\nRank 2 is slow" in text
    found = find_stragglers(str(tmp_path / "job"))
    assert found.worker_slowdown is not None and [*found.worker_slowdown] == [2, 1]


def test_missing_ranks_are_named(tmp_path: Path, job: tuple[str, np.ndarray, np.ndarray]) -> None:
    for rank in (0, 1, 3):
        (tmp_path / f"job.{rank}.et").write_bytes(Path(f"{job[0]}.{rank}.et").read_bytes())
    notes = find_stragglers(str(tmp_path / "job")).notes
    assert "job: 3 of 4 ranks (without 2): waiting for the others counts as communication" in notes


def test_ranks_without_communication_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        et_file.write(tmp_path / f"job.{rank}.et", make_trace(cpu(1, 5, start=1), world_size=2))
    with pytest.raises(TraceError, match="no communication in common"):
        find_stragglers(str(tmp_path / "job"))


def test_ranks_that_recorded_different_steps_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        nodes = [cpu(1, 5, start=1, name=f"ProfilerStep#{3 + rank}")]
        if rank:
            nodes.append(recv(2, 9, 0, (1,), start=6))
        else:
            nodes.append(send(2, 9, 1, (1,), start=6))
        et_file.write(tmp_path / f"job.{rank}.et", make_trace(*nodes, world_size=2))
    with pytest.raises(TraceError, match="rank 1 recorded steps 4, but rank 0 steps 3"):
        find_stragglers(str(tmp_path / "job"))
