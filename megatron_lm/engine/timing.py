"""Start and end times of each part of an iteration on this rank, measured through megatron-core's timers.

They are logged in Megatron-LM's format with the times of every call, from which
``_05_report_visualization.py`` draws its picture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# In the order of the log.
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
# megatron-core's names of today → those of the log format.
RENAMED = {
    "all-grads-sync": "grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce": "layernorm-grads-all-reduce",
}


class Timer:
    """The calls of one timer: epoch seconds of their starts and ends."""

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
    """All timers of this rank; megatron-core gets one by ``timers(name)``.

    sharded: gradients are reduce-scattered, for a sharded optimizer.
    """

    def __init__(self, rank: int, sharded: bool = False) -> None:
        self.rank = rank
        self._renamed = RENAMED | ({"all-grads-sync": "grads-reduce-scatter"} if sharded else {})
        # Without a synchronisation, timers would measure kernel launches.
        self._settle = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        name = self._renamed.get(name, name)
        if name not in self._timers:
            self._timers[name] = Timer(self._settle)
        return self._timers[name]

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Measure a block."""
        timer = self(name)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, measured by timer ``name``."""

        def call(*args: Any, **options: Any) -> Any:
            with self.during(name):
                return function(*args, **options)

        return call

    def block(self) -> str:
        """The log lines of all calls since the last block: sums in ms, then start and end times."""
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
