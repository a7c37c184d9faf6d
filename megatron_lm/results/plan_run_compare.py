"""Plans a run, runs it and compares: how well does FASOP predict a Megatron run on this machine?

    megatron_lm/plan_run_compare.sh [--stages 2] [--global-batch 16] [--iterations 10] [--output DIR]

1. Measure: two short runs with different partitions. Least squares over their stage times gives the cost of
   the embedding, of one layer and of the head; their shortest message gives the cost of a message.
2. Plan: FASOP's exact model chooses the partition from these costs.
3. Run: the plan's settings, as ``fasop export`` writes them, through ``_03_submit.sh --local``.
4. Compare: predicted and measured times, as a table and a picture.

Writes the planner's input (costs.json, models.yaml, cluster.yaml), plan.json, plan.conf (the plan as
settings) and compare.html to --output.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chakra_et import cli, files
from chakra_et.report.page import TextTable
from chakra_et.text import table
from fasop.commands import plan as planner
from fasop.plans.plan import Plan, plans_json
from fasop.profiling.measure import fit_units
from megatron_lm import plan_settings
from megatron_lm.errors import RunError
from megatron_lm.logs import records, runs
from megatron_lm.results import picture
from megatron_lm.results.picture import WORK, Bubble
from megatron_lm.settings import MODELS, conf

MODEL, GPU = "tiny", "CPU"
PLAN, SETTINGS = "plan.json", "plan.conf"
PLENTY = 1e18  # bit/s: a message costs its latency alone


@dataclass(frozen=True)
class CompareConfig:
    stages: int = cli.option("pipeline stages, one process per stage", 2, least=2, most=MODELS[MODEL].layers)
    global_batch: int = cli.option("sequences per iteration, in micro-batches of one", 16)
    iterations: int = cli.option("iterations per run; the first isn't counted", 10, least=3, most=10_000)
    output: Path = cli.option("folder for the results", Path("plan_run_compare"))

    def __post_init__(self) -> None:
        if self.global_batch < self.stages:
            raise ValueError(f"--global-batch {self.global_batch}: give at least --stages ({self.stages})")


class Measured(NamedTuple):
    """Seconds. stage_forward, stage_backward: per micro-batch; message: the shortest one; stages: what each
    did, per iteration.
    """

    job: str
    iteration: float
    pipeline: float
    stage_forward: list[float]
    stage_backward: list[float]
    message: float
    stages: Sequence[Bubble]

    @property
    def outside(self) -> float:
        """What an iteration takes beside the pipeline: optimizer, data loading, logging."""
        return max(0.0, self.iteration - self.pipeline)


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(CompareConfig, argv, prog="plan_run_compare.sh", description=__doc__)
    print(compare(config))
    print(f"written to {config.output}: {', '.join(sorted(path.name for path in config.output.iterdir()))}")
    return 0


def compare(config: CompareConfig) -> str:
    """Do all four steps and return the tables as text. Raises ``RunError`` or ``OSError``."""
    folder = config.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    partitions = calibration_partitions(config.stages)
    measured = [run(config, partition) for partition in partitions]
    costs = unit_costs(partitions, measured)
    plan = best_plan(config, folder, costs, min(each.message for each in measured))
    files.write_text(folder / SETTINGS, plan_settings.lines(plan))
    result = run(config, plan.layers, plan_settings.settings(plan))
    heading = f"Predicted and measured: {MODEL}, {'-'.join(map(str, plan.layers))}"
    outside = statistics.median(each.outside for each in measured)
    tables = [comparison(plan, result, outside), explained(plan, result, outside)]
    files.write_text(folder / "compare.html", drawn(result.job, plan, tables))
    lines = [heading]
    for each in tables:
        lines += ["", each.title, *table([each.header, *each.rows])]
    return "\n".join(lines)


def calibration_partitions(stages: int) -> list[tuple[int, ...]]:
    """Two partitions that differ in their first and last stage, so that E, T and P can be separated."""
    spare = MODELS[MODEL].layers - stages
    first, last = [1] * stages, [1] * stages
    first[0] += spare
    last[-1] += spare
    # Without a spare layer, the inner stages give the cost of a layer.
    return [tuple(first), tuple(last)] if spare else [tuple(first)]


def best_plan(config: CompareConfig, folder: Path, entry: dict[str, Any], message: float) -> Plan:
    """FASOP's plan for this machine, as one node on which a message takes ``message`` seconds; its input and
    the plan stay in ``folder``. Raises ``PlanError``."""
    found = plan_settings.model_of(MODELS[MODEL], MODEL, config.global_batch)
    model = {name: getattr(found, name) for name in (*plan_settings.SIZES, "global_batch")}
    bandwidth = {"inter_bandwidth": PLENTY, "intra_bandwidth": PLENTY}
    cpu = {"nodes": 1, "memory_gib": 1024.0, "price_per_hour": 0.0, "intra_latency": message, **bandwidth}
    cluster = {"gpus_per_node": config.stages, "gpus": {GPU: cpu}}
    source = "Runs of megatron_lm on this machine's CPU, by megatron_lm/plan_run_compare.sh."
    costs = {"format": 1, "source": source, "models": {MODEL: {"name": MODEL, **model}}}
    # JSON is YAML.
    files.write_json(folder / "models.yaml", {"models": {MODEL: model}})
    files.write_json(folder / "cluster.yaml", {"clusters": {"this": cluster}})
    files.write_json(folder / "costs.json", costs | {"entries": [entry]})
    search = planner.Config(
        model=MODEL, models_file=str(folder / "models.yaml"), cluster=str(folder / "cluster.yaml"),
        costs=(str(folder / "costs.json"),), tp=1, dp=1, pp=config.stages, mbs=1, max_tp=1, top=1,
    )  # fmt: skip
    plan = planner.found(search, ())[0][0]
    files.write_text(folder / PLAN, plans_json([plan]) + "\n")
    return plan


def run(config: CompareConfig, layers: Sequence[int], planned: Mapping[str, str] | None = None) -> Measured:
    """Measure one local run, with a plan's settings if there is one. Raises ``RunError``."""
    partition = "-".join(map(str, layers))
    values = {
        "MODEL": MODEL, "NNODES": "1", "NPROC_PER_NODE": str(config.stages),
        "GLOBAL_BATCH_SIZE": str(config.global_batch), "PIPELINE_MP_SIZE": str(config.stages),
        "PARTITION": partition, **(planned or {}),
        # What no plan decides.
        "TRAIN_ITERS": str(config.iterations), "LOG_INTERVAL": "1", "PROFILE": "true",
    }  # fmt: skip
    print(f"running {MODEL} as {partition} …", file=sys.stderr, flush=True)
    words = [f"{name}={value}" for name, value in values.items()]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [str(conf.FOLDER / "_03_submit.sh"), "--local", *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RunError(f"the run of {partition} failed with status {done.returncode}.")
    return read_run(done.stdout.strip(), config.stages)


def read_run(job: str, stages: int) -> Measured:
    """Medians over all iterations but the first, of a run with one rank per stage. Raises ``RunError``."""
    found = runs.find((job,), conf.log_dir())
    iterations = records.all_iterations(node.read("out") for node in found.nodes)
    events, _ = picture.read_events(found, "all")
    events = [event for event in events if event.iteration > 1]
    if not iterations or not events:
        raise RunError(f"job {job}: its logs have no times of any iteration after the first.")

    def typical(task: str, stage: int) -> float:
        mine = (each for each in events if (each.task, each.rank) == (task, stage))
        return statistics.median(each.end - each.start for each in mine)

    forward, backward = ([typical(task, stage) for stage in range(stages)] for task in WORK)
    numbers = sorted({event.iteration for event in events})
    of_iterations = (picture.bubbles(e for e in events if e.iteration == number) for number in numbers)
    pipelines = [of_iteration[0].seconds for of_iteration in of_iterations]
    messages = ("forward-recv", "backward-recv", "forward-send")
    shortest = min(each.end - each.start for each in events if each.task in messages)
    whole = ((each.rank, each.seconds, each.compute, each.communication) for each in picture.bubbles(events))
    of_stages = [Bubble(rank, *(seconds / len(numbers) for seconds in of_rank)) for rank, *of_rank in whole]
    times = records.typical(iterations), statistics.median(pipelines)
    return Measured(job, *times, forward, backward, shortest, of_stages)


def _share(bubbles: Sequence[Bubble]) -> float:
    """The bubble of all ranks together, 0 to 1."""
    return 1 - sum(each.compute for each in bubbles) / sum(each.seconds for each in bubbles)


def unit_costs(partitions: list[tuple[int, ...]], measured: list[Measured]) -> dict[str, Any]:
    """Cost of E, T and P per micro-batch, fitted to the stage times, as an entry of a cost file of fasop.

    Raises ``RunError``.
    """
    try:
        forward = fit_units(partitions, [of_run.stage_forward for of_run in measured])
        backward = fit_units(partitions, [of_run.stage_backward for of_run in measured])
    except ValueError as error:
        raise RunError(f"the runs have no usable stage times: {error}.") from None
    per_unit = [[e, *[t] * MODELS[MODEL].layers, p] for e, t, p in (forward, backward)]
    return {"model": MODEL, "gpu": GPU, "tp": 1, "mbs": 1, "forward": per_unit[0], "backward": per_unit[1]}


def explained(plan: Plan, result: Measured, outside: float) -> TextTable:
    """The parts of a step of the stage that computes longest, which add up to it, beside those of the plan.

    ``outside``: seconds beside the pipeline, as measured in the runs before the plan.
    """
    theirs = max(result.stages, key=lambda stage: stage.compute)
    ours = picture.bubbles(picture.predicted_events(plan))[theirs.rank]
    idle = tuple(each.seconds - each.compute - each.communication for each in (ours, theirs))
    parts = {
        "compute": (ours.compute, theirs.compute),
        "messages, and waiting for them": (ours.communication, theirs.communication),
        "idle": idle,
        "beside the pipeline (optimizer, data, logging)": (outside, result.iteration - theirs.seconds),
    }
    parts["step"] = (sum(planned for planned, _ in parts.values()), result.iteration)
    gap = parts["step"][1] - parts["step"][0]
    rows = [
        (name, f"{1000 * a:.2f}", f"{1000 * b:.2f}", f"{1000 * (b - a):+.2f}", f"{100 * (b - a) / gap:.0f}")
        for name, (a, b) in parts.items()
        if gap
    ]
    header = (f"stage {theirs.rank}", "planned, ms", "measured, ms", "difference, ms", "of the difference, %")
    return TextTable("Why the step differs", header, rows)


def comparison(plan: Plan, result: Measured, outside: float) -> TextTable:
    """Predicted against measured; error: of the prediction, relative to the measured time."""
    bubbles = picture.bubbles(picture.predicted_events(plan))
    rows = [("pipeline, ms", 1000 * plan.pipeline_time, 1000 * result.pipeline)]
    for name in ("forward", "backward"):
        pairs = zip(getattr(plan, f"stage_{name}"), getattr(result, f"stage_{name}"), strict=True)
        rows += [(f"{name} of stage {stage}, ms", 1000 * a, 1000 * b) for stage, (a, b) in enumerate(pairs)]
    rows.append(("bubble, %", 100 * _share(bubbles), 100 * _share(result.stages)))
    step = "step, ms (with optimizer, data loading and logging as in the runs before the plan)"
    rows.append((step, 1000 * (plan.step_time + outside), 1000 * result.iteration))
    cells = [(name, f"{a:.2f}", f"{b:.2f}", f"{100 * (a / b - 1):+.1f}" if b else "") for name, a, b in rows]
    return TextTable("Times", ("", "predicted", "measured", "error, %"), cells)


def drawn(job: str, plan: Plan, tables: Sequence[TextTable]) -> str:
    found = runs.find((job,), conf.log_dir())
    events, settings = picture.read_events(found, "last")
    return picture.draw(found, events, settings, picture.predicted_events(plan), tables)
