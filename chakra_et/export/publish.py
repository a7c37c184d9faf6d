"""A report's figures in TensorBoard: scalars per step and rank, and the trace of each rank."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from chakra_et.errors import TraceError
from chakra_et.export.chrome import packed, write_kineto
from chakra_et.export.window import Window
from chakra_et.files import atomic_file
from chakra_et.report.columns import PHASES
from chakra_et.report.run import ReportRun
from chakra_et.report.times import find_steps
from chakra_et.simulate.breakdown import ACTIVITIES
from chakra_et.traces.records import open_trace


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
