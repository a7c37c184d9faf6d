"""One optimizer step: forward and backward passes over this rank's micro-batches, one update of the weights;
with the model, the samples that each rank sees, the optimizer and its learning rate.

Each step has one collective besides DDP's own, over four numbers: the loss, its token count, the count of all
tokens, and whether a rank was asked to stop. The loss is a mean over the tokens of the global batch, so loss
and gradient don't depend on how ranks and accumulation share the batch. Samples, learning rate and random
numbers are functions of the seed and the step.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from utils.distributed import World
from utils.training.config import TrainConfig
from utils.watch import Watch, describe

COMPILER_MODULES = ("torch._dynamo", "torch._inductor")
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ModelFamily:
    """What the training loop needs to know about a kind of model.

    model_class, config_class: of transformers; dropouts: names of the dropout rates in the configuration;
    loss_sum: (model, batch) → loss summed over the predicted tokens, and the number of these tokens.
    """

    model_class: type[PreTrainedModel]
    config_class: type[PretrainedConfig]
    dropouts: tuple[str, ...]
    loss_sum: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]

    def build(
        self, preset: Mapping[str, Any], weights: Path | None, dropout: float | None,
        gradient_checkpointing: bool = False,
    ) -> PreTrainedModel:  # fmt: skip
        """A random model of size ``preset``, or the one in the folder ``weights``, in float32.

        ``dropout`` replaces all dropout rates (None: keep them). ``gradient_checkpointing`` keeps the inputs
        of each layer only, and computes its activations again in the backward pass. Raises ValueError if
        ``weights`` is absent, damaged or of another family.
        """
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        rates: dict[str, Any] = {} if dropout is None else dict.fromkeys(self.dropouts, dropout)
        if weights is None:
            model = self.model_class(self.config_class(**preset, **rates))
        else:
            model = self._load(weights, rates)
        if gradient_checkpointing:
            # The name changed in transformers 5.
            new = getattr(model, "activation_checkpointing_enable", None)
            (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
        return model

    def _load(self, weights: Path, rates: dict[str, Any]) -> PreTrainedModel:
        try:
            config = AutoConfig.from_pretrained(weights, **rates)
            if config.model_type != self.config_class.model_type:
                raise ValueError(f"it is a {config.model_type} model, not {self.config_class.model_type}")
            model: PreTrainedModel = self.model_class.from_pretrained(weights, config=config)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"the weights at {weights} can't be loaded: {reason}") from error
        model.to(torch.float32)
        return model


@dataclass(frozen=True)
class BatchPlan:
    """How a data set of ``samples`` is split into global batches, and those into ranks' micro-batches.

    micro_batch: samples per forward pass on one rank; accumulation: forward passes per optimizer step on one
    rank; seed: of the order.
    """

    samples: int
    micro_batch: int
    world_size: int
    accumulation: int
    seed: int

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch * self.world_size * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    def order(self, epoch: int) -> torch.Tensor:
        """The sample indices of an epoch, a whole number of global batches.

        The last batch is filled up from the beginning of the epoch, so that every step has the same size.
        """
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "order", epoch))
        permutation = torch.randperm(self.samples, generator=generator)
        wanted = self.steps_per_epoch * self.global_batch
        return permutation.repeat(-(-wanted // self.samples))[:wanted]

    def micro_batches(self, rank: int, epoch: int, first_step: int = 0) -> list[list[int]]:
        """The micro-batches of one rank in one epoch, from optimizer step ``first_step`` of that epoch on.

        Global batch k is order[k·G : (k+1)·G]; micro-batch m of rank r starts at (m·world + r)·B within it.
        The samples of a step therefore depend on G alone, not on how ranks and accumulation share it.
        """
        blocks = self.order(epoch).view(-1, self.world_size, self.micro_batch)
        return cast("list[list[int]]", blocks[first_step * self.accumulation :, rank].tolist())


def derived_seed(*parts: object) -> int:
    """A 32-bit hash of ``parts``, the same on every machine.

    32 bits, because PyTorch's CPU generator ignores the rest.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def build_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW, fused if PyTorch supports it on the model's device; biases and norms have no weight decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # In these models the vectors are the biases and layer-norm weights; everything else is a matrix.
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    try:
        return torch.optim.AdamW(groups, lr=learning_rate, fused=True)
    except RuntimeError:
        return torch.optim.AdamW(groups, lr=learning_rate)


def learning_rate_at(step: int, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0): linear warm-up to ``peak``, then linear decay to 0.

    A function of the step alone, so a resumed run needs no scheduler state. The rate is above 0 at the first
    and the last step: neither is wasted.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    return peak * max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))


class Stepper:
    """Runs optimizer steps on one rank, with DDP if there are several."""

    def __init__(
        self, config: TrainConfig, family: ModelFamily, world: World, watch: Watch, model: PreTrainedModel,
        optimizer: torch.optim.Optimizer, total_steps: int,
    ):  # fmt: skip
        self.config, self.family, self.world, self.watch = config, family, world, watch
        self.model, self.optimizer, self.total_steps = model, optimizer, total_steps
        if config.bf16 and world.device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ValueError(f"--bf16: {torch.cuda.get_device_name()} does not support bfloat16; omit it")
        self.ddp: DistributedDataParallel | None = None
        if world.size > 1:
            # These models have constant buffers only: nothing to broadcast per step.
            known = inspect.signature(DistributedDataParallel).parameters
            name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            self.ddp = DistributedDataParallel(model, **cast(Any, {name: False}))
        self.wrapped: nn.Module = self.ddp or model
        if config.compile:
            self.wrapped = cast(nn.Module, torch.compile(self.wrapped))

    def run(self, step: int, batches: Iterator[Batch]) -> tuple[dict[str, Any], float, bool]:
        """Take optimizer step ``step`` (from 0); returns figures for the log, the tokens over all ranks, and
        whether a rank was asked to stop. Raises ValueError if the loss is not finite."""
        config, watch = self.config, self.watch
        torch.manual_seed(derived_seed(config.seed, "step", step, self.world.rank))
        rate = learning_rate_at(step, config.learning_rate, config.warmup_steps, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums = torch.zeros(3, dtype=torch.float64, device=self.world.device)
        for micro in range(config.gradient_accumulation_steps):
            watch.mark(step, "loading data", micro)
            batch = self.to_device(next(batches))
            watch.mark(step, "forward", micro)
            inner = micro + 1 < config.gradient_accumulation_steps
            with self.ddp.no_sync() if self.ddp is not None and inner else contextlib.nullcontext():
                loss, counted = self._forward(batch)
                watch.mark(step, "backward", micro)
                loss.backward()
            seen = batch["attention_mask"].sum()
            sums += torch.stack([loss.detach().double(), counted.double(), seen.double()])
        watch.mark(step, "reducing")
        loss_sum, predicted, tokens, stop = self.world.sum(*sums, float(watch.signal != 0))
        mean = loss_sum / max(1.0, predicted)
        if not math.isfinite(mean):
            raise ValueError(f"the loss is {mean} at step {step + 1}: lower --learning-rate")
        watch.mark(step, "optimizer step")
        # DDP has averaged gradients of sums over ranks; rescale them to the mean over all tokens.
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        torch._foreach_mul_(gradients, self.world.size / max(1.0, predicted))
        most = config.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), most) if most else None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        figures = {"loss": mean, "learning_rate": rate, **({} if norm is None else {"grad_norm": norm})}
        return figures, tokens, stop > 0

    @torch.no_grad()
    def evaluate(self, step: int, batches: Iterable[Batch]) -> float | None:
        """Mean loss over all ranks' ``batches``; None if a rank was asked to stop meanwhile."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        self.model.eval()
        for index, batch in enumerate(batches):
            self.watch.mark(step - 1, "evaluating", index)
            if self.watch.signal:
                break
            with self.autocast():
                loss, counted = self.family.loss_sum(self.model, self.to_device(batch))
            sums += torch.stack([loss.double(), counted.double()])
        self.model.train()
        loss_sum, predicted, stop = self.world.sum(*sums, float(self.watch.signal != 0))
        return None if stop else loss_sum / max(1.0, predicted)

    def autocast(self) -> torch.autocast:
        """The context of a forward pass: bfloat16 where that is safe, or nothing. Weights, gradients and
        optimizer state are float32."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.bf16)

    def to_device(self, batch: Batch) -> Batch:
        """The batch on this rank's device."""
        return {name: tensor.to(self.world.device, non_blocking=True) for name, tensor in batch.items()}

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        try:
            with self.autocast():
                return self.family.loss_sum(self.wrapped, batch)
        except Exception as error:
            if self.config.compile and type(error).__module__.startswith(COMPILER_MODULES):
                raise ValueError(f"--compile fails here, omit it: {describe(error)}") from error
            raise
