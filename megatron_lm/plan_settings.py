"""``python -m fasop export PLAN``: a plan as the settings that launch it with megatron_lm, or the reason why
that can't run it as planned.

python -m fasop plan --model gpt2-xl --cluster paper-gpt2xl-het --json > plans.json
python -m fasop export plans.json --output plan.conf
megatron_lm/_03_submit.sh --settings plan.conf
python -m fasop export plans.json --format torchtitan --output plan.toml

With --format, the settings of Megatron-Bridge (YAML), torchtitan (TOML) or DeepSpeed (JSON).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from chakra_et import cli, files
from fasop.errors import PlanError
from fasop.inputs.clusters import Gpu
from fasop.inputs.models import Model
from fasop.output import frameworks
from fasop.plans.plan import Plan, pick_plan
from megatron_lm.errors import RunError
from megatron_lm.settings import Size, conf
from megatron_lm.settings.values import SIZE_SETTINGS

# MODEL of megatron_lm for models of these sizes (hidden, layers); its names for others of the same kind.
MODELS = {(1600, 48): "xl", (1024, 24): "small", (64, 4): "tiny"}
GPT, LLAMA = "xl", "llama3-8b"
# The planner's name of each size that both know, and the setting that it is.
SIZES = {
    "hidden": "HIDDEN_SIZE", "layers": "NUM_LAYERS", "heads": "NUM_HEADS", "seq": "SEQ_LENGTH",
    "vocab": "VOCAB_SIZE", "ffn": "FFN", "kv_heads": "KV_GROUPS", "gated": "SWIGLU", "tied": "TIED_EMBEDDING",
}  # fmt: skip
Format = Literal["megatron_lm", "megatron-bridge", "torchtitan", "deepspeed"]


@dataclass
class Config:
    plan: str = cli.option("file that 'plan --json' printed", positional=True)
    rank: int = cli.option("which of its plans, counted from 1", 1)
    output: str = cli.option("file to write (default: standard output)", "")
    format: Format = cli.option("whose settings", "megatron_lm")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(Config, argv, description="Write a plan's settings.")
    plan = pick_plan(config.plan, config.rank)
    text = lines(plan) if config.format == "megatron_lm" else frameworks.exported(plan, config.format)
    if config.format == "deepspeed":  # JSON has no comments
        for left in frameworks.not_exported(plan, config.format):
            print(f"not in this file: {left}", file=sys.stderr)
    if config.output:
        files.write_text(Path(config.output), text)
    else:
        sys.stdout.write(text)
    return 0


def settings(plan: Plan) -> dict[str, str]:
    """The settings that a plan decides. Raises ``PlanError`` where megatron_lm can't run it as planned."""
    _check(plan)
    options = plan.options
    tp, dp, mbs = _degrees(plan)
    found = {
        **_nodes(plan),
        **_model(plan.model),
        "GLOBAL_BATCH_SIZE": str(plan.micro_batches * plan.dp * plan.mbs),
        "MICRO_BATCH_SIZE": str(mbs),
        "TENSOR_MP_SIZE": str(tp),
        "DP_SIZE": str(dp),
        "PIPELINE_MP_SIZE": str(plan.pp),
        "PARTITION": "-".join(map(str, frameworks.layers(plan))),
        "VIRTUAL_STAGES": str(plan.virtual_stages),
        "SEQUENCE_PARALLEL": conf.text_of(options.sequence_parallel and tp > 1),
        "RECOMPUTE": plan.choices[0].recompute if plan.choices else options.recompute,
        "ATTENTION": options.attention.rstrip("2"),
        "SHARDED_OPTIMIZER": conf.text_of(options.zero == 1),
        # Of 16 bits, the user chooses which.
        **({"PRECISION": "fp32"} if options.precision == "fp32" else {}),
    }
    try:
        # What a launch would refuse, before it is written.
        conf.from_environment({conf.PREFIX + name: value for name, value in found.items()})
    except RunError as error:
        raise PlanError(f"the plan can't be exported: megatron_lm refuses {error}") from None
    return found


def model_of(size: Size, name: str, global_batch: int) -> Model:
    """A model of megatron_lm as the planner sees it."""
    sizes = {ours: getattr(size, SIZE_SETTINGS[setting]) for ours, setting in SIZES.items()}
    return Model(name=name, global_batch=global_batch, **sizes)


def lines(plan: Plan) -> str:
    """NAME=VALUE lines, as ``megatron_lm/_03_submit.sh --settings`` reads them. Raises ``PlanError``."""
    values = conf.write_lines(settings(plan))
    return (
        f"# {plan.model.name} on {plan.cluster.name}: {plan.step_time:.4f} s per step ({plan.cost_model}).\n"
        f"# megatron_lm/_03_submit.sh --settings THIS_FILE\n{values}"
    )


def _check(plan: Plan) -> None:
    """Raises ``PlanError``."""
    model, options = plan.model, plan.options
    apart = options.scatter_gather or options.per_stage
    is_split = plan.pp > 1 and _degrees(plan)[0] > 1 and not options.sequence_parallel
    ways = {(each.tp, each.recompute, mbs) for each in plan.choices for _, mbs in each.shares}
    sizes = [plan.cluster.size(plan.cluster.gpu(name)) for name in plan.placement]
    each, used = " and ".join(map(str, sorted(set(sizes)))), plan.tp * plan.dp * plan.pp
    alike = "megatron_lm starts the same number of processes on each node"
    unknown = any((model.cp > 1, options.cuda_graphs, options.offload, options.again, options.recomputed < 1))
    unknown = unknown or options.adapters
    other = model.encoder_layers is not None or not model.causal or model.experts > 0
    layer = model.attention_weights + model.hidden * (3 * model.ffn_width + 2)
    llama = model.layers * layer + model.hidden * (model.vocab * (1 if model.tied else 2) + 1)
    reasons = {
        f"megatron_lm trains GPT-2 and Llama-like models only, not {model.name}": other,
        f"{model.name} has {model.parameters:,} parameters, megatron_lm's Llama of these sizes {llama:,} (no "
        "biases, two norms per layer)": model.gated and model.parameters not in (0, llama),
        "it runs out of memory": plan.is_oom,
        "megatron_lm has no zero-bubble schedule": bool(plan.weight_gradients),
        f"its heads are {model.head_width} wide (d_kv), not hidden / heads": model.width != model.hidden,
        "its tensor-parallel ranks send a share of a stage's output each, as with --per-stage, megatron_lm's "
        "send all of it (unless --sequence-parallel)": is_split and apart,
        f"megatron_lm has --zero 0 and 1, the plan needs --zero {options.zero}": options.zero >= 2,
        "megatron_lm reduces gradients at the end (no --overlap)": options.overlap and plan.dp > 1,
        f"it is for {options.engine}": options.engine != "megatron",
        "megatron_lm computes in 16 or 32 bits": options.precision not in ("mixed", "fp32"),
        "megatron_lm has no --cp, --cuda-graphs, --offload, --lora and recomputes no single modules": unknown,
        "megatron_lm reduces gradients of 4 bytes, the plan fewer": options.gradient_bytes != 4,
        "its stages differ in tp, micro-batch or recomputation (--per-stage)": len(ways) > 1,
        f"its nodes have {each} GPUs, and {alike}": len(set(sizes)) > 1,
        f"it uses {used} of {sum(sizes)} GPUs, and {alike}": used != sum(sizes) and len(sizes) > 1,
    }
    frameworks.refuse(reasons)


def _degrees(plan: Plan) -> tuple[int, int, int]:
    """tp, dp and sequences per micro-batch of all stages."""
    tp = plan.choices[0].tp if plan.choices else plan.tp
    dp = plan.tp * plan.dp // tp
    return tp, dp, plan.mbs * plan.dp // dp


def _model(model: Model) -> dict[str, str]:
    """The model's sizes; what a plan doesn't depend on stays as MODEL has it."""
    whole = replace(model, ffn=model.ffn_width, kv_heads=model.kv_heads or model.heads)
    sizes = {setting: conf.text_of(getattr(whole, name)) for name, setting in SIZES.items()}
    return {"MODEL": LLAMA if model.gated else MODELS.get((model.hidden, model.layers), GPT), **sizes}


def _nodes(plan: Plan) -> dict[str, str]:
    """How many nodes of which types, in the order of the stages. Raises ``PlanError``."""
    runs = [(name, len(list(group))) for name, group in itertools.groupby(plan.placement)]
    size = plan.cluster.size(plan.cluster.gpu(plan.placement[0]))
    if len(plan.placement) == 1:
        size = plan.tp * plan.dp * plan.pp
    types = [plan.cluster.gpu(name) for name, _ in runs]
    named = all(gpu.hosts for gpu in types)
    found = {"NPROC_PER_NODE": str(size), "NNODES": str(len(plan.placement))}
    if named:
        found["NODELIST"] = ",".join(plan.hosts)
    if len(runs) == 2:
        queues = {"MASTER_QUEUE": types[0].queue, "SLAVE_QUEUE": types[1].queue}
        found |= {"HOMOGENEOUS_CLUSTER": "false", "MASTER_NNODES": str(runs[0][1])}
        found |= {"MASTER_GRES": _gres(types[0], size), "SLAVE_GRES": _gres(types[1], size)}
    elif len(runs) == 1 or (named and len({gpu.queue for gpu in types}) == 1):
        queues = {"SLURM_QUEUE": types[0].queue}
        # Of nodes of several types, named: any GPUs, as many on each.
        typed = len(runs) == 1 and (bool(types[0].gres) or len(plan.cluster.gpus) > 1)
        found |= {"HOMOGENEOUS_CLUSTER": "true", "GRES": _gres(types[0], size) if typed else f"gpu:{size}"}
    else:
        order = ", ".join(f"{count} of {name}" for name, count in runs)
        how = "give 'hosts' and the same 'queue' to each GPU type in the cluster file."
        raise PlanError(f"the plan can't be exported: its nodes come in the order {order}; {how}")
    return found | {name: queue for name, queue in queues.items() if queue}


def _gres(gpu: Gpu, count: int) -> str:
    """What sbatch --gres calls so many GPUs of a type."""
    return f"gpu:{gpu.gres or gpu.name.lower()}:{count}"
