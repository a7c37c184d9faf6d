"""The BERT model class and its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM

from utils.training.step import Batch, ModelFamily


def loss_sum(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross entropy summed over the masked tokens, and their number.

    ``batch``: input_ids, attention_mask, token_type_ids and labels, each [batch, sequence]; labels are the
    original ids at masked positions and -100 elsewhere.
    """
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    logits = model(**inputs).logits
    targets = batch["labels"].flatten()
    loss = cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=-100, reduction="sum")
    return loss, torch.count_nonzero(targets != -100)


DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
BERT = ModelFamily(BertForMaskedLM, BertConfig, DROPOUTS, loss_sum)
