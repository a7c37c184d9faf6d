"""FASOP, by its command line: its input files, the best plan, and the settings that launch it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chakra_et import files
from fasop.errors import PlanError
from fasop.plans.plan import Plan, read_plans
from megatron_lm.errors import RunError
from megatron_lm.settings import Size, conf

PLANS, SETTINGS = "plan.json", "plan.conf"


def write_inputs(
    folder: Path, name: str, model: Mapping[str, Any], cluster: Mapping[str, Any], source: str,
    entries: Sequence[Mapping[str, Any]],
) -> list[str]:  # fmt: skip
    """Write models.yaml, cluster.yaml and costs.json; the arguments of FASOP that name them.

    ``entries``: the costs, which ``source`` explains.
    """
    costs = {"format": 1, "source": source, "models": {name: {"name": name, **model}}, "entries": entries}
    # JSON is YAML.
    files.write_json(folder / "models.yaml", {"models": {name: model}})
    files.write_json(folder / "cluster.yaml", {"clusters": {"this": cluster}})
    files.write_json(folder / "costs.json", costs)
    words = ["--model", name, "--models-file", str(folder / "models.yaml")]
    return [*words, "--cluster", str(folder / "cluster.yaml"), "--costs", str(folder / "costs.json")]


def model_of(size: Size, global_batch: int) -> dict[str, int | bool]:
    """A model in the terms of FASOP."""
    return {
        "hidden": size.hidden, "seq": size.sequence, "layers": size.layers, "vocab": size.vocabulary,
        "heads": size.heads, "kv_heads": size.kv_groups, "ffn": size.ffn, "gated": size.swiglu,
        "tied": size.tied_embedding, "global_batch": global_batch,
    }  # fmt: skip


def best(words: Sequence[str], folder: Path) -> Plan:
    """Plan with these arguments of ``python -m fasop plan``. Leaves the plan in ``folder``, an absolute path.

    Raises ``RunError`` with FASOP's sentence.
    """
    files.write_text(folder / PLANS, _run("plan", *words, "--top", "1", "--json"))
    return read_plan(folder / PLANS)


def read_plan(path: Path) -> Plan:
    """The first plan in a file of plans. Raises ``RunError``."""
    try:
        plans = read_plans(path)
    except PlanError as error:
        raise RunError(str(error)) from None
    if not plans:
        raise RunError(f"{path}: has no plan: make one with 'python -m fasop plan --json'.")
    return plans[0]


def settings(folder: Path) -> dict[str, str]:
    """The settings of ``best``'s plan, as ``python -m fasop export`` gives them. Raises ``RunError``."""
    _run("export", str(folder / PLANS), "--output", str(folder / SETTINGS))
    return conf.read_file(folder / SETTINGS)


def _run(*words: str) -> str:
    command = [sys.executable, "-m", "fasop", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=conf.FOLDER.parent)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise RunError(f"python -m fasop {words[0]}: {reason.removeprefix('error: ')}")
    return done.stdout
