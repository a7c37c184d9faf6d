"""What a training process prints, in Megatron-LM's log format, which ``logs/records.py`` reads: iterations,
memory, and when each part of an iteration started and ended on this rank, by megatron-core's timers.

Every line is written in one piece, because the ranks of a node share a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lm.settings import Settings
from megatron_lm.settings.conf import FOLDER
from utils.training.metrics import publisher

if TYPE_CHECKING:
    from megatron_lm.engine.optimizer import Stepped

# megatron-core's names of today → those of the log format.
RENAMED = {
    "all-grads-sync": "grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce": "layernorm-grads-all-reduce",
}


class Timer:
    """The calls of one timer: epoch seconds of their starts and ends."""

    def __init__(self) -> None:
        self.started: list[float] = []
        self.ended: list[float] = []

    def start(self, barrier: bool = False) -> None:
        self.started.append(_now())

    def stop(self, barrier: bool = False) -> None:
        self.ended.append(_now())


class Timers:
    """All timers of this rank; megatron-core gets one by ``timers(name)``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._timers: defaultdict[str, Timer] = defaultdict(Timer)

    def __call__(self, name: str, log_level: int = 0) -> Timer:
        return self._timers[RENAMED.get(name, name)]

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        timer = self(name)
        timer.start()
        try:
            yield
        finally:
            timer.stop()

    def block(self) -> str:
        """The log lines of all calls since the last block: sums in ms, then start and end times."""
        lines = ["times across ranks (ms):"]
        for name, timer in self._timers.items():
            if not timer.ended:
                continue
            spent = sum(end - start for start, end in zip(timer.started, timer.ended, strict=True))
            lines.append(f"  {name}:")
            lines.append(f"     rank {self.rank:2d}: {spent * 1000:.2f}")
            lines.append(f" {name} start time lst:  " + " ".join(f"{at:.6f}" for at in timer.started))
            lines.append(f" {name} end time lst:  " + " ".join(f"{at:.6f}" for at in timer.ended))
        self._timers.clear()
        return "\n".join(lines) + "\n"


class Log:
    """The log of one rank."""

    def __init__(self, settings: Settings, timers: Timers | None) -> None:
        self.settings, self.timers = settings, timers
        self.rank = dist.get_rank()
        self.is_last = self.rank == dist.get_world_size() - 1
        self._since, self._iterations = time.perf_counter(), 0
        self._skipped = self._nan = 0
        self._losses: list[float] = []
        self._logged_memory = False
        self._closing = contextlib.ExitStack()
        if self.is_last:
            folder = FOLDER / settings.log_dir / os.environ.get("RUN_ID", "")
            values = dataclasses.asdict(settings)
            name = f"megatron-{settings.model}"
            self._publish = publisher(settings.report_to, folder, name, values, self._closing)

    def close(self, status: int) -> None:
        """After the last iteration."""
        self._closing.__exit__(SystemExit if status else None, None, None)

    def before_training(self) -> None:
        """Write the precision that is used, once per node, and when training starts."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _write(f"PRECISION: {self.settings.precision}\n")
        if self.rank == 0:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            _write(f"[before the start of training step] datetime: {now} \n")
        self._since = time.perf_counter()

    def iteration(self, number: int, loss: float, stepped: Stepped, rate: float, loss_scale: float) -> None:
        """Count an iteration, and write the log lines after every LOG_INTERVAL-th; ``rate``: of learning."""
        self._iterations += 1
        self._skipped += not stepped.done
        self._nan += not math.isfinite(loss)
        if stepped.done and math.isfinite(loss):
            self._losses.append(loss)
        if number % self.settings.log_interval:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        milliseconds = (time.perf_counter() - self._since) * 1000 / self._iterations
        if self.is_last:
            batch, total = self.settings.global_batch_size, self.settings.train_iters
            losses = f" lm loss: {sum(self._losses) / len(self._losses):.6E} |" if self._losses else ""
            norm = f" grad norm: {stepped.norm:.3f} |" if stepped.norm is not None else ""
            _write(
                f" iteration {number:8d}/{total:8d} | consumed samples: {number * batch:12d} |"
                f" elapsed time per iteration (ms): {milliseconds:.1f} | learning rate: {rate:.3E} |"
                f" global batch size: {batch:5d} |{losses} loss scale: {loss_scale:.1f} |{norm}"
                f" number of skipped iterations: {self._skipped:3d} |"
                f" number of nan iterations: {self._nan:3d} |\n"
            )
            figures = {"loss": loss, "learning_rate": rate, "loss_scale": loss_scale}
            figures |= {"step_seconds": milliseconds / 1000, "grad_norm": stepped.norm or math.nan}
            self._publish(number, figures)
        if not self._logged_memory and rate > 0:
            self._logged_memory = True
            if parallel_state.get_data_parallel_rank() == 0:
                _write(memory_line(self.rank, number))
        if self.timers is not None:
            _write(self.timers.block())
        self._since, self._iterations = time.perf_counter(), 0
        self._skipped = self._nan = 0
        self._losses.clear()

    def not_finite(self, number: int, sentence: str) -> None:
        """Write a sentence of ``Health`` at once, whatever LOG_INTERVAL is."""
        if sentence and self.is_last:
            _write(f" iteration {number:8d}/{self.settings.train_iters:8d} {sentence}\n")


def memory_line(rank: int, after: int) -> str:
    """Memory of the GPU; without one, the peak of the process's resident memory in all places."""
    if torch.cuda.is_available():
        sizes = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
        sizes += [torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()]
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        sizes = [peak] * 4
    names = ("allocated", "max allocated", "reserved", "max reserved")
    text = " | ".join(f"{name}: {size / 2**20}" for name, size in zip(names, sizes, strict=True))
    return f"[Rank {rank}] (after {after} iterations) memory (MB) | {text}\n"


def _now() -> float:
    # Without a synchronisation, timers would measure kernel launches.
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.time()


def _write(text: str) -> None:
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), text.encode())
