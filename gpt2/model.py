"""The GPT-2 model class and its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import GPT2Config, GPT2LMHeadModel

from utils.training.step import Batch, ModelFamily


def loss_sum(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Next-token cross entropy summed over the predicted tokens, and their number.

    ``batch``: input_ids and labels, each [batch, sequence]; labels are the input ids, or -100 where nothing
    is to be predicted.
    """
    # No attention mask: padding is on the right, where causal attention can't look, and without a mask
    # PyTorch takes its fastest kernels.
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    # Shift the labels rather than the logits, which are large and would be copied.
    targets = pad(batch["labels"][:, 1:], (0, 1), value=-100).flatten()
    loss = cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=-100, reduction="sum")
    return loss, torch.count_nonzero(targets != -100)


GPT2 = ModelFamily(GPT2LMHeadModel, GPT2Config, ("resid_pdrop", "embd_pdrop", "attn_pdrop"), loss_sum)
