"""megatron-core's optimizer (mixed precision, loss scale, clipping, sharded or not) and learning rate."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_lm.engine.log_lines import Timers
from megatron_lm.settings import Settings

CLIP, WEIGHT_DECAY = 1.0, 0.01
MOMENTS = ("exp_avg", "exp_avg_sq")


class Stepped(NamedTuple):
    """done: False if the step was skipped because gradients had overflowed. norm: of all gradients."""

    done: bool
    norm: float | None


class Optimizer:
    """megatron-core's optimizer, with its state by model parameter, whatever its sharding and precision."""

    def __init__(
        self, chunks: list[DistributedDataParallel], settings: Settings, timers: Timers | None
    ) -> None:
        # Adam's betas and epsilon, and the first loss scale, are megatron-core's defaults.
        config = OptimizerConfig(
            lr=settings.lr,
            min_lr=0.0,
            weight_decay=WEIGHT_DECAY,
            fp16=settings.precision == "fp16",
            bf16=settings.precision == "bf16",
            params_dtype=chunks[0].config.params_dtype,
            clip_grad=CLIP,
            use_distributed_optimizer=settings.sharded_optimizer,
            timers=timers,
        )
        self.chained = get_megatron_optimizer(config, chunks)
        # Without experts the chain has one link.
        (self._mixed,) = self.chained.chained_optimizers
        self._sharded = settings.sharded_optimizer

    def scale(self) -> float:
        """The factor by which losses are multiplied."""
        return float(self.chained.get_loss_scale().item())

    def step(self) -> Stepped:
        done, norm, _ = self.chained.step()
        return Stepped(bool(done), None if norm is None else float(norm))

    def gather(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """A parameter's fp32 value, its moments (absent before the first step) and ``step``, on the CPU.

        With a sharded optimizer all data-parallel ranks call it, and the first one gets the result.
        """
        main, own = self._main(parameter)
        flat = torch.zeros(1 + len(MOMENTS), parameter.numel(), device=parameter.device)
        if main is not None:
            state = self._mixed.optimizer.state.get(main, {})
            for row, tensor in zip(flat, (main, *(state.get(name) for name in MOMENTS)), strict=True):
                if tensor is not None:
                    row[own] = tensor.detach().reshape(-1)
        if self._sharded:
            group = parallel_state.get_data_parallel_group()
            dist.reduce(flat, dist.get_global_rank(group, 0), group=group)
        # All parameters have been stepped alike; this rank may have no slice of this one.
        steps = self._steps()
        whole = [row.view_as(parameter).cpu() for row in flat]
        if not steps:
            return {"value": whole[0]}
        return dict(zip(("value", *MOMENTS), whole, strict=True)) | {"step": torch.tensor(float(steps))}

    def put(self, parameter: torch.nn.Parameter, state: dict[str, torch.Tensor]) -> None:
        """Set a parameter, and the optimizer's state of it, to what ``gather`` returned."""
        with torch.no_grad():
            parameter.copy_(state["value"])
            main, own = self._main(parameter)
            if main is None:
                return
            main.copy_(state["value"].reshape(-1)[own].view_as(main))
            if "step" not in state:
                return
            moments = {
                name: state[name].reshape(-1)[own].view_as(main).to(main.device, torch.float32).clone()
                for name in MOMENTS
            }
            adam = self._mixed.optimizer
            if isinstance(adam, torch.optim.AdamW):
                adam.state[main] = {"step": state["step"].clone(), **moments}
            else:
                # Transformer Engine's and Apex's Adam count steps per group.
                adam.state[main] = moments
                for group in adam.param_groups:
                    group["step"] = int(state["step"])

    def loss_scale_state(self) -> dict[str, float]:
        """The state of a dynamic loss scale; empty without one."""
        scaler = getattr(self._mixed, "grad_scaler", None)
        state = scaler.state_dict() if scaler is not None else {}
        return {name: float(value) for name, value in state.items()}

    def set_loss_scale_state(self, state: dict[str, float]) -> None:
        """Take back ``loss_scale_state``."""
        scaler = getattr(self._mixed, "grad_scaler", None)
        if state and scaler is not None:
            counts = {name: int(value) for name, value in state.items() if name != "scale"}
            scaler.load_state_dict({"scale": torch.tensor([state["scale"]]), **counts})

    def _main(self, parameter: torch.nn.Parameter) -> tuple[Any, slice]:
        """The fp32 tensor that Adam works on, and the slice of the flat parameter that it is.

        None in place of the tensor if this rank's shard has nothing of the parameter.
        """
        if not self._sharded:
            return getattr(parameter, "main_param", parameter), slice(None)
        optimizer = self._mixed
        place = optimizer.model_param_group_index_map.get(parameter)
        if place is None:
            return None, slice(0, 0)
        buffer, dtype, bucket = optimizer.model_param_gbuf_map[parameter]
        own = optimizer.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
        group, order = place
        return optimizer.optimizer.param_groups[group]["params"][order], slice(own.start, own.end)

    def _steps(self) -> int:
        adam = self._mixed.optimizer
        counts = [group["step"] for group in adam.param_groups if "step" in group]
        counts += [state["step"] for state in adam.state.values() if "step" in state]
        return int(max(counts, default=0))


def schedule(optimizer: Optimizer, settings: Settings) -> OptimizerParamScheduler:
    """The learning rate, which counts samples: a warm-up, then a cosine to 0."""
    decay = settings.lr_decay_iters * settings.global_batch_size
    return OptimizerParamScheduler(
        optimizer.chained,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=0.0,
        lr_warmup_steps=int(settings.lr_warmup_fraction * decay),
        lr_decay_steps=decay,
        lr_decay_style="cosine",
        start_wd=WEIGHT_DECAY,
        end_wd=WEIGHT_DECAY,
        wd_incr_steps=settings.train_iters * settings.global_batch_size,
        wd_incr_style="constant",
    )
