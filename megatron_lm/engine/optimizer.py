"""The optimizer, with one face on GPUs and CPUs, and its learning rate.

On GPUs it is megatron-core's: mixed precision with a loss scale, clipping, states shared among the
data-parallel ranks. That one needs CUDA; without it torch's AdamW takes its place, in fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_lm.engine.model import named
from megatron_lm.engine.timing import Timers
from megatron_lm.settings import Settings

CLIP, WEIGHT_DECAY, BETAS, EPSILON = 1.0, 0.01, (0.9, 0.999), 1e-8


class Stepped(NamedTuple):
    """done: False where the step was skipped, as gradients had overflowed. norm: of all gradients."""

    done: bool
    norm: float | None


class CpuOptimizer:
    """AdamW over the gradients that megatron-core has reduced into ``main_grad``."""

    def __init__(self, model: DistributedDataParallel, settings: Settings, timers: Timers | None) -> None:
        self.parameters = [parameter for _, parameter in named(model)]
        self._adam = torch.optim.AdamW(
            [
                {"params": [p for p in self.parameters if p.dim() > 1], "wd_mult": 1.0},
                # Biases and norms are not decayed, as in megatron-core.
                {"params": [p for p in self.parameters if p.dim() == 1], "wd_mult": 0.0},
            ],
            lr=settings.lr,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=WEIGHT_DECAY,
        )
        self._timers = timers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._adam.param_groups

    @property
    def state(self) -> dict[torch.nn.Parameter, dict[str, torch.Tensor]]:
        return self._adam.state

    def scale(self) -> float:
        return 1.0

    def zero_grad(self) -> None:
        """Gradients live in the model's buffers, which the training loop clears."""

    def step(self) -> Stepped:
        for parameter in self.parameters:
            parameter.grad = parameter.main_grad
        norm = global_norm(self.parameters)
        if norm > CLIP:
            for parameter in self.parameters:
                parameter.grad.mul_(CLIP / (norm + 1e-6))
        self._adam.step()
        # megatron-core adds a gradient that it finds to main_grad, which would count this one twice.
        self._adam.zero_grad(set_to_none=True)
        return Stepped(True, norm)


def global_norm(parameters: list[torch.nn.Parameter]) -> float:
    """2-norm of all gradients of the model, each counted once: the last stage's copy of the embedding and
    what every tensor-parallel rank has alike are left out on all ranks but one."""
    once = [
        parameter.grad
        for parameter in parameters
        if not getattr(parameter, "shared", False)
        and (
            getattr(parameter, "tensor_model_parallel", False)
            or parallel_state.get_tensor_model_parallel_rank() == 0
        )
    ]
    total = torch.zeros((), dtype=torch.float64)
    for gradient in once:
        total += gradient.double().square().sum()
    dist.all_reduce(total, group=parallel_state.get_model_parallel_group())
    return total.sqrt().item()


def build(
    model: DistributedDataParallel, settings: Settings, timers: Timers | None
) -> tuple[Any, OptimizerParamScheduler]:
    """The optimizer of this rank and the schedule of its learning rate, which counts samples."""
    if torch.cuda.is_available():
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=0.0,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPSILON,
            fp16=settings.precision == "fp16",
            bf16=settings.precision == "bf16",
            params_dtype=model.config.params_dtype,
            initial_loss_scale=2.0**32,
            clip_grad=CLIP,
            use_distributed_optimizer=True,
            timers=timers,
        )
        optimizer: Any = MegatronOptimizer(get_megatron_optimizer(config, [model]))
    else:
        optimizer = CpuOptimizer(model, settings, timers)
    decay = settings.lr_decay_iters * settings.global_batch_size
    schedule = OptimizerParamScheduler(
        optimizer,
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
    return optimizer, schedule


class MegatronOptimizer:
    """megatron-core's optimizer with the face of ``CpuOptimizer``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def scale(self) -> float:
        return self.inner.get_loss_scale().item()

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> Stepped:
        done, norm, _ = self.inner.step()
        return Stepped(bool(done), None if norm is None else float(norm))

    def save(self, path: str) -> None:
        """Every rank calls it; data-parallel rank 0 writes ``path``, which has loss scale and moments."""
        if parallel_state.get_data_parallel_rank() == 0:
            torch.save(self.inner.state_dict(), f"{path}.scale")
        self.inner.save_parameter_state(path)

    def load(self, path: str) -> None:
        """Take back what ``save`` wrote in the same layout."""
        self.inner.load_state_dict(torch.load(f"{path}.scale", map_location="cpu", weights_only=False))
        self.inner.load_parameter_state(path)

    def take_weights(self) -> None:
        """The model's weights are new: copy them into the fp32 ones that the optimizer keeps."""
        self.inner.reload_model_params()
