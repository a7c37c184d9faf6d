"""Build a Hugging Face model: with random weights from a preset, or from saved weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

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
        self, preset: dict[str, int], weights: Path | None, dropout: float | None,
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
            model = self.model_class(self.config_class(**{**preset, **rates}))
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
        model.to(torch.float32)  # type: ignore[arg-type]
        return model
