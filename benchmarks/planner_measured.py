#!/usr/bin/env python3
"""Plans of GPT-2 on one GPU against the steps of whole models on it, which ``scripts/gpu_check.sh`` measured.

    python benchmarks/planner_measured.py
    python benchmarks/planner_measured.py --update        (writes the table into docs/HOW_TRUE.md)

Steps are those of a CUDA graph, so that no host is in them; planned by the layer costs that ``fasop profile``
measured on the same GPU. Memory is what the whole process took.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.summary import put
from chakra_et import cli
from fasop.inputs.clusters import Cluster, Gpu
from fasop.inputs.costs import read_costs
from fasop.plans.options import Options
from fasop.plans.shapes import Shape
from fasop.search.planner import Planner

GPU = Gpu("H200", 139.8, 0, 1e9, 1e9)
OPTIONS = Options(attention="flash", unfused=("loss",), cuda_graphs=True)


@dataclass
class Config:
    folder: Path = field(
        default=ROOT / "benchmarks" / "data" / "h200",
        metadata={"help": "with planner_costs.json and planner_steps.csv"},
    )
    update: bool = field(default=False, metadata={"help": "write the table into docs/HOW_TRUE.md"})


def errors(folder: Path) -> list[tuple[str, int, float, float, float, float]]:
    """By model and micro-batch: the step in ms and the memory in GiB, each as measured and as planned."""
    costs, found = read_costs(folder / "planner_costs.json"), []
    on = Cluster("here", 1, (GPU,), (1,))
    for row in csv.DictReader((folder / "planner_steps.csv").read_text().splitlines()):
        mbs, layers = int(row["mbs"]), int(row["layers"])
        model = replace(costs.models[row["model"]], layers=layers, global_batch=mbs)
        planner = Planner(model, on, [costs], OPTIONS)
        plan = planner.estimate(Shape(1, 1, 1, mbs), (GPU.name,), (layers + 2,))
        measured = float(row["graph_ms"]), float(row["gib"])
        found.append((model.name, mbs, measured[0], plan.step_time * 1e3, measured[1], plan.stage_memory[0]))
    return found


def main() -> int:
    config = cli.parse(Config, description=__doc__.splitlines()[0])
    head = ["model", "micro-batch", "step, ms", "planned", "error", "memory, GiB", "planned", "error"]
    lines, off = [head, ["---"] * 8], []
    for name, mbs, *values in errors(config.folder):
        pairs = [(values[at], values[at + 1], values[at + 1] / values[at] - 1) for at in (0, 2)]
        shown = [word for a, b, c in pairs for word in (f"{a:.1f}", f"{b:.1f}", f"{c:+.1%}")]
        lines.append([name, str(mbs), *shown])
        off.append([abs(error) for *_, error in pairs])
    of_step, of_memory = map(mean, zip(*off, strict=True))
    lines.append(["mean", "", "", "", f"{of_step:.1%}", "", "", f"{of_memory:.1%}"])
    text = [f"| {' | '.join(line)} |" for line in lines]
    print("\n".join(text))
    if config.update:
        put("h200 plans", text, ROOT / "docs" / "HOW_TRUE.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
