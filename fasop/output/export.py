"""A plan as the settings that launch it on Megatron.

Only what is planned changes; every other setting of the template stays as it is.
"""

from __future__ import annotations

import re
from pathlib import Path

from fasop.errors import PlanError
from fasop.plans.plan import Plan

TEMPLATE = Path(__file__).resolve().parents[2] / "megatron_lm" / "_00_conf.sh"
# Names under which megatron_lm trains a model of these sizes (hidden, layers).
MODELS = {(1600, 48): "xl", (1024, 24): "small", (64, 4): "tiny"}
SETTING = r'(?m)(?<![A-Z_])({name}="\$\{{{name}:-)[^}}"]*(\}}")'


def settings(plan: Plan) -> dict[str, str]:
    """The settings that a plan decides. Raises ``PlanError`` for a model that megatron_lm doesn't train."""
    model = MODELS.get((plan.model.hidden, plan.model.layers))
    if plan.model.encoder_layers is not None or model is None or plan.model.name.startswith("bert"):
        raise PlanError(
            f"model {plan.model.name}: megatron_lm trains GPT-2 only; plan gpt2-xl or gpt2-345m to export it."
        )
    kinds = sorted(set(plan.placement))
    return {
        "HOMOGENEOUS_CLUSTER": "true" if len(kinds) == 1 else "false",
        "MODEL": model,
        "NPROC_PER_NODE": str(plan.cluster.gpus_per_node),
        "NNODES": str(plan.cluster.node_count),
        "GLOBAL_BATCH_SIZE": str(plan.micro_batches * plan.dp * plan.mbs),
        "MICRO_BATCH_SIZE": str(plan.mbs),
        "TENSOR_MP_SIZE": str(plan.tp),
        "DP_SIZE": str(plan.dp),
        "PIPELINE_MP_SIZE": str(plan.pp),
        "PARTITION": "-".join(map(str, plan.layers)),
        # The nodes of the first type in rank order are the master job's.
        "MASTER_NNODES": str(_nodes_of_the_first_type(plan)),
    }


def _nodes_of_the_first_type(plan: Plan) -> int:
    others = (node for node, gpu in enumerate(plan.placement) if gpu != plan.placement[0])
    return next(others, 1)


def exported(plan: Plan, template: Path) -> str:
    """The template with the plan's settings as defaults. Raises ``PlanError``."""
    try:
        text = template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{template}: can't be read: {error}.") from None
    for name, value in settings(plan).items():
        # A setting that has a default for each model gets the same one for all.
        text, count = re.subn(SETTING.format(name=name), rf"\g<1>{value}\g<2>", text)
        if not count:
            raise PlanError(f'{template}: has no line {name}="${{{name}:-…}}" to replace.')
    return text
