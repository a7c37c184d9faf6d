"""More or fewer repeated blocks: their passes, the collectives of their gradients, and what is done for every
parameter (the optimizer, the norm of the gradients, copies of buckets).

Assumed, and said in the notes: every new block does what the captured one beside it does; the work for
parameters follows their number of elements, or their number where it is one call for each.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.job import gradients
from chakra_et.job.blocks import Blocks, find_blocks
from chakra_et.job.mesh import Mesh, Place
from chakra_et.job.operators import Operators, Shape
from chakra_et.transform.changes import RankTraces
from chakra_et.transform.tensors import wanted
from chakra_et.transform.unroll import Draft, drafted, finished

_MOST_LAYERS = 4096
_REDUCED = {
    "by rule": "the buckets of {:,} backward passes were refilled by DDP's rule",
    "by bytes": "the buckets of {:,} backward passes keep their number, and grew with their gradients",
    "whole": "{:,} collectives of all gradients grew with the elements",
}


def with_layers(ranks: RankTraces, layers: str) -> RankTraces:
    """The ranks of a model with so many blocks, as ``8`` or ``2x``. Raises ``TraceError``, naming what was
    looked for, where blocks aren't recognised."""
    of_rank, where = ranks.operators(), ranks.where
    blocks = find_blocks(of_rank, where)
    held = stage_blocks(blocks, ranks.mesh, where)
    total = sum(held)
    refusal = f"--layers {layers}: {total} blocks were recognised: give a number from 1 to {_MOST_LAYERS}"
    count = wanted(layers, total, _MOST_LAYERS, refusal)
    # New block j is a copy of block ⌊j · captured / wanted⌋.
    copied = Counter(new * total // count for new in range(count))
    ends = list(itertools.accumulate(held))
    copies = [[copied[at] for at in range(end - own, end)] for own, end in zip(held, ends, strict=True)]
    empty = next((stage for stage, of_stage in enumerate(copies) if not sum(of_stage)), None)
    if empty is not None:
        raise TraceError(f"{where}: --layers {layers} leaves no block on pipeline stage {empty}: give more")
    traces, found = {}, Counter[str]()
    for rank, each in of_rank.items():
        own = copies[ranks.mesh.place(rank).stage]
        traces[rank], counts = _layered(each, blocks[rank], own, ranks.retime, f"{where}.{rank}")
        found.update(counts)
    sources = " and ".join(sorted({each.source for each in blocks.values()}))
    notes = [
        f"{total} repeated blocks were recognised by {sources}; each of the {count} new ones does what the "
        "captured one beside it does, forward and backward, with its kernels and communication"
    ]
    if found["before"]:
        notes.append(
            f"the gradients of all ranks have {found['after']:,} elements in place of {found['before']:,}; "
            "optimizer, norm and copies of gradients scale with them, or with the number of parameters "
            "where each has its own call"
        )
    notes += [text.format(found[which]) for which, text in _REDUCED.items() if found[which]]
    if found["before"] != found["after"] and not any(found[which] for which in _REDUCED):
        notes.append("no collective of gradients was recognised: communication outside of blocks stays")
    return ranks.with_traces(traces, *notes)


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


def _layered(
    operators: Operators, blocks: Blocks, copies: Sequence[int], retime: gradients.Retime, where: str
) -> tuple[ExecutionTrace, dict[str, int]]:
    """A rank whose block b runs ``copies[b]`` times, and what there is to note: elements of gradients before
    and after, and how often which rule gave collectives other bytes."""
    sweeps, trace = gradients.sweeps_of(operators, blocks), operators.trace
    if not sweeps:
        return finished(drafted(trace, blocks, copies), where, retime), {}
    parameters = gradients.parameters_of(sweeps)
    of_block = [parameters.get(block, Counter()) for block in range(blocks.held)]
    other = next((at for at, each in enumerate(of_block) if each != of_block[0]), None)
    if other is not None:
        raise TraceError(
            f"{where}: blocks 0 and {other} repeat their operators, and have gradients of other shapes: "
            "--layers needs blocks that are alike"
        )
    # All blocks are alike.
    before, after = (
        parameters.get(-1, Counter())
        + Counter({shape: number * times for shape, number in of_block[0].items()})
        for times in (blocks.held, sum(copies))
    )
    blocks = _without_launches(operators, blocks, sweeps)
    factors = parameter_factors(operators, blocks, before, after)
    trace = replace(trace, duration_micros=np.rint(trace.duration_micros * factors).astype(np.uint64))
    draft = drafted(trace, blocks, copies)
    nodes = {draft.old[node]: node for lane in draft.lanes.values() for node in lane}
    counts = Counter(before=gradients.elements(before), after=gradients.elements(after))
    grown = gradients.grown_reductions(
        operators, sweeps, lambda each: copies[each.block] if each.block >= 0 else 1, blocks.block < 0
    )
    for sweep in sweeps:
        reduced = {collective: grown.pop(collective, 0) for collective, _ in sweep.launches}
        # Where all collectives stay with their blocks they are right.
        if all(blocks.block[launch] >= 0 for _, launch in sweep.launches):
            continue
        if _refilled(operators, draft, sweep, nodes):
            counts["by rule"] += 1
        else:
            counts["by bytes"] += 1
            draft.sizes |= {nodes[row]: size for row, size in reduced.items() if size}
    draft.sizes |= {nodes[row]: size for row, size in grown.items()}
    return finished(draft, where, retime), counts | Counter(whole=len(grown))


def _without_launches(operators: Operators, blocks: Blocks, sweeps: Sequence[gradients.Sweep]) -> Blocks:
    """The launches of gradients' collectives belong to no block: buckets hold the gradients of several. Those
    that reduce just the gradients of their block stay with it."""
    group, block = blocks.group.copy(), blocks.block.copy()
    for sweep in sweeps:
        sizes: Counter[int] = Counter()
        for gradient in sweep.gradients:
            sizes[gradient.block] += gradient.bytes
        trees = gradients.launch_tree(operators, sweep)
        for rows, (collective, launch) in zip(trees, sweep.launches, strict=True):
            own = sizes.get(int(blocks.block[launch]), 0)
            size = int(operators.trace.column("comm_size")[collective])
            if blocks.block[launch] < 0 or abs(size - own) > gradients.NEAR * own:
                group[list(rows)], block[list(rows)] = -1, -1
    return replace(blocks, group=group, block=block)


def _refilled(operators: Operators, draft: Draft, sweep: gradients.Sweep, node_of: Mapping[int, int]) -> bool:
    """Put the gradients that there are now into buckets where it was DDP's rule that made those of a sweep;
    whether it was. ``node_of``: of rows outside of blocks."""
    trace = operators.trace
    before = [int(trace.column("comm_size")[collective]) for collective, _ in sweep.launches]
    sizes, types = [each.bytes for each in sweep.gradients], [each.type for each in sweep.gradients]
    limits = gradients.limits_of(sizes, types, before)
    dependencies = np.diff(trace.data_deps.offsets)
    # A GPU's collective waits for more than its launch: it runs after what made its gradients.
    waits = any(dependencies[row] > 1 + bool(draft.chained[row]) for row, _ in sweep.launches)
    if not limits or waits:
        return False
    rows, nodes = {gradient.row: gradient for gradient in sweep.gradients}, draft.lanes[sweep.lane]
    order = [(at, rows[draft.old[node]]) for at, node in enumerate(nodes) if draft.old[node] in rows]
    trees = [{row: node_of[row] for row in tree} for tree in gradients.launch_tree(operators, sweep)]
    _as_ddp(operators, draft, sweep.lane, trees, order, limits)
    return True


def _as_ddp(
    operators: Operators,
    draft: Draft,
    thread: int,
    old: Sequence[Mapping[int, int]],
    order: Sequence[tuple[int, gradients.Gradient]],
    limits: tuple[int, int],
) -> None:
    """Buckets by DDP's rule; ``old``: row → node of what launched each; ``order``: the gradients and their
    places on the lane of their ``thread``. What launches a bucket's collective is a copy of what launched
    one, in the operator around the gradient that closes it."""
    nodes, parent, of_lane = draft.lanes[thread], operators.parent, operators.lane
    removed = {node for tree in old for node in tree.values()}
    sizes, types = [each.bytes for _, each in order], [each.type for _, each in order]
    buckets = gradients.buckets_of(sizes, types, limits[1], limits[0])
    fresh: list[dict[int, int]] = []
    ends = []
    for number, bucket in enumerate(buckets):
        at = order[bucket[-1]][0]
        tree = old[-1 if number == len(buckets) - 1 else min(number, len(old) - 1)]
        copy = len(draft.old) + 1
        fresh.append({node: draft.add(draft.old[node], copy) for node in sorted(tree.values())})
        around = int(parent[draft.old[nodes[at]]]), draft.copy[nodes[at]]
        for node, made in fresh[-1].items():
            if parent[draft.old[node]] not in tree:
                draft.above[made] = around
            if operators.trace.types[draft.old[node]] == NodeType.COMM_COLL:
                draft.sizes[made] = sum(sizes[each] for each in bucket)
        ends.append(_end_of_top(operators, draft, nodes, at))
    for lane in {int(of_lane[draft.old[node]]) for node in removed}:
        first = min(at for at, node in enumerate(draft.lanes[lane]) if node in removed)
        placed = [(at, 1, node) for at, node in enumerate(draft.lanes[lane]) if node not in removed]
        for copies, end in zip(fresh, ends, strict=True):
            at = end if lane == thread else first
            placed += [(at, 0, new) for new in copies.values() if of_lane[draft.old[new]] == lane]
        draft.lanes[lane] = [node for *_, node in sorted(placed)]
    across: list[tuple[int, int]] = []
    for one, two in draft.across:
        if one not in removed and two not in removed:
            across.append((one, two))
        else:
            across += [(c.get(one, one), c.get(two, two)) for c in fresh if one in c or two in c]
    draft.across = [(one, two) for one, two in across if one not in removed and two not in removed]


def _end_of_top(operators: Operators, draft: Draft, nodes: Sequence[int], place: int) -> int:
    """The place after the operators around the node at ``place``."""
    top, copy = operators.top[draft.old[nodes[place]]], draft.copy[nodes[place]]
    end = place + 1
    while end < len(nodes) and operators.top[draft.old[nodes[end]]] == top and draft.copy[nodes[end]] == copy:
        end += 1
    return end


def parameter_factors(
    operators: Operators, blocks: Blocks, before: Counter[Shape], after: Counter[Shape]
) -> np.ndarray:
    """By how much the time of each node outside of blocks changes with the parameters; float64[N].

    Operators on lists of as many tensors as half of the parameters follow the tensors' elements; so does a
    run of one operator for each parameter whose first tensor has a parameter's shape. Other such runs follow
    the number of parameters.
    """
    factors = np.ones(len(operators.trace))
    number = sum(before.values())
    by_count = sum(after.values()) / number
    of_shape = {shape: after[shape] / before[shape] for shape in before if len(shape)}
    least = max(number // 2, 4)
    for lane, tops in operators.tops.items():
        rows = np.flatnonzero(operators.lane == lane)
        end_of = dict(zip(tops, [*tops[1:], len(factors)], strict=True))
        outside = [row for row in tops if blocks.block[row] < 0]
        updates = sum(operators.phase[row] == "optimizer" for row in outside)
        for _, run in itertools.groupby(outside, operators.name.__getitem__):
            alike = list(run)
            for row in alike:
                tree = rows[np.searchsorted(rows, row) : np.searchsorted(rows, end_of[row])]
                shapes = operators.shapes(row)
                if len(shapes) >= least or (not shapes and _scalars(operators, row) >= least):
                    sizes = [int(np.prod(shape)) for shape in shapes]
                    grown = [of_shape.get(shape, by_count) for shape in shapes]
                    whole = sum(size * factor for size, factor in zip(sizes, grown, strict=True))
                    by_elements = whole / sum(sizes) if sum(sizes) else by_count
                    # As one call it follows elements; with a call for each tensor, those of each.
                    factors[tree] = by_elements if len(tree) < least else by_count
                    for inner in tree[1:].tolist():
                        first = next(iter(operators.shapes(inner)), ())
                        factors[inner] = of_shape.get(first, factors[inner])
                elif len(alike) >= least or (operators.phase[row] == "optimizer" and updates >= number):
                    factors[tree] = of_shape.get(shapes[0] if shapes else (), by_count)
    device = np.flatnonzero(~np.isin(operators.lane, list(operators.tops)) & (operators.parent >= 0))
    device = device[operators.trace.types[device] < NodeType.COMM_SEND]
    factors[device] = factors[operators.parent[device]]
    return factors


def _scalars(operators: Operators, row: int) -> int:
    """Tensors of no dimensions in the lists of an operator's inputs."""
    inputs = operators.trace.inputs
    if inputs is None or "foreach" not in operators.name[row] or row not in (rows := inputs.rows):
        return 0
    lists = re.findall(rb"\[((?:\[\],?\s*)+)\]", inputs.shapes[int(np.searchsorted(rows, row))][1:-1])
    return sum(each.count(b"[]") for each in lists)
