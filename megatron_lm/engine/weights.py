"""The weights of a rank under their names in the whole model, and the slice of each that belongs to the
rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from megatron_lm.settings import Settings

INIT_STD = 0.02
# Gate and input of a gated MLP in one matrix: every tensor-parallel rank has a slice of both.
GATED = ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias")


def named(chunks: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in the whole model, parameter) of a rank's chunks; layers are numbered through all stages.

    The last stage's copy of a tied embedding has the embedding's name.
    """
    for chunk in chunks:
        module: Any = getattr(chunk, "module", chunk)
        for name, parameter in module.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, number, rest = name.split(".", 3)
                layer = module.decoder.layers[int(number)].layer_number - 1  # megatron-core counts from 1
                name = f"decoder.layers.{layer}.{rest}"
            elif name == "output_layer.weight" and module.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            yield name, parameter


def split_dim(parameter: Any) -> int | None:
    """The dimension along which the tensor-parallel ranks share a parameter; None if each has the whole."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return int(parameter.partition_dim)


def full_shape(parameter: nn.Parameter) -> list[int]:
    """Shape over all tensor-parallel ranks."""
    shape, dim = list(parameter.shape), split_dim(parameter)
    if dim is not None:
        shape[dim] *= parallel_state.get_tensor_model_parallel_world_size()
    return shape


def own_slice(parameter: nn.Parameter, whole: torch.Tensor, gated: bool) -> torch.Tensor:
    """The slice of ``whole`` that belongs to this tensor-parallel rank; ``gated``: two matrices in one."""
    dim = split_dim(parameter)
    if dim is None:
        return whole
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    halves = whole.chunk(2, dim) if gated else (whole,)
    return torch.cat([half.chunk(ranks, dim)[rank] for half in halves], dim)


def joined(slices: list[torch.Tensor], dim: int, gated: bool) -> torch.Tensor:
    """The whole tensor from the slices of all tensor-parallel ranks, in their order."""
    if not gated:
        return torch.cat(slices, dim)
    halves = [part.chunk(2, dim) for part in slices]
    return torch.cat([half[at] for at in (0, 1) for half in halves], dim)


def is_gated(name: str, swiglu: bool) -> bool:
    """Whether a parameter holds gate and input of a gated MLP."""
    return swiglu and name.endswith(GATED)


def initialize(model: nn.Module, settings: Settings) -> None:
    """GPT-2's initial weights, drawn by parameter name, so that they are the same in every layout."""
    for name, parameter in named([model]):
        if name.endswith("bias"):
            value = torch.zeros(full_shape(parameter))
        elif "layernorm" in name:
            value = torch.ones(full_shape(parameter))
        else:
            draw = torch.Generator().manual_seed(settings.seed * 2**32 + zlib.crc32(name.encode()))
            # Outputs to the residual stream are scaled down by their number.
            residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            std = INIT_STD / (2 * settings.size.layers) ** 0.5 if residual else INIT_STD
            value = torch.randn(full_shape(parameter), generator=draw) * std
        with torch.no_grad():
            parameter.copy_(own_slice(parameter, value, is_gated(name, settings.size.swiglu)))
