"""``chakra-et scale outputs/NAME --dp 64 -o outputs/NAME-64``: other ranks, layers, batch or sequence.

Each new rank is a copy of a captured one with the measured spread of compute times; groups, peers and sizes
of collectives are those of its place.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from chakra_et import text
from chakra_et.cli import allow_missing_ranks, option, parse, run_names
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.node_attributes import with_metadata
from chakra_et.et.record import refuse_existing, write_run
from chakra_et.et.sets import RankSet, read_set
from chakra_et.names import RunFiles, run_at
from chakra_et.simulate.run import Run, make_run
from chakra_et.transform.contention import Slowdown, find_slowdown
from chakra_et.transform.flags import SizeFlags
from chakra_et.transform.network import read_network
from chakra_et.transform.rank_copies import filled
from chakra_et.transform.scale import Scaled, Scaling, scaled

MOST_SLOWED = 4_000_000
"""Nodes of all ranks up to which the slowdown beside gloo's transfers is computed."""


@dataclass
class ScaleConfig(SizeFlags):
    name: str = run_names("the captured run", "a folder")
    output: str = option("NAME of the new run (as NAME-dp64 beside the captured one)", "", short="-o")
    seed: int = option("random seed of the spread of compute times", 0)
    spread: float | None = option(
        "relative spread of compute times per step, 0 for none; default: as measured", None, least=0, most=1
    )
    variants: int = option("random draws per captured rank; equal ranks share a file", 8, least=1)
    fill: bool = option("first make missing ranks from ranks of the same stage", False)
    allow_missing_ranks: bool = allow_missing_ranks()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sizes():
            raise ValueError("give what is to change: --dp, --tp, --pp, --layers, --batch, --seq or --resize")

    @property
    def changes(self) -> str:
        """What is appended to the name: ``-dp64-layers2x``."""
        given = self.sizes()
        sizes = "-".join(("-resize", *given.pop("resize", ())))
        return "".join(f"-{name}{value}" for name, value in given.items()) + sizes * bool(self.resize)


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(ScaleConfig, argv, description="Make a run of other ranks, layers, batch or sequence.")
    found = read_set(config.name, config.allow_missing_ranks or config.fill)
    run = run_at(config.output or f"{found.name}{config.changes}")
    scaling = config.scaling(read_network(config.network) if config.network else None)
    assert scaling is not None  # the config has made sure
    with tempfile.TemporaryDirectory() as scratch:
        if config.fill and found.missing:
            found, made = filled(found, Path(scratch), config.mesh, config.seed)
            found = replace(found, notes=[*found.notes, made])
        ranks = write_scaled(found, scaling, run)
    print(f"{run.et_file(0)} … {run.et_file(ranks - 1)}")
    return 0


def write_scaled(found: RankSet, wanted: Scaling, target: RunFiles) -> int:
    """Print what was assumed and write the scaled set; how many ranks it has. Raises ``TraceError``, with
    nothing written, where it can't be made."""
    traces = {rank: et_file.read(path) for rank, path in found.files.items()}
    grouped = any("pg_name" in each.attributes for each in traces.values())
    if not found.groups and (found.world > 1 or grouped):
        raise TraceError(f"{found.run.name}: no comm-group file: convert the traces again")
    run = make_run(found.run.name, list(traces.values()), list(traces), found.groups)
    refuse_existing(target)
    slowdown = find_slowdown(run)
    made = scaled(slowdown.without(run) if slowdown else run, wanted)
    notes = [*found.notes, *made.notes]
    ranks: Iterable[tuple[int, object, ExecutionTrace | None]] = made
    slowed = None
    if slowdown:
        slowed, note = _slowed(run, made, slowdown)
        ranks, notes = slowed or ranks, [*notes, note]
    target.folder.mkdir(parents=True, exist_ok=True)
    notes.append(_about_files(found, run, made, slowed is not None, target.folder))
    for note in notes:
        print(f"note: {note}", flush=True)
    report = {
        "scaled_from": found.name,
        "captured": {"tp": made.old.tp, "dp": made.old.dp, "pp": made.old.pp},
        "mesh": {"tp": made.new.tp, "dp": made.new.dp, "pp": made.new.pp},
        **{name: getattr(wanted, name) or None for name in ("layers", "batch", "seq", "resize")},
        "seed": wanted.seed,
        "notes": notes,
    }
    write_run(target, ranks, made.groups.all, made.new.ranks, report)
    return made.new.ranks


def _about_files(found: RankSet, run: Run, made: Scaled, apart: bool, folder: Path) -> str:
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
            f"{found.run.name}: the new run takes about {text.size(size)}, and {folder} has "
            f"{text.size(free)}: choose another -o, or fewer --variants"
        )
    work = len({(copy.source, copy.variant) for copy in files})
    others = f": {work:,} differ in their work, the others in the ranks and groups that they communicate with"
    differ = f"{len(files):,} different files for {made.new.ranks:,} ranks, about {text.size(size)}"
    return differ + others * (work < len(files) and not apart)


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
    return found, slowdown.note
