"""The loss over the validation set, shared by all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from utils.training.models import Batch
from utils.training.step import Stepper


@torch.no_grad()
def validation_loss(stepper: Stepper, batches: Iterable[Batch], step: int) -> float | None:
    """Mean loss over all ranks' ``batches``; None if a rank was asked to stop meanwhile."""
    world, watch = stepper.world, stepper.watch
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    stepper.model.eval()
    for index, batch in enumerate(batches):
        watch.mark(step - 1, "evaluating", index)
        if watch.signal:
            break
        with stepper.precision.autocast():
            loss, counted = stepper.family.loss_sum(stepper.model, stepper.to_device(batch))
        sums += torch.stack([loss.double(), counted.double()])
    stepper.model.train()
    loss_sum, predicted, stop = world.sum(*sums, float(watch.signal != 0))
    return None if stop else loss_sum / max(1.0, predicted)
