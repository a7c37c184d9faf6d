"""Checkpoints that any partition can go on from.

A checkpoint is a folder ``iter_0000050`` with a file for each pipeline stage and tensor-parallel rank, which
holds every parameter under its name in the whole model, together with its optimizer state. Whoever loads it
takes what its stage needs from whichever file has it. Written by data-parallel rank 0. On GPUs megatron-core
adds its own files for the optimizer, whose state is sharded.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lm.engine.model import named, own_part
from megatron_lm.engine.optimizer import MegatronOptimizer
from megatron_lm.settings import Settings
from utils.training.checkpoint import CheckpointError, atomic_folder

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
MOMENTS = ("exp_avg", "exp_avg_sq")
META = "meta.json"


def folder_of(save: str, iteration: int) -> Path:
    return _resolved(save) / f"iter_{iteration:07d}"


def _resolved(path: str) -> Path:
    """Relative paths are relative to megatron_lm, as all paths of ``_00_conf.sh``."""
    return (ROOT / "megatron_lm" / path).resolve()


class Checkpoints:
    """Saves and loads this run's model, optimizer and schedule."""

    def __init__(self, settings: Settings, stage: Any, optimizer: Any, schedule: Any) -> None:
        self.settings, self.stage, self.optimizer, self.schedule = settings, stage, optimizer, schedule

    def after(self, iteration: int) -> None:
        """Save where SAVE and SAVE_INTERVAL ask for it. Raises ``CheckpointError``."""
        settings = self.settings
        due = settings.save_interval and iteration % settings.save_interval == 0
        if settings.save and (due or iteration == settings.train_iters):
            self.save(folder_of(settings.save, iteration), iteration)

    def save(self, folder: Path, iteration: int) -> None:
        """Write a checkpoint, whole or not at all; every rank calls it. Raises ``CheckpointError``.

        Rank 0 makes the folder under another name, all write into it, and rank 0 gives it its name.
        """
        with atomic_folder(folder) if dist.get_rank() == 0 else contextlib.nullcontext() as temporary:
            told = [str(temporary)]
            dist.broadcast_object_list(told, 0)
            try:
                self._write(Path(told[0]), iteration)
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"can't save {folder}: {error}; older ones are untouched") from error
            dist.barrier()
        dist.barrier()

    def _write(self, folder: Path, iteration: int) -> None:
        if parallel_state.get_data_parallel_rank() == 0:
            state = {name: self._entry(parameter) for name, parameter in named(self.stage)}
            torch.save(state, folder / _file(*_place()))
        if isinstance(self.optimizer, MegatronOptimizer):
            self.optimizer.save(str(folder / _file(*_place(), "optimizer_")))
        if dist.get_rank() == 0:
            meta = {
                "iteration": iteration,
                "model": self.settings.model,
                "partition": self.settings.partition,
                "tensor_mp_size": self.settings.tensor_mp_size,
                "schedule": self.schedule.state_dict(),
            }
            (folder / META).write_text(json.dumps(meta, indent=1) + "\n")

    def _entry(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        moments = getattr(self.optimizer, "state", {}).get(parameter, {})
        split = getattr(parameter, "tensor_model_parallel", False)
        return {
            "value": parameter.detach().cpu(),
            "split_dim": parameter.partition_dim if split else None,
            "step": moments.get("step"),
            **{name: moments[name].cpu() for name in MOMENTS if name in moments},
        }

    def load(self) -> int:
        """Take over LOAD's state; returns the iterations that it has done. Raises ``CheckpointError``."""
        folder = _newest(_resolved(self.settings.load))
        meta, parts = read(folder)
        if meta["model"] != self.settings.model:
            raise CheckpointError(f"checkpoint {folder} is of model {meta['model']}: set MODEL to it")
        for name, parameter in named(self.stage):
            if name not in parts:
                raise CheckpointError(f"checkpoint {folder} lacks {name}: load another")
            self._take(parameter, parts[name])
        if isinstance(self.optimizer, MegatronOptimizer):
            self._take_optimizer(folder, meta)
        self.schedule.load_state_dict(meta["schedule"])
        return int(meta["iteration"])

    def _take_optimizer(self, folder: Path, meta: dict[str, Any]) -> None:
        """megatron-core's own state fits the layout that it was saved in; in another one it begins anew."""
        layout = (meta["partition"], meta["tensor_mp_size"])
        if layout == (self.settings.partition, self.settings.tensor_mp_size):
            self.optimizer.load(str(folder / _file(*_place(), "optimizer_")))
        else:
            self.optimizer.take_weights()
            log.warning("another partition or TENSOR_MP_SIZE: the optimizer's moments begin anew")

    def _take(self, parameter: torch.nn.Parameter, whole: dict[str, Any]) -> None:
        with torch.no_grad():
            parameter.copy_(_fitted(own_part(parameter, whole["value"]), parameter))
        if all(name in whole for name in MOMENTS) and hasattr(self.optimizer, "state"):
            state = self.optimizer.state[parameter]
            state["step"] = whole["step"].clone()
            for name in MOMENTS:
                moment = torch.zeros_like(parameter)
                moment.copy_(_fitted(own_part(parameter, whole[name]), parameter))
                state[name] = moment


def read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(what meta.json says, every parameter of the whole model: value, split_dim and moments).

    Raises ``CheckpointError``.
    """
    folder = _newest(path)
    try:
        meta = json.loads((folder / META).read_text())
        found: dict[str, list[dict[str, Any]]] = {}
        for file in sorted(folder.glob("stage*_tensor*.pt")):
            # The tied embedding stands in the first and the last stage: either will do.
            state = torch.load(file, map_location="cpu", weights_only=True)
            tensor_rank = int(file.stem.rpartition("tensor")[2])
            for name, entry in state.items():
                found.setdefault(name, [{}] * meta["tensor_mp_size"])[tensor_rank] = entry
        return meta, {name: _joined(parts) for name, parts in found.items()}
    except Exception as error:  # torch.load raises whatever a damaged pickle does
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"checkpoint {folder} can't be read ({reason}): load another") from None


def _place() -> tuple[int, int]:
    return parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()


def _file(stage: int, tensor_rank: int, kind: str = "") -> str:
    return f"{kind}stage{stage:03d}_tensor{tensor_rank:03d}.pt"


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    first = parts[0]
    if first["split_dim"] is None or len(parts) == 1:
        return first
    tensors = ("value", *(name for name in MOMENTS if name in first))
    return first | {name: torch.cat([part[name] for part in parts], first["split_dim"]) for name in tensors}


def _fitted(tensor: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The vocabulary is padded by the number of tensor-parallel ranks: rows of padding come and go."""
    rows = parameter.shape[0]
    if tensor.shape[0] < rows:
        padding = torch.zeros(rows - tensor.shape[0], *tensor.shape[1:], dtype=tensor.dtype)
        return torch.cat([tensor, padding])
    return tensor[:rows]


def _newest(path: Path) -> Path:
    """``path`` itself, or the last of the checkpoints in it."""
    if (path / META).is_file():
        return path
    found = sorted(folder.parent for folder in path.glob(f"iter_*/{META}")) if path.is_dir() else []
    if not found:
        raise CheckpointError(f"LOAD={path}: no checkpoint there")
    return found[-1]
