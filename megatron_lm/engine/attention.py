"""Fused attention, which keeps no scores: PyTorch's flash kernel in place of megatron-core's two products."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# Before PyTorch 2.5, keys and values need as many heads as queries.
GROUPED = "enable_gqa" in (nn.functional.scaled_dot_product_attention.__doc__ or "")


class FusedAttention(nn.Module):
    """Causal attention without dropout, built and called as megatron-core's ``DotProductAttention`` is.

    Fails where the GPU has no flash kernel, rather than compute with the scores in memory.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.config, self.scale = config, softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        """query: (sequence, batch, heads, width); key, value: of as many heads or fewer; the result:
        (sequence, batch, heads · width).
        """
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        each = q.shape[1] // k.shape[1]
        how: dict[str, Any] = {}
        if each > 1 and GROUPED:
            how["enable_gqa"] = True
        elif each > 1:
            k, v = (heads.repeat_interleave(each, 1) for heads in (k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            context = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, **how
            )
        return context.permute(2, 0, 1, 3).flatten(2)
