"""``python -m fasop evaluate PLAN``: what a given plan takes, without a search.

python -m fasop evaluate layouts.yaml --costs costs.json
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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from chakra_et import cli, text
from chakra_et.text import printable
from fasop.errors import PlanError
from fasop.exact.estimate import Estimate, estimate
from fasop.exact.training_runs import predicted, usable
from fasop.inputs.costs import PUBLISHED, check_cost_name, read_costs
from fasop.output.report import errors, expected_error, options_line, speed
from fasop.plans.layout import Described, of_plan, read_layouts, working_gpus
from fasop.plans.plan import pick_plan

Done = tuple[Described, Estimate]


@dataclass
class Config:
    plan: str = cli.option("YAML file of layouts, or file of 'plan --json'", "", positional=True)
    rows: str = cli.option("CSV of published training runs, in place of a plan", "")
    rank: int = cli.option("which plan of a file of 'plan --json', counted from 1", 1)
    models_file: str = cli.option("YAML file of models", "")
    costs: tuple[str, ...] = cli.option("cost files, before the published costs", ())
    json: bool = cli.option("print the estimates as JSON", False)


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(Config, argv, description="Estimate a given plan, without a search.")
    if config.rows:
        return _show(config.json, _published(config.rows, config.models_file))
    if not config.plan:
        raise PlanError("give a file of layouts or plans, or --rows FILE.")
    cost_files = [read_costs(PUBLISHED), *map(read_costs, reversed(config.costs))]
    done: list[Done] = []
    status = 0
    given: Iterable[Described | PlanError] = ()
    if config.plan.endswith(".json"):
        plan = pick_plan(config.plan, config.rank)
        given = [Described(f"plan {config.rank}", of_plan(plan), plan.options)]
    for each in given or read_layouts(config.plan, cost_files, config.models_file):
        try:
            if isinstance(each, PlanError):
                raise each
            check_cost_name(cost_files, each.layout.model)
            done.append((each, estimate(each.layout, cost_files, each.options)))
        except PlanError as error:
            where = "" if isinstance(each, PlanError) else f"{config.plan}: {each.name}: "
            print(printable(f"error: {where}{error}"), file=sys.stderr)
            status = 2
    return _show(config.json, done) or status


def _show(as_json: bool, done: list[Done]) -> int:
    """Print estimates; 2 where there is none."""
    if not done:
        return 2
    if as_json:
        rows = [{"name": each.name, "measured": each.measured, **asdict(one)} for each, one in done]
        print(json.dumps(rows, indent=1))
        return 0
    lines = _summary(done)
    if len(done) == 1:
        ((given, found),) = done
        layout, gpus = given.layout, working_gpus(given.layout.stages)
        lines += ["", *_stages(given, found), ""]
        lines.append(f"It trains {speed(layout.model, layout.cluster, gpus, found.step)}.")
        lines.append(f"It runs with {options_line(given.options, layout)}.")
        lines.append(expected_error(errors(layout.cluster, set(gpus), layout.model, given.options)))
    counts = Counter(note for _, one in done for note in one.notes)
    notes = [f"note: {f'{count} of {len(done)}: ' * (len(done) > 1)}{note}" for note, count in counts.items()]
    print("\n".join([*lines, *([""] if notes else []), *notes]))
    return 0


def _published(path: str, models: str) -> list[Done]:
    """The runs of a table that can be expressed, their steps as they are compared."""
    done = []
    for run, layout in usable(path, models):
        step, one = predicted(run, layout)
        given = Described(run.name, layout, run.options, run.seconds)
        done.append((given, replace(one, step=step, notes=(*run.assumed, *one.notes))))
    return done


def _summary(done: list[Done]) -> list[str]:
    head = ["", "step s", "pipeline s", "messages ms", "gradients s", "emb s"]
    rows = [[*head, "memory GiB", "measured s", "error"]]
    for each, one in done:
        measured = ["", ""]
        if each.measured:
            measured = [f"{each.measured:.4f}", f"{one.step / each.measured - 1:+.1%}"]
        messages, reduction = max(one.p2p, default=0.0), max(stage.reduction for stage in one.stages)
        figures = [f"{one.step:.4f}", f"{one.pipeline:.4f}", f"{messages * 1e3:.2f}", f"{reduction:.4f}"]
        memory = f"{one.memory:.2f}" + " OOM" * any(_over(each, one))
        rows.append([each.name, *figures, f"{one.embedding:.4f}", memory, *measured])
    return text.table(rows, right=set(range(1, 9)))


def _over(given: Described, found: Estimate) -> list[bool]:
    """Of each stage, whether it needs more memory than a GPU of it has."""
    of, stages = given.layout.cluster.gpu, given.layout.stages
    caps = [min(of(name).memory_gib for name in working_gpus([stage])) for stage in stages]
    return [one.memory > cap for one, cap in zip(found.stages, caps, strict=True)]


def _stages(given: Described, found: Estimate) -> list[str]:
    head = ["stage", "GPUs", "units", "forward ms", "backward ms", "gradients ms"]
    rows = [[*head, "update ms", "memory GiB", ""]]
    each = zip(given.layout.stages, found.stages, _over(given, found), strict=True)
    for index, (stage, one, is_over) in enumerate(each):
        held = " + ".join(f"{count}×{name}" for name, count in working_gpus([stage]).items())
        times = [f"{way * 1e3:.2f}" for way in (one.forward, one.backward, one.reduction, one.update)]
        rows.append([str(index), held, str(stage.units), *times, f"{one.memory:.2f}", "OOM" * is_over])
    return text.table(rows, right=set(range(2, 8)))
