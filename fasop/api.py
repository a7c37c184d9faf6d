"""Plans from Python, and jobs of ``chakra_et`` in and out. Everything here is in ``fasop``.

    import fasop

    plan = fasop.plan("gpt2-xl", "paper-gpt2xl-het")[0]
    print(plan.step_time, fasop.as_job(plan).steps.pandas())

Plans, and the jobs that they become, are values: no file is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chakra_et
from chakra_et import cli
from fasop.commands.plan import Config, found
from fasop.errors import PlanError
from fasop.inputs.costs import CostFile
from fasop.inputs.models import find_model
from fasop.output.traces import write
from fasop.plans.plan import Plan
from fasop.profiling.from_traces import from_traces
from fasop.schedule.events import of_plan


def plan(model: str, cluster: str, costs: Sequence[CostFile] = (), **flags: Any) -> list[Plan]:
    """The best plans for ``model`` on ``cluster`` (names or files), best first.

    ``costs``: of measured jobs, before the published ones; ``flags``: as of ``python -m fasop plan``.
    Raises ``PlanError``.
    """
    try:
        config = cli.made(Config, {"model": model, "cluster": cluster, **flags})
    except (TypeError, ValueError) as error:
        raise PlanError(f"{model} on {cluster}: {error}") from None
    return found(config, costs)[0]


def costs(
    job: chakra_et.Job, model: str, gpu: str, tp: int = 1, mbs: int = 1, models_file: str = ""
) -> CostFile:
    """Layer costs on ``gpu``, from a job that trained ``model`` with micro-batches of ``mbs`` on parts of
    ``tp`` ranks. Raises ``PlanError`` for a job of another model."""
    with tempfile.TemporaryDirectory() as folder:
        paths = job.save(Path(folder) / job.name)
        return from_traces(find_model(model, models_file), paths, gpu, tp, mbs)[0]


def as_job(plan: Plan) -> chakra_et.Job:
    """One step of a plan as a job: its tables, its critical path, and what changes would do to it."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / plan.model.name
        write(plan, of_plan(plan), prefix.parent, prefix.name)
        return chakra_et.load(prefix)
