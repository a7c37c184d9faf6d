"""Captured ranks as those of a model with other layers, another batch or other sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace
from chakra_et.job.blocks import Blocks, find_blocks
from chakra_et.job.gradients import Retime
from chakra_et.job.mesh import Mesh, Place
from chakra_et.job.operators import operators_of
from chakra_et.job.sets import Groups
from chakra_et.transform.layers import Layered, copies_of, with_layers
from chakra_et.transform.tensor_parallel import find_sharding, with_shards
from chakra_et.transform.tensors import Resizing, Tokens, find_sizes, resized

MOST_LAYERS = 4096
LARGEST = 1 << 24
"""Batch or sequence."""


@dataclass(frozen=True)
class ModelSize:
    """What is asked for: ``8`` or ``2x``, "" for what was captured."""

    layers: str = ""
    batch: str = ""
    seq: str = ""

    @property
    def is_other(self) -> bool:
        return bool(self.layers or self.batch or self.seq)


@dataclass(frozen=True)
class Remodelled:
    """``traces`` and, of each of their nodes, the captured row it is a copy of (``source``), by rank."""

    traces: dict[int, ExecutionTrace]
    source: dict[int, np.ndarray]
    notes: list[str]


def remodelled(
    traces: Mapping[int, ExecutionTrace], mesh: Mesh, model: ModelSize, retime: Retime, where: str
) -> Remodelled:
    """The ranks of the other model, by their numbers. Raises ``TraceError``, naming what was looked for,
    where the captured model isn't recognised."""
    found = dict(traces)
    source = {rank: np.arange(len(trace)) for rank, trace in found.items()}
    notes: list[str] = []
    if model.batch or model.seq:
        found, note = _with_tokens(found, model, retime, where)
        notes += note
    if model.layers:
        layered, note = _with_layers(found, mesh, model, retime, where)
        found = {rank: each.unrolled.trace for rank, each in layered.items()}
        source = {rank: each.unrolled.source for rank, each in layered.items()}
        notes += note
    return Remodelled(found, source, notes)


def _with_tokens(
    traces: Mapping[int, ExecutionTrace], model: ModelSize, retime: Retime, where: str
) -> tuple[dict[int, ExecutionTrace], list[str]]:
    sizes = find_sizes(
        {rank: operators_of(trace, f"{where}.{rank}") for rank, trace in traces.items()}, where
    )
    old = sizes.tokens
    new = Tokens(
        _wanted_size(model.batch, old.batch, "batch") if model.batch else old.batch,
        _wanted_size(model.seq, old.sequence, "seq") if model.seq else old.sequence,
    )
    resizing = Resizing(sizes, new, where)
    made = {rank: resized(trace, resizing.text, retime) for rank, trace in traces.items()}
    nodes, moved = (sum(getattr(each, name) for each in made.values()) for name in ("nodes", "moved"))
    if not nodes:
        raise TraceError(
            f"{where}: no operator's work depends on batch {old.batch} or sequence {old.sequence}"
        )
    before, after = (
        sum(getattr(each, name) for each in made.values()) / 1000 for name in ("before", "after")
    )
    return {rank: each.trace for rank, each in made.items()}, [
        f"batch × sequence of a pass was {old.batch} × {old.sequence} (look-up of tokens) and is "
        f"{new.batch} × "
        f"{new.sequence}: {nodes:,} nodes that took {before:,.1f} ms take {after:,.1f} ms, assuming that an "
        "operator's time follows its operations, but for what one without work takes",
        f"{moved:,} collectives and messages carry activations and changed with them; those of gradients "
        "stay",
    ]


def _with_layers(
    traces: Mapping[int, ExecutionTrace], mesh: Mesh, model: ModelSize, retime: Retime, where: str
) -> tuple[dict[int, Layered], list[str]]:
    of_rank = {rank: operators_of(trace, f"{where}.{rank}") for rank, trace in traces.items()}
    blocks = find_blocks(of_rank, where)
    held = stage_blocks(blocks, mesh, where)
    refusal = (
        f"--layers {model.layers}: {sum(held)} blocks were recognised: give a number from 1 to {MOST_LAYERS}"
    )
    wanted = _wanted(model.layers, sum(held), MOST_LAYERS, refusal)
    copies = copies_of(wanted, held)
    empty = next((stage for stage, of_stage in enumerate(copies) if not sum(of_stage)), None)
    if empty is not None:
        raise TraceError(
            f"{where}: --layers {model.layers} leaves no block on pipeline stage {empty}: give more"
        )
    made = {
        rank: with_layers(
            of_rank[rank], blocks[rank], copies[mesh.place(rank).stage], retime, f"{where}.{rank}"
        )
        for rank in traces
    }
    return made, list(_layer_notes(made, blocks, sum(held), wanted))


def stage_blocks(blocks: Mapping[int, Blocks], mesh: Mesh, where: str) -> list[int]:
    """The blocks of each pipeline stage. Raises ``TraceError`` where ranks of a stage have other numbers."""
    held = []
    for stage in range(mesh.pp):
        ranks = [mesh.rank(Place(t, d, stage)) for t in range(mesh.tp) for d in range(mesh.dp)]
        counts = {blocks[rank].held for rank in ranks}
        if len(counts) > 1:
            raise TraceError(
                f"{where}: the ranks of pipeline stage {stage} have {min(counts)} to {max(counts)} repeated "
                f"blocks ({mesh}): give the mesh, as in --mesh tp2,dp4,pp2"
            )
        held.append(counts.pop())
    return held


def _layer_notes(
    made: Mapping[int, Layered], blocks: Mapping[int, Blocks], held: int, wanted: int
) -> list[str]:
    sources = " and ".join(sorted({each.source for each in blocks.values()}))
    notes = [
        f"{held} repeated blocks were recognised by {sources}; each of the {wanted} new ones does what the "
        "captured one beside it does, forward and backward, with its kernels and communication"
    ]
    others = sorted({other for each in blocks.values() for other in each.others})
    if others:
        notes.append(f"what else repeats stays as captured: {', '.join(others)}")
    before, after = (sum(each.parameters[at] for each in made.values()) for at in range(2))
    if before:
        notes.append(
            f"all ranks together have {after:,} gradients' elements in place of {before:,}; optimizer, "
            "norm and "
            "copies of gradients follow the elements, or the number of parameters where each has a call of "
            "its own"
        )
    by_rule, by_bytes = (sum(each.buckets[at] for each in made.values()) for at in range(2))
    whole = sum(each.scaled for each in made.values())
    if by_rule:
        notes.append(f"the buckets of {by_rule:,} backward passes were filled anew by DDP's rule")
    if by_bytes:
        notes.append(
            f"the buckets of {by_bytes:,} backward passes keep their number, and have the bytes of the "
            "gradients before each"
        )
    if whole:
        notes.append(f"{whole:,} collectives of all gradients grew with the elements")
    if before and not by_rule and not by_bytes and not whole and after != before:
        notes.append("no collective of gradients was recognised: communication outside of blocks stays")
    return notes


def resharded(
    made: Remodelled, groups: Groups, old: Mesh, new: Mesh, retime: Retime, where: str
) -> Remodelled:
    """The ranks with the shards of more tensor-parallel ranks. Raises ``TraceError``, naming what was looked
    for, where shards aren't recognised."""
    of_rank = {rank: operators_of(trace, f"{where}.{rank}") for rank, trace in made.traces.items()}
    tensor = {
        name
        for name, members in groups.items()
        if len(members) == old.tp and len({old.place(rank)[1:] for rank in members}) == 1
    }
    sharding = find_sharding(of_rank, tensor, old.tp, new.tp, where)
    shards = {rank: with_shards(each, sharding, retime) for rank, each in of_rank.items()}
    traces = {rank: each.trace for rank, each in shards.items()}
    nodes, before, after = (
        sum(getattr(each, name) for each in shards.values()) for name in ("nodes", "before", "after")
    )
    sizes = ", ".join(map(str, sorted(sharding.sharded)))
    note = (
        f"each shard of a tensor-parallel operator becomes {sharding.ratio}: sizes {sizes} were recognised "
        f"as sharded, and {nodes:,} nodes that took {before / 1000:,.1f} ms take {after / 1000:,.1f} ms, "
        "assuming that an operator's time follows its operations"
    )
    return Remodelled(traces, made.source, [*made.notes, note])


def _wanted(text: str, have: int, most: int, refusal: str) -> int:
    """The number that ``8`` or ``2x`` asks for, of ``have``: 1 to ``most``. Raises ``TraceError``."""
    try:
        number = float(text[:-1]) * have if text.endswith("x") else float(int(text))
    except ValueError:
        number = 0.0
    if not 1 <= number <= most or number != int(number):
        raise TraceError(f"{refusal}, or a factor that makes a whole one, as 2x")
    return int(number)


def _wanted_size(text: str, have: int, flag: str) -> int:
    return _wanted(
        text, have, LARGEST, f"--{flag} {text}: the captured one is {have}: give a number from 1 on"
    )
