"""What a training process prints, in Megatron-LM's log format, which ``logs/records.py`` reads.

Every line is written in one piece, because the ranks of a node share a file.
"""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import sys
import time

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lm.engine.optimizer import Stepped
from megatron_lm.engine.timing import Timers
from megatron_lm.settings import Settings
from megatron_lm.settings.conf import FOLDER
from utils.training.metrics import Published


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
        if self.is_last:
            folder = FOLDER / settings.log_dir / os.environ.get("RUN_ID", "")
            values = dataclasses.asdict(settings)
            self._published = Published(settings.report_to, folder, f"megatron-{settings.model}", values)

    def close(self, status: int) -> None:
        """After the last iteration."""
        if self.is_last:
            self._published.close(status)

    def before_training(self) -> None:
        """Write the precision that is used, once per node, and when training starts."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _write(f"PRECISION: {self.settings.precision}\n")
        if self.rank == 0:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            _write(f"[before the start of training step] datetime: {now} \n")
        self._since = time.perf_counter()

    def iteration(
        self, number: int, loss: float, stepped: Stepped, learning_rate: float, loss_scale: float
    ) -> None:
        """Count an iteration, and write the log lines after every LOG_INTERVAL-th."""
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
            _write(self._line(number, milliseconds, stepped, learning_rate, loss_scale))
            figures = {"loss": loss, "learning_rate": learning_rate, "loss_scale": loss_scale}
            figures |= {"step_seconds": milliseconds / 1000, "grad_norm": stepped.norm or math.nan}
            self._published.write(number, figures)
        if not self._logged_memory and learning_rate > 0:
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

    def _line(self, number: int, milliseconds: float, stepped: Stepped, rate: float, scale: float) -> str:
        batch = self.settings.global_batch_size
        line = (
            f" iteration {number:8d}/{self.settings.train_iters:8d} |"
            f" consumed samples: {number * batch:12d} |"
            f" elapsed time per iteration (ms): {milliseconds:.1f} |"
            f" learning rate: {rate:.3E} |"
            f" global batch size: {batch:5d} |"
        )
        if self._losses:
            line += f" lm loss: {sum(self._losses) / len(self._losses):.6E} |"
        line += f" loss scale: {scale:.1f} |"
        if stepped.norm is not None:
            line += f" grad norm: {stepped.norm:.3f} |"
        return (
            f"{line} number of skipped iterations: {self._skipped:3d} |"
            f" number of nan iterations: {self._nan:3d} |\n"
        )


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


def _write(text: str) -> None:
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), text.encode())
