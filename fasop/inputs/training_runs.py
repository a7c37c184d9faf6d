"""Published training runs: tables whose rows say how a model was trained, and how fast.

A file has the columns of ``training_runs.csv`` (Megatron-Bridge, MLPerf, torchtitan), of MPT's own table, or
of NeuSight's steps (``neusight_steps.csv``: backward passes of one GPU, whole steps of four). What a row
leaves open is taken as its framework's default and noted; a row that can't be expressed is a ``PlanError``
with the reason.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from chakra_et.cost import gpus
from chakra_et.files import read_bytes
from chakra_et.yaml_file import read_yaml
from fasop.errors import PlanError
from fasop.exact.recipes import Again, Precision, Recipe, Software
from fasop.inputs.hf_config import model_sizes
from fasop.inputs.models import Model

_SOFTWARE: dict[str, Software] = {"Megatron-Bridge": "megatron", "torchtitan": "torchtitan"}
_PRECISIONS: dict[str, Precision] = {
    **{"BF16": "bf16", "FP8": "fp8", "FP8-CS": "fp8", "MXFP8": "mxfp8", "FP8-MX": "mxfp8", "NVFP4": "nvfp4"},
    **{"unknown": "fp8", "amp_bf16": "bf16", "bf16": "bf16", "amp_fp8": "fp8", "FP32": "fp32"},
}
_SAME = {"LLAMA3_8B": "LLAMA3.1_8B", "LLAMA3_70B": "LLAMA3.1_70B", "LLAMA2_70B": "LLAMA3.1_70B"}
_VOCABULARIES = {"LLAMA2_70B": 32000}
# What modules are called whose activations are computed again.
_AGAIN: dict[str, Again] = {
    **{"mla_up_proj": "latent", "'mlp'": "experts", "'moe'": "experts", "core_attn": "elementwise"},
    **{"layernorm": "elementwise", "moe_act": "elementwise", "full AC": "all", "selective AC": "operators"},
}
_OFTEN = "26"  # from this release on recipes send tokens by DeepEP or HybridEP
# Hidden size, layers and heads (README of MPT's llm-foundry).
_MPT = {
    **{"125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16)},
    **{"3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56)},
    "70b": (8192, 80, 64),
}
# Hidden size, layers, heads and vocabulary (NeuSight, scripts/asplos/data/DLmodel_configs).
_STEPS = {
    **{"bert_large": (1024, 24, 16, 30522), "gpt2_large": (1280, 36, 20, 50257)},
    **{"gpt3_xl": (3072, 24, 24, 50257), "gpt3_27": (2560, 32, 32, 50257), "opt_13": (2048, 24, 32, 50272)},
}
_LAYOUT = ("source", "gpu", "num_gpus", "precision", "model", "task", "mbs", "seq", "tp", "pp", "ep")
_RECIPE = (
    *("recompute_modules", "cuda_graph_impl", "cuda_graph_scope", "moe_flex_dispatcher_backend"),
    "moe_a2a_overlap",
)
_NEEDED = {
    "model": ("source", "gpu", "num_gpus", "precision", "model", "gbs", "mbs", "seq", "tp", "pp", "step_s"),
    "mpt": ("gpu", "num_gpus", "precision", "gbs", "mbs", "seq", "recompute", "tokens_per_s_per_gpu"),
    "steps": ("device", "model", "mode", "seq", "batch", "parallelism", "num_gpus", "e2e_ms", "bwall_ms"),
}


class Run(NamedTuple):
    """A row: its name, its recipe (or why it has none here), seconds of a step, and what was assumed."""

    name: str
    group: str
    recipe: Recipe | PlanError
    seconds: float
    assumed: tuple[str, ...]
    row: Mapping[str, str]


def read_runs(path: Path, models: Path | None = None) -> list[Run]:
    """All rows of a file. ``models``: YAML of the models' Hugging Face settings, ``models.yaml`` beside the
    file by default. Raises ``PlanError`` for a file that has other columns.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path}: can't be read as CSV: {error}.") from None
    head = rows[0] if rows else {}
    kind = "mpt" if "hfu_percent" in head else "steps" if "bwall_ms" in head else "model"
    missing = [name for name in _NEEDED[kind] if not rows or name not in rows[0]]
    if missing:
        raise PlanError(
            f"{path}: no column {missing[0]!r}: give a table as ../shared/data/truth's, or MPT's."
        )
    if kind == "model":
        settings = read_yaml(models or path.with_name("models.yaml"))
    found = []
    for number, row in enumerate(rows, 1):
        try:
            if kind == "model":
                found.append(_published(_with_recipe(row, rows), settings))
            else:
                found.append((_mpt if kind == "mpt" else _step)(row))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PlanError(f"{path}, row {number}: a value is missing or no number: {error}.") from None
    return found


def _with_recipe(row: dict[str, str], rows: list[dict[str, str]]) -> dict[str, str]:
    """A row whose recipe isn't stated, with that of the nearest release that ran the same, if one did."""
    same = [other for other in rows if other.get("settings") and _same(row) == _same(other)]
    if row.get("settings") or not same:
        return row
    number = float(row["release"][:5])
    nearest = min(same, key=lambda other: abs(float(other["release"][:5]) - number))
    taken = {name: nearest.get(name, "") for name in _RECIPE}
    return row | taken | {"settings": f"those of {nearest['release']}"}


def _same(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row.get(name, "") for name in _LAYOUT)


def _published(row: Mapping[str, str], settings: Mapping[str, Any]) -> Run:
    name = f"{row['model']}, {row['num_gpus']} × {row['gpu']}, {row['precision']}"
    assumed: list[str] = []
    seconds = float(row["step_s"])
    recipe: Recipe | PlanError
    try:
        recipe = _recipe(row, settings, assumed)
    except PlanError as error:
        recipe = error
    except (KeyError, ValueError) as error:
        recipe = PlanError(f"a column can't be read: {error}.")
    task = row.get("task") or "Pre-Training"
    group = "experts" if isinstance(recipe, Recipe) and recipe.model.experts else "dense"
    group = row["source"].split()[0] + ", " + (group if task == "Pre-Training" else "fine-tuning")
    return Run(name, group, recipe, seconds, tuple(assumed), row)


def _recipe(row: Mapping[str, str], models: Mapping[str, Any], assumed: list[str]) -> Recipe:
    def count(column: str, default: int = 1) -> int:
        return int(row[column]) if row.get(column) else default

    if not row["tp"]:
        raise PlanError("its layout isn't stated.")
    config = models.get(_SAME.get(row["model"], row["model"])) or models.get(row["model"])
    if config is None:
        raise PlanError(f"the settings of {row['model']} aren't known.")
    sizes = model_sizes(config, row["model"])
    sizes |= {"seq": count("seq"), "global_batch": count("gbs")}
    if row["model"] in _VOCABULARIES:
        sizes |= {"vocab": _VOCABULARIES[row["model"]], "parameters": 0}
    model = Model(name=row["model"], **sizes)
    software = _SOFTWARE.get(row["source"], "mlperf")
    if row["precision"] == "unknown":
        assumed.append("FP8, as its precision isn't stated")
    notes, modules = row.get("notes") or "", row.get("recompute_modules") or ""
    precision = _PRECISIONS[row["precision"]]
    if "rowwise" in notes:
        precision = "fp8 rows"
    graph = f"{row.get('cuda_graph_impl')} {row.get('cuda_graph_scope')}"
    recent = row.get("release", "") >= _OFTEN
    settled = row.get("settings")
    if settled and settled != "recipe":
        assumed.append("the settings of another release's recipe")
    elif model.experts and not settled:
        assumed.append("no recomputation and no CUDA graph, as its recipe isn't stated")
    flex = row.get("moe_flex_dispatcher_backend") or (recent and not settled)
    overlaps = {"tensor"} if "async" in notes else set()
    if row.get("moe_a2a_overlap") == "True":
        overlaps.add("tokens")
    depth = int(config.get("num_nextn_predict_layers") or 0)
    return Recipe(
        model, _gpu(row["gpu"]), count("num_gpus"), count("mbs"), count("tp"), count("pp"), count("cp"),
        count("vp"), count("ep"), count("dp_shard", 0), 2, precision, software,
        adapters=row.get("task") == "LoRA",
        again=frozenset(again for word, again in _AGAIN.items() if word in notes + modules),
        graph="full_iteration" in graph,
        overlaps=frozenset(overlaps),
        fast_dispatch=bool(flex),
        mtp=0 if "w/o MTP" in notes else depth,
    )  # fmt: skip


def _mpt(row: Mapping[str, str]) -> Run:
    count, gbs, seq = int(row["num_gpus"]), int(row["gbs"]), int(row["seq"])
    name = f"MPT {row['model']}, {count} × {row['gpu']}, seq {seq}"
    seconds = gbs * seq / float(row["tokens_per_s_per_gpu"]) / count
    recipe: Recipe | PlanError
    try:
        h, layers, heads = _MPT[row["model"]]
        recipe = Recipe(
            Model(f"mpt-{row['model']}", h, seq, layers, 50368, heads, gbs), _gpu(row["gpu"]), count,
            int(row["mbs"]), shards=count, gathers=1 if row.get("sharding") == "SHARD_GRAD_OP" else 2,
            precision=_PRECISIONS[row["precision"]], software="mpt",
            again=frozenset({"all"} if row["recompute"] == "True" else ()),
        )  # fmt: skip
    except PlanError as error:
        recipe = error
    except KeyError as error:
        recipe = PlanError(f"{error.args[0]} isn't known.")
    return Run(name, f"MPT, {row['gpu'].split('_')[0].upper()}", recipe, seconds, (), row)


def _step(row: Mapping[str, str]) -> Run:
    """A row of NeuSight's steps, in fp32 with eager attention; on one GPU its backward pass counts, as the
    forward pass waits for memory that was just given back."""
    ways, count, seq = row["parallelism"], int(row["num_gpus"]), int(row["seq"])
    name = f"{row['model']}, {row['device']}, batch {row['batch']}, {ways}"
    seconds = float((row["bwall_ms"] if ways == "none" else row["e2e_ms"]) or "nan") / 1e3
    recipe: Recipe | PlanError
    try:
        if row["mode"] != "train":
            raise PlanError("it is inference.")
        h, layers, heads, vocab = _STEPS[row["model"]]
        batch = int(row["batch"])
        recipe = Recipe(
            Model(row["model"], h, seq, layers, vocab, heads, batch), _gpu(row["device"]), count,
            batch // (count if ways.startswith("dp") else 1), count if ways.startswith("tp") else 1,
            count if ways.startswith("pp") else 1, precision="fp32", software="eager",
            passes="backward" if ways == "none" else "step", fused_attention=False,
        )  # fmt: skip
    except PlanError as error:
        recipe = error
    except KeyError as error:
        recipe = PlanError(f"{error.args[0]} can't be planned.")
    of = "backward" if ways == "none" else "four GPUs"
    vendor = "AMD" if "AMD" in row["device"] else "NVIDIA"
    return Run(name, f"NeuSight, {of}, {vendor}", recipe, seconds, (), row)


def _gpu(text: str) -> str:
    """The name in the table of GPUs."""
    upper = text.replace("_", " ")
    found = gpus.by_driver(upper if "96GB" in upper else upper.upper())
    if found is None:
        raise PlanError(f"the GPU {text!r} isn't known.")
    return found


def expressible(runs: list[Run]) -> Iterator[tuple[Run, Recipe]]:
    """The rows that can be predicted."""
    for run in runs:
        if isinstance(run.recipe, Recipe):
            yield run, run.recipe


def refused(runs: list[Run]) -> Counter[str]:
    """Why rows can't be predicted, with their numbers."""
    return Counter(str(run.recipe) for run in runs if isinstance(run.recipe, PlanError))
