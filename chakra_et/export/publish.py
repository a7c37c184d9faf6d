"""A report's figures in TensorBoard, and its page and tables in Weights & Biases.

Both libraries are optional. TensorBoard gets scalars per step and rank, and the timeline as a Chrome trace.
wandb gets one artifact with the page, and three tables.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chakra_et.errors import TraceError
from chakra_et.export import chrome
from chakra_et.export.window import Window
from chakra_et.files import atomic_file
from chakra_et.report.content import content, tables
from chakra_et.report.page import write_page
from chakra_et.report.run import Run
from chakra_et.report.steps import find_times

# The entries of the page's content that become wandb tables: their columns.
TABLES = {
    "steps": ("rank", "step", "start_ns", "end_ns", "parts_ns", "hidden_ns", "phases_ns", "replayed_ns"),
    "entries": (
        "kind", "name", "count", "self_ns", "longest_ns", "device_ns", "rank_ns", "flops", "bytes_per_second",
    ),
    "modules": ("path", "count", "host_ns", "device_ns", "communication_ns", "phases_ns"),
}  # fmt: skip


def scalars(content: dict[str, Any]) -> Iterator[tuple[int, int, str, float]]:
    """(rank, step, name, ms): the parts of every step; a trace without steps is step 0."""
    for rank, step, start, end, parts, hidden, phases, replayed in content["steps"]:
        number = int(step) if step.isdigit() else 0
        yield rank, number, f"step/{content['base']}", (end - start) / 1e6
        if replayed is not None:
            yield rank, number, "step/replayed", replayed / 1e6
        for name, part in zip(content["activities"], parts, strict=True):
            yield rank, number, f"time/{name.replace(' ', '_')}", part / 1e6
        yield rank, number, "time/hidden_communication", hidden / 1e6
        for name, part in zip(content["phases"], phases, strict=True):
            yield rank, number, f"phase/{name}", part / 1e6


def to_tensorboard(window: Window, folder: Path) -> None:
    """Write scalars to FOLDER/NAME/rankN, and the window to FOLDER/NAME/NAME.pt.trace.json.gz.

    Raises ``TraceError`` where torch or tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise TraceError("tensorboard needs torch and tensorboard: pip install torch tensorboard") from None
    run = window.run
    found = list(scalars(tables(run, find_times(run))))
    place = folder / run.name
    for rank in run.ranks:
        with SummaryWriter(str(place / f"rank{rank}")) as writer:
            for of_rank, step, name, value in found:
                if of_rank == rank:
                    writer.add_scalar(f"{name}_ms", value, step)
    with atomic_file(place / f"{run.name}.pt.trace.json.gz") as file:
        chrome.write(window, file, compress=True)


def to_wandb(run: Run, project: str) -> None:
    """Log the report as an artifact, and the tables of ``TABLES``, to a new run of ``project``.

    Raises ``TraceError`` where wandb is not installed.
    """
    try:
        import wandb
    except ImportError:
        raise TraceError("wandb is not installed: pip install wandb") from None
    found, columns = content(run)
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "report.html"
        write_page(page, "report", f"{run.name}: report", found, columns)
        with wandb.init(project=project, name=run.name, job_type="report") as logged:
            artifact = wandb.Artifact(_artifact_name(run.name), type="report")
            artifact.add_file(str(page))
            logged.log_artifact(artifact)
            for name, fields in TABLES.items():
                rows = [[_cell(value) for value in row] for row in found[name]]
                if rows:
                    logged.log({name: wandb.Table(columns=list(fields), data=rows)})


def _cell(value: Any) -> Any:
    return str(list(value)) if isinstance(value, list | tuple) else value


def _artifact_name(name: str) -> str:
    """wandb allows letters, digits, dashes, dots and underscores, at most 128."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:128]
