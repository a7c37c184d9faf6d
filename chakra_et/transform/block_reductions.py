"""The collectives of gradients in a draft whose blocks run more or fewer times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.et.node_attributes import texts
from chakra_et.job.buckets import buckets_of, limits_of
from chakra_et.job.gradients import Gradient, Retime, Sweep, launch_tree
from chakra_et.job.operators import Operators
from chakra_et.transform.unroll import Draft


class BlockReductions:
    """The collectives of gradients in a draft whose blocks run more or fewer times."""

    def __init__(self, operators: Operators, draft: Draft, retime: Retime):
        self.operators, self.draft, self.retime = operators, draft, retime
        trace = operators.trace
        self.sizes = trace.column("comm_size")
        self.kinds = trace.column("comm_type", -1)
        self.groups, self.group_of = texts(trace, "pg_name")
        self.as_ddp = self.as_bytes = 0
        self.made: list[int] = []

    def set_size(self, node: int, size: int) -> None:
        """Give a collective other bytes, and the time that they take."""
        row = self.draft.old[node]
        before, kind = int(self.sizes[row]), int(self.kinds[row])
        if size == before or before <= 0 or kind not in set(CollectiveType):
            return
        group = self.groups[self.group_of[row]] if self.group_of[row] >= 0 else ""
        micros = float(self.operators.trace.duration_micros[row])
        self.draft.sizes[node] = size
        self.draft.micros[node] = max(
            round(self.retime(CollectiveType(kind), before, size, group, micros)), 1
        )

    def reduce(self, sweep: Sweep) -> None:
        """Give the collectives of a sweep the gradients that there are now: more buckets where it was DDP's
        rule that made them, else more bytes."""
        if not sweep.launches:
            return
        rows = {gradient.row: gradient for gradient in sweep.gradients}
        launched = {launch: collective for collective, launch in sweep.launches}
        nodes = self.draft.lanes[sweep.lane]
        events = [
            (place, node)
            for place, node in enumerate(nodes)
            if self.draft.old[node] in rows or self.draft.old[node] in launched
        ]
        before = [int(self.sizes[collective]) for collective, _ in sweep.launches]
        limits = limits_of(*_sizes_and_types(sweep.gradients), before)
        alone = all(not self._waits_elsewhere(sweep, collective) for collective, _ in sweep.launches)
        if limits and alone:
            self._as_ddp(sweep, events, rows, limits)
            self.as_ddp += 1
        else:
            self._as_bytes(sweep, events, rows, launched, before)
            self.as_bytes += 1

    def _waits_elsewhere(self, sweep: Sweep, collective: int) -> bool:
        """Whether a collective waits for more than its launch (a GPU's runs after what made its
        gradients)."""
        trace = self.operators.trace
        begin, end = trace.data_deps.offsets[collective : collective + 2]
        return bool(end - begin > 1 + bool(self.draft.chained[collective]))

    def _as_bytes(
        self,
        sweep: Sweep,
        events: Sequence[tuple[int, int]],
        rows: dict[int, Gradient],
        launched: dict[int, int],
        before: Sequence[int],
    ) -> None:
        nodes = {self.draft.old[node]: node for node in self.draft.lanes[self._lane_of(sweep)]}
        captured = list(_since(sweep))
        held, place = 0, 0
        for _, node in events:
            row = self.draft.old[node]
            if row in rows:
                held += rows[row].bytes
            else:
                share = before[place] / captured[place] if captured[place] else 0.0
                collective = nodes.get(launched[row])
                if collective is not None and share:
                    self.set_size(collective, max(round(held * share), 1))
                held, place = 0, place + 1

    def _lane_of(self, sweep: Sweep) -> int:
        return int(self.operators.lane[sweep.launches[0][0]])

    def _as_ddp(
        self,
        sweep: Sweep,
        events: Sequence[tuple[int, int]],
        rows: dict[int, Gradient],
        limits: tuple[int, int],
    ) -> None:
        draft, trees = self.draft, launch_tree(self.operators, sweep)
        order = [(place, rows[draft.old[node]]) for place, node in events if draft.old[node] in rows]
        buckets = buckets_of(*_sizes_and_types([gradient for _, gradient in order]), limits[1], limits[0])
        ends = [order[bucket[-1]][0] for bucket in buckets]
        whole = [sum(order[at][1].bytes for at in bucket) for bucket in buckets]
        nodes = draft.lanes[sweep.lane]
        old_nodes = [{row: node for node, row in self._nodes_of(tree)} for tree in trees]
        after = [self._tree_end(nodes, end) for end in ends]
        fresh: list[dict[int, int]] = []
        for number in range(len(buckets)):
            last = number == len(buckets) - 1
            tree = old_nodes[-1 if last else min(number, len(trees) - 1)]
            number_of_copy = len(draft.old) + 1
            fresh.append({node: self._copy(node, number_of_copy) for node in sorted(tree.values())})
            gradient = nodes[ends[number]]
            parent = int(self.operators.parent[draft.old[gradient]])
            for node, made in fresh[-1].items():
                # What launches is in the operator around the gradient that closes its bucket.
                if self.operators.parent[draft.old[node]] not in tree:
                    draft.above[made] = parent, draft.copy[gradient]
        removed = {node for tree in old_nodes for node in tree.values()}
        self._place(sweep, fresh, after, removed)
        draft.across = self._copied_edges(fresh, removed)
        for copies, size in zip(fresh, whole, strict=True):
            for node in copies.values():
                if self.operators.trace.types[draft.old[node]] == NodeType.COMM_COLL:
                    self.set_size(node, size)
                    self.made.append(node)

    def _nodes_of(self, tree: set[int]) -> Iterator[tuple[int, int]]:
        lanes = {int(self.operators.lane[row]) for row in tree}
        for lane in lanes:
            for node in self.draft.lanes[lane]:
                if self.draft.old[node] in tree:
                    yield node, self.draft.old[node]

    def _copy(self, node: int, number: int) -> int:
        self.draft.old.append(self.draft.old[node])
        self.draft.copy.append(number)
        return len(self.draft.old) - 1

    def _tree_end(self, nodes: Sequence[int], place: int) -> int:
        """The place after the operators around the node at ``place``."""
        operators, old = self.operators, self.draft.old
        top = operators.top[old[nodes[place]]]
        copy = self.draft.copy[nodes[place]]
        end = place + 1
        while (
            end < len(nodes) and operators.top[old[nodes[end]]] == top and self.draft.copy[nodes[end]] == copy
        ):
            end += 1
        return end

    def _place(
        self, sweep: Sweep, fresh: Sequence[dict[int, int]], after: Sequence[int], removed: set[int]
    ) -> None:
        draft = self.draft
        for lane in {int(self.operators.lane[draft.old[node]]) for node in removed}:
            nodes = draft.lanes[lane]
            mine = [
                [new for old, new in copies.items() if self.operators.lane[draft.old[old]] == lane]
                for copies in fresh
            ]
            if lane == sweep.lane:
                kept: list[int] = []
                by_place: dict[int, list[int]] = {}
                for at, new in zip(after, mine, strict=True):
                    by_place.setdefault(at, []).extend(new)
                for place, node in enumerate([*nodes, -1]):
                    kept += by_place.get(place, [])
                    if node >= 0 and node not in removed:
                        kept.append(node)
                draft.lanes[lane] = kept
            else:
                at = next(place for place, node in enumerate(nodes) if node in removed)
                others = [node for node in nodes if node not in removed]
                draft.lanes[lane] = [*others[:at], *(new for each in mine for new in each), *others[at:]]

    def _copied_edges(self, fresh: Sequence[dict[int, int]], removed: set[int]) -> list[tuple[int, int]]:
        kept: list[tuple[int, int]] = []
        for one, two in self.draft.across:
            if one not in removed and two not in removed:
                kept.append((one, two))
                continue
            for copies in fresh:
                if one in copies or two in copies:
                    kept.append((copies.get(one, one), copies.get(two, two)))
        return [(one, two) for one, two in kept if one not in removed and two not in removed]


def _since(sweep: Sweep) -> Iterator[int]:
    """Bytes of the gradients between each launch of a sweep and the one before."""
    marks = sorted(
        [(gradient.row, gradient.bytes) for gradient in sweep.gradients]
        + [(launch, -1) for _, launch in sweep.launches]
    )
    held = 0
    for _, size in marks:
        if size < 0:
            yield held
            held = 0
        else:
            held += size


def _sizes_and_types(gradients: Sequence[Gradient]) -> tuple[list[int], list[str]]:
    return [each.bytes for each in gradients], [each.type for each in gradients]
