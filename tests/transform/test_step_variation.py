"""Which step a node belongs to, and copies that vary as the ranks that they are drawn from."""

from __future__ import annotations

import numpy as np
import pytest

from chakra_et.transform.rank_copies import compute_micros, drawn_factors, relative_spread, step_of
from tests.simulate.replay_traces import cpu, kernel, make_trace


def test_device_work_belongs_to_the_step_that_launched_it() -> None:
    """By its start, a kernel that a step launched and the next one ran was that one's: GPU work of 8.3, 4.9
    and 21.0 ms for steps that take the same."""
    nodes = [cpu(1, 0, kind="host-overhead", start=0), kernel(2, 70, (1,), is_cpu_op=0, start=0)]
    for step in range(3):
        at, begin = len(nodes) + 1, 100 * step
        nodes.append(cpu(at, 10, (at - 2,), name=f"ProfilerStep#{step}", kind="annotation", start=begin))
        nodes.append(cpu(at + 1, 10, (at,), kind="runtime", start=begin + 10))
        # Behind the kernel that was launched before the recording, and ever later.
        last = 2 if step == 0 else at - 1
        nodes.append(
            kernel(at + 2, 90, (at + 1, last), is_cpu_op=0, kind="kernel", start=begin + 70 + 60 * step)
        )
        nodes.append(cpu(at + 3, 5, (at + 1,), kind="operator", start=begin + 20))
    trace = make_trace(*nodes)
    steps = step_of(trace)
    assert steps[1] == -1
    assert steps[2:].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert compute_micros(trace).sum(axis=1).tolist() == [115] * 3
    trace.start_micros = np.zeros(len(trace), np.uint64)
    assert step_of(trace)[2:].tolist() == steps[2:].tolist()


@pytest.mark.parametrize(("ranks", "steps"), [(1, 5), (2, 3), (4, 10)])
def test_copies_of_copies_vary_as_much_as_copies(ranks: int, steps: int) -> None:
    generator = np.random.default_rng(3)
    busy = [generator.normal(1000, 50, (steps, 1)) * [[0.2, 0.8]] for _ in range(ranks)]
    measured = relative_spread(busy)

    def copies(of: list[np.ndarray], count: int) -> list[np.ndarray]:
        owners = generator.integers(len(of), size=count).tolist()
        return [of[own] * drawn_factors(generator, of, own, None) for own in owners]

    once = copies(busy, 400)
    twice = copies(once, 400)
    for made in (once, twice):
        spread = np.array(
            [each.sum(axis=1) / np.mean([o.sum(axis=1) for o in made], axis=0) for each in made]
        )
        assert spread.std() == pytest.approx(measured, rel=0.2)
    given = [busy[0] * drawn_factors(generator, busy, 0, 0.3) for _ in range(400)]
    totals = np.array([each.sum(axis=1) for each in given])
    assert (totals / totals.mean(axis=0)).std() == pytest.approx(0.3, rel=0.15)
