"""The tasks of a schedule."""

from __future__ import annotations

from typing import NamedTuple


class Task(NamedTuple):
    """A computation of a stage, or with ``peer`` a message from ``stage`` to ``peer``.

    is_forward: of activations, else of gradients. waits: the tasks, by their place in the list, that must
    have ended. chunk: of the stage that computes or sends, in an interleaved schedule.
    """

    stage: int
    peer: int
    micro_batch: int
    is_forward: bool
    waits: tuple[int, ...]
    chunk: int = 0

    @property
    def is_message(self) -> bool:
        return self.peer >= 0

    def involves(self, stage: int) -> bool:
        return stage in (self.stage, self.peer)
