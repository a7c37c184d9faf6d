"""A report's figures in TensorBoard, and its page and tables in Weights & Biases.

Both libraries are optional. TensorBoard gets scalars per step and rank, and the trace of each rank.
wandb gets one artifact with the page, and three tables.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from chakra_et.errors import TraceError
from chakra_et.export.chrome import packed, write_kineto
from chakra_et.export.window import Window
from chakra_et.files import atomic_file
from chakra_et.names import gz
from chakra_et.report.columns import PHASES
from chakra_et.report.content import content
from chakra_et.report.inputs import RunInput
from chakra_et.report.page import write_page
from chakra_et.report.run import ReportRun
from chakra_et.report.times import find_steps
from chakra_et.simulate.breakdown import ACTIVITIES
from chakra_et.traces.records import open_trace

# The tables of the page's content that wandb gets, with the columns that have other names there.
TABLES = {"steps": {"name": "step"}, "entries": {"per_second": "flops"}, "modules": {}}


def scalars(run: ReportRun) -> Iterator[tuple[int, int, str, float]]:
    """(rank, step, name, ns): the parts of every step; a trace without steps is step 0."""
    for step in find_steps(run):
        found: list[tuple[str, float]] = [(f"step/{run.base}", step.lasts_ns)]
        if step.replayed_ns is not None:
            found.append(("step/replayed", step.replayed_ns))
        found += [
            (f"time/{name.replace(' ', '_')}", ns) for name, ns in zip(ACTIVITIES, step.parts_ns, strict=True)
        ]
        found.append(("time/hidden_communication", step.hidden_ns))
        found += [(f"phase/{name}", ns) for name, ns in zip(PHASES, step.phases_ns, strict=True)]
        for name, ns in found:
            yield step.rank, int(step.name) if step.name.isdigit() else 0, name, ns


def to_tensorboard(window: Window, folder: Path, recorded: Mapping[int, Path]) -> None:
    """Write scalars to FOLDER/NAME/rankN, and the trace of each rank to FOLDER/NAME/rankN.pt.trace.json.gz,
    where TensorBoard's plugin looks for it.

    ``recorded``: rank → its device trace, which is taken as it is; ranks without one get what ``window`` has.
    Raises ``TraceError`` where torch or tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise TraceError("tensorboard needs torch and tensorboard: pip install torch tensorboard") from None
    run = window.run
    found = list(scalars(run))
    place = folder / run.name
    for rank in sorted(set(window.rank.tolist())):
        with SummaryWriter(str(place / f"rank{rank}")) as writer:
            for of_rank, step, name, ns in found:
                if of_rank == rank:
                    writer.add_scalar(f"{name}_ms", ns / 1e6, step)
        with atomic_file(place / f"rank{rank}.pt.trace.json.gz") as file:
            if rank in recorded:
                with open_trace(recorded[rank]) as trace, packed(file) as written:
                    shutil.copyfileobj(trace, written)
            else:
                write_kineto(window, rank, file)


def recorded_traces(chosen: RunInput, ranks: Iterable[int]) -> dict[int, Path]:
    """The device traces that a run was converted from, as far as they are there."""
    if chosen.traces is not None:
        return {rank: pair.device for rank, pair in chosen.traces.pairs.items()}
    paths = {rank: chosen.files.trace_file(rank, "device") for rank in ranks}
    there = {rank: [each for each in (path, gz(path)) if each.is_file()] for rank, path in paths.items()}
    return {rank: found[0] for rank, found in there.items() if found}


def to_wandb(run: ReportRun, project: str) -> None:
    """Log the report as an artifact, and the tables of ``TABLES``, to a new run of ``project``.

    Raises ``TraceError`` where wandb is not installed, or can't start a run.
    """
    try:
        import wandb
    except ImportError:
        raise TraceError("wandb is not installed: pip install wandb") from None
    found, packed_columns = content(run)
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "report.html"
        write_page(page, "report", f"{run.name}: report", found, packed_columns)
        try:
            started = wandb.init(project=project, name=run.name, job_type="report")
        except wandb.errors.Error as error:
            # Its text may go on for lines.
            first = str(error).splitlines()[0].rstrip(".:")
            raise TraceError(
                f"wandb: {first}: log in with `wandb login`, or set WANDB_MODE=offline"
            ) from None
        with started as logged:
            # wandb allows letters, digits, dashes, dots and underscores, at most 128.
            artifact = wandb.Artifact(re.sub(r"[^A-Za-z0-9._-]", "_", run.name)[:128], type="report")
            artifact.add_file(str(page))
            logged.log_artifact(artifact)
            for name, renamed in TABLES.items():
                if rows := [vars(row) for row in found[name]]:
                    columns = [renamed.get(field, field) for field in rows[0]]
                    cells = [
                        [str(list(cell)) if isinstance(cell, tuple) else cell for cell in row.values()]
                        for row in rows
                    ]
                    logged.log({name: wandb.Table(columns=columns, data=cells)})
