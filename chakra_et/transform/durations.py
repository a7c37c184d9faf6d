"""What-ifs that change how long nodes run, or what waits for communication: ``Setting`` in, ``Setting`` out.

    from chakra_et.predict.predict import predict
    print(predict(chakra_et.load("outputs/gpt2_2gpu_quick_trace").run, [Scale("addmm", 0.5)]).after_ms)

Times are in nanoseconds, one per node of the run's joint graph.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.errors import TraceError, time_limit
from chakra_et.et.columns import NodeType
from chakra_et.et.sets import MANY_RANKS
from chakra_et.simulate.run import Run, Setting
from chakra_et.simulate.time_by_kind import KINDS
from chakra_et.text import plural, shortened

MATCHING_SECONDS = 10
_LONGEST_NS = 2**61


@dataclass(frozen=True)
class Scale:
    """Nodes whose name has a match of ``pattern`` take ``factor`` times as long.

    An operator's node holds its own time without the operators that it calls, which are nodes of their own;
    a matched collective's time is its transfer.
    """

    pattern: str
    factor: float

    def apply(self, run: Run, setting: Setting) -> Setting:
        try:
            expression = re.compile(self.pattern)
        except re.error as error:
            raise TraceError(f"--scale: {self.pattern!r} is not a regular expression: {error}") from None
        slow = f"--scale: {self.pattern!r} takes more than {MATCHING_SECONDS} s to match: give a simpler one"
        with time_limit(MATCHING_SECONDS, TraceError(slow)):
            chosen = run.named(expression.search)
        if not chosen.any():
            spent = np.bincount(run.name_of, run.measured.own_ns, len(run.names))
            longest = np.argsort(-spent)[:4].tolist()
            near = ", ".join(repr(shortened(run.names[at], 60)) for at in longest)
            raise TraceError(f"--scale: no node's name matches {self.pattern!r}: the longest are {near}")
        return scaled(run, setting, chosen, self.factor, f" matching {self.pattern!r}")


@dataclass(frozen=True)
class GpuKernels:
    """All work on a device (kernels, copies and memsets, communication among them) takes ``factor`` times as
    long; calls of the host and the device's overhead stay as they are."""

    factor: float

    def apply(self, run: Run, setting: Setting) -> Setting:
        overhead = run.kind == KINDS.index("device-overhead")
        chosen = (run.graph.attribute("stream", -1) >= 0) & ~run.graph.is_cpu & ~overhead
        if not chosen.any():
            raise TraceError("--gpu-kernels: the run has no work on a device")
        return scaled(run, setting, chosen, self.factor, " on devices")


def scaled(run: Run, setting: Setting, chosen: np.ndarray, factor: float, which: str) -> Setting:
    """The setting in which the ``chosen`` nodes take ``factor`` times as long; ``which``: for the note."""
    own, lasting = (
        np.where(chosen, np.minimum(np.rint(times * factor), _LONGEST_NS), times).astype(np.int64)
        for times in (setting.own_ns, setting.lasting_ns)
    )
    spent = int(np.where(run.operation >= 0, setting.lasting_ns, setting.own_ns)[chosen].sum())
    count = plural(int(chosen.sum()), "node")
    note = f"{count}{which}: {spent / 1e6:,.3f} ms × {factor:g}"
    return replace(setting, own_ns=own, lasting_ns=lasting).noting(note)


@dataclass(frozen=True)
class RankAs:
    """Rank ``rank`` computes as fast as the median of the others.

    Nodes correspond by name and order. What the rank runs more or less often than the others takes in sum
    what it takes there; what only its host does, nothing. Communication changes by what it no longer delays.
    """

    rank: int

    def apply(self, run: Run, setting: Setting) -> Setting:
        ranks = run.graph.ranks
        if self.rank not in ranks:
            raise TraceError(f"--rank {self.rank}: the run has ranks {', '.join(map(str, ranks[:9]))}")
        others = [rank for rank in ranks if rank != self.rank]
        if not others:
            raise TraceError(f"--rank {self.rank}: there is no other rank to compare it with")
        if len(others) > MANY_RANKS:  # at random, as ranks of one step width would be of one place in a mesh
            others = np.random.default_rng(0).choice(others, MANY_RANKS, replace=False).tolist()
        graph, own = run.graph, setting.own_ns.copy()
        code, mine = run.alike, ranks.index(self.rank)
        groups = np.unique(code[graph.first[mine] : graph.first[mine + 1]])

        def by_group(rank: int) -> tuple[np.ndarray, np.ndarray]:
            """The rank's nodes in groups that this one has, by group and order, and their groups."""
            at = ranks.index(rank)
            nodes = np.arange(graph.first[at], graph.first[at + 1])
            of = np.minimum(np.searchsorted(groups, code[nodes]), len(groups) - 1)
            order = np.argsort(of, kind="stable")
            order = order[groups[of[order]] == code[nodes[order]]]
            return nodes[order], of[order]

        nodes, group = by_group(self.rank)
        found = [by_group(rank) for rank in others]
        count = np.array([np.bincount(of, minlength=len(groups)) for _, of in found])
        spent = np.array([np.bincount(of, own[each], len(groups)) for each, of in found])
        my_count, my_spent = np.bincount(group), np.bincount(group, own[nodes])
        there, computing = count > 0, ~run.is_communication[nodes]
        known = there.any(axis=0) & (np.bincount(group, ~computing) == 0)
        alike = known & ~(there & (count != my_count)).any(axis=0)
        theirs = np.full((len(others), len(nodes)), np.nan)
        for row, (each, of), has in zip(theirs, found, there, strict=True):
            row[(alike & has)[group]] = own[each[alike[of]]]
        chosen = alike[group]
        for at in np.flatnonzero(known & ~alike).tolist():
            ratio = float(np.median(spent[there[:, at], at])) / max(my_spent[at], 1)
            own[nodes[group == at]] = np.rint(own[nodes[group == at]] * ratio)
        own[nodes[chosen]] = np.nanmedian(theirs[:, chosen], axis=0)
        own[nodes[(count.max(axis=0) == 0)[group] & computing & graph.is_cpu[nodes]]] = 0
        some = f"{len(others)} other" if len(others) < len(ranks) - 1 else "the other"
        return replace(setting, own_ns=own).noting(
            f"rank {self.rank} as the median of {some} ranks: {int(known[group].sum()):,} of its "
            f"{int(computing.sum()):,} nodes have counterparts"
        )


def parse_scale(text: str) -> Scale:
    """``PATTERN=FACTOR``. Raises ``ValueError``."""
    pattern, sign, factor = text.rpartition("=")
    try:
        value = float(factor)
    except ValueError:
        sign = ""
    if not sign or not pattern or not 0 <= value < math.inf:
        raise ValueError(
            f"--scale {text!r}: write PATTERN=FACTOR with a factor of 0 or more, as in 'aten::mm|gemm'=0.5"
        )
    return Scale(pattern, value)


def parse_ranks(text: str) -> list[RankAs]:
    """``3`` or ``3,4,5``. Raises ``ValueError``."""
    if not all(each.isdecimal() for each in text.split(",")):
        raise ValueError(f"--rank {text!r}: write numbers of ranks, as 3 or 3,4,5")
    return [RankAs(int(each)) for each in text.split(",")]


@dataclass(frozen=True)
class Overlap:
    """Computation waits for the collectives of its step only at the end of the step, the most that overlap
    can give. Messages bring what the next stage computes on, and are waited for as before."""

    def apply(self, run: Run, setting: Setting) -> Setting:
        graph, collective = setting.graph, setting.graph.types == NodeType.COMM_COLL
        if not collective.any():
            raise TraceError("--overlap: the files have no collectives")
        lanes = graph.in_lanes.lane
        waits = collective[graph.source] & ~run.is_communication[graph.target]
        waits &= lanes[graph.source] != lanes[graph.target]
        edges = []
        for node in np.unique(graph.source[waits]).tolist():
            later = run.steps[int(graph.trace_of[node])].first
            later = later[(later >= 0) & (graph.position[later] > graph.position[node])]
            edges += [(node, int(later[0]))] if len(later) else []
        moved = np.array(edges, np.int64).reshape(-1, 2).T
        source, target = np.append(np.stack([graph.source, graph.target])[:, ~waits], moved, axis=1)
        lag = np.append(graph.lag_ns[~waits], np.zeros(len(edges), np.int64))
        changed = replace(graph, source=source, target=target, lag_ns=lag)
        return replace(setting, graph=changed).noting(
            f"--overlap: {int(waits.sum()):,} dependencies on collectives move to the end of their step"
        )
