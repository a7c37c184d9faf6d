"""AdamW with two parameter groups, and the learning-rate schedule."""

from __future__ import annotations

import torch
from torch import nn


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
