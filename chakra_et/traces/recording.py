"""What our tracer writes into the device trace about the recording itself: the field ``chakra_et``.

Behind the structure step and outside of all steps, the tracer repeats a small computation whose CPU time
without recording it has measured before. What it takes longer is the cost of recording.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Recording(msgspec.Struct, frozen=True):
    """``structure_step``: the step in which the ExecutionTraceObserver ran; its times are not used if a step
    follows. ``step_us``: duration by the host's clock and CPU time of the process, in µs, of each step from
    the first of the training on, the first ``untraced_steps`` of which ran without a profiler. ``plain_us``,
    ``recorded_us``: CPU time of the computation: ``operators``, and with a GPU ``launches``, of which there
    are as many as that says. ``passes``: how often it ran within the recording.
    """

    structure_step: int
    untraced_steps: int
    step_us: list[tuple[float, float]]
    plain_us: dict[str, float] = {}
    recorded_us: dict[str, float] = {}
    passes: int = 1
    launches: int = 1

    @property
    def untraced_us(self) -> list[tuple[float, float]]:
        """The untraced steps, without the first one, which initialises lazily."""
        return self.step_us[1 : self.untraced_steps]

    @property
    def timed_us(self) -> list[tuple[float, float]]:
        """The steps that count: those after the structure step or, without any, that step itself."""
        return self.step_us[self.structure_step + 1 :] or self.step_us[self.structure_step :]

    def added_us(self, what: str) -> float:
        """CPU time that recording adds to one pass of the operators or of the launches."""
        return max(self.recorded_us.get(what, 0.0) - self.plain_us.get(what, 0.0), 0.0)


def read_recording(field: Any) -> Recording | None:
    """The field's value; None if it is absent or not ours."""
    try:
        found = msgspec.convert(field, Recording)
    except msgspec.ValidationError:
        return None
    times = [
        *found.plain_us.values(),
        *found.recorded_us.values(),
        *(t for step in found.step_us for t in step),
    ]
    counts = found.passes, found.launches, found.structure_step + 1, found.untraced_steps + 1
    return found if all(0 <= time < 1e15 for time in times) and min(counts) > 0 else None
