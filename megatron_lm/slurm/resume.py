"""Continues an earlier run from its last checkpoint, on the same number of nodes or without those that were
lost.

Without some nodes, FASOP plans what is left: it is given the model, the remaining nodes by their kind of
GPU, and what each part of the model costs on them (``replan``). Tensor parallelism, micro-batch and global
batch stay, so that the training goes on as it would have.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fasop.plans.plan import Plan
from megatron_lm import checkpoints, planner
from megatron_lm.errors import RunError
from megatron_lm.logs import LOCAL, records, runs
from megatron_lm.logs.runs import Node, Run
from megatron_lm.settings import conf
from megatron_lm.slurm import replan


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
    folder = _checkpoint(job, values)
    print(f"job {job}: continuing from {folder}", file=sys.stderr)
    values = {**values, "LOAD": values["SAVE"]}
    if not without:
        return values
    left = _left(run, without)
    return {**values, **_planned(run, values, left)}


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


def _left(run: Run, without: Sequence[str]) -> list[Node]:
    """The nodes of the run but these. Raises ``RunError``."""
    names = [node.name for node in run.nodes]
    unknown = [name for name in without if name not in names]
    if run.jobs[0].startswith(LOCAL):
        raise RunError("--without: a run on this machine has no nodes to leave out.")
    if unknown:
        raise RunError(f"--without {','.join(unknown)}: the run's nodes are {', '.join(names)}.")
    left = [node for node in run.nodes if node.name not in without]
    if not left:
        raise RunError("--without names all nodes of the run: none is left.")
    return left


def _planned(run: Run, values: Mapping[str, str], left: list[Node]) -> dict[str, str]:
    """What FASOP's plan of the remaining nodes changes. Raises ``RunError``.

    If all of them can't share the work, one after the other is left idle.
    """
    folder = run.log_dir / run.jobs[0]
    refusal: RunError | None = None
    for count in range(len(left), 0, -1):
        nodes = left[:count]
        try:
            plan = planner.best(replan.write_inputs(folder, values, nodes), folder)
        except RunError as error:
            refusal = refusal or error
            continue
        ordered = replan.in_order(plan.placement, nodes)
        _report(run, plan, ordered)
        return {
            "NNODES": str(count),
            "WORLD_SIZE": str(count * int(values["NPROC_PER_NODE"])),
            "DP_SIZE": str(plan.dp),
            "PIPELINE_MP_SIZE": str(plan.pp),
            "PARTITION": "-".join(map(str, plan.layers)),
            "VIRTUAL_STAGES": "1",
            "NODELIST": ",".join(node.name for node in ordered),
            **_jobs(run, values, ordered),
        }
    raise refusal or RunError("no node is left.")


def _report(run: Run, plan: Plan, ordered: list[Node]) -> None:
    idle = ", ".join(node.name for node in run.nodes if node not in ordered)
    names = ", ".join(node.name for node in ordered)
    print(
        f"FASOP's plan for {names} (without {idle}): stages of {'-'.join(map(str, plan.layers))} layers, "
        f"{plan.dp} data-parallel ranks; in {run.log_dir / run.jobs[0] / planner.PLANS}",
        file=sys.stderr,
    )


def _jobs(run: Run, values: Mapping[str, str], ordered: list[Node]) -> dict[str, str]:
    """How the two jobs of a heterogeneous run share the nodes. Raises ``RunError`` if they can't."""
    if values["HOMOGENEOUS_CLUSTER"] == "true":
        return {}
    parts = [_part(run, values, node) for node in ordered]
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


def _part(run: Run, values: Mapping[str, str], node: Node) -> str:
    """MASTER or SLAVE: the job, or the component of one het job, that the node was in."""
    if len(run.jobs) > 1:
        return "MASTER" if node.job == run.jobs[0] else "SLAVE"
    rank = records.settings(node.read("out")).get("NODE_RANK", "0")
    return "MASTER" if int(rank) < int(values["MASTER_NNODES"]) else "SLAVE"
