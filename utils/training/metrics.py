"""Metrics of a run: a progress bar on a terminal, the log, a JSON-lines file, and TensorBoard or wandb."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from chakra_et.files import write_text
from utils.training.config import TrainConfig

log = logging.getLogger(__name__)

LOG_FILE = "training_log.jsonl"


class Metrics(contextlib.ExitStack):
    """Publishes the metrics of rank 0; a context manager. Does nothing on other ranks.

    Raises ValueError if the package or service named by ``--report-to`` isn't available.
    """

    def __init__(self, config: TrainConfig, active: bool, first_step: int, total_steps: int):
        super().__init__()
        self.active, self.total_steps = active, total_steps
        self.steps, self.tokens, self.seconds, self.losses = 0, 0.0, 0.0, (math.nan, math.nan)
        self._shown = (0, 0.0, 0.0)
        self._failed = False
        if not active:
            return
        folder, name = Path(config.save_dir), f"{config.family}-{config.model_name}"
        self._publish = publisher(config.report_to, folder, name, dataclasses.asdict(config), self)
        self._file = self.enter_context(_continued(folder / LOG_FILE, first_step))
        tqdm.monitor_interval = 0  # no thread that watches the bar: data loaders are forked from this process
        bar = tqdm(total=total_steps, initial=first_step, unit="step", disable=not sys.stderr.isatty())
        self._bar = self.enter_context(bar)
        if not bar.disable:  # the log's lines go above it
            self.enter_context(logging_redirect_tqdm())

    def advance(self, step: int, tokens: float, seconds: float, figures: dict[str, Any], show: bool) -> None:
        """Count optimizer step ``step`` (from 1), which took ``seconds`` for its ``tokens`` over all ranks.

        With ``show``, publish its figures, and tokens per second and seconds per step since the last shown.
        Both are those of the steps alone, without evaluation, saving and writing traces.
        """
        if not self.active:
            return
        self.steps, self.tokens, self.seconds = self.steps + 1, self.tokens + tokens, self.seconds + seconds
        self.losses = (figures["loss"] if self.steps == 1 else self.losses[0], figures["loss"])
        self._bar.set_postfix_str(f"loss {figures['loss']:.4f}", refresh=False)
        self._bar.update()
        if show:
            steps, tokens, seconds = self._shown
            rates = {
                "tokens_per_second": (self.tokens - tokens) / (self.seconds - seconds),
                "step_seconds": (self.seconds - seconds) / (self.steps - steps),
            }
            self._shown = (self.steps, self.tokens, self.seconds)
            self.write(step, {**{name: float(value) for name, value in figures.items()}, **rates})

    def span(self) -> str:
        """First and last loss, and the mean speed so far, in words; empty if there was no step."""
        if not self.steps:
            return ""
        speed = self.tokens / self.seconds
        return f", loss {self.losses[0]:.4f} to {self.losses[1]:.4f}, {speed:,.0f} tokens/s"

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Publish named figures of ``step`` (from 1)."""
        if not self.active:
            return
        # JSON has no infinity, which a gradient norm can be.
        content = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        try:
            self._file.write((json.dumps({"step": step, **content}) + "\n").encode())
        except OSError as error:
            if not self._failed:
                log.warning("%s can't be written: %s; training goes on", LOG_FILE, error.strerror)
            self._failed = True
        text = "  ".join(f"{name} {_short(value)}" for name, value in figures.items())
        log.info("step %d/%d  %s", step, self.total_steps, text)
        self._publish(step, figures)


def _continued(path: Path, first_step: int) -> Any:
    """Open the log for appending, without the lines that a resumed run will write again."""
    kept = []
    if first_step and path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError):
                if json.loads(line)["step"] <= first_step:
                    kept.append(line + "\n")
    write_text(path, "".join(kept))
    # Without a buffer, which would fail again when the file is closed.
    return path.open("ab", buffering=0)


def publisher(
    target: str, folder: Path, name: str, values: dict[str, Any], closing: contextlib.ExitStack
) -> Callable[[int, dict[str, float]], None]:
    """What sends the figures of a step to TensorBoard, in ``folder``, or to wandb, until ``closing`` ends; to
    neither for another ``target``. Raises ValueError if the package or service isn't available."""
    try:
        if target == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
        elif target == "wandb":
            import wandb
    except ImportError:
        raise ValueError(f"--report-to {target} needs the {target} package: pip install it") from None
    if target == "tensorboard":
        writer: Any = closing.enter_context(SummaryWriter(log_dir=str(folder / "tensorboard")))

        def add(step: int, figures: dict[str, float]) -> None:
            for name, value in figures.items():
                writer.add_scalar(name, value, step)

        return add
    if target != "wandb":
        return lambda step, figures: None
    try:
        run: Any = wandb.init(project="mosim-llms", name=name, dir=str(folder), config=values)
    except wandb.errors.Error as error:
        reason = f"{str(error).splitlines()[0]}; log in with `wandb login`, or set WANDB_MODE=offline"
        raise ValueError(f"--report-to wandb: {reason}") from None

    def finish(kind: type[BaseException] | None, *_: object) -> None:
        run.finish(exit_code=int(kind is not None))

    closing.push(finish)
    return lambda step, figures: run.log(figures, step=step)


def _short(value: float) -> str:
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.2e}"
