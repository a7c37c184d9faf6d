"""A plan as the settings of other frameworks: Megatron-Bridge (YAML), torchtitan (TOML) and DeepSpeed (JSON).

Each table names a framework's own settings; what a plan doesn't decide is left to the framework.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from fasop.errors import PlanError
from fasop.inputs.read_files import DATA
from fasop.plans.plan import Plan
from fasop.schedule.events import chunk_layers

_NAMES = json.loads((DATA / "frameworks.json").read_text(encoding="utf-8"))


def exported(plan: Plan, framework: str) -> str:
    """The text of a settings file. Raises ``PlanError`` where the framework can't run the plan."""
    model, options, stages = plan.model, plan.options, set(plan.layers)
    titan, deepspeed = framework == "torchtitan", framework == "deepspeed"
    bridge = not (titan or deepspeed)
    unlike = model.encoder_layers or not (model.causal or deepspeed) or titan and not model.gated
    chunked = plan.virtual_stages > 1 or plan.pp > 1 and options.zero > 1
    some = options.recompute == "full" and options.recomputed < 1
    again = {options.recomputed * count for count in layers(plan)}
    reasons = {
        "its stages differ in tp, micro-batch or recomputation (--per-stage)": bool(plan.choices),
        "it runs out of memory": plan.is_oom,
        "LoRA's adapters have settings of their own there": options.adapters,
        f"{framework} has no zero-bubble schedule with one chunk per stage": bool(plan.weight_gradients),
        f"{framework} has no model like {model.name}": bool(unlike),
        f"{framework} makes no CUDA graphs": bool(options.cuda_graphs) and not bridge,
        f"{framework} computes all layers again, or none": some and not bridge,
        "its share of layers isn't one whole number": some and (len(again) > 1 or min(again) % 1 > 0),
        "deepspeed has as many layers in each stage": deepspeed and len(stages) > 1,
        "deepspeed has no chunks of stages, nor stages with --zero 2": deepspeed and chunked,
        "torchtitan has no --cp-comm all-to-all": titan and model.by_heads,
        "deepspeed has no --cp and no --hsdp": deepspeed and (model.cp > 1 or options.shard > 0),
        f"{framework} has no {options.precision}": options.precision not in _NAMES["precisions"][framework],
    }
    refuse(reasons, f" to {framework}")
    if deepspeed:
        return json.dumps(_deepspeed(plan), indent=2) + "\n"
    lines = [f"# {plan.title}: {plan.step_time:.4f} s per step"]
    lines += [f"# not in this file: {left}" for left in not_exported(plan, framework)]
    settings = (_torchtitan if titan else _bridge)(plan)
    given = [(name.rpartition("."), value) for name, value in settings.items() if value is not None]
    for section, values in itertools.groupby(given, key=lambda each: each[0][0]):
        # Numbers, texts and lists of both are written alike in JSON, YAML and TOML.
        each = [(name, json.dumps(value)) for (_, _, name), value in values]
        if titan:
            lines += [f"[{section}]", *(f"{name} = {value}" for name, value in each), ""]
        else:
            lines += [f"{section}:", *(f"  {name}: {value}" for name, value in each)]
    if not titan:
        lines.append(f"mixed_precision: {_NAMES['mixed'][options.precision]}")
    return "\n".join(lines).rstrip() + "\n"


def not_exported(plan: Plan, framework: str) -> list[str]:
    """What the plan needs and the framework sets elsewhere."""
    options, deepspeed = plan.options, framework == "deepspeed"
    wide = framework == "torchtitan" and options.precision in _NAMES["converters"] and plan.model.experts > 0
    left = {
        f"the order of the nodes, {' '.join(plan.hosts)}": len(set(plan.placement)) > 1,
        f"{options.attention} attention": deepspeed or options.attention == "unfused",
        f"sequences of {plan.model.seq} tokens": deepspeed,
        f"recomputation {options.recompute}": deepspeed and options.recompute != "none",
        "stages of PipelineModule, as many layers in each": deepspeed and plan.pp > 1,
        f"{', '.join(options.unfused)} not fused": bool(options.unfused),
        "which kernels dispatch tokens, DeepEP or HybridEP": plan.ep > 1 and options.fast_dispatch,
        "experts, whose products stay in 16 bits there": wide,
        f"times, which are those of --engine {options.engine}": options.engine not in framework,
    }
    return [words for words, applies in left.items() if applies]


def refuse(reasons: Mapping[str, bool], where: str = "") -> None:
    """Raise ``PlanError`` with the first reason that applies."""
    for reason, applies in reasons.items():
        if applies:
            raise PlanError(f"the plan can't be exported{where}: {reason}.")


def layers(plan: Plan) -> list[int]:
    """Layers of each stage, or of each chunk in the order of the layers."""
    chunks = [chunk_layers(plan, stage) for stage in range(plan.pp)]
    return [chunks[stage][chunk] for chunk in range(plan.virtual_stages) for stage in range(plan.pp)]


def _torchtitan(plan: Plan) -> dict[str, Any]:
    """Of ``torchtitan.config.job_config.JobConfig`` (0.2; later ones read no TOML). A rank's batch is all of
    its micro-batches.
    """
    options, cp, fp8 = plan.options, plan.model.cp, plan.options.precision == "fp8"
    ranks = plan.dp // cp
    shard = max(options.shared(plan.dp) // cp, 1) if options.zero else 1
    names = [*(f"layers.{at}" for at in range(plan.model.layers)), "norm", "output"]
    ends = [0, *itertools.accumulate(layers(plan))]
    ends[-1] = len(names)
    modules = [names[begin:end] for begin, end in itertools.pairwise(ends)]
    modules[0] = ["tok_embeddings", *modules[0]]
    return {
        "model.converters": _NAMES["converters"].get(options.precision, []),
        "compile.enable": True,
        "training.seq_len": plan.model.seq * cp,
        "training.local_batch_size": plan.micro_batches * plan.mbs if plan.pp > 1 else plan.mbs,
        "training.global_batch_size": plan.model.global_batch // cp,
        "training.mixed_precision_param": "float32" if options.precision == "fp32" else "bfloat16",
        "training.enable_cpu_offload": options.offload,
        "parallelism.data_parallel_replicate_degree": ranks // shard,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.fsdp_reshard_after_forward": "always" if options.zero == 3 else "never",
        "parallelism.tensor_parallel_degree": plan.tp,
        "parallelism.context_parallel_degree": cp,
        "parallelism.expert_parallel_degree": plan.ep,
        "parallelism.expert_tensor_parallel_degree": plan.tp if plan.ep > 1 else None,
        "parallelism.pipeline_parallel_degree": plan.pp,
        "parallelism.pipeline_parallel_schedule": "Interleaved1F1B" if plan.virtual_stages > 1 else "1F1B",
        "parallelism.pipeline_parallel_microbatch_size": plan.mbs,
        "parallelism.module_fqns_per_model_part": modules if plan.pp > 1 else None,
        "activation_checkpoint.mode": options.recompute,
        "quantize.linear.float8.recipe_name": _NAMES["float8"].get(options.precision),
        "quantize.linear.float8.enable_fsdp_float8_all_gather": True if fp8 and shard > 1 else None,
    }


def _bridge(plan: Plan) -> dict[str, Any]:
    """Of ``megatron.bridge.training.config.ConfigContainer``."""
    options, cp, chunks, held = plan.options, plan.model.cp, plan.virtual_stages, layers(plan)
    full, some, fsdp = options.recompute == "full", options.recomputed < 1, options.zero >= 2
    graphs = options.cuda_graphs
    layout = f"E{'|'.join('t' * count for count in held)}L"
    return {
        "model.tensor_model_parallel_size": plan.tp,
        "model.pipeline_model_parallel_size": plan.pp,
        "model.virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "model.pipeline_model_parallel_layout": layout if len(set(held)) > 1 else None,
        "model.context_parallel_size": cp,
        "model.cp_comm_type": "a2a" if plan.model.by_heads else None,
        "model.expert_model_parallel_size": plan.ep,
        "model.expert_tensor_parallel_size": plan.tp if plan.model.experts else None,
        "model.moe_token_dispatcher_type": "flex" if plan.ep > 1 and options.fast_dispatch else None,
        "model.sequence_parallel": options.sequence_parallel and plan.tp > 1,
        "model.seq_length": plan.model.seq * cp,
        "model.recompute_granularity": None if options.recompute == "none" else options.recompute,
        "model.recompute_method": ("block" if some else "uniform") if full else None,
        "model.recompute_num_layers": (int(options.recomputed * held[0]) if some else 1) if full else None,
        "model.apply_rope_fusion": options.fused,
        "model.cross_entropy_loss_fusion": options.fused_loss,
        "model.cross_entropy_fusion_impl": "te" if options.fused_loss else None,
        "model.cuda_graph_impl": "local" if graphs is True else "transformer_engine" if graphs else "none",
        # No scope: whole layers.
        "model.cuda_graph_scope": {True: "full_iteration", "layer": [], "attention": ["attn"]}.get(graphs),
        "train.micro_batch_size": plan.mbs,
        "train.global_batch_size": plan.model.global_batch // cp,
        "ddp.use_distributed_optimizer": options.zero > 0,
        "ddp.use_megatron_fsdp": fsdp,
        "ddp.data_parallel_sharding_strategy": {2: "optim_grads", 3: "optim_grads_params"}.get(options.zero),
        "ddp.overlap_grad_reduce": options.overlap,
        "ddp.overlap_param_gather": options.overlap and options.zero > 0,
        "ddp.num_distributed_optimizer_instances": plan.dp // options.shared(plan.dp),
        "optimizer.optimizer_cpu_offload": options.offload,
        "optimizer.optimizer_offload_fraction": 1.0 if options.offload else None,
        # What these demand.
        "checkpoint.ckpt_format": "fsdp_dtensor" if fsdp else None,
        "rerun_state_machine.check_for_nan_in_loss": False if graphs is True else None,
    }


def _deepspeed(plan: Plan) -> dict[str, Any]:
    """Of ``deepspeed.runtime.config.DeepSpeedConfig``."""
    options = plan.options
    zero: dict[str, Any] = {"stage": options.zero, "overlap_comm": options.overlap}
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    experts = {"enabled": plan.ep > 1, "autoep_size": plan.ep, "expert_tensor_parallel_size": plan.tp}
    return {
        "train_batch_size": plan.model.global_batch,
        "train_micro_batch_size_per_gpu": plan.mbs,
        "gradient_accumulation_steps": plan.micro_batches,
        "bf16": {"enabled": options.precision == "mixed"},
        "communication_data_type": "fp32" if options.gradient_bytes == 4 else "bf16",
        "zero_optimization": zero,
        "tensor_parallel": {"autotp_size": plan.tp if plan.tp > 1 else 0},
        "pipeline": {"stages": plan.pp},
        **({"expert_parallel": experts} if plan.model.experts else {}),
    }
