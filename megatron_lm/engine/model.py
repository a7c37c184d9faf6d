"""GPT-2 on megatron-core: this rank's part of the model, its weights, its gradients' reduction."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron_lm.engine.timing import Timers
from megatron_lm.settings import Settings

INIT_STD = 0.02
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def build(settings: Settings, timers: Timers | None) -> DistributedDataParallel:
    """This rank's stage, wrapped for data-parallel reduction. The process groups must be there."""
    model_parallel_cuda_manual_seed(settings.seed)
    config = transformer_config(settings, timers)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=settings.padded_vocabulary,
        max_sequence_length=settings.size.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    )
    initialize(model, settings)
    if timers is not None and model.post_process:
        inner = model._postprocess
        model._postprocess = lambda *args, **options: _timed(timers, inner, *args, **options)
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())
    model.to(DTYPES[settings.precision])
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=torch.cuda.is_available(),
    )
    return DistributedDataParallel(config, reduction, model)


def transformer_config(settings: Settings, timers: Timers | None) -> TransformerConfig:
    """What megatron-core is told; fusions are off, as they need Transformer Engine or Apex."""
    size, dtype = settings.size, DTYPES[settings.precision]
    return TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        ffn_hidden_size=4 * size.hidden,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=settings.tensor_mp_size,
        pipeline_model_parallel_size=settings.pipeline_mp_size,
        pipeline_model_parallel_layout=settings.layout if settings.pipeline_mp_size > 1 else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        fp16=dtype is torch.float16,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        timers=timers,
        finalize_model_grads_func=finalize_model_grads,
    )


def _timed(timers: Timers, inner, *args, **options):
    with timers.during("post-process"):
        return inner(*args, **options)


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name in the whole model, parameter) of this rank's stage: layers are numbered through all stages.

    The last stage's copy of the embedding matrix has the embedding's name.
    """
    module = model.module if isinstance(model, DistributedDataParallel) else model
    for name, parameter in module.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            layer = module.decoder.layers[int(number)].layer_number - 1  # megatron-core counts from 1
            name = f"decoder.layers.{layer}.{rest}"
        elif name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, parameter


def full_shape(parameter: nn.Parameter) -> list[int]:
    """Shape over all tensor-parallel ranks."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()
    return shape


def own_part(parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
    """What of the whole tensor belongs to this tensor-parallel rank."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return full.chunk(ranks, dim=parameter.partition_dim)[parallel_state.get_tensor_model_parallel_rank()]


def initialize(model: GPTModel, settings: Settings) -> None:
    """GPT-2's initial weights, drawn by the parameter's name, so that they are the same in every layout."""
    for name, parameter in named(model):
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
            parameter.copy_(own_part(parameter, value))
