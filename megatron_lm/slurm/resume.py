"""Continues an earlier run from its last checkpoint, on the same number of nodes or without those that were
lost.

Without some nodes, FASOP plans what is left: it is given the model, the remaining nodes by their kind of
GPU, and what each part of the model costs on them. Tensor parallelism, micro-batch and global batch stay, so
that the training goes on as it would have. Costs are operations over a share of the GPU's peak speed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from chakra_et.cost import gpus as gpu_table
from megatron_lm import checkpoints, planner
from megatron_lm.errors import RunError
from megatron_lm.logs import LOCAL, gpus, records, runs
from megatron_lm.logs.runs import Node, Run
from megatron_lm.settings import PREFIX, Settings, conf

CPU = "CPU"
FRACTION = 0.4  # of the peak, as large matrix products reach in training
USABLE = 0.97  # of a GPU's memory
HOST_MEMORY = 1024.0  # GiB: what fits into a node without GPUs is not known here
# bit/s, as of a common cluster; the network of this one is not known
NETWORK = {"inter_bandwidth": 100e9, "intra_bandwidth": 400e9}


def settings_of(job: str, without: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The settings that continue the run of ``job``, with those ``given`` now. Raises ``RunError``."""
    run = runs.find((job,), conf.log_dir())
    values = runs.submitted(run)
    if not values:
        raise RunError(
            f"job {job}: its settings were not kept; submit it anew with LOAD set to its last checkpoint."
        )
    for each in run.jobs:
        known = runs.state_of(run, each)
        if known.word in runs.ALIVE:
            raise RunError(f"job {each} is still {known.word}: cancel it before you continue its run.")
    values |= given
    print(f"job {job}: continuing from {_checkpoint(job, values)}", file=sys.stderr)
    values["LOAD"] = values["SAVE"]
    return values | (_planned(run, values, without) if without else {})


def _checkpoint(job: str, values: Mapping[str, str]) -> Path:
    """The checkpoint to continue from. Raises ``RunError`` if there is none, or nothing left to do."""
    if not values["SAVE"]:
        raise RunError(
            f"job {job} wrote no checkpoints, as SAVE was empty: there is nothing to continue from."
        )
    folder, damaged = checkpoints.newest_whole(Path(values["SAVE"]))
    for sentence in damaged:
        print(f"job {job}: {sentence}", file=sys.stderr)
    if folder is None:
        raise RunError(f"job {job}: there is no good checkpoint in {values['SAVE']} to continue from.")
    try:
        done = int(checkpoints.read_meta(folder)["iteration"])
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{folder}: can't be read ({error}); set LOAD to another checkpoint.") from None
    if done >= int(values["TRAIN_ITERS"]):
        raise RunError(
            f"job {job} has done {done} iterations of TRAIN_ITERS={values['TRAIN_ITERS']}: to train on, "
            "give a larger TRAIN_ITERS."
        )
    return folder


def _planned(run: Run, values: Mapping[str, str], without: Sequence[str]) -> dict[str, str]:
    """What FASOP's plan of the remaining nodes changes. Raises ``RunError``.

    If all of them can't share the work, one after the other is left idle.
    """
    names = [node.name for node in run.nodes]
    if run.jobs[0].startswith(LOCAL):
        raise RunError("--without: a run on this machine has no nodes to leave out.")
    if not set(without) <= set(names):
        unknown = ",".join(name for name in without if name not in names)
        raise RunError(f"--without {unknown}: the run's nodes are {', '.join(names)}.")
    left = [node for node in run.nodes if node.name not in without]
    if not left:
        raise RunError("--without names all nodes of the run: none is left.")
    folder = run.log_dir / run.jobs[0]
    refusals: list[RunError] = []
    for count in range(len(left), 0, -1):
        by_kind = _kinds(left[:count])
        try:
            plan = planner.best(_inputs(folder, values, by_kind), folder)
        except RunError as error:
            refusals.append(error)
            continue
        # The nodes in the order of the plan's kinds.
        ordered = [by_kind[kind].pop(0) for kind in plan.placement]
        idle = ", ".join(node.name for node in run.nodes if node not in ordered)
        layers = "-".join(map(str, plan.layers))
        print(
            f"FASOP's plan for {', '.join(node.name for node in ordered)} (without {idle}): stages of "
            f"{layers} layers, {plan.dp} data-parallel ranks; in {folder / planner.PLANS}",
            file=sys.stderr,
        )
        return {
            "NNODES": str(count),
            "WORLD_SIZE": str(count * int(values["NPROC_PER_NODE"])),
            "DP_SIZE": str(plan.dp),
            "PIPELINE_MP_SIZE": str(plan.pp),
            "PARTITION": layers,
            "VIRTUAL_STAGES": "1",
            "NODELIST": ",".join(node.name for node in ordered),
            **_jobs(run, values, ordered),
        }
    raise refusals[0]


def _kinds(nodes: Sequence[Node]) -> dict[str, list[Node]]:
    """Kind of GPU → the nodes that have it, in the order of their ranks."""
    found: dict[str, list[Node]] = {}
    for node in nodes:
        gpu = _gpu(node)
        found.setdefault(gpu.name if gpu else CPU, []).append(node)
    return found


def _gpu(node: Node) -> gpus.Gpu | None:
    samples = gpus.samples(node.read("gpu"), 1)
    return next((gpu for sample in samples.values() for gpu in sample), None)


def _inputs(folder: Path, values: Mapping[str, str], by_kind: Mapping[str, list[Node]]) -> list[str]:
    """Write FASOP's input files into ``folder`` and return the arguments of ``python -m fasop plan``."""
    settings = conf.read_settings({PREFIX + name: value for name, value in values.items()})
    size, kinds, entries = settings.size, {}, []
    for kind, nodes in by_kind.items():
        gpu = _gpu(nodes[0])
        memory = gpu.total / 1024 * USABLE if gpu and gpu.total else HOST_MEMORY
        kinds[kind] = {"nodes": len(nodes), "memory_gib": memory, "price_per_hour": 0.0, **NETWORK}
        # Seconds per micro-batch; the embedding is a look-up, but must cost something.
        work = [2 * size.hidden, *[size.layer_operations] * size.layers, size.head_operations]
        rate = speed(kind)
        forward = [_per_micro_batch(settings, each) / rate for each in work]
        entries.append({
            "model": settings.model, "gpu": kind, "tp": settings.tensor_mp_size,
            "mbs": settings.micro_batch_size, "forward": forward, "backward": [2 * each for each in forward],
        })  # fmt: skip
    cluster = {"gpus_per_node": settings.nproc_per_node, "gpus": kinds}
    model = planner.model_of(size, settings.global_batch_size)
    source = "Operations over speed, by megatron_lm/slurm/resume.py."
    words = planner.write_inputs(folder, settings.model, model, cluster, source, entries)
    words += ["--tp", str(settings.tensor_mp_size), "--max-tp", str(settings.tensor_mp_size)]
    words += ["--mbs", str(settings.micro_batch_size), "--recompute", settings.recompute]
    # These costs are rough, and the network is not known: no reason to leave a node idle.
    words += ["--attention", settings.attention, "--no-idle"]
    flags = {
        "--sharded-optimizer": settings.sharded_optimizer,
        "--sequence-parallel": settings.sequence_parallel,
        "--precision=fp32": settings.precision == "fp32",
    }
    return words + [flag for flag, wanted in flags.items() if wanted]


def speed(kind: str) -> float:
    """Operations per second of one rank on this kind of GPU."""
    known = gpu_table.by_driver(kind)
    if known is None:
        print(f"note: no speed of {kind} is known; it is taken to be equal to an A10", file=sys.stderr)
    return FRACTION * gpu_table.gpu(known or "A10").peak("half")


def _per_micro_batch(settings: Settings, per_token: float) -> float:
    return per_token * settings.micro_batch_size * settings.size.sequence / settings.tensor_mp_size


def _jobs(run: Run, values: Mapping[str, str], ordered: list[Node]) -> dict[str, str]:
    """How the two jobs of a heterogeneous run share the nodes. Raises ``RunError`` if they can't."""
    if values["HOMOGENEOUS_CLUSTER"] == "true":
        return {}
    # MASTER or SLAVE: the job, or the component of one het job, that each node was in.
    parts = []
    for node in ordered:
        rank = int(records.settings(node.read("out")).get("NODE_RANK", "0"))
        first = node.job == run.jobs[0] if len(run.jobs) > 1 else rank < int(values["MASTER_NNODES"])
        parts.append("MASTER" if first else "SLAVE")
    order = list(dict.fromkeys(parts))
    if parts != sorted(parts, key=order.index):
        raise RunError(
            "FASOP's plan alternates the nodes of both jobs "
            f"({', '.join(node.name for node in ordered)}): submit it as one job, with "
            "HOMOGENEOUS_CLUSTER=true and a SLURM_QUEUE that has all of them."
        )
    if len(order) == 1:
        queue, gres = (values[f"{order[0]}_{name}"] for name in ("QUEUE", "GRES"))
        return {"HOMOGENEOUS_CLUSTER": "true", "SLURM_QUEUE": queue, "GRES": gres}
    found = {"MASTER_NNODES": str(parts.count(order[0]))}
    for new, old in zip(("MASTER", "SLAVE"), order, strict=True):
        found |= {f"{new}_{name}": values[f"{old}_{name}"] for name in ("QUEUE", "GRES")}
    return found
