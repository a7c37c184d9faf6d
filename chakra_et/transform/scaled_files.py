"""The files of a scaled set: each different one once, the rest hard links to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from chakra_et import text
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.node_attributes import with_metadata
from chakra_et.et.record import commit
from chakra_et.files import scratch_folder, write_json
from chakra_et.job.sets import InputSet
from chakra_et.names import RunFiles
from chakra_et.simulate.run import Run
from chakra_et.transform.contention import Slowdown, find_slowdown
from chakra_et.transform.scale import Scaled, Scaling, captured_run, scaled

MOST_SLOWED = 4_000_000
"""Nodes of all ranks up to which the slowdown beside gloo's transfers is computed."""


def write_scaled(
    found: InputSet, wanted: Scaling, target: RunFiles, say: Callable[[str], None]
) -> tuple[int, int]:
    """Write the scaled set; its ranks, and how many files differ, the rest being hard links to them. ``say``
    gets its notes before. Raises ``TraceError``, with nothing written, where it can't be made."""
    run = captured_run(found)
    if target.et_files():
        raise TraceError(
            f"{target.folder / target.name}: there are files of that name: choose another -o, or remove them"
        )
    slowdown = find_slowdown(run)
    made = scaled(slowdown.without(run) if slowdown else run, wanted, found.manifest)
    notes = [*found.notes, *made.notes]
    target.folder.mkdir(parents=True, exist_ok=True)
    with scratch_folder(target.folder / target.name) as scratch:
        inner = RunFiles(scratch, target.name)
        ranks: Iterable[tuple[int, object, ExecutionTrace | None]] = made
        slowed = None
        if slowdown:
            slowed, note = _slowed(run, made, slowdown)
            ranks, notes = slowed or ranks, [*notes, note]
        notes.append(_about_files(found, run, made, slowed is not None, scratch))
        for note in notes:
            say(note)
        files: dict[object, Path] = {}
        for rank, key, trace in ranks:
            path = inner.et_file(rank)
            if trace is None:
                os.link(files[key], path)
            else:
                et_file.write(path, trace)
                files[key] = path
        write_json(inner.groups_file, made.groups.all())
        source = str(found.run.folder / found.name)
        record = {
            "scaled_from": source,
            "captured": {"tp": made.old.tp, "dp": made.old.dp, "pp": made.old.pp},
            "mesh": {"tp": made.new.tp, "dp": made.new.dp, "pp": made.new.pp},
            **{name: getattr(wanted, name) or None for name in ("layers", "batch", "seq", "topology")},
            "seed": wanted.seed,
            "different_files": len(files),
            "notes": notes,
        }
        write_json(inner.folder / f"{target.name}_scaled.json", record)
        commit(scratch, target, made.new.ranks, {"scaled_from": source})
    return made.new.ranks, len(files)


def _about_files(found: InputSet, run: Run, made: Scaled, apart: bool, folder: Path) -> str:
    """How many files differ, in what, and what they take on the disk; ``apart``: each rank has its own.
    Raises ``TraceError`` where ``folder`` hasn't room for them."""
    nodes = dict(zip(run.graph.ranks, map(len, run.graph.traces), strict=True))
    size_of = {
        source: found.files[made.origin[source]].stat().st_size * len(trace) / nodes[made.origin[source]]
        for source, trace in made.plain.items()
    }
    files = made.copies if apart else list(set(made.copies))
    size, free = sum(size_of[copy.source] for copy in files), shutil.disk_usage(folder).free
    if size > free:
        raise TraceError(
            f"{found.name}: the new set takes about {text.size(size)}, and {folder.parent} has "
            f"{text.size(free)}: choose another -o, or fewer --variants"
        )
    work = len({(copy.source, copy.variant) for copy in files})
    note = f"{len(files):,} of {made.new.ranks:,} files differ, about {text.size(size)}"
    if work < len(files) and not apart:
        note += (
            f": {work:,} in their work, the others in the ranks and groups that they communicate with alone"
        )
    return note


def _slowed(
    run: Run, made: Scaled, slowdown: Slowdown
) -> tuple[list[tuple[int, object, ExecutionTrace | None]] | None, str]:
    """The ranks as gloo's threads slow them beside the new transfers, which ``predict`` takes into account
    too; None for more nodes than are computed together."""
    count = sum(map(len, made.plain.values())) * made.new.ranks // len(made.plain)
    if count > MOST_SLOWED:
        return None, (
            f"gloo's threads slow operators beside its transfers by {slowdown.part:.0%} in the capture: not "
            f"computed for more than {MOST_SLOWED:,} nodes, so that operators take what they take alone"
        )
    whole = made.as_run(run)
    own = whole.graph.scatter(slowdown.within(whole, whole.measured).own_ns)
    found: list[tuple[int, object, ExecutionTrace | None]] = []
    for rank, trace, ns in zip(whole.graph.ranks, whole.graph.traces, own, strict=True):
        computes = trace.types < NodeType.COMM_SEND
        micros = np.where(computes, np.rint(ns / 1000), trace.duration_micros).astype(np.uint64)
        found.append((rank, rank, replace(with_metadata(trace, rank=None), duration_micros=micros)))
    return found, (
        f"gloo's threads take {slowdown.part:.0%} of the time in which operators run beside its transfers, "
        "by the same operators alone: in the new set, too"
    )
