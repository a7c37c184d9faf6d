"""What a forward pass computes in: float32, bfloat16, or float16 with the loss scaling that it needs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


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

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, times the loss scale, to the parameters'."""
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale, and note whether they overflowed."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, unless gradients overflowed, and adapt the loss scale."""
        self.scaler.step(optimizer)
        self.scaler.update()

    @property
    def figures(self) -> dict[str, float]:
        """The loss scale, for the log; empty without one."""
        return {"loss_scale": self.scaler.get_scale()} if self.scaler.is_enabled() else {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON."""
        return self.scaler.state_dict()

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
