"""``python -m fasop plan``: rank the ways to run a model on a cluster.

python -m fasop plan --model gpt2-xl --cluster paper-gpt2xl-het
python -m fasop plan --model bert-large --cluster my.yaml --objective cost --max-step-time 1.5
python -m fasop plan --model gpt2-xl --cluster paper-pareto --objective pareto
python -m fasop plan --model bert --cluster paper-bert-het --cost-model hpdc24 --all --csv rows.csv
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from chakra_et import cli, files
from fasop.errors import PlanError
from fasop.exact.stage_costs import Options
from fasop.inputs.clusters import Cluster, load_clusters
from fasop.inputs.costs import PUBLISHED, Costs, read_costs
from fasop.inputs.models import Model, find_model
from fasop.output import report
from fasop.plans.plan import Plan, plans_json
from fasop.search.search import Goal, pareto_front, search


@dataclass
class Config:
    """What is planned, and what is shown."""

    model: str = field(metadata={"help": "gpt2-xl, gpt2-345m, bert-large, t5, or a name in --models-file"})
    cluster: str = field(metadata={"help": "preset, or YAML file of one cluster (or FILE:NAME)"})
    cost_model: Literal["exact", "hpdc24"] = field(
        default="exact", metadata={"help": "exact, or the published tool's own estimate"}
    )
    objective: Literal["time", "cost", "pareto"] = field(
        default="time", metadata={"help": "shortest step, cheapest step, or all that nothing beats in both"}
    )
    budget: float | None = field(default=None, metadata={"help": "leave out clusters above this price, $/h"})
    max_step_time: float | None = field(default=None, metadata={"help": "leave out slower plans, seconds"})
    max_tp: int = field(default=4, metadata={"help": "largest tensor-parallel degree"})
    tp: int | None = field(default=None, metadata={"help": "only this tensor-parallel degree"})
    dp: int | None = field(default=None, metadata={"help": "only this data-parallel degree"})
    pp: int | None = field(default=None, metadata={"help": "only this number of pipeline stages"})
    mbs: int | None = field(default=None, metadata={"help": "only this micro-batch, sequences"})
    top: int = field(default=10, metadata={"help": "plans shown"})
    json: bool = field(default=False, metadata={"help": "print the plans as JSON, for simulate and export"})
    csv: str = field(default="", metadata={"help": "write rows as CSV to this file (none or -: print them)"})
    all: bool = field(default=False, metadata={"help": "every row, those that do not fit into memory too"})
    oom: bool = field(default=False, metadata={"help": "show plans that do not fit into memory too"})
    recompute: Literal["none", "selective", "full"] = field(
        default="none", metadata={"help": "activations computed again in the backward pass"}
    )
    sharded_optimizer: bool = field(
        default=False, metadata={"help": "optimizer states divided among the data-parallel ranks"}
    )
    overlap: bool = field(default=False, metadata={"help": "gradients reduced beside the last backward"})
    global_batch: int | None = field(default=None, metadata={"help": "sequences a step, if not the model's"})
    iterations: int = field(default=12_500_000, metadata={"help": "steps of the training that is priced"})
    models_file: str = field(default="", metadata={"help": "YAML file of models"})
    costs: tuple[str, ...] = field(
        default=(), metadata={"help": "cost files of 'profile', before the published costs"}
    )
    workers: int = field(default=0, metadata={"help": "processes (0: as many as are worth it)"})

    def __post_init__(self) -> None:
        for name in ("max_tp", "tp", "dp", "pp", "mbs", "top", "global_batch", "iterations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}: give at least 1")
        for name in ("budget", "max_step_time"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} is {value}: give a number above 0")
        if self.workers < 0:
            raise ValueError(f"--workers is {self.workers}: give at least 0")
        if self.json and self.csv:
            raise ValueError("--json and --csv exclude each other: choose one")
        if self.cost_model == "hpdc24":
            if self.max_tp > 4:
                raise ValueError("--cost-model hpdc24 has no --max-tp above 4: use --cost-model exact")
            if self.recompute != "none" or self.overlap:
                raise ValueError(
                    "--cost-model hpdc24 has no --recompute or --overlap: use --cost-model exact"
                )

    @property
    def goal(self) -> Goal:
        degrees = {name: getattr(self, name) for name in ("tp", "dp", "pp", "mbs")}
        # Rows of everything are asked for, or plans that do not fit: no plan may be skipped.
        return Goal(self.objective, self.top, self.max_step_time, self.all or self.oom, **degrees)


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(
        Config, _with_dash(sys.argv[1:] if argv is None else argv), prog="python -m fasop plan"
    )
    model = find_model(config.model, config.models_file)
    if config.global_batch:
        model = replace(model, global_batch=config.global_batch)
    clusters = _affordable(load_clusters(config.cluster), config.budget)
    cost_files = [read_costs(PUBLISHED), *map(read_costs, reversed(config.costs))]
    if config.csv not in ("", "-") and not Path(config.csv).absolute().parent.is_dir():
        raise PlanError(f"{config.csv}: no such folder: make {Path(config.csv).parent} first.")
    if config.cost_model == "hpdc24":
        costs = Costs(cost_files, model, hpdc24=True)
        plans, rows = _hpdc24(config, model, clusters, costs)
    else:
        costs = Costs(cost_files, model)
        plans = _exact(config, model, clusters, costs)
        rows = [report.csv_row(plan, _sharded_memory) for plan in plans] if config.csv else []
    if config.csv:
        text = report.csv_text(rows)
        if config.csv == "-":
            print(text, end="")
        else:
            files.write_text(Path(config.csv), text)
            print(f"{len(rows)} rows: {config.csv}", file=sys.stderr)
        return 0
    if config.json:
        print(plans_json(plans))
    else:
        print("\n".join(_text(config, plans[: config.top], clusters, _notes(plans, costs))))
    return 0


def _with_dash(argv: Sequence[str]) -> list[str]:
    """``--csv`` without a file prints."""
    words = list(argv)
    for index in range(len(words) - 1, -1, -1):
        if words[index] == "--csv" and (index + 1 == len(words) or words[index + 1].startswith("--")):
            words.insert(index + 1, "-")
    return words


def _affordable(clusters: list[Cluster], budget: float | None) -> list[Cluster]:
    if budget is None:
        return clusters
    kept = [cluster for cluster in clusters if cluster.price_per_hour <= budget]
    if not kept:
        cheapest = min(clusters, key=lambda cluster: cluster.price_per_hour)
        raise PlanError(
            f"no cluster costs at most ${budget:g}/h, {cheapest.name} ${cheapest.price_per_hour:.2f}/h: "
            "raise --budget, or give node counts as ranges (nodes: 0-8) to plan on fewer."
        )
    return kept


def _exact(config: Config, model: Model, clusters: list[Cluster], costs: Costs) -> list[Plan]:
    options = Options(config.recompute, config.sharded_optimizer, config.overlap)
    with _progress() as progress:
        plans = search(
            *(model, clusters, costs, options, config.goal, config.max_tp, config.iterations),
            *(config.workers, progress),
        )
    if not plans:
        from fasop.search.advice import no_plan

        raise PlanError(no_plan(model, clusters, costs, options, config.goal, config.max_tp))
    if config.objective == "pareto" and config.goal.everything and not config.all:
        plans = pareto_front(plans)
    return plans if config.all or config.objective == "pareto" else plans[: config.top]


def _hpdc24(
    config: Config, model: Model, clusters: list[Cluster], costs: Costs
) -> tuple[list[Plan], list[tuple[object, ...]]]:
    from fasop.hpdc24 import search as hpdc24

    with _progress() as progress:
        total = 0

        def advance(count: int, of: int) -> None:
            nonlocal total
            total += count
            progress(total, of)

        found = hpdc24.search(model, clusters, costs, advance)
    goal = config.goal
    kept = [row for row in found if row.candidate.tp <= config.max_tp and goal.fits(row.candidate)]
    if not kept:
        raise PlanError(goal.no_shape([row.candidate for row in found]))

    def is_oom(row: hpdc24.Row) -> bool:
        return (row.sharded if config.sharded_optimizer else row.plain)[0]

    if not goal.everything:
        kept = [row for row in kept if not is_oom(row)]
        if not kept:
            raise PlanError(
                f"no plan of {model.name} on {clusters[0].name} fits into memory by hpdc24: try "
                "--sharded-optimizer, or --cost-model exact, which can also plan with --recompute full."
            )
    if config.max_step_time is not None:
        fastest = min(row.step_time for row in kept)
        kept = [row for row in kept if row.step_time <= config.max_step_time]
        if not kept:
            raise PlanError(
                f"no plan takes at most {config.max_step_time:g} s: the fastest takes {fastest:.4f} s."
            )

    def price(row: hpdc24.Row) -> float:
        return clusters[row.candidate.cluster].price_per_hour * row.step_time

    if config.objective == "cost" and not config.all:
        kept.sort(key=price)
    if config.objective == "pareto" and not config.all:
        front: list[hpdc24.Row] = []
        for row in sorted(kept, key=lambda row: (row.step_time, price(row))):
            if not front or price(row) < price(front[-1]):
                front.append(row)
        kept = front
    if not config.all and config.objective != "pareto":
        del kept[config.top :]
    rows = []
    if config.csv:
        rows = [hpdc24.csv_row(row, clusters[row.candidate.cluster], config.iterations) for row in kept]
    wanted = kept if config.json else kept[: config.top]
    plans = [
        hpdc24.plan_of(
            row, model, clusters[row.candidate.cluster], config.iterations, config.sharded_optimizer
        )
        for row in wanted
    ]
    return plans, rows


def _text(config: Config, plans: list[Plan], clusters: list[Cluster], notes: list[str]) -> list[str]:
    model = plans[0].model
    where = report.cluster_line(clusters[0]) if len(clusters) == 1 else f"{len(clusters)} clusters"
    lines = [
        f"{model.name} ({model.layers} layers of {model.hidden}, sequences of {model.seq}, "
        f"{model.global_batch} a step) on {where}; cost model {config.cost_model}",
        "",
        *report.table(plans),
        "",
        *report.reasons(plans, config.objective, config.cost_model == "exact"),
        "",
        f"Plan 1 by stage (tp {plans[0].tp}, dp {plans[0].dp}, micro-batches of {plans[0].mbs}):",
        *report.stages(plans[0]),
    ]
    return lines + (["", *notes] if notes else [])


def _notes(plans: list[Plan], costs: Costs) -> list[str]:
    """What of the plans' costs was modelled."""
    found: dict[str, None] = {}
    for plan in plans:
        for gpu in plan.cluster.gpus:
            found.update(dict.fromkeys(costs.of(gpu, plan.tp, plan.mbs).notes))
    return [f"note: {note}" for note in found]


def _sharded_memory(plan: Plan) -> Sequence[float]:
    from fasop.search.planner import stage_memory

    return stage_memory(plan, sharded_optimizer=True)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr where that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield _silent
        return
    from tqdm import tqdm

    with tqdm(unit=" shapes", leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _silent(done: int, total: int) -> None:
    pass
