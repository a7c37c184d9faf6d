"""The 1F1B schedule against a machine that only knows what each stage does next, and its own laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasop.schedule import one_f_one_b as schedule
from fasop.schedule.events import task_ends

Result = tuple[dict[tuple[str, int, int], float], list[float]]


def reference(forward: list[float], backward: list[float], p2p: list[float], m: int) -> Result:
    """Run the stages' programs step by step: ends of all computations, and of all stages.

    A program is a list of computations (kind, micro-batch) and of groups of messages (sent?, kind,
    boundary, micro-batch) that are posted together and all must end. A message takes its boundary's time
    from when both sides have posted it.
    """
    stages = len(forward)
    programs = [_program(i, stages, m) for i in range(stages)]
    clock, at = [0.0] * stages, [0] * stages
    posted: dict[tuple, dict[bool, float]] = {}
    ends = {}
    while any(at[i] < len(programs[i]) for i in range(stages)):
        before = list(at)
        for i, program in enumerate(programs):
            while at[i] < len(program):
                step = program[at[i]]
                if isinstance(step, tuple):
                    kind, j = step
                    clock[i] += (forward if kind == "F" else backward)[i]
                    ends[kind, i, j] = clock[i]
                else:
                    for sent, *message in step:
                        posted.setdefault(tuple(message), {})[sent] = clock[i]
                    both = [posted[tuple(message)] for _, *message in step]
                    if any(len(sides) < 2 for sides in both):
                        break
                    clock[i] = max(
                        max(sides.values()) + p2p[boundary]
                        for sides, (_, _, boundary, _) in zip(both, step, strict=True)
                    )
                at[i] += 1
        assert at != before, "no stage can go on"
    return ends, clock


def _program(i: int, stages: int, m: int) -> list:
    warm = min(stages - 1 - i, m)
    first, last = i == 0, i == stages - 1
    program: list = []
    for j in range(warm):
        program += [] if first else [[(False, "F", i - 1, j)]]
        program += [("F", j), [(True, "F", i, j)]]
    if warm < m and not first:
        program.append([(False, "F", i - 1, warm)])
    for k in range(m - warm):
        program.append(("F", warm + k))
        program += [] if last else [[(True, "F", i, warm + k), (False, "B", i, k)]]
        program.append(("B", k))
        group = [] if first else [(True, "B", i - 1, k)]
        if not first and k + 1 < m - warm:
            group.append((False, "F", i - 1, warm + k + 1))
        program += [group] if group else []
    for k in range(m - warm, m):
        program += [[(False, "B", i, k)], ("B", k)]
        program += [] if first else [[(True, "B", i - 1, k)]]
    return program


durations = st.one_of(st.floats(0, 3), st.sampled_from([0.0, 1.0, 2.0]))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[float], list[float], int]:
    stages = draw(st.integers(1, 7))
    lists = [draw(st.lists(durations, min_size=n, max_size=n)) for n in (stages, stages, stages - 1)]
    return (*lists, draw(st.integers(1, 10)))


@settings(max_examples=150, deadline=None)
@given(pipelines())
def test_equals_a_naive_event_driven_reference(pipeline: tuple) -> None:
    ends, clock = reference(*pipeline)
    line = schedule.run(*pipeline)
    tasks = schedule.tasks(len(pipeline[0]), pipeline[-1])
    *passes, p2p, _ = pipeline
    chunks = [[[each] for each in seconds] for seconds in passes]
    found = {
        ("F" if task.is_forward else "B", task.stage, task.micro_batch): end
        for task, end in zip(tasks, task_ends(tasks, *chunks, [*p2p, 0.0]), strict=True)
        if not task.is_message
    }
    assert found == {key: pytest.approx(end, abs=1e-9) for key, end in ends.items()}
    last = [ends["B", stage, pipeline[-1] - 1] for stage in range(len(pipeline[0]))]
    assert line.backward_end == pytest.approx(last, abs=1e-9)
    assert line.stage_end == pytest.approx(clock, abs=1e-9)
    assert line.pipeline_time == pytest.approx(max(clock), abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(pipelines(), st.floats(0, 1), st.integers(0, 100))
def test_no_end_grows_when_a_duration_shrinks(pipeline: tuple, factor: float, which: int) -> None:
    *lists, m = pipeline
    flat = [(part, k) for part, values in enumerate(lists) for k in range(len(values))]
    part, k = flat[which % len(flat)]
    faster = [list(values) for values in lists]
    faster[part][k] *= factor
    before, after = schedule.run(*lists, m), schedule.run(*faster, m)
    assert after.pipeline_time <= before.pipeline_time + 1e-9
    for old, new in zip(before.stage_end, after.stage_end, strict=True):
        assert new <= old + 1e-9


@settings(max_examples=40, deadline=None)
@given(st.lists(pipelines(), min_size=2, max_size=4))
def test_many_at_once_are_each_as_alone(several: list[tuple]) -> None:
    stages, m = len(several[0][0]), several[0][3]
    alike = [pipeline for pipeline in several if len(pipeline[0]) == stages]
    arrays = [list(np.array([pipeline[part] for pipeline in alike]).T) for part in range(3)]
    together = schedule.run(*arrays, m)
    for k, pipeline in enumerate(alike):
        alone = schedule.run(*pipeline[:3], m)
        assert float(together.pipeline_time[k]) == pytest.approx(alone.pipeline_time, abs=1e-12)


def test_even_stages_without_messages_take_the_textbook_time() -> None:
    line = schedule.run([1.0] * 4, [2.0] * 4, [0.0] * 3, 8)
    assert line.pipeline_time == pytest.approx((8 + 4 - 1) * 3)


def test_every_boundary_counts() -> None:
    free = schedule.run([1.0] * 4, [2.0] * 4, [0.0] * 3, 8).pipeline_time
    for boundary in range(3):
        p2p = [0.0] * 3
        p2p[boundary] = 0.5
        assert schedule.run([1.0] * 4, [2.0] * 4, p2p, 8).pipeline_time > free + 0.9
