"""Checkpoint folders that transformers can load: written atomically, and read back to resume."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from chakra_et.files import write_text
from utils.processes import is_running

BEST = "best_model"
STATE = "trainer_state.json"
OPTIMIZER = "optimizer.pt"
STATE_KEYS = {"step", "best_loss", "model_name", "order", "saved_at"}  # "complete" and "scaler" came later


class CheckpointError(OSError):
    """A checkpoint can't be written or read; the message says which one and why."""


def step_folder(save_dir: Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` optimizer steps."""
    return save_dir / f"step-{step}"


def save_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    save_format: str,
    optimizer: torch.optim.Optimizer | None = None,
    state: dict[str, Any] | None = None,
) -> None:
    """Write a folder for ``from_pretrained``; with ``optimizer`` and ``state``, one that can be resumed from.

    Replaces ``folder`` atomically. If that fails, raises CheckpointError and leaves the old folder in place.
    """
    parts = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        parts += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in parts)
    with atomic_folder(folder, needed) as temporary:
        if save_format == "bin":
            model.config.save_pretrained(temporary)
            _torch_save(model.state_dict(), temporary / "pytorch_model.bin")
        else:
            model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if optimizer is not None:
            _torch_save(optimizer.state_dict(), temporary / OPTIMIZER)
        if state is not None:
            text = json.dumps({**state, "saved_at": time.time()}, indent=2)
            (temporary / STATE).write_text(text + "\n", encoding="utf-8")


def find_checkpoint(wanted: str, save_dir: Path) -> Path:
    """The folder to resume from: ``wanted``, or the newest one in ``save_dir`` if that is "latest".

    Raises CheckpointError if there is none.
    """
    if wanted != "latest":
        folder = Path(wanted)
        if not (folder / STATE).is_file():
            why = "has weights only" if (folder / "config.json").is_file() else "is not a checkpoint"
            raise CheckpointError(
                f"--resume-from-checkpoint {wanted} {why}: give a step-N folder (or --init-from for weights)"
            )
        return folder
    found = [path.parent for path in save_dir.glob(f"step-*/{STATE}")]
    if not found:
        raise CheckpointError(f"--resume-from-checkpoint latest: there is no checkpoint in {save_dir}")
    return max(found, key=lambda folder: read_state(folder)["saved_at"])


def read_state(folder: Path) -> dict[str, Any]:
    """The ``state`` that was saved with a checkpoint, and when it was saved. Raises CheckpointError."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not state.keys() >= STATE_KEYS:
            raise ValueError(f"{STATE} lacks {', '.join(sorted(STATE_KEYS))}")
        return state
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} can't be read ({error}): resume from another") from None


def update_state(folder: Path, **changes: Any) -> None:
    """Change values of a checkpoint's state. Raises OSError."""
    write_text(folder / STATE, json.dumps({**read_state(folder), **changes}, indent=2) + "\n")


def remove_oldest(save_dir: Path, keep: int) -> list[Path]:
    """Remove the oldest checkpoints of ``save_dir`` until ``keep`` are left, and return them."""
    found = [path.parent for path in save_dir.glob(f"step-*/{STATE}")]
    found.sort(key=lambda folder: float(read_state(folder)["saved_at"]))
    for folder in found[: max(0, len(found) - keep)]:
        # Under a name that clean_up knows, so that an interrupted removal leaves no half checkpoint.
        doomed = _temporary_of(folder)
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
    return found[: max(0, len(found) - keep)]


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Restore the state of ``optimizer``. Raises CheckpointError."""
    try:
        optimizer.load_state_dict(torch.load(folder / OPTIMIZER, map_location=device, weights_only=True))
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"checkpoint {folder} can't be read ({reason}): resume from another") from None


@contextlib.contextmanager
def atomic_folder(target: Path, needed: int = 0) -> Iterator[Path]:
    """A folder to fill, which replaces ``target`` when the block ends without an error.

    At any time ``target`` is either the old folder or the complete new one, even if the process is killed or
    the disk fills up. ``needed``: bytes about to be written; raises CheckpointError at once if the disk has
    less room. Raises CheckpointError if writing fails.
    """
    temporary = _temporary_of(target)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")
        yield temporary
        for path in temporary.iterdir():
            # safetensors makes its files private to the owner; give them the permissions of the folder.
            path.chmod(temporary.stat().st_mode & 0o666)
            _sync(path)
        _sync(temporary)
        _replace(temporary, target)
        _sync(target.parent)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if _is_full(error):
            reason = f"the disk is full ({reason}): free some space"
        raise CheckpointError(f"can't save {target}: {reason}; older checkpoints are untouched") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def clean_up(save_dir: Path) -> list[Path]:
    """Remove what interrupted saves left in ``save_dir`` and return it; saves in progress stay.

    Call it before this process saves anything.
    """
    removed = []
    for path in save_dir.glob(".*.tmp"):
        name, _, pid = path.name.removesuffix(".tmp").rpartition(".")
        here = name.endswith(f".{socket.gethostname()}")
        # A container has a new host name at each start, so saves of other hosts are judged by age alone.
        if not _is_running(int(pid)) if here else time.time() - path.stat().st_mtime > 3600:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    for old in save_dir.glob(".*.old"):
        target = _target_of(old)
        if target.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, target)
    return removed


def _replace(source: Path, target: Path) -> None:
    """Move the folder ``source`` to ``target`` and delete the old one."""
    if not target.exists():
        os.rename(source, target)
    elif _exchange(source, target):
        shutil.rmtree(source)
    else:
        # For an instant neither has the name; if the process dies there, clean_up restores the old one.
        old = target.with_name(f".{target.name}.old")
        os.rename(target, old)
        os.rename(source, target)
        shutil.rmtree(old)


def _temporary_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}.tmp")


def _target_of(old: Path) -> Path:
    return old.with_name(old.name.removeprefix(".").removesuffix(".old"))


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one system call; False if the system or file system can't (it is Linux only)."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, exchange = -100, 2
    return bool(renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _torch_save(content: Any, path: Path) -> None:
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


def _is_running(pid: int) -> bool:
    # In a container the process that left the folder may have had the same number as this one.
    return pid != os.getpid() and is_running(pid)
