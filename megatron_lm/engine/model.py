"""The transformer on megatron-core: this rank's chunks of layers, wrapped for data-parallel reduction; their
weights under their names in the whole model, and the slice of each that belongs to the rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_lm.engine.log_lines import Timers
from megatron_lm.settings import Settings

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
INIT_STD = 0.02
# Gate and input of a gated MLP in one matrix: every tensor-parallel rank has a slice of both.
GATED = ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias")
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}


def build(settings: Settings, timers: Timers | None) -> list[DistributedDataParallel]:
    """This rank's chunks, one unless VIRTUAL_STAGES is above 1. The process groups must exist."""
    model_parallel_cuda_manual_seed(settings.seed)
    config = transformer_config(settings, timers)
    sharded = settings.sharded_optimizer
    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    chunks = []
    for number in range(settings.virtual_stages):
        model = _chunk(settings, config, number if settings.virtual_stages > 1 else None)
        initialize(model, settings)
        if timers is not None and model.post_process:
            model._postprocess = timers.during("post-process")(model._postprocess)
        if torch.cuda.is_available():
            model.cuda(torch.cuda.current_device())
        model.to(DTYPES[settings.precision])
        chunks.append(DistributedDataParallel(config, reduction, model, disable_bucketing=number > 0))
    return chunks


def transformer_config(settings: Settings, timers: Timers | None) -> TransformerConfig:
    """megatron-core's configuration; its fusions are off by default, and need Transformer Engine or Apex."""
    size, dtype = settings.size, DTYPES[settings.precision]
    full = settings.recompute == "full"
    return TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        num_query_groups=size.kv_groups,
        ffn_hidden_size=size.ffn,
        gated_linear_unit=size.swiglu,
        activation_func=nn.functional.silu if size.swiglu else nn.functional.gelu,
        normalization=NORMS[size.normalization],
        add_bias_linear=size.linear_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=settings.tensor_mp_size,
        sequence_parallel=settings.sequence_parallel,
        pipeline_model_parallel_size=settings.pipeline_mp_size,
        pipeline_model_parallel_layout=settings.layout if settings.pipeline_mp_size > 1 else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        fp16=dtype is torch.float16,
        bf16=dtype is torch.bfloat16,
        recompute_granularity=None if settings.recompute == "none" else settings.recompute,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
        use_cpu_initialization=True,
        batch_p2p_comm=False,
        timers=timers,
        finalize_model_grads_func=finalize_model_grads,
    )


class Norm:
    """PyTorch's norm of the configured kind, in the form in which megatron-core's layers ask for one.

    megatron-core's own wrapper refuses sequence parallelism, which needs no more than this mark on the
    weights: their gradients are summed over the tensor-parallel ranks, each with a part of the sequence.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:  # type: ignore[misc]
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class FusedAttention(nn.Module):
    """Attention that keeps no scores: PyTorch's flash kernel in place of megatron-core's two products.

    Causal, without dropout, built and called as megatron-core's ``DotProductAttention`` is.

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
        ways: dict[str, Any] = {"scale": self.scale, "enable_gqa": q.shape[1] != k.shape[1]}
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **ways)
        return context.permute(2, 0, 1, 3).flatten(2)


def layer_spec(settings: Settings) -> ModuleSpec:
    """What each layer is made of, for megatron-core to build."""
    layer = get_gpt_layer_local_spec(normalization=NORMS[settings.size.normalization])
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if settings.attention == "flash":
        layer.submodules.self_attention.submodules.core_attention = FusedAttention
    return layer


def _chunk(settings: Settings, config: TransformerConfig, number: int | None) -> GPTModel:
    layer = layer_spec(settings)
    count = get_num_layers_to_build(config, vp_stage=number)
    position = {"learned": "learned_absolute", "rope": "rope"}[settings.size.position]
    place = {} if number is None else {"ignore_virtual": False, "vp_stage": number}
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm),
        vocab_size=settings.padded_vocabulary,
        max_sequence_length=settings.size.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        share_embeddings_and_output_weights=settings.size.tied_embedding,
        position_embedding_type=position,
        rotary_base=settings.size.rotary_base,
        vp_stage=number,
    )


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
