"""Checkpoints from which any partition can continue.

A checkpoint is a folder ``iter_0000050`` with one file per pipeline stage and tensor-parallel rank. A file
holds every parameter of its stage under its name in the whole model: fp32 value, Adam's moments and step. A
rank that loads takes what its own stage needs from all files. Written by data-parallel rank 0; meta.json
comes last, with the files' checksums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from chakra_et import files
from megatron_lm import saved
from megatron_lm.engine import model
from megatron_lm.engine.optimizer import MOMENTS, Optimizer
from megatron_lm.settings import Settings, Size
from megatron_lm.settings.conf import FOLDER
from utils.training.checkpoint import CheckpointError, atomic_folder, torch_save

log = logging.getLogger(__name__)


class Checkpoints:
    """Saves and loads this run's model, optimizer and schedule."""

    def __init__(self, settings: Settings, chunks: list[Any], optimizer: Optimizer, schedule: Any) -> None:
        self.settings, self.chunks, self.optimizer, self.schedule = settings, chunks, optimizer, schedule

    def check_writable(self) -> None:
        """Write a test file to SAVE on every rank that will write there. Raises ``CheckpointError``."""
        save = self.settings.save
        if not save or (parallel_state.get_data_parallel_rank() and dist.get_rank()):
            return
        try:
            (FOLDER / save).mkdir(parents=True, exist_ok=True)
            with files.scratch_folder(FOLDER / save / "write_test") as probe:
                (probe / "test").write_bytes(b"test")
        except OSError as error:
            how = "set SAVE to a folder that all nodes share and can write to"
            raise CheckpointError(f"SAVE={save}: can't be written to ({error.strerror}): {how}") from None

    def after(self, iteration: int, now: bool = False) -> None:
        """Save if SAVE and SAVE_INTERVAL ask for it, or ``now``. Raises ``CheckpointError``."""
        settings = self.settings
        due = settings.save_interval and iteration % settings.save_interval == 0
        if settings.save and (due or now or iteration == settings.train_iters):
            self.save(saved.of_iteration(FOLDER / settings.save, iteration), iteration)

    def save(self, folder: Path, iteration: int) -> None:
        """Write a checkpoint, all of it or nothing; every rank calls this. Raises ``CheckpointError``.

        Rank 0 makes a folder with a temporary name, all write into it, and rank 0 gives it its name.
        """
        with atomic_folder(folder) if dist.get_rank() == 0 else contextlib.nullcontext() as temporary:
            shared = [str(temporary)]
            dist.broadcast_object_list(shared, 0)
            try:
                self._write(Path(shared[0]), iteration)
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"can't save {folder}: {error}; older ones are untouched") from error
            dist.barrier()
        dist.barrier()

    def load(self) -> int:
        """Continue from LOAD, or after Slurm requeued the job from the newest checkpoint in SAVE.

        Returns the number of iterations done. Raises ``CheckpointError``.
        """
        folder = self._start()
        if folder is None:
            return 0
        meta, parts = read(folder)
        size = Size(**meta["size"])
        if size != self.settings.size:
            theirs, ours = dataclasses.asdict(size), dataclasses.asdict(self.settings.size)
            differs = ", ".join(name for name in ours if theirs[name] != ours[name])
            how = f"set MODEL={meta['model']} and its sizes as in the run that wrote it"
            raise CheckpointError(f"checkpoint {folder} is of another model ({differs} differ): {how}")
        for name, parameter in model.named(self.chunks):
            if name not in parts:
                raise CheckpointError(f"checkpoint {folder} lacks {name}: load another one")
            whole, gated = parts[name], model.is_gated(name, size.swiglu)
            kinds = [kind for kind in ("value", *MOMENTS) if kind in whole]
            own = {kind: model.own_slice(parameter, whole[kind], gated) for kind in kinds}
            step = {"step": whole["step"]} if whole.get("step") is not None else {}
            self.optimizer.put(parameter, own | step)
        self.optimizer.set_loss_scale_state(meta.get("loss_scale", {}))
        self.schedule.load_state_dict(meta["schedule"])
        return int(meta["iteration"])

    def _start(self) -> Path | None:
        """The newest good checkpoint, the same on all ranks; None to start anew.

        Raises ``CheckpointError``.
        """
        settings = self.settings
        found: list[Path] = []
        if settings.save and os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
            found = saved.newest_first(FOLDER / settings.save)
        if settings.load:
            found += saved.newest_first(FOLDER / settings.load)
            if not found:
                raise CheckpointError(f"LOAD={settings.load}: there is no checkpoint")
        # Rank 0 decides: another rank may not see the newest folder yet.
        shared = [found]
        dist.broadcast_object_list(shared, 0)
        for folder in shared[0]:
            # Every rank checks its share of the files.
            problems = [""] * dist.get_world_size()
            dist.all_gather_object(problems, saved.damage(folder, dist.get_rank(), len(problems)))
            problem = next(filter(None, problems), "")
            if not problem:
                if folder != shared[0][0] and dist.get_rank() == 0:
                    log.warning("continuing from %s, the newest good checkpoint", folder)
                return folder
            if dist.get_rank() == 0:
                log.warning("checkpoint %s is damaged: %s", folder, problem)
        if shared[0]:
            others = [path for path in saved.newest_first(folder.parent) if path not in shared[0]]
            whole = [path for path in others if not saved.damage(path)]
            instead = f"set LOAD to {whole[0]}" if whole else "there is no other"
            raise CheckpointError(f"checkpoint {folder} is damaged: {problem}; {instead}")
        return None

    def _write(self, folder: Path, iteration: int) -> None:
        first = parallel_state.get_data_parallel_rank() == 0
        state, written = {}, {}
        for name, parameter in model.named(self.chunks):
            entry = self.optimizer.gather(parameter)
            if first:
                state[name] = {**entry, "split_dim": model.split_dim(parameter)}
        if first:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            tensor_rank = parallel_state.get_tensor_model_parallel_rank()
            name = f"stage{stage:03d}_tensor{tensor_rank:03d}.pt"
            torch_save(state, folder / name)
            written[name] = (folder / name).stat().st_size, files.sha256(folder / name)
        gathered: list[dict[str, tuple[int, str]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(gathered, written)
        if dist.get_rank() == 0:
            meta = {
                "iteration": iteration,
                "model": self.settings.model,
                "size": dataclasses.asdict(self.settings.size),
                "partition": self.settings.partition,
                "tensor_mp_size": self.settings.tensor_mp_size,
                "loss_scale": self.optimizer.loss_scale_state(),
                "schedule": self.schedule.state_dict(),
                "files": {name: entry for of_rank in gathered for name, entry in of_rank.items()},
            }
            files.write_json(folder / saved.META, meta)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(meta.json, every parameter of the whole model: value, split_dim, moments and step). Raises
    ``CheckpointError``."""
    try:
        meta = saved.read_meta(folder)
        swiglu = meta["size"]["swiglu"]
        found: dict[str, list[dict[str, Any]]] = {}
        for file in sorted(folder.glob("stage*_tensor*.pt")):
            # A tied embedding is in the first and in the last stage: either will do.
            state = torch.load(file, map_location="cpu", weights_only=True)
            tensor_rank = int(file.stem.rpartition("tensor")[2])
            for name, entry in state.items():
                found.setdefault(name, [{}] * meta["tensor_mp_size"])[tensor_rank] = entry
        return meta, {name: _joined(parts, model.is_gated(name, swiglu)) for name, parts in found.items()}
    except Exception as error:  # torch.load raises whatever a damaged pickle does
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"checkpoint {folder} can't be read ({reason}): load another one") from None


def _joined(parts: list[dict[str, Any]], gated: bool) -> dict[str, Any]:
    first = parts[0]
    if first["split_dim"] is None or len(parts) == 1:
        return first
    kinds = ("value", *(kind for kind in MOMENTS if kind in first))
    dim = first["split_dim"]
    return first | {kind: model.joined([part[kind] for part in parts], dim, gated) for kind in kinds}
