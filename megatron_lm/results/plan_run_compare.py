"""Plans a run, runs it and compares: how well does FASOP predict a Megatron run on this machine?

    megatron_lm/plan_run_compare.sh [--stages 2] [--global-batch 16] [--iterations 10] [--output DIR]

1. Measure: two short runs with different partitions. Least squares over their stage times gives the cost of
the
   embedding, of one layer and of the head; their shortest message gives the cost of a message.
2. Plan: FASOP's exact model chooses the partition from these costs.
3. Run: the plan's settings, as ``fasop export`` writes them, through ``_03_submit.sh --local``.
4. Compare: predicted and measured times, as a table and a picture.

Writes costs.json, plan.json, _00_conf.sh (the plan as settings), compare.md and compare.html to --output.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from chakra_et import cli
from fasop import export
from fasop.clusters import Cluster, Gpu
from fasop.costs import FORMAT, CostFile, Costs, Entry, write_costs
from fasop.errors import PlanError
from fasop.models import Model
from fasop.plan import Plan, write_plans
from fasop.search import Goal, search
from fasop.stage_costs import INTRA_LOSS, Options
from megatron_lm.errors import RunError
from megatron_lm.logs import runs
from megatron_lm.results import pages, picture, speed, timeline
from megatron_lm.results.pages import Table
from megatron_lm.results.predicted import predicted_events
from megatron_lm.settings import MODELS

MODEL, GPU = "tiny", "CPU"
BITS = 16  # per number in a message, in FASOP's model


@dataclass(frozen=True)
class CompareConfig:
    """The size of the runs, and where the results go."""

    stages: int = field(default=2, metadata={"help": "pipeline stages, one process per stage"})
    global_batch: int = field(
        default=16, metadata={"help": "sequences per iteration, in micro-batches of one"}
    )
    iterations: int = field(default=10, metadata={"help": "iterations per run"})
    output: Path = field(default=Path("plan_run_compare"), metadata={"help": "folder for the results"})

    def __post_init__(self) -> None:
        layers = MODELS[MODEL].layers
        if not 2 <= self.stages <= layers:
            raise ValueError(f"--stages {self.stages}: give 2 to {layers}, the number of layers of {MODEL}")
        if self.global_batch < self.stages:
            raise ValueError(f"--global-batch {self.global_batch}: give at least --stages ({self.stages})")
        if not 3 <= self.iterations <= 10_000:
            raise ValueError(f"--iterations {self.iterations}: give 3 to 10000 (the first is not counted)")


class Measured(NamedTuple):
    """Seconds. stage_forward, stage_backward: per micro-batch; message: the shortest one; bubble: 0 to 1."""

    job: str
    iteration: float
    pipeline: float
    stage_forward: list[float]
    stage_backward: list[float]
    message: float
    bubble: float


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(
        CompareConfig, argv, prog="plan_run_compare.sh", description=(__doc__ or "").splitlines()[0]
    )
    try:
        text = compare(config)
    except PlanError as error:
        raise RunError(str(error)) from None
    print(text)
    print(f"written to {config.output}: costs.json, plan.json, _00_conf.sh, compare.md, compare.html")
    return 0


def compare(config: CompareConfig) -> str:
    """Do all four steps and return the table as Markdown. Raises ``RunError``, ``PlanError`` or
    ``OSError``.
    """
    config.output.mkdir(parents=True, exist_ok=True)
    partitions = calibration_partitions(config.stages)
    measured = [run(config, partition) for partition in partitions]
    costs = unit_costs(partitions, measured)
    write_costs(config.output / "costs.json", costs)
    plan = best_plan(config, costs, min(each.message for each in measured))
    write_plans(config.output / "plan.json", [plan])
    pages.write(config.output / "_00_conf.sh", export.exported(plan, runs.CONF))
    result = run(config, plan.layers, export.settings(plan))
    heading = f"Predicted and measured: {MODEL}, {'-'.join(map(str, plan.layers))}"
    text = pages.markdown(heading, [], [comparison(plan, result)])
    pages.write(config.output / "compare.md", text)
    pages.write(config.output / "compare.html", drawn(result.job, plan))
    return text


def calibration_partitions(stages: int) -> list[tuple[int, ...]]:
    """Two partitions that differ in their first and last stage, so that E, T and P can be separated."""
    spare = MODELS[MODEL].layers - stages
    first, last = [1] * stages, [1] * stages
    first[0] += spare
    last[-1] += spare
    # Without a spare layer, the inner stages give the cost of a layer.
    return [tuple(first), tuple(last)] if spare else [tuple(first)]


def run(
    config: CompareConfig, layers: tuple[int, ...], exported: Mapping[str, str] | None = None
) -> Measured:
    """Measure one local run, optionally with a plan's ``exported`` settings. Raises ``RunError``."""
    environment = {**os.environ, **run_settings(config, layers), **(exported or {})}
    print(f"running {MODEL} as {'-'.join(map(str, layers))} …", file=sys.stderr, flush=True)
    script = str(runs.FOLDER / "_03_submit.sh")
    done = subprocess.run([script, "--local"], env=environment, stdout=subprocess.PIPE, text=True)
    job = done.stdout.strip()
    if done.returncode != 0:
        raise RunError(f"the run of {'-'.join(map(str, layers))} failed with status {done.returncode}.")
    return read_run(job, config.stages)


def read_run(job: str, stages: int) -> Measured:
    """Medians over all iterations but the first, of a run with one rank per stage. Raises ``RunError``."""
    found = runs.find((job,), runs.log_dir())
    outputs = [node.read("out") for node in found.nodes]
    iterations = speed.iterations(outputs)
    events, _ = picture.read_events(found, (), "all")
    events = [event for event in events if event.iteration > 1]
    if not iterations or not events:
        raise RunError(f"job {job}: its logs have no times of any iteration after the first.")

    def median(task: str, stage: int) -> float:
        return statistics.median(e.end - e.start for e in events if e.task == task and e.rank == stage)

    pipelines = []
    for number in sorted({event.iteration for event in events}):
        work = [e for e in events if e.iteration == number and e.task in ("forward", "backward")]
        pipelines.append(max(e.end for e in work) - min(e.start for e in work))
    bubbles = timeline.bubbles(events)
    return Measured(
        job,
        speed.typical(iterations),
        statistics.median(pipelines),
        [median("forward", stage) for stage in range(stages)],
        [median("backward", stage) for stage in range(stages)],
        min(e.end - e.start for e in events if e.task in ("forward-recv", "backward-recv", "forward-send")),
        1 - sum(bubble.compute for bubble in bubbles) / sum(bubble.seconds for bubble in bubbles),
    )


def unit_costs(partitions: list[tuple[int, ...]], measured: list[Measured]) -> CostFile:
    """Cost of E, T and P per micro-batch, fitted to the stage times by least squares, not below 0."""
    rows, forward, backward = [], [], []
    for layers, of_run in zip(partitions, measured, strict=True):
        for stage, count in enumerate(layers):
            rows.append([stage == 0, count, stage == len(layers) - 1])
        forward += of_run.stage_forward
        backward += of_run.stage_backward
    matrix = np.array(rows, dtype=float)
    # Dividing each row by its time weighs stages by relative error.
    units = [
        np.maximum(
            np.linalg.lstsq(matrix / np.array(times)[:, None], np.ones(len(times)), rcond=None)[0], 0.0
        )
        for times in (forward, backward)
    ]
    size = MODELS[MODEL]
    entry = Entry(
        MODEL, GPU, 1, 1, *(tuple([e, *[t] * size.layers, p]) for e, t, p in np.array(units).tolist())
    )
    source = "Runs of megatron_lm on this machine's CPU, by megatron_lm/plan_run_compare.py."
    return CostFile(FORMAT, source, {MODEL: model(1)}, (entry,))


def best_plan(config: CompareConfig, costs: CostFile, message: float) -> Plan:
    """FASOP's best plan with one rank per stage. Raises ``PlanError``."""
    size = MODELS[MODEL]
    # FASOP takes a bandwidth: the one at which an activation takes as long as the measured message.
    bandwidth = size.sequence * size.hidden * BITS * INTRA_LOSS / message
    cpu = Gpu(
        GPU, memory_gib=1024.0, price_per_hour=0.0, inter_bandwidth=bandwidth, intra_bandwidth=bandwidth
    )
    cluster = Cluster("this machine", config.stages, (cpu,), (1,))
    whole = model(config.global_batch)
    goal = Goal(top=1, everything=False, tp=1, dp=1, pp=config.stages, mbs=1)
    plans = search(whole, [cluster], Costs([costs], whole), Options(), goal, max_tp=1, workers=1)
    if not plans:
        raise PlanError(f"no plan of {MODEL} with {config.stages} stages.")
    return plans[0]


def model(global_batch: int) -> Model:
    size = MODELS[MODEL]
    return Model(MODEL, size.hidden, size.sequence, size.layers, size.vocabulary, size.heads, global_batch)


def run_settings(config: CompareConfig, layers: tuple[int, ...]) -> Mapping[str, str]:
    stages = str(config.stages)
    return {
        "HOMOGENEOUS_CLUSTER": "true",
        "MODEL": MODEL,
        "NNODES": "1",
        "NPROC_PER_NODE": stages,
        "WORLD_SIZE": stages,
        "GLOBAL_BATCH_SIZE": str(config.global_batch),
        "MICRO_BATCH_SIZE": "1",
        "TENSOR_MP_SIZE": "1",
        "DP_SIZE": "1",
        "PIPELINE_MP_SIZE": stages,
        "PARTITION": "-".join(map(str, layers)),
        "TRAIN_ITERS": str(config.iterations),
        "LOG_INTERVAL": "1",
        "PROFILE": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def comparison(plan: Plan, result: Measured) -> Table:
    """Predicted against measured; error: of the prediction, relative to the measured time."""
    predicted = timeline.bubbles(predicted_events(plan))
    bubble = 1 - sum(each.compute for each in predicted) / sum(each.seconds for each in predicted)
    rows = [("pipeline, ms", 1000 * plan.pipeline_time, 1000 * result.pipeline)]
    for name, ours, theirs in (
        ("forward", plan.stage_forward, result.stage_forward),
        ("backward", plan.stage_backward, result.stage_backward),
    ):
        pairs = zip(ours, theirs, strict=True)
        rows += [(f"{name} of stage {stage}, ms", 1000 * a, 1000 * b) for stage, (a, b) in enumerate(pairs)]
    rows.append(("bubble, %", 100 * bubble, 100 * result.bubble))
    rows.append(
        (
            "step, ms (measured: with optimizer, data loading and logging)",
            1000 * plan.step_time,
            1000 * result.iteration,
        )
    )
    header = ("", "predicted", "measured", "error, %")
    return Table(
        "Times",
        header,
        [(name, f"{a:.2f}", f"{b:.2f}", f"{100 * (a / b - 1):+.1f}" if b else "") for name, a, b in rows],
    )


def drawn(job: str, plan: Plan) -> str:
    found = runs.find((job,), runs.log_dir())
    events, settings = picture.read_events(found, (), "last")
    return picture.draw(found, events, settings, predicted_events(plan))
