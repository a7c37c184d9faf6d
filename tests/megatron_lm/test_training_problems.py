"""What get_result.sh finds wrong in logs of a run that goes on: a growing loss, no progress."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from pathlib import Path

import pytest

from megatron_lm.logs import runs
from megatron_lm.logs.records import Iteration
from megatron_lm.results import problems
from tests.megatron_lm.written_logs import iteration_line, simple_iteration, write_node


def with_losses(*losses: float | None) -> list[Iteration]:
    return [dataclasses.replace(simple_iteration(n), loss=loss) for n, loss in enumerate(losses, 1)]


def noisy(count: int, scale: float = 0.3) -> list[float]:
    """A loss that falls from 10 to 3 with noise, some of it large, as small batches have."""
    draw = random.Random(7)
    falling = (3 + 7 * 0.98**step for step in range(count))
    return [loss + draw.gauss(0, scale) + (4 if draw.random() < 0.02 else 0) for loss in falling]


def test_a_noisy_loss_that_falls_does_not_diverge() -> None:
    assert problems.divergence(with_losses(*noisy(1_000))) == ""
    assert problems.divergence(with_losses(*noisy(300, 0.01), *[3.2] * 200)) == "", "a plateau"
    assert problems.divergence(with_losses(*noisy(100), 40, 60, *noisy(100)[-50:])) == "", "two outliers"
    assert problems.divergence(with_losses(8.0, None, None)) == ""


@pytest.mark.parametrize("before", [[8.0], noisy(20), noisy(500)], ids=len)
def test_a_loss_that_grows_for_good_diverges(before: list[float]) -> None:
    said = problems.divergence(with_losses(*before, 22, 31, 75, 152, 140))
    assert said.startswith(
        f"the loss diverges from iteration {len(before) + 1} on: up to 152, after a median of "
    )


def waiting(folder: Path, seconds: float, err: str = "", iterations: int = 5) -> str:
    """What is said of a run whose last line is ``seconds`` old; an iteration takes 1.5 s."""
    found = [simple_iteration(number) for number in range(1, iterations + 1)]
    write_node(folder / "7", "n1", out="".join(map(iteration_line, found)), err=err)
    then = time.time() - seconds
    os.utime(folder / "7" / "n1.out", (then, then))
    return problems.stall(runs.find(("7",), folder), found, 1)


def test_no_progress_is_a_problem_after_ten_iterations_but_thirty_seconds(tmp_path: Path) -> None:
    assert waiting(tmp_path, 25) == ""
    assert waiting(tmp_path, 40) == "no progress for 40 s, since iteration 5"
    who = "rank 3 (h, pid 7, last seen at step 6, forward)"
    log = f"10:00:01 rank 0 WARNING no progress for 30 s: waiting for {who}\n"
    assert waiting(tmp_path, 33, log) == f"no progress for 33 s, since iteration 5: waiting for {who}"
    assert waiting(tmp_path, 40, log, 0) == f"no progress for 40 s in set-up: waiting for {who}"
    assert waiting(tmp_path, 5, log + "10:00:09 rank 0 WARNING rank 0: progress again\n") == ""
    later = "attempt 1 on n1 at 2026-11-22T03:00:00+0000\n"
    assert waiting(tmp_path, 5, log + later) == "", "of an attempt before"
