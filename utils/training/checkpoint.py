"""Checkpoint folders that Hugging Face loads, written whole or not at all, and read back for a resume."""

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
from torch import nn

from utils.processes import is_running

BEST = "best_model"
STATE = "trainer_state.json"
OPTIMIZER = "optimizer.pt"
STATE_KEYS = {"step", "best_loss", "model_name", "order", "saved_at"}


class CheckpointError(OSError):
    """A checkpoint that can't be written or read; the text says which and why."""


def step_folder(save_dir: Path, step: int) -> Path:
    """Where the periodic checkpoint after ``step`` optimizer steps goes."""
    return save_dir / f"step-{step}"


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    tokenizer: Any,
    save_format: str,
    optimizer: torch.optim.Optimizer | None = None,
    state: dict[str, Any] | None = None,
) -> None:
    """Write a folder that ``from_pretrained`` loads; with ``optimizer`` and ``state``, one to resume from.

    Replaces ``folder`` in one go. Raises CheckpointError and leaves what was there.
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
    """The folder to resume from: ``wanted``, or for "latest" the newest one in ``save_dir``.

    Raises CheckpointError where there is none.
    """
    if wanted != "latest":
        folder = Path(wanted)
        if not (folder / STATE).is_file():
            why = "holds weights alone" if (folder / "config.json").is_file() else "is no checkpoint"
            raise CheckpointError(
                f"--resume-from-checkpoint {wanted} {why}: give a step-N folder (or --init-from for weights)"
            )
        return folder
    found = [path.parent for path in save_dir.glob(f"step-*/{STATE}")]
    if not found:
        raise CheckpointError(f"--resume-from-checkpoint latest: there is no checkpoint in {save_dir}")
    return max(found, key=lambda folder: read_state(folder)["saved_at"])


def read_state(folder: Path) -> dict[str, Any]:
    """What ``save_checkpoint`` was given as ``state``, and when. Raises CheckpointError."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not state.keys() >= STATE_KEYS:
            raise ValueError(f"{STATE} lacks {', '.join(sorted(STATE_KEYS))}")
        return state
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} can't be read ({error}): resume from another") from None


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Restore the moments of ``optimizer``. Raises CheckpointError."""
    try:
        optimizer.load_state_dict(torch.load(folder / OPTIMIZER, map_location=device, weights_only=True))
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"checkpoint {folder} can't be read ({reason}): resume from another") from None


@contextlib.contextmanager
def atomic_folder(target: Path, needed: int = 0) -> Iterator[Path]:
    """A folder to fill, which takes the place of ``target`` when the block ends without an error.

    At every moment ``target`` is the old folder or the complete new one, whatever is killed or full.
    ``needed``: bytes that are about to be written, refused at once where the disk hasn't that much.
    Raises CheckpointError.
    """
    temporary = target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")
        yield temporary
        for path in temporary.iterdir():
            # safetensors keeps its files to the owner; they are as public as the folder.
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
    """Remove what interrupted saves have left in ``save_dir``, and return it; saves under way stay.

    To be called before this process saves anything.
    """
    removed = []
    for path in save_dir.glob(".*.tmp"):
        name, _, pid = path.name.removesuffix(".tmp").rpartition(".")
        here = name.endswith(f".{socket.gethostname()}")
        # A container's name is new at each start, so that only age tells about other hosts' saves.
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
    """Put the folder ``source`` at ``target`` and delete what was there."""
    if not target.exists():
        os.rename(source, target)
    elif _exchange(source, target):
        shutil.rmtree(source)
    else:
        # For an instant neither stands at the name; should it end there, clean_up puts the old one back.
        old = target.with_name(f".{target.name}.old")
        os.rename(target, old)
        os.rename(source, target)
        shutil.rmtree(old)


def _target_of(old: Path) -> Path:
    return old.with_name(old.name.removeprefix(".").removesuffix(".old"))


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one system call, where the system and the file system have it (Linux)."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, exchange = -100, 2
    return renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _torch_save(content: Any, path: Path) -> None:
    # Given a path, PyTorch writes by itself and its error doesn't tell that the disk is full.
    with path.open("wb") as file:
        torch.save(content, file)


def _is_full(error: BaseException | None) -> bool:
    """Whether ``error``, or one behind it, says so; libraries in Rust have the number in their text alone."""
    if error is None:
        return False
    numbers = (errno.ENOSPC, errno.EDQUOT)
    found = getattr(error, "errno", None) in numbers or any(os.strerror(n) in str(error) for n in numbers)
    return found or _is_full(error.__cause__ or error.__context__)


def _is_running(pid: int) -> bool:
    # A container's first process: the one that left the folder had the same number.
    return pid != os.getpid() and is_running(pid)
