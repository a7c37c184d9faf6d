"""A set with more pipeline stages: its ranks, mesh and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.node_attributes import texts
from chakra_et.job.blocks import find_blocks
from chakra_et.job.gradients import Retime
from chakra_et.job.mesh import Mesh, Place
from chakra_et.job.operators import operators_of
from chakra_et.job.sets import Groups
from chakra_et.transform.rank_copies import relabelled
from chakra_et.transform.remodel import Remodelled, stage_blocks
from chakra_et.transform.stages import Part, Splitter


@dataclass(frozen=True)
class Split:
    """Ranks of more stages: ``made``, their ``mesh`` and ``groups``, and the captured rank of each."""

    made: Remodelled
    mesh: Mesh
    groups: Groups
    captured: dict[int, int]


def split(made: Remodelled, groups: Groups, old: Mesh, stages: int, retime: Retime, where: str) -> Split:
    """The ranks with every captured stage cut into several. Raises ``TraceError``, naming what was looked
    for,
    where passes or blocks aren't recognised."""
    parts, mesh = stages // old.pp, Mesh(old.tp, old.dp, stages)
    of_rank = {rank: operators_of(trace, f"{where}.{rank}") for rank, trace in made.traces.items()}
    blocks = find_blocks(of_rank, where)
    held = stage_blocks(blocks, old, where)
    names = StageGroups(groups, shared_by_stages(made.traces), old, mesh)
    traces: dict[int, ExecutionTrace] = {}
    captured: dict[int, int] = {}
    source: dict[int, np.ndarray] = {}
    for rank, operators in of_rank.items():
        splitter = Splitter(operators, blocks[rank], parts, f"{where}.{rank}")
        place = old.place(rank)
        for at in range(parts):
            stage = place.stage * parts + at
            own = mesh.rank(place._replace(stage=stage))
            before = mesh.rank(place._replace(stage=stage - 1)) if stage else -1
            after = mesh.rank(place._replace(stage=stage + 1)) if stage < stages - 1 else -1
            cut = splitter.made(Part(at, parts, stage, stages, own, before, after), retime)
            new = names.of(texts(cut.trace, "pg_name")[0], place._replace(stage=stage))
            traces[own] = relabelled(cut.trace, new, {}, mesh.ranks)
            source[own], captured[own] = made.source[rank][cut.source], rank
    note = (
        f"the {old.pp} captured pipeline stages of {', '.join(map(str, held))} repeated blocks became "
        f"{stages} of equal parts, which run 1F1B with a message of the captured size per pass and "
        "boundary; sends hold nobody up"
    )
    ordered = dict(sorted(traces.items()))
    return Split(Remodelled(ordered, source, [*made.notes, note]), mesh, names.all(), captured)


def shared_by_stages(traces: Mapping[int, ExecutionTrace]) -> set[str]:
    """The groups of the first and last stage alone (copies of the embedding), by description."""
    found = set()
    for trace in traces.values():
        (names, of_node), (described, about) = texts(trace, "pg_name"), texts(trace, "pg_description")
        for at, text in set(zip(of_node.tolist(), about.tolist(), strict=True)):
            if at >= 0 and text >= 0 and "EMBEDDING" in described[text].upper():
                found.add(names[at])
    return found


class StageGroups:
    """The groups of a mesh whose stages become several."""

    def __init__(self, groups: Groups, at_ends: set[str], old: Mesh, new: Mesh):
        self.groups, self.at_ends, self.old, self.new = groups, at_ends, old, new
        self.numbers: dict[tuple[tuple[int, ...], str], str] = {}

    def of(self, used: Sequence[str], place: Place) -> dict[str, str]:
        """Captured group → the one that stands for it on the rank at ``place`` of the new mesh."""
        return {name: self._number(name, place) for name in used if name in self.groups}

    def _number(self, name: str, place: Place) -> str:
        places = [self.old.place(rank) for rank in self.groups[name]]
        held = {each.stage for each in places}
        others = {each[:2] for each in places}
        if len(held) == 1:
            stages = [place.stage]
        elif name in self.at_ends:
            stages = [0, self.new.pp - 1]
        elif len(held) == self.old.pp:
            stages = list(range(self.new.pp))
        else:
            raise TraceError(
                f"group {name} has some of the {self.old.pp} stages: --pp can't tell which of more"
            )
        members = tuple(sorted(self.new.rank(Place(t, d, p)) for t, d in others for p in stages))
        return self.numbers.setdefault((members, name), str(len(self.numbers) + 1))

    def all(self) -> Groups:
        return {number: list(members) for (members, _), number in self.numbers.items()}
