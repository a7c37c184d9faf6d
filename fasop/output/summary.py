"""What a step yields and what it is made of: tokens, FLOP/s, shares of its time, bytes by kind."""

from __future__ import annotations

from collections.abc import Mapping

from fasop.exact.memory import GIB, MEMORY_MARGIN, held_parameters, state_bytes
from fasop.exact.passes import BACKWARD_SUMS, FORWARD_SUMS
from fasop.exact.recipes import hardware, mean_error
from fasop.inputs.clusters import Cluster
from fasop.inputs.models import Model
from fasop.plans.options import Options
from fasop.plans.plan import Plan


def speed(model: Model, cluster: Cluster, gpus: Mapping[str, int], step: float) -> str:
    """gpus: how many of each type work; step: seconds."""
    count, tokens = sum(gpus.values()), model.global_batch * model.seq / step
    rate = tokens * model.flops_per_token
    line = (
        f"{tokens:,.0f} tokens/s ({tokens / count:,.0f} per GPU), {rate / count / 1e12:.1f} TFLOP/s per GPU"
    )
    types = [cluster.gpu(name) for name in gpus]
    known = [of for gpu in types if (of := hardware(gpu.costs_of))]
    if len(known) < len(types):
        return line
    peaks = [of.peak("16 bit") * gpu.speed for of, gpu in zip(known, types, strict=True)]
    peak = sum(each * count for each, count in zip(peaks, gpus.values(), strict=True))
    return f"{line}, MFU {rate / peak:.1%} (of the dense 16-bit peak)"


def expected_error(names: set[str], model: Model, options: Options) -> str:
    """How far off plans of this kind on these GPUs were where others have measured."""
    parts = []
    for name in sorted(names):
        gpu = hardware(name)
        error = mean_error(gpu.name, model, options) if gpu else None
        parts.append(f"not judged on {name}" if error is None else f"{error:.0%} on {name}")
    return f"Expected error of the step, from plans that others have measured: {', '.join(parts)}."


def options_line(options: Options) -> str:
    """How the job is run, in words."""
    zero = {0: "optimizer on every rank", 1: "optimizer sharded (ZeRO-1)"}
    words = [f"recomputation {options.recompute}", f"{options.attention} attention"]
    words += [zero.get(options.zero, f"ZeRO-{options.zero}"), f"{options.precision} precision"]
    words += [f"in groups of {options.shard} (HSDP)"] * (options.shard > 0)
    words += ["optimizer on the host"] * options.offload
    words += ["sequence parallelism"] * options.sequence_parallel
    recipe = {
        "CUDA graphs": options.cuda_graphs,
        "LoRA": options.adapters,
        "fast dispatch": options.fast_dispatch,
    }
    words += [name for name, is_on in recipe.items() if is_on]
    words += [f"{', '.join(options.again)} computed again"] * bool(options.again)
    words += ["gradients overlapped" if options.overlap else "gradients not overlapped"]
    return ", ".join(words)


def shares(plan: Plan, messages: float) -> str:
    """Mean shares of the stages' time; messages: seconds that they add to the pipeline."""
    sums = 0.0
    for stage, parts in enumerate(plan.parts):
        if plan.choice(stage).tp > 1:
            kinds = plan.model.kinds[plan.units(stage)]
            sums += parts.tensor_sum * sum(FORWARD_SUMS[kind] + BACKWARD_SUMS[kind] for kind in kinds)
    passes = plan.micro_batches * (sum(plan.stage_forward) + sum(plan.stage_backward)) / plan.pp
    tensor = min(plan.micro_batches * sums / plan.pp, passes)
    shares = {
        "compute": passes - tensor,
        "tensor-parallel collectives": tensor,
        "messages": messages,
        "exposed gradient reduction": sum(plan.dp_allreduce) / plan.pp,
        "embedding": plan.embedding_allreduce,
        "optimizer and gathering": sum(plan.update) / plan.pp,
    }
    shares["bubble and waiting"] = max(plan.step_time - sum(shares.values()), 0.0)
    return ", ".join(f"{name} {value / plan.step_time:.1%}" for name, value in shares.items() if value)


def memory(plan: Plan) -> str:
    """GiB of a GPU of the fullest stage by kind, each with the margin."""
    pairs = zip(plan.stage_memory, plan.stage_cap, strict=True)
    stage = [size / cap for size, cap in pairs].index(plan.fullest)
    tp = plan.choice(stage).tp
    held, of_experts = held_parameters(plan.model, tp, plan.ep, plan.units(stage))
    ranks = plan.tp * plan.dp // tp
    pieces = zip(state_bytes(plan.options, ranks), state_bytes(plan.options, ranks // plan.ep), strict=True)
    kinds = [MEMORY_MARGIN / GIB * ((held - of_experts) * a + of_experts * b) for a, b in pieces]
    reserved = max(plan.cluster.gpu(name).reserved_gib for name in plan.stage_gpu[stage].split("+"))
    parts = dict(zip(("weights", "gradients", "optimizer states"), kinds, strict=True))
    parts["activations"] = max(plan.stage_memory[stage] - reserved - sum(kinds), 0.0)
    parts["reserved"] = reserved
    listed = ", ".join(f"{name} {size:.2f}" for name, size in parts.items() if size)
    size, cap = plan.stage_memory[stage], plan.stage_cap[stage]
    return f"stage {stage} is the fullest: {size:.2f} of {cap:.2f} GiB ({listed})"
