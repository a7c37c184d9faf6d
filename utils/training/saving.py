"""What a run saves: checkpoints to resume from, and the best model."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from utils.training import checkpoint
from utils.training.checkpoint import CheckpointError
from utils.training.config import TrainConfig
from utils.training.precision import Precision

log = logging.getLogger(__name__)


class Saver:
    """Saves on rank 0; does nothing on other ranks.

    A save that fails is a warning and training goes on, but for those that end the run (``last``), which
    raise CheckpointError.

    Args:
        active: whether this is rank 0.
        order: what the data order depends on, kept in the checkpoints.
        folder: the checkpoint that the run was resumed from, if any.
    """

    def __init__(
        self,
        config: TrainConfig,
        active: bool,
        model: PreTrainedModel,
        tokenizer: Any,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        order: dict[str, int],
        folder: Path | None,
    ):
        self.config, self.active, self.model, self.tokenizer = config, active, model, tokenizer
        self.optimizer, self.precision, self.order, self.folder = optimizer, precision, order, folder
        self.save_dir = Path(config.save_dir)

    def checkpoint(self, step: int, best_loss: float, last: bool) -> float:
        """Save a checkpoint to resume from, and remove the oldest; returns the seconds it took."""
        began = time.perf_counter()
        folder = checkpoint.step_folder(self.save_dir, step)
        state = {
            "step": step,
            "best_loss": best_loss if math.isfinite(best_loss) else None,
            "model_name": self.config.model_name,
            "order": self.order,
            "scaler": self.precision.state(),
            "complete": False,
        }
        if self._save(folder, last, self.optimizer, state):
            self.folder = folder
            self._remove_oldest()
        return time.perf_counter() - began

    def best(self, last: bool) -> bool:
        """Save the best model; returns whether that succeeded."""
        return self._save(self.save_dir / checkpoint.BEST, last)

    def complete(self, step: int, best_loss: float) -> None:
        """Record in the checkpoint of ``step`` that everything due after that step is done."""
        if self.active and self.folder is not None and self.folder.name == f"step-{step}":
            known = best_loss if math.isfinite(best_loss) else None
            try:
                checkpoint.update_state(self.folder, complete=True, best_loss=known)
            except OSError as error:
                log.warning("%s; a resumed run will evaluate once more", error)

    def _remove_oldest(self) -> None:
        keep = self.config.keep_checkpoints
        if not self.active or keep is None:
            return
        try:
            for removed in checkpoint.remove_oldest(self.save_dir, keep):
                log.info("removed %s (--keep-checkpoints %d)", removed, keep)
        except OSError as error:
            log.warning("--keep-checkpoints %d: can't remove an old checkpoint: %s", keep, error)

    def _save(self, folder: Path, last: bool, *training_state: Any) -> bool:
        if not self.active:
            return True
        try:
            checkpoint.save_checkpoint(
                folder, self.model, self.tokenizer, self.config.save_format, *training_state
            )
        except CheckpointError as error:
            if last:
                raise
            log.warning("%s; training goes on", error)
            return False
        log.info("saved %s", folder)
        return True
