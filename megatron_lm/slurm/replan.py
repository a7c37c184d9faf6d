"""FASOP's inputs for the nodes that are left of a run: kinds of GPU, costs, network.

Costs are operations over speed. The speed of a kind of GPU is measured in the run's own logs if they have
timers (PROFILE=true), else it is taken from the table of peak speeds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chakra_et.cost import gpus as gpu_table
from megatron_lm import planner
from megatron_lm.logs import gpus, records
from megatron_lm.logs.runs import Node
from megatron_lm.settings import PREFIX, Settings
from megatron_lm.settings.environment import read_settings

CPU = "CPU"
FRACTION = 0.4  # of the peak, as large matrix products reach in training
USABLE = 0.97  # of a GPU's memory
HOST_MEMORY = 1024.0  # GiB: what fits into a node without GPUs is not known here
BETWEEN, WITHIN = 100e9, 400e9  # bit/s, as of a common cluster; the network of this one is not known


def kinds(nodes: Sequence[Node]) -> dict[str, list[Node]]:
    """Kind of GPU → the nodes that have it, in the order of their ranks."""
    found: dict[str, list[Node]] = {}
    for node in nodes:
        gpu = _gpu(node)
        found.setdefault(gpu.name if gpu else CPU, []).append(node)
    return found


def write_inputs(folder: Path, values: Mapping[str, str], nodes: Sequence[Node]) -> list[str]:
    """Write FASOP's input files into ``folder`` and return the arguments of ``python -m fasop plan``."""
    settings = read_settings({PREFIX + name: value for name, value in values.items()})
    by_kind = kinds(nodes)
    cluster = {"gpus_per_node": settings.nproc_per_node, "gpus": {k: _kind(k, v) for k, v in by_kind.items()}}
    entries = [_costs(settings, kind, speed(settings, kind, of_kind)) for kind, of_kind in by_kind.items()]
    model = planner.model_of(settings.size, settings.global_batch_size)
    source = "Operations over speed, by megatron_lm/slurm/replan.py."
    words = planner.write_inputs(folder, settings.model, model, cluster, source, entries)
    words += ["--tp", str(settings.tensor_mp_size), "--max-tp", str(settings.tensor_mp_size)]
    words += ["--mbs", str(settings.micro_batch_size), "--recompute", settings.recompute]
    words += ["--attention", settings.attention]
    # These costs are rough, and the network is not known: no reason to leave a node idle.
    words += ["--no-idle"]
    flags = {
        "--sharded-optimizer": settings.sharded_optimizer,
        "--sequence-parallel": settings.sequence_parallel,
        "--precision=fp32": settings.precision == "fp32",
    }
    return words + [flag for flag, wanted in flags.items() if wanted]


def speed(settings: Settings, kind: str, nodes: Sequence[Node]) -> float:
    """Operations per second of one rank on this kind of GPU."""
    measured = [rate for node in nodes for rate in _measured(settings, node)]
    if measured:
        return statistics.median(measured)
    known = gpu_table.by_driver(kind)
    if known is None:
        print(f"note: no speed of {kind} is known; it is taken to be equal to an A10", file=sys.stderr)
    return FRACTION * gpu_table.gpu(known or "A10").peak("half")


def in_order(placement: Sequence[str], nodes: Sequence[Node]) -> list[Node]:
    """The nodes in the order of a plan's kinds."""
    left = {kind: list(of_kind) for kind, of_kind in kinds(nodes).items()}
    return [left[kind].pop(0) for kind in placement]


def _measured(settings: Settings, node: Node) -> list[float]:
    """Operations per second of each rank of a node, from its forward passes; empty without timers."""
    if settings.virtual_stages > 1:
        return []
    rates = []
    for (rank, name), lists in records.timers(node.read("out")).items():
        stage = rank // (settings.tensor_mp_size * settings.dp_size)
        if name == "forward-compute" and len(lists.start) and stage < settings.pipeline_mp_size:
            head = settings.size.head_operations if stage == settings.pipeline_mp_size - 1 else 0
            work = settings.layers[stage] * settings.size.layer_operations + head
            seconds = statistics.median((lists.end - lists.start).tolist())
            if work and seconds > 0:
                rates.append(_per_micro_batch(settings, work) / seconds)
    return rates


def _costs(settings: Settings, kind: str, rate: float) -> dict[str, Any]:
    """A cost entry of FASOP: seconds per micro-batch of the embedding, each layer and the head."""
    # The embedding is a look-up; it must cost something.
    work = [2 * settings.size.hidden, settings.size.layer_operations, settings.size.head_operations]
    embedding, layer, head = (_per_micro_batch(settings, each) / rate for each in work)
    forward = [embedding, *[layer] * settings.size.layers, head]
    sizes = {"tp": settings.tensor_mp_size, "mbs": settings.micro_batch_size}
    times = {"forward": forward, "backward": [2 * each for each in forward]}
    return {"model": settings.model, "gpu": kind, **sizes, **times}


def _per_micro_batch(settings: Settings, per_token: float) -> float:
    return per_token * settings.micro_batch_size * settings.size.sequence / settings.tensor_mp_size


def _kind(kind: str, nodes: Sequence[Node]) -> dict[str, float]:
    gpu = _gpu(nodes[0])
    memory = gpu.total / 1024 * USABLE if gpu and gpu.total else HOST_MEMORY
    network = {"inter_bandwidth": BETWEEN, "intra_bandwidth": WITHIN}
    return {"nodes": len(nodes), "memory_gib": memory, "price_per_hour": 0.0, **network}


def _gpu(node: Node) -> gpus.Gpu | None:
    samples = gpus.samples(node.read("gpu"), 1)
    return next((gpu for sample in samples.values() for gpu in sample), None)
