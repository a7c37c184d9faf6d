"""Plan, run and compare, at a size that this machine can do: how well does FASOP predict what Megatron does?

    megatron_lm/plan_run_compare.sh [--stages 2] [--global-batch 16] [--iterations 10] [--output DIR]

1. Measures: two short runs with different partitions; the times of their stages give those of the embedding,
   of a layer and of the head (least squares), their shortest messages the time of a message.
2. Plans: FASOP's exact model chooses the partition from these costs.
3. Runs: the plan's settings, as ``fasop export`` writes them, through ``_03_submit.sh --local``.
4. Compares: predicted and measured times, in a table and a picture.

Writes costs.json, plan.json, plan.conf (the plan as settings), compare.md and compare.html into --output.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from chakra_et.cli import parse
from fasop.errors import PlanError
from fasop.exact.links import INTRA_LOSS
from fasop.inputs.clusters import Cluster, Gpu
from fasop.inputs.costs import FORMAT, CostFile, Entry, write_costs
from fasop.inputs.models import Model
from fasop.output import export
from fasop.plans.goal import Goal
from fasop.plans.options import Options
from fasop.plans.plan import Plan, write_plans
from fasop.search.search import search
from megatron_lm import picture, runs, speed, timeline
from megatron_lm.predicted import predicted_events
from megatron_lm.report import Table, markdown, write_text
from megatron_lm.runs import RunError
from megatron_lm.settings import MODELS

MODEL, GPU = "tiny", "CPU"
BITS = 16  # of a number in a message, as FASOP counts them


@dataclass(frozen=True)
class CompareConfig:
    stages: int = field(default=2, metadata={"help": "pipeline stages, one process each"})
    global_batch: int = field(default=16, metadata={"help": "sequences a step, in micro-batches of one"})
    iterations: int = field(default=10, metadata={"help": "of each run"})
    output: Path = field(default=Path("plan_run_compare"), metadata={"help": "folder of what is written"})

    def __post_init__(self) -> None:
        layers = MODELS[MODEL].layers
        if not 2 <= self.stages <= layers:
            raise ValueError(f"--stages {self.stages}: from 2 to {layers}, the layers of {MODEL}")
        if self.global_batch < self.stages:
            raise ValueError(f"--global-batch {self.global_batch}: at least --stages, {self.stages}")
        if not 3 <= self.iterations <= 10_000:
            raise ValueError(f"--iterations {self.iterations}: from 3 to 10000; the first is left out")


class Measured(NamedTuple):
    """Seconds. stage_forward, stage_backward: one micro-batch; message: the shortest of each rank."""

    job: str
    iteration: float
    pipeline: float
    stage_forward: list[float]
    stage_backward: list[float]
    message: float
    bubble: float


def main(argv: list[str] | None = None) -> int:
    config = parse(
        CompareConfig, argv, prog="plan_run_compare.sh", description=(__doc__ or "").splitlines()[0]
    )
    try:
        config.output.mkdir(parents=True, exist_ok=True)
        partitions = calibration_partitions(config.stages)
        measured = [run(config, partition) for partition in partitions]
        costs = unit_costs(partitions, measured)
        write_costs(config.output / "costs.json", costs)
        plan = best_plan(config, costs, min(each.message for each in measured))
        write_plans(config.output / "plan.json", [plan])
        write_text(config.output / "plan.conf", export.lines(plan))
        result = run(config, plan.layers, export.settings(plan))
        table = comparison(plan, result)
        text = markdown(f"Predicted and measured: {MODEL}, {'-'.join(map(str, plan.layers))}", [], [table])
        write_text(config.output / "compare.md", text)
        write_text(config.output / "compare.html", drawn(result.job, plan))
    except OSError as error:
        print(f"plan_run_compare.sh: {config.output}: {error.strerror or error}", file=sys.stderr)
        return 1
    except (RunError, PlanError) as error:
        print(f"plan_run_compare.sh: {error}", file=sys.stderr)
        return 1
    print(text)
    print(f"written to {config.output}: costs.json, plan.json, plan.conf, compare.md, compare.html")
    return 0


def calibration_partitions(stages: int) -> list[tuple[int, ...]]:
    """Two partitions that differ in the first and the last stage, so that E, a layer and P can be told."""
    spare = MODELS[MODEL].layers - stages
    first, last = [1] * stages, [1] * stages
    first[0] += spare
    last[-1] += spare
    # Without a spare layer, an inner stage tells what a layer takes.
    return [tuple(first), tuple(last)] if spare else [tuple(first)]


def run(
    config: CompareConfig, layers: tuple[int, ...], exported: Mapping[str, str] | None = None
) -> Measured:
    """One local run, with a plan's ``exported`` settings, and what its logs say of every iteration but the
    first. Raises ``RunError``."""
    environment = dict(os.environ) | run_settings(config, layers) | dict(exported or {})
    print(f"running {MODEL} as {'-'.join(map(str, layers))} …", file=sys.stderr, flush=True)
    script = str(runs.FOLDER / "_03_submit.sh")
    done = subprocess.run([script, "--local"], env=environment, stdout=subprocess.PIPE, text=True)
    job = done.stdout.strip()
    if done.returncode != 0:
        raise RunError(f"the run of {'-'.join(map(str, layers))} failed with status {done.returncode}.")
    return read_run(job, config.stages)


def read_run(job: str, stages: int) -> Measured:
    """What the logs of a run with one rank a stage say. Raises ``RunError``."""
    found = runs.find((job,), runs.log_dir())
    outputs = [node.read("out") for node in found.nodes]
    iterations = speed.iterations(outputs)
    events, _ = picture.read_events(found, (), "all")
    events = [event for event in events if event.iteration > 1]
    if not iterations or not events:
        raise RunError(f"job {job}: its logs have no times of an iteration but the first.")

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
    """E, T and P of one micro-batch, from the stages' times by least squares; none below 0."""
    rows, forward, backward = [], [], []
    for layers, of_run in zip(partitions, measured, strict=True):
        for stage, count in enumerate(layers):
            rows.append([stage == 0, count, stage == len(layers) - 1])
        forward += of_run.stage_forward
        backward += of_run.stage_backward
    matrix = np.array(rows, dtype=float)
    # Rows over their time: each stage counts by its relative error.
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
    """FASOP's plan of one rank a stage. Raises ``PlanError``."""
    size = MODELS[MODEL]
    # FASOP knows a bandwidth; this one makes an activation take what a message took.
    bandwidth = size.sequence * size.hidden * BITS * INTRA_LOSS / message
    cpu = Gpu(
        GPU, memory_gib=1024.0, price_per_hour=0.0, inter_bandwidth=bandwidth, intra_bandwidth=bandwidth
    )
    cluster = Cluster("this machine", config.stages, (cpu,), (1,))
    whole = model(config.global_batch)
    goal = Goal(top=1, everything=False, tp=1, dp=1, pp=config.stages, mbs=1)
    plans = search(whole, [cluster], [costs], [Options()], goal, max_tp=1, workers=1)
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
    """Predicted against measured; the error is that of the prediction."""
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
        ("step, ms (measured: optimizer, data and log, too)", 1000 * plan.step_time, 1000 * result.iteration)
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


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
