"""A plan as the settings of other frameworks: Megatron-Bridge (YAML), torchtitan (TOML) and DeepSpeed (JSON).

Each table names a framework's own settings, by section; what a plan doesn't decide is left to the framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fasop.errors import PlanError
from fasop.plans.plan import Plan

Settings = dict[str, dict[str, Any]]
_MIXED = {
    **{"mixed": "bf16_mixed", "fp8": "bf16_with_fp8_current_scaling_mixed", "mxfp8": "bf16_with_mxfp8_mixed"},
    "nvfp4": "bf16_with_nvfp4_mixed",
}


def exported(plan: Plan, framework: str) -> str:
    """The text of a settings file. Raises ``PlanError`` where the framework can't run the plan."""
    layers = "-".join(map(str, plan.layers))
    even = len(set(plan.layers)) == 1 or framework == "megatron-bridge" and plan.virtual_stages == 1
    reasons = {
        "its stages differ in tp, micro-batch or recomputation (--per-stage)": bool(plan.choices),
        f"its stages hold {layers} layers, {framework} has as many in each": not even,
        "it runs out of memory": plan.is_oom,
        "the model has an encoder": plan.model.encoder_layers is not None,
        "DeepSpeed has no context parallelism": framework == "deepspeed" and plan.model.cp > 1,
        "DeepSpeed shares parameters among all ranks": framework == "deepspeed" and plan.options.shard > 0,
        f"{framework} has no {plan.options.precision}": framework != "megatron-bridge"
        and plan.options.precision not in _PRECISIONS[framework],
    }
    refuse(reasons, f" to {framework}")
    if framework == "deepspeed":
        return json.dumps(_deepspeed(plan), indent=2) + "\n"
    lines = []
    for section, values in (_torchtitan if framework == "torchtitan" else _bridge)(plan).items():
        # Numbers, texts and lists of both are written alike in JSON, YAML and TOML.
        each = [(name, json.dumps(value)) for name, value in values.items() if value is not None]
        if framework == "torchtitan":
            lines += [f"[{section}]", *(f"{name} = {value}" for name, value in each), ""]
        else:
            lines += [f"{section}:", *(f"  {name}: {value}" for name, value in each)]
    if framework == "megatron-bridge" and plan.options.precision in _MIXED:
        lines.append(f"mixed_precision: {_MIXED[plan.options.precision]}")
    return f"# {plan.title}: {plan.step_time:.4f} s per step\n" + "\n".join(lines).rstrip() + "\n"


def refuse(reasons: Mapping[str, bool], where: str = "") -> None:
    """Raise ``PlanError`` with the first reason that applies."""
    for reason, applies in reasons.items():
        if applies:
            raise PlanError(f"the plan can't be exported{where}: {reason}.")


_PRECISIONS = {"torchtitan": ("mixed", "fp8", "mxfp8", "fp32"), "deepspeed": ("mixed", "fp32")}


def _torchtitan(plan: Plan) -> Settings:
    """Of ``torchtitan.config.job_config.JobConfig``. A rank's batch is all of its micro-batches."""
    options, cp = plan.options, plan.model.cp
    converters = {"fp8": ["float8"], "mxfp8": ["mx"]}.get(options.precision, [])
    ranks = plan.dp // cp
    shard = max(options.shared(plan.dp) // cp, 1) if options.zero else 1
    local = plan.micro_batches * plan.mbs if plan.pp > 1 else plan.mbs
    return {
        "model": {"converters": converters},
        "training": {
            "seq_len": plan.model.seq * cp,
            "local_batch_size": local,
            "global_batch_size": plan.model.global_batch // cp,
            "enable_cpu_offload": options.offload,
        },
        "parallelism": {
            "data_parallel_replicate_degree": ranks // shard,
            "data_parallel_shard_degree": shard,
            "fsdp_reshard_after_forward": "always" if options.zero == 3 else "never",
            "tensor_parallel_degree": plan.tp,
            "enable_async_tensor_parallel": options.overlap_tensor,
            "context_parallel_degree": cp,
            "expert_parallel_degree": plan.ep,
            "pipeline_parallel_degree": plan.pp,
            "pipeline_parallel_schedule": "Interleaved1F1B" if plan.virtual_stages > 1 else "1F1B",
            "pipeline_parallel_microbatch_size": plan.mbs,
        },
        "activation_checkpoint": {"mode": options.recompute},
    }


def _bridge(plan: Plan) -> Settings:
    """Of ``megatron.bridge.training.config.ConfigContainer``."""
    options, cp = plan.options, plan.model.cp
    model: dict[str, Any] = {
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "virtual_pipeline_model_parallel_size": plan.virtual_stages if plan.virtual_stages > 1 else None,
        "context_parallel_size": cp,
        "expert_model_parallel_size": plan.ep,
        "sequence_parallel": options.sequence_parallel and plan.tp > 1,
        "seq_length": plan.model.seq * cp,
        "recompute_granularity": None if options.recompute == "none" else options.recompute,
        "cuda_graph_impl": "local" if options.cuda_graphs else "none",
    }
    if options.recompute == "full":
        model |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if len(set(plan.layers)) > 1:
        model["pipeline_model_parallel_layout"] = f"E{'|'.join('t' * count for count in plan.layers)}L"
    return {
        "model": model,
        "train": {"micro_batch_size": plan.mbs, "global_batch_size": plan.model.global_batch // cp},
        "ddp": {
            "use_distributed_optimizer": options.zero > 0,
            "use_megatron_fsdp": options.zero == 3,
            "overlap_grad_reduce": options.overlap,
            "overlap_param_gather": options.overlap and options.zero > 0,
            "num_distributed_optimizer_instances": plan.dp // options.shared(plan.dp),
        },
        "optimizer": {"optimizer_cpu_offload": options.offload},
    }


def _deepspeed(plan: Plan) -> dict[str, Any]:
    """Of ``deepspeed.runtime.config.DeepSpeedConfig``."""
    options = plan.options
    zero: dict[str, Any] = {"stage": options.zero, "overlap_comm": options.overlap}
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_batch_size": plan.model.global_batch,
        "train_micro_batch_size_per_gpu": plan.mbs,
        "gradient_accumulation_steps": plan.micro_batches,
        "bf16": {"enabled": options.precision == "mixed"},
        "zero_optimization": zero,
        "tensor_parallel": {"autotp_size": plan.tp if plan.tp > 1 else 0},
        "pipeline": {"stages": plan.pp},
    }
