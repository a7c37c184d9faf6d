"""``python -m fasop evaluate PLAN``: what a given plan takes, without a search.

python -m fasop evaluate layouts.yaml
python -m fasop evaluate layouts.yaml --cluster measured.yaml --costs costs.json
python -m fasop evaluate plans.json --rank 2 --json
python -m fasop evaluate --rows training_runs.csv

PLAN is a file of ``plan --json``, or YAML as ``fasop/plans/layout.py`` describes it, where stages and
replicas may differ and a measured time may stand beside each layout. ``--rows`` takes a table of published
training runs instead (``fasop/exact/training_runs.py``) and sets its steps beside those predicted.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from chakra_et import cli, text
from chakra_et.text import printable
from fasop.errors import PlanError
from fasop.exact.estimate import Estimate, estimate
from fasop.exact.training_runs import expressible, predicted, read_runs, refused
from fasop.inputs.clusters import check_gpus, check_nodes, load_clusters
from fasop.inputs.costs import PUBLISHED, check_cost_name, read_costs
from fasop.output.report import expected_error, options_line, speed
from fasop.plans.layout import Described, LayoutStage, of_plan, read_layouts
from fasop.plans.plan import pick_plan


@dataclass
class Config:
    """Which plans are evaluated, and with what."""

    plan: str = cli.option("YAML file of layouts, or file of 'plan --json'", "", positional=True)
    rows: str = cli.option("CSV of published training runs, in place of a plan", "")
    rank: int = cli.option("which plan of a file of 'plan --json', counted from 1", 1)
    cluster: str = cli.option("preset or YAML file, instead of the plan's cluster", "")
    models_file: str = cli.option("YAML file of models", "")
    costs: tuple[str, ...] = cli.option("cost files, before the published costs", ())
    json: bool = cli.option("print the estimates as JSON", False)


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(Config, argv, description="Estimate a given plan, without a search.")
    if config.rows:
        return _published(Path(config.rows), config.models_file, config.json)
    if not config.plan:
        raise PlanError("give a file of layouts or plans, or --rows FILE.")
    cost_files = [read_costs(PUBLISHED), *map(read_costs, reversed(config.costs))]
    given, found = [], []
    status = 0
    for each in _given(config):
        try:
            if isinstance(each, PlanError):
                raise each
            check_cost_name(cost_files, each.layout.model)
            found.append(estimate(each.layout, cost_files, each.options))
            given.append(each)
        except PlanError as error:
            where = "" if isinstance(each, PlanError) else f"{config.plan}: {each.name}: "
            print(printable(f"error: {where}{error}"), file=sys.stderr)
            status = 2
    if not found:
        return status
    if config.json:
        pairs = zip(given, found, strict=True)
        rows = [{"name": each.name, "measured": each.measured, **asdict(one)} for each, one in pairs]
        print(json.dumps(rows, indent=1))
        return status
    lines = _summary(given, found)
    if len(given) == 1:
        layout, gpus = given[0].layout, _gpus(given[0].layout.stages)
        lines += ["", *_stages(given[0], found[0]), ""]
        lines.append(f"It trains {speed(layout.model, layout.cluster, gpus, found[0].step)}.")
        lines.append(f"It runs with {options_line(given[0].options)}.")
        lines.append(expected_error(set(gpus), layout.model, given[0].options))
    notes = dict.fromkeys(f"note: {note}" for one in found for note in one.notes)
    print("\n".join([*lines, *([""] if notes else []), *notes]))
    return status


def _published(path: Path, models: str, as_json: bool) -> int:
    runs = read_runs(path, Path(models) if models else None)
    found = [(run, *predicted(run, layout)) for run, layout in expressible(runs)]
    if as_json:
        rows = [
            {"name": run.name, "measured": run.seconds, "step": step, "assumed": run.assumed}
            for run, step, _ in found
        ]
        print(json.dumps(rows, indent=1))
    else:
        table = [["", "measured s", "predicted s", "error"]]
        for run, step, _ in found:
            error = f"{step / run.seconds - 1:+.1%}"
            table.append([run.name, f"{run.seconds:.3f}", f"{step:.3f}", error])
        print("\n".join(text.table(table, right={1, 2, 3})))
    assumed = Counter(what for run in runs for what in run.assumed)
    assumed += Counter(note for *_, one in found for note in one.notes if "no published" in note)
    notes = [f"note: {count} rows: {what}" for what, count in assumed.items()]
    notes += [f"refused: {count} rows: {reason}" for reason, count in refused(runs).items()]
    print("\n".join(map(printable, notes)), file=sys.stderr)
    return 0 if found else 2


def _given(config: Config) -> Iterator[Described | PlanError]:
    if not config.plan.endswith(".json"):
        yield from read_layouts(config.plan, config.cluster, config.models_file)
        return
    plan = pick_plan(config.plan, config.rank)
    if config.cluster:
        where, clusters = f"--cluster {config.cluster}", load_clusters(config.cluster)
        if len(clusters) > 1 or set(plan.placement) - {gpu.name for gpu in clusters[0].gpus}:
            raise PlanError(f"{where}: give one cluster that has {', '.join(sorted(set(plan.placement)))}.")
        check_nodes(where, clusters[0], plan.placement)
        check_gpus(f"{where}: tp × dp × pp", clusters[0], plan.placement, plan.tp * plan.dp * plan.pp)
        plan = replace(plan, cluster=clusters[0])
    yield Described(f"plan {config.rank}", of_plan(plan), plan.options)


def _summary(given: list[Described], found: list[Estimate]) -> list[str]:
    head = ["", "step s", "pipeline s", "messages ms", "gradients s", "emb s"]
    rows = [[*head, "memory GiB", "measured s", "error"]]
    for each, one in zip(given, found, strict=True):
        measured = ["", ""]
        if each.measured:
            measured = [f"{each.measured:.4f}", f"{one.step / each.measured - 1:+.1%}"]
        messages, reduction = max(one.p2p, default=0.0), max(stage.reduction for stage in one.stages)
        figures = [f"{one.step:.4f}", f"{one.pipeline:.4f}", f"{messages * 1e3:.2f}", f"{reduction:.4f}"]
        rows.append([each.name, *figures, f"{one.embedding:.4f}", f"{one.memory:.2f}", *measured])
    return text.table(rows, right=set(range(1, 9)))


def _gpus(stages: Sequence[LayoutStage]) -> dict[str, int]:
    """How many GPUs of each type work."""
    parts = [part for stage in stages for replica in stage.replicas for part in replica.group]
    return {name: sum(part.gpus for part in parts if part.gpu == name) for _, name, _ in parts}


def _stages(given: Described, found: Estimate) -> list[str]:
    head = ["stage", "GPUs", "units", "forward ms", "backward ms", "gradients ms"]
    rows = [[*head, "update ms", "memory GiB", ""]]
    for index, (stage, one) in enumerate(zip(given.layout.stages, found.stages, strict=True)):
        gpus = _gpus([stage])
        cap = min(given.layout.cluster.gpu(name).memory_gib for name in gpus)
        held = " + ".join(f"{count}×{name}" for name, count in gpus.items())
        times = [f"{way * 1e3:.2f}" for way in (one.forward, one.backward, one.reduction, one.update)]
        oom = "OOM" if one.memory > cap else ""
        rows.append([str(index), held, str(stage.units), *times, f"{one.memory:.2f}", oom])
    return text.table(rows, right=set(range(2, 8)))
