"""``python -m fasop plan``: rank the ways to run a model on a cluster (examples: fasop/README.md)."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

from chakra_et import cli, files
from fasop.errors import PlanError
from fasop.inputs.clusters import Cluster, load_clusters
from fasop.inputs.costs import PUBLISHED, CostFile, check_cost_name, is_measured, read_costs
from fasop.inputs.models import CpComm, Model, find_model
from fasop.output import report
from fasop.plans.options import Attention, CudaGraphs, Options, Recompute, Unfused
from fasop.plans.plan import Goal, Plan, by_time_and_price, pareto_front, plans_json

Numbers = Literal["mixed", "bf16", "fp8", "fp8-rows", "fp8-blocks", "mxfp8", "nvfp4", "fp32"]
exact_flag = functools.partial(cli.option, exact_only=True)  # what the published tool doesn't have


@dataclass
class Config:
    model: str = cli.option("a preset (data/models.json), a name in --models-file, or a config.json")
    cluster: str = cli.option("a preset, GPUs as they are sold (16xH100), or a YAML file (FILE:NAME)")
    cost_model: Literal["exact", "hpdc24"] = cli.option("hpdc24: the published tool's estimates", "exact")
    objective: Literal["time", "cost", "pareto"] = cli.option("which plans are best; pareto: in both", "time")
    budget: float | None = cli.option("leave out clusters that cost more, $/h", None, above=0)
    max_step_time: float | None = cli.option("leave out plans with a longer step, seconds", None, above=0)
    max_tp: int = cli.option("largest tensor-parallel degree", 4, least=1)
    tp: int | None = cli.option("only this tensor-parallel degree", None, least=1)
    dp: int | None = cli.option("only this data-parallel degree", None, least=1)
    pp: int | None = cli.option("only this number of pipeline stages", None, least=1)
    mbs: int | None = cli.option("only this micro-batch, sequences", None, least=1)
    top: int = cli.option("plans shown", 10, least=1)
    json: bool = cli.option("print the plans as JSON, for the other commands", False)
    csv: str = cli.option("write rows as CSV, or Parquet (.parquet), to this file (-: print them)", "")
    picture: str = cli.option("draw cost over time of all plans found, with the Pareto front, as .svg", "")
    all: bool = cli.option("list every plan, also those that do not fit into memory", False)
    oom: bool = cli.option("list plans that do not fit into memory, too", False)
    recipe: Literal["auto", "modern", "plain"] = cli.option(
        "modern: FlashAttention, sequence parallelism, sharded optimizer; plain: only what flags turn on; "
        "auto: modern where a model has no measured costs on these GPUs",
        "auto",
    )
    recompute: Literal[Recompute, "auto"] = exact_flag(
        "activations that the backward pass computes again; auto: whichever is fastest", "none"
    )
    recomputed: float = exact_flag("share of the layers that --recompute full is for", 1.0, least=0, most=1)
    zero: Literal[0, 1, 2, 3] | None = cli.option(
        "1 shards optimizer states, 2 also gradients, 3 parameters (default: as --recipe has it)", None
    )
    overlap: bool = exact_flag("reduce gradients during the last backward pass", False)
    sequence_parallel: bool = exact_flag("split activations by tokens between tensor-parallel ranks", False)
    attention: Attention | None = exact_flag(
        "flash: fused, no scores stored; flash2: FlashAttention-2 (default: as --recipe has it)", None
    )
    precision: Numbers = exact_flag(
        "mixed, bf16: 16 bits with fp32 master weights; fp8 to nvfp4: the same, but products in this",
        "mixed",
    )
    cp: int = exact_flag(
        "GPUs that share each sequence (context parallelism); 0: the best of 1, 2, 4 and 8", 1, least=0
    )
    cp_comm: CpComm = exact_flag("exchange keys and values in a ring (p2p) or heads all-to-all (a2a)", "ring")
    fsdp: bool = exact_flag("shard parameters and overlap communication: --zero 3 --overlap", False)
    hsdp: int = exact_flag("--fsdp within groups of N GPUs; each group holds all parameters", 0, least=0)
    lora: bool = exact_flag("train LoRA's adapters alone, of rank 16, beside attention's products", False)
    fast_dispatch: bool = exact_flag("send tokens to experts by kernels for it: DeepEP, HybridEP", False)
    offload: bool = exact_flag("keep and update optimizer states on the host", False)
    cuda_graphs: CudaGraphs = exact_flag(
        "attention, layer: a CUDA graph for each pass of it; full, or the flag alone: one for the whole step",
        "none",
        bare="full",
    )
    unfused: tuple[str, ...] = exact_flag(
        "run these with a kernel for each operation, not fused: norm, loss",
        (),
        choices=get_args(Unfused),
        metavar="PART",
    )
    engine: Literal["megatron", "torchtitan", "deepspeed"] = exact_flag("what runs the plan", "megatron")
    interleave: bool = exact_flag("also try several chunks of layers per stage", False)
    schedule: Literal["1f1b", "zero-bubble"] = exact_flag("zero-bubble: where it makes a plan faster", "1f1b")
    per_stage: bool = exact_flag("each stage may have its own tp, micro-batches and recomputation", False)
    idle: bool = cli.option("leave nodes idle where that is faster or cheaper", True)
    global_batch: int | None = cli.option("sequences per step (default: the model's)", None, least=1)
    seq: int | None = cli.option("tokens per sequence (default: the model's)", None, least=1)
    tokens: str = cli.option("tokens of the training whose cost is shown, as 300B or 2T", "1T")
    iterations: int | None = cli.option(
        "steps of that training, in place of --tokens (hpdc24: 12,500,000)", None, least=1
    )
    models_file: str = cli.option("YAML file of models, in the form of data/models.json", "")
    costs: tuple[str, ...] = cli.option("cost files of 'profile', used before the published ones", ())
    time_limit: float = exact_flag(
        "seconds until the search stops; what it left out is counted (0: never)", 60, least=0
    )
    workers: int = cli.option("processes (0: as many as shorten the search)", 0, least=0)

    def __post_init__(self) -> None:
        if self.tp is not None and self.tp > self.max_tp:
            raise ValueError(f"--tp {self.tp} is above --max-tp {self.max_tp}: give --max-tp {self.tp}")
        if not re.fullmatch(r"\d{1,18}(\.\d*)?[KMBT]?", self.tokens) or not self.steps_of(1):
            raise ValueError(f"--tokens {self.tokens}: give a number of tokens, as 300B or 2T")
        if self.picture and not self.picture.endswith(".svg"):
            raise ValueError(f"--picture {self.picture}: give a name that ends in .svg")
        if self.json and self.csv:
            raise ValueError("--json and --csv exclude each other: choose one")
        other = "interleave" if self.interleave else "schedule" if self.schedule != "1f1b" else ""
        other = other if self.cp else "cp 0"
        if other and (self.objective != "time" or self.all):
            raise ValueError(f"--{other} searches for the shortest step: leave out --objective and --all")
        if self.interleave and self.schedule != "1f1b":
            raise ValueError("--interleave and --schedule zero-bubble exclude each other: choose one")
        if self.per_stage and (self.tp or self.dp or self.mbs):
            raise ValueError("--per-stage chooses them for each stage: leave out --tp, --dp and --mbs")
        if self.cost_model == "hpdc24":
            if self.max_tp > 4:
                raise ValueError("--cost-model hpdc24 has no --max-tp above 4: use --cost-model exact")
            only = [each for each in fields(self) if each.metadata.get("exact_only")]
            changed = [each.name for each in only if getattr(self, each.name) != each.default]
            if changed or (self.zero or 0) > 1:
                flag = (*changed, "zero")[0].replace("_", "-")
                raise ValueError(f"--cost-model hpdc24 has no --{flag}: use --cost-model exact")

    def steps_of(self, tokens_per_step: int) -> int:
        """Steps of the training that is priced."""
        if self.iterations or self.cost_model == "hpdc24":
            return self.iterations or 12_500_000
        scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(self.tokens[-1], 1.0)
        return math.ceil(float(self.tokens.rstrip("KMBT")) * scale / tokens_per_step)

    @property
    def goal(self) -> Goal:
        degrees = self.tp, self.dp and self.dp * self.cp, self.pp, self.mbs
        # Rows of everything are asked for, or plans that do not fit: no plan may be skipped.
        everything = self.all or self.oom
        limit = 0.0 if everything else self.time_limit
        idle = self.idle and not self.all  # every row of every shape is one for all GPUs
        more = limit, self.max_tp, idle, self.workers
        return Goal(self.objective, self.top, self.max_step_time, everything, *degrees, *more)

    def options(self, measured: bool) -> list[Options]:
        """The ways to run the job that are tried; measured: the model, on one of the GPUs."""
        modern = self.recipe == "modern" or self.recipe == "auto" and not measured
        same = {each.name: getattr(self, each.name) for each in fields(Options) if hasattr(self, each.name)}
        same |= {
            "zero": 3 if self.fsdp or self.hsdp else int(modern) if self.zero is None else self.zero,
            "overlap": self.overlap or self.fsdp or self.hsdp > 0,
            "shard": self.hsdp,
            "adapters": self.lora,
            "sequence_parallel": self.sequence_parallel or modern,
            "attention": self.attention or ("flash" if modern else "unfused"),
            "precision": self.precision.replace("-", " "),
        }
        if self.recompute != "auto":
            return [Options(**same)]
        # Stages that choose for themselves try every one; fused attention keeps no scores to compute again.
        fused = same["attention"] != "unfused"
        ways = ("none",) if self.per_stage else ("none", "full") if fused else get_args(Recompute)
        return [Options(**{**same, "recompute": way}) for way in ways]


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(Config, argv, description="Search for the best plans of a model on a cluster.")
    if config.csv not in ("", "-") and not Path(config.csv).absolute().parent.is_dir():
        raise PlanError(f"{config.csv}: no such folder: make {Path(config.csv).parent} first.")
    plans, rows, clusters = found(config)
    if config.picture:
        files.write_text(Path(config.picture), report.scatter(plans))
        print(f"{len(plans)} plans: {config.picture}", file=sys.stderr)
    if config.csv:
        report.write_rows(config.csv, rows)
        print(f"{len(rows)} rows: {config.csv}", file=sys.stderr)
        return 0
    if config.json:
        print(plans_json(plans))
    else:
        print("\n".join(_text(config, plans[: config.top], clusters)))
    return 0


def found(
    config: Config, costs: Sequence[CostFile] = ()
) -> tuple[list[Plan], list[tuple[object, ...]], list[Cluster]]:
    """The plans, their rows if they are asked for, and the clusters. ``costs``: before those of files."""
    model = find_model(config.model, config.models_file)
    batch, seq = config.global_batch or model.global_batch, config.seq or model.seq
    model = replace(model, global_batch=batch, seq=seq)
    clusters = load_clusters(config.cluster)
    if config.objective != "time" and not any(cluster.price_per_hour for cluster in clusters):
        raise PlanError(f"{config.cluster} has no prices: give a cluster file with price_per_hour.")
    if config.budget is not None:
        cheapest = min(clusters, key=lambda cluster: cluster.price_per_hour)
        clusters = [cluster for cluster in clusters if cluster.price_per_hour <= config.budget]
        if not clusters:
            least = f"{cheapest.name} ${cheapest.price_per_hour:.2f}/h: raise --budget, or give nodes: 0-8"
            raise PlanError(f"no cluster costs at most ${config.budget:g}/h, {least} to plan on fewer.")
    cost_files = [read_costs(PUBLISHED), *map(read_costs, reversed(config.costs)), *costs]
    check_cost_name(cost_files, model)
    if config.cost_model == "hpdc24":
        plans, rows = _hpdc24(config, model, clusters, cost_files)
    else:
        plans, degrees = [], [config.cp] if config.cp else [1, 2, 4, 8]
        for cp in degrees:
            with contextlib.suppress(*[PlanError] * (not config.cp)):
                split = model.split_sequences(cp, config.cp_comm)
                way = replace(config, cp=cp, time_limit=config.time_limit / len(degrees))
                plans += _exact(way, split, clusters, cost_files)
        plans = plans if config.cp else sorted(plans, key=lambda plan: plan.step_time)[: config.top]
        rows = [report.csv_row(plan) for plan in plans] if config.csv else []
    if not plans:
        exact, sharded = config.cost_model == "exact", config.fsdp or config.hsdp or config.zero == 3
        untried = {"--recompute auto": config.recompute == "auto", "--fsdp": sharded}
        untried |= {"--offload": config.offload, "--cp 0": config.cp != 1}
        flags = [flag for flag, is_given in untried.items() if exact and not is_given]
        raise PlanError(config.goal.no_plan(model.name, [cluster.name for cluster in clusters], flags))
    return plans, rows, clusters


def _exact(config: Config, model: Model, clusters: list[Cluster], cost_files: list[CostFile]) -> list[Plan]:
    from fasop.search.search import search

    options = config.options(is_measured(cost_files, model, clusters))
    goal = config.goal
    if config.interleave or config.schedule != "1f1b":
        from fasop.search.planner import WIDER, interleaved, reschedule, zero_bubble

        plans = search(model, clusters, cost_files, options, replace(goal, top=WIDER * goal.top))
        plans = reschedule(plans, cost_files, interleaved if config.interleave else zero_bubble)
    else:
        plans = search(model, clusters, cost_files, options, goal)
    if config.objective == "pareto" and goal.everything and not config.all:
        plans = pareto_front(plans, by_time_and_price)
    steps = config.steps_of(model.global_batch * model.seq)
    plans = [replace(plan, train_cost=plan.price_per_step * steps) for plan in plans]
    return plans if config.all or config.objective == "pareto" else plans[: config.top]


def _hpdc24(
    config: Config, model: Model, clusters: list[Cluster], cost_files: list[CostFile]
) -> tuple[list[Plan], list[tuple[object, ...]]]:
    from fasop.hpdc24.search import csv_row, plan_of, published_costs, ranked

    costs = published_costs(cost_files, model)
    sharded = config.zero == 1
    kept = ranked(model, clusters, costs, config.goal, sharded, config.all)
    rows = [csv_row(row, config.steps_of(1)) for row in kept] if config.csv else []
    wanted = kept if config.json else kept[: config.top]
    return [plan_of(row, model, costs, config.steps_of(1), sharded) for row in wanted], rows


def _text(config: Config, plans: list[Plan], clusters: list[Cluster]) -> list[str]:
    model = plans[0].model
    where = report.cluster_line(clusters[0]) if len(clusters) == 1 else f"{len(clusters)} clusters"
    count = f"{model.parameters:,} parameters, " if model.parameters else ""
    steps = f"{config.steps_of(1):,} steps" if config.iterations or config.cost_model == "hpdc24" else ""
    lines = [
        f"{model.name} ({count}{model.layers} layers of {model.hidden}, sequences of {model.seq * model.cp}, "
        f"{model.global_batch // model.cp} per step) on {where}; cost model {config.cost_model}",
        "",
        *report.table(plans, f"$ for {steps or config.tokens}"),
        "",
        *report.reasons(plans, config.objective),
        *report.faster_flags(plans[0]),
        "",
        *report.stages(plans[0]),
    ]
    notes = dict.fromkeys(f"note: {note}" for plan in plans for note in plan.notes)
    if config.cluster[0].isdigit() and clusters[0].gpus[0].shared_bus:
        notes["note: PCIe is that of one slow box that was measured: give your own in a cluster file"] = None
    return lines + (["", *notes] if notes else [])
