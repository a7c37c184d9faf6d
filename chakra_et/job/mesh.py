"""The mesh of a set: which ranks share tensors, data and pipeline stages, and its groups at another size.

>>> axes_of("TENSOR_MODEL_PARALLEL_GROUP"), axes_of("mesh_dp_shard")
(frozenset({'tp'}), frozenset({'dp'}))

Rank = t + tp·(d + dp·p), tensor-parallel place t, data-parallel place d and pipeline stage p: the order of
Megatron (tp-dp-pp), of DDP (dp alone) and of planned sets. A group is a grid of places along the three axes.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from chakra_et.arrays import rows_by_value
from chakra_et.errors import TraceError
from chakra_et.et.columns import FOR_ALL, CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import in_phase, texts
from chakra_et.et.sets import Groups
from chakra_et.job.operators import inside
from chakra_et.text import plural

_TEXT = re.compile(r"(tp|dp|pp)\s*=?\s*(\d+)")
# Words of process groups' descriptions: torch.distributed's DeviceMesh (``mesh_dp_shard``), megatron-core's
# parallel_state (``TENSOR_MODEL_PARALLEL_GROUP``) and DeepSpeed's utils.groups (``ep_size_2``, ``zero``).
WORDS = {
    "tp": ("tp", "tensor", "etp"),
    "dp": ("dp", "data", "fsdp", "ddp", "hsdp", "replicate", "shard", "zero", "edp"),
    "pp": ("pp", "pipeline", "pipe"),
    "cp": ("cp", "context", "sp", "sequence", "ulysses"),
    "ep": ("ep", "expert", "moe"),
    "embedding": ("embedding",),
}
_AXIS = {word: axis for axis, words in WORDS.items() for word in words}

# Data parallelism that communicates in the forward pass: gathered shards, statistics of batch normalization.
_OF_DATA = re.compile(r"FSDP|FullySharded|SyncBatchNorm|zero.*param|DeepSpeedZero", re.IGNORECASE)
# A few numbers, as a loss or a metric, are reduced in the forward pass under data parallelism too.
_METRIC_BYTES = 64


def axes_of(description: str) -> frozenset[str]:
    """The axes (keys of ``WORDS``) that a group's description names; empty where it names none.

    ``DATA_PARALLEL_GROUP_WITH_CP`` is of dp and cp, ``default_pg`` of none.
    """
    words = re.findall(r"[a-z]+", description.lower())
    return frozenset(_AXIS[word] for word in words if word in _AXIS)


def described_groups(trace: ExecutionTrace) -> list[tuple[str, list[int]]]:
    """(description, ranks) of the process groups in the file's metadata, which other writers leave out."""
    text = trace.metadata_str("process_groups") or "{}"
    try:
        groups = msgspec.json.decode(text, type=dict[str, tuple[str, str, list[int]]])
    except (msgspec.DecodeError, RecursionError):
        return []
    return [(description, ranks) for _, description, ranks in groups.values()]


def forward_uses(traces: Iterable[ExecutionTrace]) -> dict[str, str]:
    """Group number → a sentence on its collectives in forward passes, which data parallelism doesn't have.

    Left out are groups whose description names data parallelism, what FSDP, ZeRO and synchronized batch
    normalization do, and up to 64 bytes, as a loss has.
    """
    found: dict[str, str] = {}
    for trace in traces:
        rows = np.flatnonzero((trace.types == NodeType.COMM_COLL) & in_phase(trace, b"forward"))
        kinds = trace.column("comm_type", -1)
        rows = rows[np.isin(kinds[rows], FOR_ALL) & (trace.column("comm_size", 0)[rows] > _METRIC_BYTES)]
        if not len(rows):
            continue
        (names, group), (described, about) = texts(trace, "pg_name"), texts(trace, "pg_description")
        named = [bool(_OF_DATA.search(name.decode("utf-8", "replace"))) for name in trace.names.table]
        of_sharding = inside(trace, np.flatnonzero(np.array(named, bool)[trace.names.index]).tolist()) >= 0
        of_data = np.array([*("dp" in axes_of(text) for text in described), False])[about]
        shared = rows[(group[rows] >= 0) & ~of_data[rows] & ~of_sharding[rows]]
        for number, users in rows_by_value(group, shared).items():
            name, kind = names[number], CollectiveType(int(kinds[users[0]])).name.lower().replace("_", "-")
            found.setdefault(name, f"group {name} has {plural(len(users), kind)} inside the forward pass")
    return found


def stages_of(traces: Sequence[ExecutionTrace], ranks: Sequence[int]) -> dict[int, int]:
    """Rank → its place in its pipeline group; 0 for a rank in none."""
    stages = dict.fromkeys(ranks, 0)
    for trace in traces:
        for description, members in described_groups(trace):
            if axes_of(description) == {"pp"}:
                stages |= {rank: place for place, rank in enumerate(members) if rank in stages}
    return stages


def dp_ranks_of(stages: dict[int, int]) -> dict[int, int]:
    """Rank → its place among the ranks of its stage, in the order of ranks."""
    places: dict[int, Iterator[int]] = defaultdict(itertools.count)
    return {rank: next(places[stages[rank]]) for rank in sorted(stages)}


class Place(NamedTuple):
    """The coordinates of a rank."""

    tensor: int
    data: int
    stage: int


@dataclass(frozen=True)
class Mesh:
    """Where ranks lie: the tensor-parallel place changes fastest, the stage slowest, as in Megatron."""

    tp: int
    dp: int
    pp: int

    @property
    def ranks(self) -> int:
        return self.tp * self.dp * self.pp

    def place(self, rank: int) -> Place:
        rest, tensor = divmod(rank, self.tp)
        stage, data = divmod(rest, self.dp)
        return Place(tensor, data, stage)

    def rank(self, place: Place) -> int:
        return place.tensor + self.tp * (place.data + self.dp * place.stage)

    def __str__(self) -> str:
        return f"tp {self.tp} × dp {self.dp} × pp {self.pp}"


@dataclass(frozen=True)
class GroupShape:
    """A group as ``others`` (tensor place, stage) times data-parallel places: a ``block`` of ``size``
    neighbours (one of them alone, or experts), or a ``stride`` through every ``size``-th of them (all, or
    replicas of an expert). ``at_ends``: of the first and the last stage alone, as the embedding's copies."""

    others: tuple[tuple[int, int], ...]
    along: Literal["block", "stride"]
    size: int
    at_ends: bool = False


def parse_mesh(text: str, ranks: int) -> Mesh:
    """``tp2,dp4,pp2`` (what is left out is 1, dp what remains). Raises ``TraceError``."""
    found = {axis: int(count) for axis, count in _TEXT.findall(text.lower())}
    if not found or re.sub(r"[\s,]", "", _TEXT.sub("", text.lower())) or 0 in found.values():
        raise TraceError(f"--mesh {text!r} can't be read: write it as tp2,dp4,pp2")
    tp, pp = found.get("tp", 1), found.get("pp", 1)
    dp = found.get("dp", max(ranks // (tp * pp), 1))
    if tp * dp * pp != ranks:
        raise TraceError(f"--mesh {text!r} has {tp * dp * pp} ranks, and the set {ranks}: change it")
    return Mesh(tp, dp, pp)


def message_distances(traces: Iterable[ExecutionTrace]) -> set[int]:
    """By how many ranks the two ends of a message lie apart, for all messages."""
    apart: set[int] = set()
    for trace in traces:
        sends = trace.types == NodeType.COMM_SEND
        source, target = trace.column("comm_src", -1)[sends], trace.column("comm_dst", -1)[sends]
        known = (source >= 0) & (target >= 0)
        apart |= set(np.abs(source - target)[known].tolist())
    return apart - {0}


def find_mesh(
    where: str, groups: Groups, traces: Mapping[int, ExecutionTrace], world: int, text: str
) -> Mesh:
    """The mesh of a run: as ``text`` (``--mesh``) gives it, or else ("") as the groups' descriptions, their
    collectives and the messages between ranks show it.

    Raises ``TraceError`` where ``text`` is wrong, where no mesh explains all groups, and where a group that
    no description explains does what data parallelism doesn't.
    """
    if text:
        return parse_mesh(text, world)
    described = dict(each for trace in traces.values() for each in described_groups(trace))
    mesh = mesh_of(groups, described, message_distances(traces.values()), world)
    # What shares work in the forward pass, as tensor, sequence or expert parallelism does, is no replica.
    for name, use in forward_uses(traces.values()).items():
        shape = shape_of(groups.get(name, []), mesh)
        if shape is not None and (shape.along, shape.size) != ("block", 1):
            raise TraceError(
                f"{where}: {use}, so that its ranks share work and aren't data-parallel replicas, and no "
                "description says which mesh they make: give the mesh, as in --mesh tp2,dp4"
            )
    return mesh


def mesh_of(groups: Groups, described: Mapping[str, Sequence[int]], messages: set[int], ranks: int) -> Mesh:
    """The mesh that the groups and messages of a set show.

    ``described``: description → members, of the process groups; ``messages``: by how many ranks the two ends
    of a message lie apart. Raises ``TraceError`` where no mesh explains all groups.
    """
    axes = ("tp", "pp", "cp")
    named = {axis: [each for text, each in described.items() if axes_of(text) == {axis}] for axis in axes}
    if any(len(members) > 1 for axis in axes for members in named[axis]):
        tp, pp = (max(map(len, named[axis]), default=1) for axis in ("tp", "pp"))
    else:
        stride = min(messages, default=ranks)
        pp = ranks // stride if ranks % stride == 0 else 1
        tp = _tensor_ranks(groups, stride)
    if ranks % (tp * pp):
        raise TraceError(
            f"{ranks} ranks are no multiple of tp {tp} × pp {pp}: give the mesh, as in --mesh tp2,dp4"
        )
    mesh = Mesh(tp, ranks // (tp * pp), pp)
    for name, members in groups.items():
        if shape_of(members, mesh) is None:
            raise TraceError(
                f"group {name} (ranks {', '.join(map(str, members[:4]))}…) is no grid of {mesh}: give the "
                "mesh, as in --mesh tp2,dp4,pp2"
            )
    for axis, at in (("tp", 0), ("pp", 2)):
        for along in named[axis]:
            places = [mesh.place(rank) for rank in along if 0 <= rank < ranks]
            if any(len({place[other] for place in places}) > 1 for other in range(3) if other != at):
                raise TraceError(
                    f"the {axis} group of ranks {', '.join(map(str, along[:4]))} doesn't lie along {axis} "
                    f"of {mesh}: ranks in another order than tp, dp, pp aren't supported"
                )
    return mesh


def _tensor_ranks(groups: Groups, stage: int) -> int:
    """The size of groups of neighbours that other groups stride over; else 1: all may be data-parallel."""
    sizes = {len(m) for m in groups.values() if 1 < len(m) < stage and max(m) - min(m) == len(m) - 1}
    strides = {m[1] - m[0] for m in map(sorted, groups.values()) if len(m) > 1 and m[1] - m[0] > 1}
    return next((size for size in sorted(sizes) if size in strides and stage % size == 0), 1)


def shape_of(members: Sequence[int], mesh: Mesh) -> GroupShape | None:
    """The group as a grid of the mesh; None where it is none."""
    if not members or min(members) < 0 or max(members) >= mesh.ranks:
        return None
    places = [mesh.place(rank) for rank in members]
    others = tuple(dict.fromkeys((place.tensor, place.stage) for place in places))
    data = sorted({place.data for place in places})
    if len(others) * len(data) != len(set(members)):
        return None
    steps = {b - a for a, b in zip(data[:-1], data[1:], strict=True)}
    size = len(data)
    if mesh.dp % size == 0:
        stride = mesh.dp // size
        if steps <= {stride} and data[0] < stride and (size > 1 or stride == 1):
            return GroupShape(others, "stride", stride)
        if steps <= {1} and data[0] % size == 0:
            return GroupShape(others, "block", size)
    return None


class ScaledGroups:
    """The groups of a mesh of another size, numbered in the order of first use.

    ``apart``: of a mesh with one data-parallel place, the groups that every replica has for itself;
    ``at_ends``: those of the first and the last stage. Raises ``TraceError`` where the captured groups don't
    tell the new ones.
    """

    def __init__(
        self, groups: Groups, old: Mesh, new: Mesh, apart: Collection[str] = (), at_ends: Collection[str] = ()
    ):
        self.old, self.new = old, new
        self.shapes: dict[str, GroupShape] = {}
        for name, ranks in groups.items():
            shape = shape_of(ranks, old)
            if shape is None:
                continue
            shape = replace(shape, at_ends=name in at_ends)
            self.shapes[name] = shape = replace(shape, along="block", size=1) if name in apart else shape
            if new.dp % shape.size:
                raise TraceError(
                    f"--dp {new.dp} is no multiple of {shape.size}, by which group {name} divides the ranks "
                    "of data parallelism: choose another"
                )
            for flag, at, what in (("tp", 0, "tensor-parallel places"), ("pp", 1, "stages")):
                before, after = getattr(old, flag), getattr(new, flag)
                count = len({place[at] for place in shape.others})
                if after != before and count not in (1, before) and not (at and shape.at_ends):
                    raise TraceError(
                        f"group {name} has some of the {before} {what}: --{flag} can't tell which of more"
                    )
        # Groups keep their numbers where the mesh keeps its size.
        kept = groups if old == new else {}
        # Process groups with the same members stay apart: each has an order of its own.
        self.twin: dict[str, int] = {}
        seen: Counter[tuple[int, ...]] = Counter()
        for name in sorted(groups, key=int):
            members = tuple(sorted(groups[name]))
            self.twin[name] = seen[members]
            seen[members] += 1
        self.numbers = {(tuple(sorted(groups[name])), self.twin[name]): name for name in kept}
        self.next = max(map(int, kept), default=0) + 1

    def name_for(self, group: str, place: Place) -> str:
        """The group that stands for ``group`` on a copy at ``place`` of the new mesh."""
        if group not in self.shapes:
            raise TraceError(f"group {group} is no grid of {self.old}: give another --mesh")
        key = tuple(self._members(self.shapes[group], place)), self.twin[group]
        if key not in self.numbers:
            self.numbers[key] = str(self.next)
            self.next += 1
        return self.numbers[key]

    def counts(self, group: str) -> tuple[int, int]:
        """Members of the group that stands for ``group``, in the old and in the new mesh."""
        shape = self.shapes[group]
        before = shape.size if shape.along == "block" else self.old.dp // shape.size
        return before * len(shape.others), len(self._members(shape, Place(0, 0, 0)))

    def _members(self, shape: GroupShape, place: Place) -> list[int]:
        # A group of other data-parallel places than the rank's own doesn't occur on it.
        along = range(place.data % shape.size, self.new.dp, shape.size)
        if shape.along == "block":
            first = place.data - place.data % shape.size
            along = range(first, first + shape.size)
        others = self._others(shape, place)
        return sorted(self.new.rank(Place(t, d, p)) for t, p in others for d in along)

    def _others(self, shape: GroupShape, place: Place) -> Sequence[tuple[int, int]]:
        """(tensor place, stage) of the members: along an axis that grows, all places or the rank's own."""
        tensors, stages = (list(dict.fromkeys(column)) for column in zip(*shape.others, strict=True))
        if self.new.tp != self.old.tp:
            tensors = list(range(self.new.tp)) if len(tensors) == self.old.tp else [place.tensor]
        elif self.new.pp == self.old.pp:
            return shape.others
        if self.new.pp != self.old.pp and shape.at_ends:
            stages = [0, self.new.pp - 1]
        elif self.new.pp != self.old.pp:
            stages = list(range(self.new.pp)) if len(stages) == self.old.pp > 1 else [place.stage]
        return [(t, p) for p in stages for t in tensors]

    def all(self) -> Groups:
        """Number → ranks, of the groups that were asked for."""
        return {number: list(members) for (members, _), number in self.numbers.items()}
