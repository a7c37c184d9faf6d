"""What a run saves, in folders that transformers can load: checkpoints to resume from, and the best model.
Written atomically, and read back to resume.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from chakra_et.files import remove_abandoned, scratch_folder, sync_folder, write_json

BEST = "best_model"
STATE = "trainer_state.json"
OPTIMIZER = "optimizer.pt"
STATE_KEYS = {"step", "best_loss", "model_name", "order", "saved_at"}  # "complete" came later


class CheckpointError(OSError):
    """A checkpoint can't be written or read; the message says which one and why."""


def save_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer | None = None,
    state: dict[str, Any] | None = None,
) -> None:
    """Write a folder for ``from_pretrained``; with ``optimizer`` and ``state``, one that can be resumed from.

    Replaces ``folder`` atomically. If that fails, raises CheckpointError and leaves the old folder in place.
    """
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if optimizer is not None:
            torch_save(optimizer.state_dict(), temporary / OPTIMIZER)
        if state is not None:
            write_json(temporary / STATE, {**state, "saved_at": time.time()})


def find_checkpoint(wanted: str, save_dir: Path) -> Path:
    """The folder to resume from: ``wanted``, or the newest one in ``save_dir`` if that is "latest".

    Raises CheckpointError if there is none.
    """
    if wanted != "latest":
        folder = Path(wanted)
        if not (folder / STATE).is_file():
            why = "has weights only" if (folder / "config.json").is_file() else "is not a checkpoint"
            raise CheckpointError(f"--resume-from-checkpoint {wanted} {why}: give a step-N folder")
        return folder
    found = [path.parent for path in save_dir.glob(f"step-*/{STATE}")]
    if not found:
        raise CheckpointError(f"--resume-from-checkpoint latest: there is no checkpoint in {save_dir}")
    return max(found, key=lambda folder: float(read_state(folder)["saved_at"]))


def read_state(folder: Path) -> dict[str, Any]:
    """The ``state`` that was saved with a checkpoint, and when it was saved. Raises CheckpointError."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not state.keys() >= STATE_KEYS:
            raise ValueError(f"{STATE} lacks {', '.join(sorted(STATE_KEYS))}")
        return state
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} can't be read ({error}): resume from another") from None


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Restore the state of ``optimizer``. Raises CheckpointError."""
    try:
        optimizer.load_state_dict(torch.load(folder / OPTIMIZER, map_location=device, weights_only=True))
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"checkpoint {folder} can't be read ({reason}): resume from another") from None


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which replaces ``target`` when the block ends without an error.

    ``target`` is either the old folder or the complete new one, even if the disk fills up; if the process is
    killed between two renames, ``clean_up`` brings the old one back. Raises CheckpointError if writing fails.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(target) as temporary:
            yield temporary
            for path in temporary.iterdir():
                # safetensors makes its files private to the owner; give them the permissions of the folder.
                path.chmod(temporary.stat().st_mode & 0o666)
                sync_folder(path)
            sync_folder(temporary)
            # For an instant neither has the name; if the process dies there, clean_up restores the old.
            old = target.with_name(f".{target.name}.old")
            with contextlib.suppress(FileNotFoundError):
                os.rename(target, old)
            os.rename(temporary, target)
            shutil.rmtree(old, ignore_errors=True)
            sync_folder(target.parent)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if _is_full(error):
            reason = f"the disk is full ({reason}): free some space"
        raise CheckpointError(f"can't save {target}: {reason}; older checkpoints are untouched") from error


def clean_up(save_dir: Path) -> list[Path]:
    """Remove what interrupted saves left in ``save_dir`` and return it; saves in progress stay."""
    before = list(save_dir.glob(".*.tmp"))
    remove_abandoned(save_dir)
    for old in save_dir.glob(".*.old"):
        target = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if target.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, target)
    return [path for path in before if not path.exists()]


def torch_save(content: Any, path: Path) -> None:
    """``torch.save`` whose error says that the disk is full."""
    # Given a path, PyTorch writes with its own code, whose error doesn't mention a full disk.
    with path.open("wb") as file:
        torch.save(content, file)


def _is_full(error: BaseException | None) -> bool:
    """Whether ``error`` or its cause is a full disk; Rust libraries have the number as text only."""
    if error is None:
        return False
    numbers = (errno.ENOSPC, errno.EDQUOT)
    found = getattr(error, "errno", None) in numbers or any(os.strerror(n) in str(error) for n in numbers)
    return found or _is_full(error.__cause__ or error.__context__)
