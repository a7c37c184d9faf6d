"""When each part of a step begins and ends on this rank, as megatron-core's ``config.timers`` asks for it.

Timer blocks are written in the format of Megatron-LM's log, with the start and end times of every call: the
picture of ``_05_report_visualization.py`` is drawn from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# The order of the log. What megatron-core calls otherwise today is on the right.
TIMERS = (
    "forward-backward", "forward-compute", "post-process", "loss-compute", "backward-compute",
    "batch-generator", "forward-recv", "forward-send", "backward-recv", "backward-send",
    "forward-send-forward-recv", "forward-send-backward-recv", "backward-send-forward-recv",
    "backward-send-backward-recv", "forward-backward-send-forward-backward-recv",
    "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "grads-all-reduce", "grads-reduce-scatter",
    "params-all-gather", "optimizer-copy-to-main-grad", "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad", "optimizer-count-zeros", "optimizer-inner-step",
    "optimizer-copy-main-to-model-params", "optimizer",
)  # fmt: skip
RENAMED = {
    "all-grads-sync": "grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce": "layernorm-grads-all-reduce",
}


class Timer:
    """One name's calls: epoch seconds at which they started and ended."""

    def __init__(self, settle: Callable[[], object]) -> None:
        self._settle = settle
        self.started: list[float] = []
        self.ended: list[float] = []

    def start(self, barrier: bool = False) -> None:
        self._settle()
        self.started.append(time.time())

    def stop(self, barrier: bool = False) -> None:
        self._settle()
        self.ended.append(time.time())


class Timers:
    """All timers of this rank; ``timers(name)`` as megatron-core calls it.

    ``sharded``: gradients are reduce-scattered, as the distributed optimizer wants them.
    """

    def __init__(self, rank: int, sharded: bool = False) -> None:
        self.rank = rank
        self._renamed = RENAMED | ({"all-grads-sync": "grads-reduce-scatter"} if sharded else {})
        # Kernels run on after their launch: without this a timer would measure launches.
        self._settle = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        name = self._renamed.get(name, name)
        if name not in self._timers:
            self._timers[name] = Timer(self._settle)
        return self._timers[name]

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        timer = self(name)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def block(self) -> str:
        """The lines of all calls since the last block: sums in ms, then each start and end."""
        lines = ["times across ranks (ms):"]
        for name in TIMERS:
            timer = self._timers.get(name)
            if timer is None or not timer.ended:
                continue
            spent = sum(end - start for start, end in zip(timer.started, timer.ended, strict=True))
            lines.append(f"  {name}:")
            lines.append(f"     rank {self.rank:2d}: {spent * 1000:.2f}")
            lines.append(f" {name} start time lst:  " + " ".join(f"{at:.6f}" for at in timer.started))
            lines.append(f" {name} end time lst:  " + " ".join(f"{at:.6f}" for at in timer.ended))
        self._timers.clear()
        return "\n".join(lines) + "\n"
