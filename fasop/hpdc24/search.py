"""The cost model ``hpdc24``: every row of the published FASOP tool, as it would print them.

Source: FASOP, HPDC 2024, and its published tool; ``README.md`` says how far the rows were compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np

from fasop.errors import PlanError, nearest
from fasop.exact.unit_times import Compute
from fasop.hpdc24.rules import MARGIN, check_memory, f32, incoming, links, minmax, simulate
from fasop.inputs.clusters import Cluster
from fasop.inputs.costs import CostFile, Growth
from fasop.inputs.models import Model
from fasop.plans.options import Options
from fasop.plans.plan import Goal, Plan, pareto_front
from fasop.plans.shapes import divisors

FAST, SLOW = "A100", "A10"  # the two types the tool knows, in its order
LAYER_EXTRA = 20800  # parameters of a layer beside 12h², as the tool counts them
LARGEST_HALF = 24  # stages that a half of an encoder-decoder model can have
PASSES = 3.0  # the tool's unit is a whole pass, multiplied before anything else


@dataclass
class Row:
    """One row of the tool's output: a candidate, and once that is partitioned, what it takes.

    stage_type, cap, reduce_bandwidth: of each stage; boundary, embedding: seconds, float32; plain, sharded:
    whether it is out of memory without and with a sharded optimizer, the GiB that the tool reports, and those
    of each stage.
    """

    cluster: Cluster
    placement: tuple[str, ...]
    mbs: int
    tp: int
    dp: int
    pp: int
    stage_type: np.ndarray
    cap: np.ndarray
    boundary: np.ndarray
    reduce_bandwidth: np.ndarray
    embedding: float
    partition: tuple[int, ...] = field(init=False)
    compute: np.ndarray = field(init=False)
    stage_end: np.ndarray = field(init=False)
    all_reduce: np.ndarray = field(init=False)
    step_time: float = field(init=False)
    plain: tuple[bool, float, np.ndarray] = field(init=False)
    sharded: tuple[bool, float, np.ndarray] = field(init=False)

    @property
    def price(self) -> float:
        """$ per step."""
        return self.cluster.price_per_hour / 3600 * self.step_time


def published_costs(cost_files: list[CostFile], model: Model) -> Compute:
    """Unit costs as the tool looks them up, measured at micro-batch 1 and grown by its factors; ``forward``
    is a whole pass. Degrees and depths that it has not are scaled as in the ``exact`` cost model, which
    ``notes`` names. Raises ``PlanError`` where no file has the model's costs.
    """
    files = []
    for file in cost_files:
        entries = [replace(e, forward=tuple(PASSES * value for value in e.forward)) for e in file.entries]
        growth: Growth = {}
        for table in (file.growth, file.growth_hpdc24):
            for name, gpus in (table or {}).items():
                for gpu, kinds in gpus.items():
                    growth.setdefault(name, {}).setdefault(gpu, {}).update(kinds)
        settings: dict[str, Any] = {"collectives": "excluded", "precision": "", "attention": ""}
        files.append(replace(file, entries=tuple(entries), growth=growth or None, **settings))
    found = Compute(files, model, Options())
    if not found.sources:
        known = sorted({entry.model for file in cost_files for entry in file.entries})
        how = f"measure it with 'fasop profile', or use --cost-model exact: {nearest(model.name, known)}"
        raise PlanError(f"no costs for model {model.name}: set 'costs' in the models file, {how}")
    return found


def ranked(
    model: Model, clusters: list[Cluster], costs: Compute, goal: Goal, sharded: bool, every_row: bool
) -> list[Row]:
    """Rows by the goal's objective; with ``every_row`` all of them as the tool sorts them.

    Raises ``PlanError`` where none has the goal's degrees.
    """
    kept = [row for row in search(model, clusters, costs) if row.tp <= goal.max_tp and goal.fits(row)]
    if not kept:
        raise PlanError(goal.no_shape)
    if not goal.everything:
        kept = [row for row in kept if not (row.sharded if sharded else row.plain)[0]]
    if goal.max_step_time is not None:
        kept = [row for row in kept if row.step_time <= goal.max_step_time]
    if every_row:
        return kept
    if goal.objective == "pareto":
        return pareto_front(kept, attrgetter("step_time", "price"))
    return (sorted(kept, key=attrgetter("price")) if goal.objective == "cost" else kept)[: goal.top]


def search(model: Model, clusters: list[Cluster], costs: Compute) -> list[Row]:
    """All rows of some clusters, sorted as the tool sorts them.

    Raises ``PlanError`` for a cluster with other GPU types than the tool's two.
    """
    rows = [row for cluster in clusters for row in _candidates(model, cluster)]
    sums, cost_set = _unit_sums(model, clusters, costs, rows)
    for depth in {row.pp for row in rows}:
        indices = [index for index, row in enumerate(rows) if row.pp == depth]
        _complete(model, [rows[index] for index in indices], sums, cost_set[indices])
    return sorted(rows, key=lambda row: row.step_time)


def plan_of(row: Row, model: Model, costs: Compute, iterations: int, sharded_optimizer: bool) -> Plan:
    """A row as a plan. Stage memory includes the margin that the tool checks with, so that it compares."""
    cluster, (is_oom, _, memory) = row.cluster, row.sharded if sharded_optimizer else row.plain
    notes = dict.fromkeys(note for gpu in cluster.gpus for note in costs.of(gpu, row.tp, row.mbs).notes)
    same = ("placement", "partition", "tp", "dp", "pp", "mbs", "step_time")
    return Plan(
        model=model,
        cluster=cluster,
        cost_model="hpdc24",
        **{name: getattr(row, name) for name in same},
        micro_batches=model.global_batch // (row.dp * row.mbs),
        stage_gpu=tuple((FAST, SLOW)[code] for code in row.stage_type),
        stage_forward=tuple((row.compute / 3).tolist()),
        stage_backward=tuple((2 * row.compute / 3).tolist()),
        p2p=tuple(map(float, row.boundary)),
        dp_allreduce=tuple(row.all_reduce.tolist()),
        embedding_allreduce=row.embedding,
        pipeline_time=float(row.stage_end[0]),
        stage_memory=tuple((memory * (1.0 if sharded_optimizer else MARGIN)).tolist()),
        stage_cap=tuple(row.cap.tolist()),
        is_oom=is_oom,
        price_per_step=row.price,
        train_cost=row.price * iterations,
        options=Options(zero=int(sharded_optimizer), gradient_bytes=2),
        hosts=tuple(cluster.assigned(row.placement)),
        notes=tuple(notes),
    )


def csv_row(row: Row, iterations: int) -> tuple[object, ...]:
    """A row in the published tool's columns (``report.COLUMNS``)."""
    memory = [value for oom, gib, _ in (row.plain, row.sharded) for value in (oom, f"{f32(gib):.4f}")]
    return (
        *(row.mbs, row.tp, row.dp, row.pp, row.cluster.instances(row.placement)),
        *(row.placement.count(FAST), row.placement.count(SLOW), list(row.partition)),
        *(row.step_time, float(row.stage_end[0]), float(row.all_reduce[0]), row.embedding, row.price),
        *(*memory, row.price * iterations),
    )


def placements(cluster: Cluster) -> list[tuple[str, ...]]:
    """The cyclic rotations of [A100…, A10…], or the one placement of a single type. Raises ``PlanError``."""
    names, where = [gpu.name for gpu in cluster.gpus], f"cluster {cluster.name}: cost model hpdc24"
    if len({cluster.size(gpu) for gpu in cluster.gpus}) > 1:
        raise PlanError(f"{where} needs nodes of one size: use --cost-model exact.")
    if others := ", ".join(sorted(set(names) - {FAST, SLOW})):
        raise PlanError(f"{where} knows only {FAST} and {SLOW}, not {others}: use --cost-model exact.")
    nodes = [name for name in (FAST, SLOW) if name in names for _ in range(cluster.nodes[names.index(name)])]
    if len(set(nodes)) == 1:
        return [tuple(nodes)]
    return [tuple(nodes[k:] + nodes[:k]) for k in range(len(nodes))]


def _candidates(model: Model, cluster: Cluster) -> Iterator[Row]:
    placed = placements(cluster)
    types = np.array([[(FAST, SLOW).index(name) for name in placement] for placement in placed])
    gpus = [next((gpu for gpu in cluster.gpus if gpu.name == name), cluster.gpus[0]) for name in (FAST, SLOW)]
    keys = ("inter_bandwidth", "intra_bandwidth", "memory_gib")
    inter, intra, memory = (np.array([getattr(gpu, key) for gpu in gpus]) for key in keys)
    size, count = cluster.size(cluster.gpus[0]), cluster.gpu_count
    degrees = []
    for tp in divisors(min(size, 4)):
        for dp in divisors(count // tp) if count % tp == 0 else ():
            pp = count // (tp * dp)
            if model.global_batch % dp == 0 and pp <= model.layers:
                of = links(types, inter, intra, size, tp, dp)
                embedding = np.zeros(len(placed), dtype=f32)
                if pp > 1 and model.encoder_layers is None:
                    embedding = f32(model.hidden * model.vocab * 16) / of.embedding.astype(f32) / f32(tp)
                degrees.append((tp, dp, pp, of, embedding))
    for k, placement in enumerate(placed):
        for mbs in divisors(model.global_batch):
            for tp, dp, pp, of, embedding in degrees:
                if model.global_batch // dp % mbs == 0:
                    message = f32(mbs * model.seq * model.hidden * 16)
                    yield Row(
                        *(cluster, placement, mbs, tp, dp, pp, of.stage_type[k], memory[of.cap_type[k]]),
                        *(message / of.boundary[k], of.data_parallel[k], float(embedding[k])),
                    )


def _unit_sums(
    model: Model, clusters: list[Cluster], costs: Compute, rows: list[Row]
) -> tuple[np.ndarray, np.ndarray]:
    """sums[c, g, a, b] as ``minmax`` takes them, and the cost set c of each row."""
    gpus = {gpu.name: gpu for cluster in clusters for gpu in cluster.gpus}
    keys = sorted({(row.tp, row.mbs) for row in rows})
    units = len(model.units)
    sums = np.zeros((len(keys), 2, units + 1, units + 1))
    for c, (tp, mbs) in enumerate(keys):
        for g, name in enumerate((FAST, SLOW)):
            if name in gpus:
                cost = costs.of(gpus[name], tp, mbs).forward
                for a in range(units):
                    # From the left, unit after unit: differences of prefix sums round otherwise.
                    sums[c, g, a, a + 1 :] = np.cumsum(cost[a:])
    position = {key: c for c, key in enumerate(keys)}
    return sums, np.array([position[row.tp, row.mbs] for row in rows], dtype=np.int64)


def _complete(model: Model, group: list[Row], sums: np.ndarray, cost_set: np.ndarray) -> None:
    """Partition rows of one pipeline depth, and enter what they take."""
    pp = group[0].pp
    stage_type = np.array([row.stage_type for row in group])
    boundary = np.array([row.boundary for row in group], dtype=np.float64).reshape(len(group), pp - 1)
    tp, dp, mbs = (np.array([getattr(row, key) for row in group]) for key in ("tp", "dp", "mbs"))
    micro_batches = model.global_batch // (dp * mbs)
    if pp == 1:
        partition = np.full((len(group), 1), len(model.units))
        compute = sums[cost_set, stage_type[:, 0], 0, -1][:, None]
        # Without a pipeline the tool stays in float32.
        ends = (compute.astype(f32) * micro_batches[:, None].astype(f32)).astype(np.float64)
    elif model.encoder_layers is None:
        partition, compute = minmax(sums, cost_set, stage_type, incoming(boundary))
        ends = _simulate(compute, boundary, micro_batches)
    else:
        partition, compute, ends = _two_halves(model, stage_type, boundary, micro_batches, sums, cost_set)
    caps = np.array([row.cap for row in group])
    plain, sharded = check_memory(model, partition, tp, dp, mbs, caps)
    all_reduce = _all_reduce(model, group, partition, tp, dp)
    embedding = np.array([row.embedding for row in group], dtype=f32)
    step = (ends.astype(f32) + all_reduce).max(axis=1) + embedding
    for k, row in enumerate(group):
        row.partition, row.step_time = tuple(partition[k].tolist()), float(step[k])
        row.compute, row.stage_end, row.all_reduce = compute[k], ends[k], all_reduce[k]
        both = ((bool(oom[k]), float(gib[k]), stages[k]) for oom, gib, stages in (plain, sharded))
        row.plain, row.sharded = both


def _simulate(compute: np.ndarray, boundary: np.ndarray, micro_batches: np.ndarray) -> np.ndarray:
    ends = np.zeros_like(compute)
    for m in np.unique(micro_batches):
        of = micro_batches == m
        ends[of] = simulate(compute[of], boundary[of, 0], boundary[of, -1], int(m))
    return ends


def _two_halves(
    model: Model,
    stage_type: np.ndarray,
    boundary: np.ndarray,
    micro_batches: np.ndarray,
    sums: np.ndarray,
    cost_set: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Partition, compute and ends of an encoder-decoder model: the best of all splits of the stages.

    As the tool does it, both halves are divided by the encoder's costs and by the boundaries from 0 on.
    """
    rows, pp = stage_type.shape
    assert model.encoder_layers is not None
    half = 1 + model.encoder_layers
    encoder_sums = sums[:, :, : half + 1, : half + 1]
    partitions = []
    for encoder in range(1, min(pp, half)):
        decoder = pp - encoder
        if decoder > LARGEST_HALF:
            continue
        parts = []
        for begin, count in ((0, encoder), (encoder, decoder)):
            types = stage_type[:, begin : begin + count]
            parts.append(minmax(encoder_sums, cost_set, types, incoming(boundary[:, : count - 1]))[0])
        partitions.append(np.concatenate(parts, axis=1))
    splits = len(partitions)
    partition = np.stack(partitions)
    last = np.cumsum(partition, axis=2)
    compute = sums[cost_set[:, None], stage_type, last - partition, last]
    every = _simulate(
        compute.reshape(-1, pp), np.tile(boundary, (splits, 1)), np.tile(micro_batches, splits)
    ).reshape(splits, rows, pp)
    # The first of equals: the smaller encoder.
    best = every[:, :, 0].argmin(axis=0)
    line = np.arange(rows)
    return partition[best, line], compute[best, line], every[best, line]


def _all_reduce(
    model: Model, group: list[Row], partition: np.ndarray, tp: np.ndarray, dp: np.ndarray
) -> np.ndarray:
    """float32 seconds of each stage's gradient all-reduce (K, P): the first stage's parameters and links."""
    units = np.array(list(model.units))
    layers = np.concatenate([[0], np.cumsum(units == "T")])[partition[:, 0]]
    params = np.zeros(len(group), dtype=f32)
    for degree in np.unique(tp):
        # Added up in float32, the embedding first, then layer by layer.
        layer = f32((12 * model.hidden**2 + LAYER_EXTRA) / degree)
        steps = np.full(model.layers + 1, layer, dtype=f32)
        steps[0] = f32(model.hidden * model.vocab)
        of = tp == degree
        params[of] = np.add.accumulate(steps)[layers[of]]
    bandwidth = np.array([row.reduce_bandwidth for row in group]).astype(f32)
    bits = (2 * (dp - 1)).astype(f32) * params * f32(16)
    return bits[:, None] / (dp.astype(f32)[:, None] * bandwidth)
