#!/usr/bin/env python3
"""How well the planner predicts runs that others have measured and published.

    python benchmarks/planner_accuracy.py
    python benchmarks/planner_accuracy.py --rows                  (every plan, not only the means)
    python benchmarks/planner_accuracy.py --truth DIR             (other published runs, by what is shipped)
    python benchmarks/planner_accuracy.py --plans FILE --vtrain FILE
    python benchmarks/planner_accuracy.py --rings 0.25 --rows     (if gradients of some had less bandwidth)
    python benchmarks/planner_accuracy.py --update                (writes the table into fasop/README.md)

Plans of OPT-350M on mixed GPUs and on GH200 (Sailor) are predicted from the layer times, layer sizes and
network curves that were published with them; plans of GPT on A100 (vTrain) from the GPU's datasheet alone.

What was chosen with these plans in sight: ``MEMORY_SHARE`` in fasop/exact/recipes.py; of one GH200 plan, left
out of the means, the share of the network's published bandwidth that its gradient
reduction reached, and the memory that nothing else explains. Five vTrain rows that an earlier version was
calibrated on stay left out. Runs of the tables in --truth are judged as in benchmarks/recipe_accuracy.py.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from benchmarks import recipe_accuracy
from benchmarks.summary import put
from chakra_et import cli, text
from fasop.exact.estimate import Estimate, estimate
from fasop.inputs.clusters import Cluster, Gpu, Link
from fasop.inputs.costs import CostFile, Entry, MeasuredOn
from fasop.inputs.models import Model
from fasop.plans.layout import Layout, LayoutStage, Replica, uniform
from fasop.plans.options import Options
from fasop.plans.shapes import Part, Shape

DATA = ROOT.parent / "shared" / "data" / "planner"
OPT = Model("opt-350m", 1024, 2048, 24, 50304, 16, 1, tied=False)
# Megatron-DeepSpeed in fp32; a message goes out in shares and is gathered where it arrives.
SAILOR = Options(precision="fp32", engine="deepspeed", scatter_gather=True)
SAILOR_CALIBRATION = "gh200_N8_D4"
# That plan's gradient reduction took 46.0 ms; over the published bandwidth it would take 14.6 ms.
NETWORK_SHARE = {"GH-96": 0.32}
# Launches decide where time grows by less than this part of what the micro-batch grows.
LAUNCHES_BIND = 0.5
# GiB of a GPU's memory that hold neither parameters nor activations: what that plan had beyond them.
RESERVED_GIB = 4.38
# Megatron-DeepSpeed (data/README.md of VIA-Research/vTrain); fp16 and full recomputation are assumed.
VTRAIN = Options(recompute="full", gradient_bytes=2, engine="deepspeed", scatter_gather=True)
VTRAIN_CALIBRATION = (0, 27, 54, 81, 108)  # rows of the published file
VTRAIN_ROWS = 109
COLUMNS = {
    **{"num_gpus": "# GPUs", "gbs": "global batch", "mbs": "micro batch", "hidden": "hidden size"},
    **{"heads": "attention heads", "layers": "# layers", "seq": "sequence length"},
    **{"tp": "tensor parallelism", "dp": "data parallelism", "pp": "pipeline parallelism"},
    "step_ms": "iteration time (ms)",
}
SIZES = {(3072, 30): 3.6, (6144, 40): 18.4, (8192, 48): 39.1, (12288, 96): 175.0}  # of vTrain's models
# DGX A100: 4 × 200 Gbit/s for the 8 GPUs of a node.
A100 = Gpu("A100-80GB", 80, 0, 800e9, 1840e9, gpu_bandwidth=200e9)


@dataclass
class Config:
    plans: Path = field(
        default=DATA / "sailor" / "measured_plans.json",
        metadata={"help": "plans of OPT-350M with their times"},
    )
    vtrain: Path = field(
        default=DATA / "vtrain" / "ground_truth_multi.csv",
        metadata={"help": "plans on A100 with their times"},
    )
    rows: bool = field(default=False, metadata={"help": "print every plan"})
    truth: Path = field(
        default=recipe_accuracy.GIVEN,
        metadata={"help": "folder of vtrain_single.csv, training_runs.csv and mpt_fsdp.csv"},
    )
    rings: float = field(
        default=1.0,
        metadata={
            "help": "for experiments only: the share of an A100 node's bandwidth that gradients get when "
            "several rings, each of several GPUs, leave the node"
        },
    )
    update: bool = field(default=False, metadata={"help": "write the table into fasop/README.md"})


class Row(NamedTuple):
    """group: a line of the table; batch: sequences per step, of which plans of a group are ranked against
    each other; memory: GiB measured, 0 for not.
    """

    name: str
    group: str
    batch: int
    measured: float
    predicted: Estimate
    memory: float = 0.0
    calibrated: bool = False
    more: float = 0.0  # seconds that a question adds

    @property
    def step(self) -> float:
        return self.predicted.step + self.more

    @property
    def error(self) -> float:
        return self.step / self.measured - 1

    @property
    def memory_error(self) -> float:
        return self.predicted.memory / self.memory - 1


class Published(NamedTuple):
    """What was published with the Sailor plans: layer times, layer sizes, and bandwidths."""

    times: dict[str, Any]
    sizes: dict[str, Any]
    between: dict[str, Any]
    within: dict[str, Any]


def sailor(path: Path) -> Iterator[Row]:
    names = ("layer_times_opt350", "layer_sizes_opt350", "network_between_nodes", "network_within_nodes")
    published = Published(*(json.loads((DATA / "sailor" / f"{name}.json").read_text()) for name in names))
    for plan in json.loads(path.read_text()):
        cluster = sailor_cluster(plan, published)
        costs = sailor_costs(cluster, published)
        layout = sailor_layout(plan, cluster)
        predicted = estimate(layout, [costs], SAILOR)
        group = plan["name"].split("_")[0]
        memory = plan.get("max_memory_bytes", 0) / 2**30
        chosen = plan["name"] == SAILOR_CALIBRATION
        yield Row(plan["name"], group, plan["global_batch"], plan["step_s"], predicted, memory, chosen)


def sailor_cluster(plan: dict[str, Any], published: Published) -> Cluster:
    nodes = [name for stage in plan["gpus"] for name in stage]
    counts = [count for stage in plan["gpus_per_node"] for count in stage]
    size = dict(zip(nodes, counts, strict=True))

    def link(one: str, two: str) -> Link:
        n = min(size[one], size[two])
        found = published.between.get(f"{one}:{n}>{two}:{n}") or published.between[f"{two}:{n}>{one}:{n}"]
        (a, b, c), peak = found
        share = min(NETWORK_SHARE.get(name, 1.0) for name in (one, two))
        sizes = [2.0**k for k in range(-4, 13)]  # MB
        curve = [1e9 * (a * math.log2(mb) ** 2 + b * math.log2(mb) + c) for mb in sizes]
        rates = [8 * share * min(max(rate, 0.01 * peak), peak) for rate in curve]
        points = tuple((mb * 1e6, rate) for mb, rate in zip(sizes, rates, strict=True))
        return Link((one, two), rates[-1], points=points)

    def gpu(name: str) -> Gpu:
        one = 8 * published.between[f"{name}:1>{name}:1"][1]
        inside = published.within[name].get(str(size[name]), [[], 1e11])[1] * 8
        own = {"gpus_per_node": size[name], "gpu_bandwidth": one, "reserved_gib": RESERVED_GIB}
        return Gpu(name, 96, 0, one, inside, **own)

    types = sorted(size)
    links = tuple(link(one, two) for at, one in enumerate(types) for two in types[at:])
    return Cluster(plan["name"], 0, tuple(map(gpu, types)), tuple(nodes.count(name) for name in types), links)


def sailor_costs(cluster: Cluster, published: Published) -> CostFile:
    entries = []
    for gpu in cluster.gpus:
        for mbs, by_tp in published.times[gpu.name].items():
            for tp, layers in by_tp.items():
                forward, backward, update = zip(*layers, strict=True)
                held: tuple[float, ...] | None = None
                kept: tuple[float, ...] | None = None
                if tp in published.sizes:
                    sizes = published.sizes[tp]
                    held = tuple(size["params_floats"] for size in sizes)
                    kept = tuple(4.0 * size["act_mem_floats"] for size in sizes)
                    # Timed once for a model of embedding, one layer and head.
                    timed = held[0] + held[1] + held[-1]
                    update = tuple(update[0] * size / timed for size in held)
                entry = (OPT.name, gpu.name, int(tp), int(mbs), forward, backward, update, held, kept)
                entries.append(Entry(*entry))
    entries = [replace(entry, kernels=kernels_alone(entry, entries)) for entry in entries]
    nodes = {gpu.name: MeasuredOn(gpu.intra_bandwidth) for gpu in cluster.gpus}
    return CostFile(1, "", {OPT.name: OPT}, tuple(entries), collectives="included", nodes=nodes)


def kernels_alone(entry: Entry, entries: list[Entry]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds that a unit's kernels need at least: where the next larger micro-batch takes hardly longer,
    launches decide, and the kernels of this one need at most their share of the larger one's time.
    """
    alike = [
        each for each in entries if (each.gpu, each.tp) == (entry.gpu, entry.tp) and each.mbs > entry.mbs
    ]
    next_one = min(alike, key=lambda each: each.mbs, default=entry)
    share, found = entry.mbs / next_one.mbs, []
    pairs = (entry.forward, next_one.forward), (entry.backward or (), next_one.backward or ())
    for now, then in (np.array(pair) for pair in pairs):
        bound = then - now < LAUNCHES_BIND * now * (1 / share - 1)
        found.append(tuple(np.where(bound, np.minimum(now, then * share), now).tolist()))
    return found[0], found[1]


def sailor_layout(plan: dict[str, Any], cluster: Cluster) -> Layout:
    stages, node = [], 0
    for units, names, degrees in zip(plan["layers"], plan["gpus"], plan["tp"], strict=True):
        replicas = []
        for name, tp in zip(names, degrees, strict=True):
            replicas.append(Replica((Part(node, name, tp),), plan["micro_batch"]))
            node += 1
        stages.append(LayoutStage(units, tuple(replicas)))
    micro_batches = plan["global_batch"] // (plan["micro_batch"] * max(plan["dp"]))
    return Layout(OPT, cluster, tuple(stages), micro_batches)


def vtrain_rows(path: Path) -> list[dict[str, float]]:
    """Rows of one of vTrain's files, with ``COLUMNS``. Ends with a sentence for another file."""
    with path.open(encoding="utf-8-sig") as handle:
        rows = [{key.strip(): value for key, value in row.items() if key} for row in csv.DictReader(handle)]
    found = []
    for number, row in enumerate(rows, 2):
        own: dict[str, float] = {}
        for name, called in COLUMNS.items():
            if name not in row and called not in row:
                sys.exit(f"{path}: no column {name!r} or {called!r} in it: give one of vTrain's files.")
            try:
                own[name] = float(row.get(name) or row.get(called) or "")
            except ValueError:
                sys.exit(f"{path}, line {number}: column {name!r} holds no number.")
        found.append(own)
    return found


def vtrain_layout(n: dict[str, float]) -> Layout:
    tp, dp, pp, mbs, layers = (int(n[key]) for key in ("tp", "dp", "pp", "mbs", "layers"))
    heads, batch = int(n["heads"]), int(n["gbs"])
    model = Model("gpt", int(n["hidden"]), int(n["seq"]), layers, 50257, heads, batch)
    nodes = max(int(n["num_gpus"]) // 8, 1)
    cluster = Cluster("a100", 8, (A100,), (nodes,))
    partition = [layers // pp + (stage < layers % pp) for stage in range(pp)]
    partition[0] += 1
    partition[-1] += 1
    shape = Shape(tp, dp, pp, mbs)
    return uniform(model, cluster, (A100.name,) * nodes, shape, tuple(partition), "full")


def vtrain(path: Path, rings: float) -> Iterator[Row]:
    rows = vtrain_rows(path)
    chosen = VTRAIN_CALIBRATION if len(rows) == VTRAIN_ROWS else ()
    for index, n in enumerate(rows):
        tp, dp, pp, mbs = (int(n[key]) for key in ("tp", "dp", "pp", "mbs"))
        layout = vtrain_layout(n)
        billion = SIZES.get((layout.model.hidden, layout.model.layers))
        group = f"{billion:g}B" if billion else f"hidden {layout.model.hidden}"
        name = f"{group} tp {tp}, dp {dp}, pp {pp}, mbs {mbs}"
        predicted = estimate(layout, [], VTRAIN)
        more = 0.0
        if 1 < min(8 // tp, dp) < dp and tp > 1:
            more = max(stage.reduction for stage in predicted.stages) * (1 / rings - 1)
        measured = n["step_ms"] / 1e3
        yield Row(name, group, layout.model.global_batch, measured, predicted, 0.0, index in chosen, more)


def mean(errors: list[float]) -> str:
    return f"{np.mean(np.abs(errors)):.1%}" if errors else "–"


def summary(label: str, rows: list[Row], ranked: bool) -> list[str]:
    """A line of the table: the mean over the plans that nothing was calibrated on."""
    errors = [row.error for row in rows if not row.calibrated]
    memory = [row.memory_error for row in rows if row.memory and not row.calibrated]
    worst = max(errors, key=abs, default=0.0)
    first = ""
    if ranked:
        first = f"{max(first_over_best(rows, batch) for batch in {row.batch for row in rows}):+.1%}"
    return [label, str(len(errors)), mean(errors), f"{worst:+.1%}", mean(memory), first]


def first_over_best(rows: list[Row], batch: int) -> float:
    """By how much the plan that is predicted to be the fastest is slower than the fastest."""
    same = [row for row in rows if row.batch == batch]
    chosen = min(same, key=lambda row: row.step)
    return chosen.measured / min(row.measured for row in same) - 1


def table(sets: dict[str, list[Row]]) -> list[str]:
    head = ["plans", "predicted", "mean error", "worst", "memory", "first plan's time over the best's"]
    lines = [head, ["---"] * len(head)]
    for label, rows in sets.items():
        groups = list(dict.fromkeys(row.group for row in rows))
        if len(groups) > 1:
            lines.append(summary(f"{label}, all", rows, False))
        for group in groups:
            lines.append(summary(f"{label}, {group}", [row for row in rows if row.group == group], True))
    return ["| " + " | ".join(line) + " |" for line in lines]


def every(rows: list[Row]) -> list[str]:
    head = ["plan", "measured s", "predicted s", "error", "memory GiB", "predicted", "error", ""]
    lines = [head]
    for row in rows:
        memory = ["", "", ""]
        if row.memory:
            memory = [f"{row.memory:.2f}", f"{row.predicted.memory:.2f}", f"{row.memory_error:+.1%}"]
        times = [f"{row.measured:.3f}", f"{row.step:.3f}", f"{row.error:+.1%}"]
        lines.append([row.name, *times, *memory, "calibrated" if row.calibrated else ""])
    return text.table(lines, right=set(range(1, 7)))


def main() -> int:
    config = cli.parse(Config, description="Predict published measurements.")
    for path in (config.plans, config.vtrain):
        if not path.exists():
            print(f"{path}: no such file: give --plans and --vtrain, or put the data beside the checkout.")
            return 1
    measured = list(sailor(config.plans))
    sets = {
        "OPT-350M": [row for row in measured if row.group != "mixed"],
        "OPT-350M, RTX and Titan": [row for row in measured if row.group == "mixed"],
        "GPT on A100": list(vtrain(config.vtrain, config.rings)),
    }
    sets = {label: rows for label, rows in sets.items() if rows}
    if config.rows:
        print("\n".join([*every([row for rows in sets.values() for row in rows]), ""]))
    lines = table(sets)
    print("\n".join(lines))
    if config.update and config.rings == 1:
        put("measured", lines, ROOT / "fasop" / "README.md")
    print(flush=True)
    return recipe_accuracy.judge(config.truth, config.rows)


if __name__ == "__main__":
    sys.exit(main())
