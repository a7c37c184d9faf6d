"""AdamW with two parameter groups, the learning-rate schedule, and what a forward pass computes in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


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


class Precision:
    """Autocast to bfloat16 or float16, with weights, gradients and optimizer state in float32.

    Gradients of float16 vanish below 6e-8, so its loss is multiplied by a scale that halves when a gradient
    overflows (that step is skipped) and doubles after 2,000 steps without one. Overflows reach all ranks in
    DDP's all-reduce, so all ranks skip the same steps. Raises ValueError if the device lacks the format.
    """

    def __init__(self, device: torch.device, bf16: bool, fp16: bool):
        self.device = device
        self.dtype = torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
        if bf16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise ValueError(f"--bf16: {torch.cuda.get_device_name()} does not support bfloat16; omit it")
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)

    @property
    def is_slow(self) -> bool:
        """Whether float32 would be faster: bfloat16 on a CPU that multiplies no matrices of it (AMX)."""
        return self.device.type == "cpu" and self.dtype == torch.bfloat16 and not _has_amx()

    def autocast(self) -> torch.autocast:
        """The context of a forward pass."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @property
    def figures(self) -> dict[str, float]:
        """The loss scale, for the log; empty without one."""
        return {"loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue with the loss scale of a checkpoint, if both use one."""
        if state and self.scaler.is_enabled():
            self.scaler.load_state_dict(state)


def rescale(parameters: Iterable[torch.nn.Parameter], factor: float, max_norm: float) -> Tensor | None:
    """Multiply all gradients by ``factor``, or by less if their norm would exceed ``max_norm``.

    Returns their norm before clipping; None without clipping (``max_norm`` 0). One pass over the gradients
    less than rescaling them and then calling ``clip_grad_norm_``, whose formula it is.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not max_norm:
        torch._foreach_mul_(gradients, factor)
        return None
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))) * factor
    torch._foreach_mul_(gradients, factor * (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _has_amx() -> bool:
    """Whether this CPU has AMX instructions for bfloat16; True where that can't be known."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
