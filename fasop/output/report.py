"""What ``plan`` prints: a table of plans, why the first is first, what it yields and is made of, and its
stages; and rows as CSV.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from chakra_et import files, text
from fasop.exact.kernels import tensor_sums
from fasop.exact.memory import GIB, MEMORY_MARGIN, held_parameters, state_bytes
from fasop.exact.recipes import hardware, mean_error
from fasop.inputs.clusters import Cluster
from fasop.inputs.models import Model
from fasop.plans.layout import Layout, of_plan, working_gpus
from fasop.plans.options import Options
from fasop.plans.plan import Plan, by_time_and_price, pareto_front
from fasop.schedule import events, one_f_one_b
from fasop.search.planner import memory_with

# How far the exact model's steps were off on average for plans that others have measured on A100
# (benchmarks/planner_accuracy.py): taken for GPUs on which no plan has been measured.
MEAN_ERROR = 0.066
WORTH = 0.8  # flags are named that together make a step shorter than this share of it
# The published tool's columns, which its users' notebooks read.
COLUMNS = (
    *("mbs", "tp", "dp", "pp", "node placement", "num_a100", "num_a10", "partition"),
    *("estimated time (s/step)", "pipeline time", "DP all-reduce time"),
    *("embedding layer all-reduce time", "price_per_step", "is_oom", "oom_gpumem", "is_fsdp_oom"),
    *("fsdpoom_gpumem", "train_cost"),
)


def cluster_line(cluster: Cluster) -> str:
    """What the cluster is and costs."""
    nodes = ", ".join(f"{n} × {gpu.name}" for gpu, n in zip(cluster.gpus, cluster.nodes, strict=True))
    each = " or ".join(map(str, sorted({cluster.size(gpu) for gpu in cluster.gpus})))
    price = f"${cluster.price_per_hour:.2f}/h" if cluster.price_per_hour else "prices not given"
    return f"{cluster.name}: {cluster.gpu_count} GPUs in nodes of {each} ({nodes}), {price}"


def placement(nodes: Sequence[str]) -> str:
    """Nodes in rank order, runs of one type together: ``1×A100 7×A10``."""
    return " ".join(f"{len(list(run))}×{name}" for name, run in itertools.groupby(nodes))


def message_time(plan: Plan) -> float:
    """Seconds that the messages between stages add to the pipeline, by the exact model."""
    if plan.pp == 1:
        return 0.0
    if plan.schedule != "1f1b":
        silent = replace(plan, p2p=(0.0,) * (plan.pp - 1), wrap=0.0)
        silent = events.rescheduled(silent, plan.virtual_stages, plan.weight_gradients)
        return max(plan.pipeline_time - silent.pipeline_time, 0.0)
    passes = list(plan.stage_forward), list(plan.stage_backward)
    line = one_f_one_b.run(*passes, [0.0] * (plan.pp - 1), plan.micro_batches)
    return plan.pipeline_time - float(line.pipeline_time)


def table(plans: Sequence[Plan], cost: str) -> list[str]:
    """One line per plan; times in seconds, ``mem`` the fullest GPU's share of its memory; cost: of what."""
    many = len({plan.cluster.name for plan in plans}) > 1
    rows = []
    for number, plan in enumerate(plans, 1):
        idle = plan.cluster.node_count - len(plan.placement)
        nodes = placement(plan.placement) + f" ({idle} idle)" * (idle > 0)
        row = {
            "": str(number),
            "step s": f"{plan.step_time:.4f}",
            "pipeline s": f"{plan.pipeline_time:.4f}",
            **({"of it p2p": f"{message_time(plan):.4f}"} if plan.cost_model == "exact" else {}),
            "dp sync": f"{max(plan.dp_allreduce):.4f}",
            "emb sync": f"{plan.embedding_allreduce:.4f}",
            **dict(zip(("tp", "dp", "pp", "mbs"), _degrees(plan), strict=True)),
        }
        # What tells plans apart, where they have it.
        if any(each.model.experts for each in plans):
            row["ep"] = str(plan.ep)
        if len({each.options.recompute for each in plans}) > 1:
            row["recompute"] = plan.options.recompute
        if any(each.weight_gradients for each in plans):
            row["schedule"] = plan.schedule
        row["mem"] = f"{plan.fullest:.0%}" + " OOM" * plan.is_oom
        if any(each.price_per_step for each in plans):
            row |= {"$/step": f"{plan.price_per_step:.5f}", cost: f"{plan.train_cost:,.0f}"}
        row["nodes"] = f"{plan.cluster.name}: {nodes}" if many else nodes
        row["partition"] = "-".join(map(str, plan.partition))
        rows.append(row)
    return text.table([list(rows[0]), *(list(row.values()) for row in rows)], right=set(range(len(row) - 2)))


def _degrees(plan: Plan) -> list[str]:
    """tp, dp, pp and mbs; of stages that differ, the range."""
    choices = [plan.choice(stage) for stage in range(plan.pp)]
    tp = [choice.tp for choice in choices]
    mbs = [size for choice in choices for _, size in choice.shares]
    ends = [(min(each), max(each)) for each in (tp, [plan.shape.group // degree for degree in tp], mbs)]
    of_tp, of_dp, of_mbs = (str(low) if low == high else f"{low}–{high}" for low, high in ends)
    of_dp = f"{plan.dp // plan.model.cp}×cp {plan.model.cp}" if plan.model.cp > 1 else of_dp
    depth = f"{plan.pp}×{plan.virtual_stages}" if plan.virtual_stages > 1 else str(plan.pp)
    return [of_tp, of_dp, depth, of_mbs]


def reasons(plans: Sequence[Plan], objective: str) -> list[str]:
    """Why the first plan is first, and which others may be as good, as sentences."""
    first = plans[0]
    exact = first.cost_model == "exact"  # which has lower bounds and a known error
    compute = [f + b for f, b in zip(first.stage_forward, first.stage_backward, strict=True)]
    slowest = max(range(first.pp), key=lambda i: compute[i])
    measure = "costs least per step" if objective == "cost" else "has the shortest step"
    lines = [
        f"Plan 1 {measure} of all that fit: {first.step_time:.4f} s for "
        f"{first.model.global_batch // first.model.cp} sequences of {first.model.seq * first.model.cp}. "
        f"Stage {slowest} ({first.stage_gpu[slowest]}) sets the pace with {compute[slowest] * 1e3:.2f} ms "
        f"for each of {first.micro_batches} micro-batches."
    ]
    layout = of_plan(first)
    gpus = working_gpus(layout.stages)
    lines.append(f"It trains {speed(first.model, first.cluster, gpus, first.step_time)}.")
    split = ", zero-bubble schedule" * bool(first.weight_gradients)
    lines.append(f"It runs with {options_line(first.options, layout)}{split}.")
    found = errors(first.cluster, set(gpus), first.model, first.options)
    if exact:
        lines.append(f"Its step: {_shares(first, message_time(first))}.")
        lines.append(f"Its memory: {_memory(first)}.")
        lines.append(expected_error(found))
    goal = attrgetter("price_per_step" if objective == "cost" else "step_time")
    error = max(each or MEAN_ERROR for each in found.values())
    alike = sum(goal(plan) <= (1 + error) * goal(first) for plan in plans)
    if exact and objective != "pareto" and alike > 1:
        which = f"1 {'and' if alike == 2 else 'to'} {alike}"
        lines.append(f"Plans {which} are within {error:.1%} of each other: time them before you choose.")
    return lines


def faster_flags(plan: Plan) -> list[str]:
    """A sentence where other flags would make a plan of computed times much faster on the same GPUs."""
    if plan.virtual_stages > 1 or plan.choices or not any("computed by" in note for note in plan.notes):
        return []
    from fasop.exact.estimate import estimate  # loaded where a plan isn't measured

    changes: dict[str, dict[str, Any]] = {
        "--attention flash": {"attention": "flash"},
        "--sequence-parallel": {"sequence_parallel": plan.tp > 1},
        "--overlap": {"overlap": True},
        "--cuda-graphs": {"cuda_graphs": True},
        "--fast-dispatch": {"fast_dispatch": plan.ep > 1},
    }
    known = [hardware(plan.cluster.gpu(name).costs_of) for name in set(plan.placement)]
    if plan.options.precision == "mixed" and all(gpu and "8 bit" in gpu.peaks for gpu in known):
        changes["--precision fp8"] = {"precision": "fp8"}

    def step(options: Options) -> float:
        return estimate(of_plan(replace(plan, options=options)), [], options).step

    base, flags, options = step(plan.options), [], plan.options
    for flag, change in changes.items():
        if step(replace(plan.options, **change)) < 0.97 * base:
            flags.append(flag)
            options = replace(options, **change)
    best = step(options)
    if best > WORTH * base:
        return []
    return [f"With {' '.join(flags)} the same layout would take {best:.4f} s ({best / base - 1:+.0%})."]


def stages(plan: Plan) -> list[str]:
    """The stages of one plan: units, layers, times, memory against the cap."""
    rows = []
    for i, (memory, cap) in enumerate(zip(plan.stage_memory, plan.stage_cap, strict=True)):
        row = {"stage": str(i), "GPU": plan.stage_gpu[i]}
        if plan.choices:
            choice = plan.choice(i)
            mbs = "+".join(str(size) for _, size in choice.shares)
            row |= {"tp": str(choice.tp), "mbs": mbs, "recompute": choice.recompute}
        row |= {
            "units": str(plan.partition[i]),
            "layers": str(plan.layers[i]),
            "forward ms": f"{plan.stage_forward[i] * 1e3:.2f}",
            "backward ms": f"{plan.stage_backward[i] * 1e3:.2f}",
            "memory GiB": f"{memory:.2f}",
            "cap": f"{cap:.2f}",
            "": "OOM" if memory > cap else "",
        }
        rows.append(row)
    degrees = {"tp": plan.tp, "dp": plan.dp // plan.model.cp}
    degrees |= {"ep": plan.ep} if plan.model.experts else {}
    degrees |= {"cp": plan.model.cp} if plan.model.cp > 1 else {}
    listed = ", ".join(f"{name} {degree}" for name, degree in degrees.items())
    alike = "" if plan.choices else f" ({listed}, micro-batches of {plan.mbs})"
    lines = [f"Plan 1 by stage{alike}:", *text.table([list(rows[0]), *(list(row.values()) for row in rows)])]
    if len(set(plan.placement)) > 1 or any(gpu.hosts for gpu in plan.cluster.gpus):
        lines.append(f"Nodes in rank order: {' '.join(plan.hosts)}")
    if plan.split_stage is not None:
        lines.append(f"The decoder begins at stage {plan.split_stage}.")
    return lines


def speed(model: Model, cluster: Cluster, gpus: Mapping[str, int], step: float) -> str:
    """gpus: how many of each type work; step: seconds."""
    count, tokens = sum(gpus.values()), model.global_batch * model.seq / step
    rate = tokens * model.flops_per_token
    line = f"{tokens:,.0f} tokens/s ({tokens / count:,.0f} per GPU), "
    line += f"{rate / count / 1e12:.1f} TFLOP/s per GPU"
    types = [cluster.gpu(name) for name in gpus]
    known = [of for gpu in types if (of := hardware(gpu.costs_of))]
    if len(known) < len(types):
        return line
    peaks = [of.peak("16 bit") * gpu.speed for of, gpu in zip(known, types, strict=True)]
    peak = sum(each * count for each, count in zip(peaks, gpus.values(), strict=True))
    return f"{line}, MFU {rate / peak:.1%} (of the dense 16-bit peak; attention counted over whole sequences)"


def errors(cluster: Cluster, names: set[str], model: Model, options: Options) -> dict[str, float | None]:
    """How far off plans of this kind on each of these GPUs were where others measured; None: nowhere."""
    return {name: mean_error(cluster.gpu(name).costs_of, model, options) for name in sorted(names)}


def expected_error(found: dict[str, float | None]) -> str:
    """``errors`` as a sentence."""
    parts = [f"{error:.0%} on {name}" if error else f"not judged on {name}" for name, error in found.items()]
    return f"Expected error of the step, from plans that others have measured: {', '.join(parts)}."


def options_line(options: Options, layout: Layout) -> str:
    """How the job is run, in words: what the options change in this layout."""
    replicas = [replica for stage in layout.stages for replica in stage.replicas]
    is_shared = len(replicas) > len(layout.stages)
    zero = {0: "optimizer on every rank", 1: "optimizer sharded (ZeRO-1)"}
    some = f" of {options.recomputed:.0%} of the layers" * (options.recomputed < 1)
    words = [f"recomputation {options.recompute}{some}", f"{options.attention} attention"]
    words += [zero.get(options.zero, f"ZeRO-{options.zero}")] * is_shared
    words += [f"in groups of {options.shard} (HSDP)"] * (is_shared and options.shard > 0)
    words += [f"{options.precision} precision"]
    words += ["optimizer on the host"] * options.offload
    words += ["sequence parallelism"] * (options.sequence_parallel and any(one.tp > 1 for one in replicas))
    of = f" ({options.cuda_graphs})" * isinstance(options.cuda_graphs, str)
    words += [f"CUDA graphs{of}"] * bool(options.cuda_graphs)
    words += [f"{', '.join(options.unfused)} not fused"] * bool(options.unfused)
    words += ["LoRA"] * options.adapters
    words += ["fast dispatch"] * (options.fast_dispatch and any(one.ep > 1 for one in replicas))
    words += [f"{', '.join(options.again)} computed again"] * bool(options.again)
    words += ["gradients overlapped" if options.overlap else "gradients not overlapped"] * is_shared
    return ", ".join(words)


def _shares(plan: Plan, messages: float) -> str:
    """Mean shares of the stages' time; messages: seconds that they add to the pipeline."""
    sums = exchanges = 0.0
    for stage, parts in enumerate(plan.parts):
        with_experts = plan.layers[stage] - plan.model.kinds[plan.units(stage)].count("F")
        exchanges += 4 * parts.exchange * with_experts  # there and back, forward and backward
        if plan.choice(stage).tp > 1:
            sums += parts.tensor_sum * tensor_sums(plan.model)[:, plan.units(stage)].sum()
    passes = plan.micro_batches * (sum(plan.stage_forward) + sum(plan.stage_backward)) / plan.pp
    tensor = min(plan.micro_batches * sums / plan.pp, passes)
    routed = min(plan.micro_batches * exchanges / plan.pp, passes - tensor)
    sharding = plan.micro_batches * sum(parts.sharding for parts in plan.parts) / plan.pp
    context = plan.micro_batches * sum(parts.context for parts in plan.parts) / plan.pp
    shares = {
        "compute": passes - tensor - routed - sharding - context,
        "tensor-parallel collectives": tensor,
        "exchange of tokens with experts": routed,
        "exposed collectives of sharding": sharding,
        "exposed context-parallel communication": context,
        "messages": messages,
        "exposed gradient reduction": sum(plan.dp_allreduce) / plan.pp,
        "embedding": plan.embedding_allreduce,
        "optimizer and gathering": sum(plan.update) / plan.pp,
    }
    shares["bubble and waiting"] = max(plan.step_time - sum(shares.values()), 0.0)
    return ", ".join(f"{name} {value / plan.step_time:.1%}" for name, value in shares.items() if value)


def _memory(plan: Plan) -> str:
    """GiB of a GPU of the fullest stage by kind, each with the margin."""
    pairs = zip(plan.stage_memory, plan.stage_cap, strict=True)
    stage = [size / cap for size, cap in pairs].index(plan.fullest)
    tp = plan.choice(stage).tp
    units = plan.units(stage)
    held, of_experts = map(float, held_parameters(plan.model, tp, plan.ep, lambda each: each[units].sum()))
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


def write_rows(path: str, rows: Sequence[Sequence[object]]) -> None:
    """Rows of ``COLUMNS`` as Parquet or CSV (-: printed). Raises ``TraceError`` without pyarrow."""
    if path.endswith(".parquet"):
        from chakra_et.export.tables import Table, write_parquet  # not loaded where nobody wants it

        table = Table({name: list(values) for name, *values in zip(COLUMNS, *rows, strict=True)})
        with files.atomic_file(Path(path)) as handle:
            write_parquet(table, handle)
        return
    import csv  # nor this

    output = io.StringIO()
    csv.writer(output, lineterminator="\n").writerows([COLUMNS, *rows])
    if path == "-":
        print(output.getvalue(), end="")
    else:
        files.write_text(Path(path), output.getvalue())


def scatter(plans: Sequence[Plan]) -> str:
    """$ over seconds per step of plans, and the line of those that no other beats in both, as SVG."""
    from chakra_et.drawing.charts import line_chart  # not loaded where nobody wants it

    front = [by_time_and_price(plan) for plan in pareto_front(plans, by_time_and_price)]
    lines = {"plans": [by_time_and_price(plan) for plan in plans], "Pareto front": front}
    return line_chart(plans[0].model.name, "s per step", "$ per step", lines, unjoined=("plans",))


def csv_row(plan: Plan) -> tuple[object, ...]:
    """One plan as a row of ``COLUMNS``."""
    fullest = []
    sharded = replace(plan.options, zero=max(plan.options.zero, 1))  # if replicas shared optimizer states
    for memory in (plan.stage_memory, memory_with(plan, sharded)):
        # Of the stage that is closest to its cap, or furthest above.
        size, cap = max(zip(memory, plan.stage_cap, strict=True), key=lambda pair: pair[0] / pair[1])
        fullest += [size > cap, f"{size:.6f}"]
    return (
        *(plan.mbs, plan.tp, plan.dp, plan.pp, plan.cluster.instances(plan.placement)),
        *(plan.placement.count("A100"), plan.placement.count("A10"), list(plan.partition)),
        *(plan.step_time, plan.pipeline_time, max(plan.dp_allreduce), plan.embedding_allreduce),
        *(plan.price_per_step, *fullest, plan.train_cost),
    )
