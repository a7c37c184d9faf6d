"""Published training runs: tables whose rows say how a model was trained, and how fast.

A file has the columns of ``training_runs.csv`` (Megatron-Bridge, MLPerf, torchtitan), of MPT's own table, or
of NeuSight's steps (``neusight_steps.csv``: backward passes of one GPU, whole steps of four). What a row
leaves open is taken as its framework's default and noted; a row that can't be expressed is a ``PlanError``
with the reason.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from chakra_et.cost import gpus as gpu_table
from chakra_et.files import read_bytes
from chakra_et.text import printable
from chakra_et.yaml_file import read_yaml
from fasop.errors import PlanError
from fasop.exact.estimate import Estimate, estimate
from fasop.inputs.clusters import of_gpus
from fasop.inputs.costs import PUBLISHED, CostFile, read_costs
from fasop.inputs.hf_config import model_sizes
from fasop.inputs.models import Model, find_model
from fasop.plans.layout import Layout, uniform
from fasop.plans.options import Again, CudaGraphs, Engine, Options, Precision, Recompute
from fasop.plans.shapes import Shape

_NAMES = json.loads(PUBLISHED.with_name("training_runs.json").read_text(encoding="utf-8"))
_AGAIN: dict[str, Again] = _NAMES["again"]
MOST_MISSING = 4  # layers that embedding and head may count as together
_FUSED_LOSS = "2025"  # from this release on torchtitan compiles the loss, too
_SINGLE = "2025-05"  # from this release on micro-batches of torchtitan's pipelines are single sequences
_OFTEN = "26"  # from this release on recipes send tokens by DeepEP or HybridEP
_LAYOUT = ("source", "gpu", "num_gpus", "precision", "model", "task", "mbs", "seq", "tp", "pp", "ep")
_read_once = functools.cache(read_costs)
_VTRAIN_COSTS = PUBLISHED.with_name("vtrain.json")  # of layers, learned from 1,040 of its rows; for no others
_VTRAIN = "num_gpus gbs mbs hidden heads layers seq tp dp pp"
# Bytes per second that vTrain counts for twice a message's bytes (``_compute_p2p_latency`` in predictor.py,
# by the 800 Gbit/s of its settings of one node).
_VTRAIN_LINK = 800 * 2**30 / 8 / 4
_RECIPE = "recompute_modules cuda_graph_impl cuda_graph_scope moe_flex_dispatcher_backend moe_a2a_overlap"
_RECIPE += " cpu_offloading_num_layers"


class Run(NamedTuple):
    """A row: its name, its layout (or why it has none here), how it runs, seconds of a step (of its backward
    passes alone where ``backward``), and what was assumed. message: seconds that the table counts for each
    message between stages, where that is known. costs: of layers, learned from other runs of its software.
    """

    name: str
    group: str
    layout: Layout | PlanError
    options: Options
    seconds: float
    assumed: tuple[str, ...]
    row: Mapping[str, str]
    backward: bool = False
    left_out_with: str = ""  # runs that are left out of a fit together, if not those of the model
    message: float = 0.0
    costs: tuple[CostFile, ...] = ()


def predicted(run: Run, layout: Layout) -> tuple[float, Estimate]:
    """Seconds that are to be compared with those measured, and the estimate that they are of."""
    found = estimate(layout, list(run.costs), run.options)
    if run.backward:
        return layout.micro_batches * sum(stage.backward for stage in found.stages), found
    # The first micro-batch's output and the last one's gradient wait for a message at each boundary.
    return found.step + 2 * sum(run.message - seconds for seconds in found.p2p if run.message), found


def layout_of(
    model: Model,
    gpu: str,
    gpus: int,
    mbs: int,
    degrees: tuple[int, int, int, int],
    recompute: Recompute = "none",
    chunks: int = 1,
) -> Layout:
    """The layout of a run on GPUs of one type, with layers spread evenly; degrees: tp, pp, cp, ep. Raises
    ``PlanError`` where it can't be.
    """
    tp, pp, cp, ep = degrees
    if min(gpus, mbs, chunks, *degrees) < 1 or pp * chunks > model.layers + MOST_MISSING:
        raise PlanError("GPUs, degrees and micro-batches are at least 1, pp × vp at most the layers.")
    if gpus % (tp * pp * cp):
        raise PlanError(f"{gpus} GPUs are no multiple of tp × pp × cp = {tp * pp * cp}.")
    dp, batch = gpus // (tp * pp * cp), model.global_batch
    if batch % (dp * mbs):
        raise PlanError(f"a batch of {batch} can't be split among {dp} replicas with micro-batches of {mbs}.")
    if model.experts % ep or gpus // pp % ep:
        raise PlanError(f"ep {ep} doesn't divide {model.experts} experts and {gpus // pp} GPUs of a stage.")
    cluster = of_gpus(gpu, gpus)
    # Where layers don't divide, embedding and head count as some, as Megatron's recipes do.
    missing = -model.layers % (pp * chunks)
    if missing > MOST_MISSING:
        missing = -model.layers % pp
    head = missing if model.mtp else -(-missing // 2)
    partition = [(model.layers + missing + stage) // pp for stage in reversed(range(pp))]
    partition[0] += 1 - (missing - head)
    partition[-1] += 1 - head
    ranks = dp * cp
    spread = ep if ranks % ep == 0 else ep // tp  # experts among all ranks of a stage
    shape, placement = Shape(tp, ranks, pp, mbs, spread), [name for _, name in cluster.hosts()]
    layout = uniform(model.split_sequences(cp), cluster, placement, shape, tuple(partition), recompute)
    return replace(layout, virtual_stages=chunks if pp > 1 else 1)


def read_runs(path: Path, models: Path | None = None) -> list[Run]:
    """All rows of a file, with why some can't be planned. ``models``: YAML of the models' Hugging Face
    settings, ``models.yaml`` beside the file by default. Raises ``PlanError`` for a file with other columns.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")
        table = csv.DictReader(io.StringIO(text, newline=""))
        head, rows = table.fieldnames or (), list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path}: can't be read as CSV: {error}.") from None
    read, needed = min(_TABLES, key=lambda kind: len({*kind[1].split()} - {*head}))
    if missing := [name for name in needed.split() if name not in head]:
        raise PlanError(f"{path}: no column {missing[0]!r}: give a table as ../shared/data/truth's.")
    known = models or path.with_name("models.yaml")
    if not isinstance(settings := read_yaml(known) if read is _published else {}, dict):
        raise PlanError(f"{known}: give the settings of models under their names.")
    found = []
    for row in rows:
        try:
            run = read(_with_recipe(row, rows), settings)
            if not 0 < run.seconds < 1e9:
                raise PlanError("its time is no number of seconds above 0.")
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            why = str(error) if isinstance(error, PlanError) else f"a column can't be read: {error}."
            why = f"{error.args[0]} can't be planned." if isinstance(error, KeyError) else why
            run = Run("", "", PlanError(why), Options(), math.nan, (), row)
        found.append(run)
    return found


def _with_recipe(row: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """A row whose recipe isn't stated, with that of the nearest release that ran the same, if one did."""
    named = [other for other in rows if other.get("settings")]
    same = [other for other in named if _layout(row) == _layout(other)]
    if row.get("settings") or not same:
        return row
    number = float(row["release"][:5])
    nearest = min(same, key=lambda other: abs(float(other["release"][:5]) - number))
    taken = {name: nearest.get(name, "") for name in _RECIPE.split()}
    return {**row, **taken, "settings": f"those of {nearest['release']}"}


def _layout(row: Mapping[str, str]) -> list[str]:
    """What rows of one layout have in common; a degree that isn't stated is 1, and names of types differ."""
    each = [row.get(name) or "1" for name in _LAYOUT]
    return [_NAMES["precision"].get(_plain(value), value) for value in each]


def _plain(value: str | None) -> str:
    return (value or "").strip().upper().replace("_", "-")


def _known(what: str, value: str | None) -> Any:
    """The planner's name of a value. Raises ``PlanError``."""
    if (name := _plain(value)) in (table := _NAMES[what]):
        return table[name]
    names = ", ".join(filter(None, table))
    raise PlanError(f"its {what} {value!r} is none of {names}." if value else f"its {what} isn't stated.")


def _published(row: Mapping[str, str], models: Mapping[str, Any]) -> Run:
    def count(column: str, default: int = 1) -> int:
        number = float(row.get(column) or default)
        if not 0 <= number == int(number):
            raise PlanError(f"its {column} is no whole number.")
        return int(number)

    assumed: list[str] = []
    stated = {"num_gpus": "number of GPUs", "tp": "layout", "gbs": "batch", "mbs": "micro-batch"}
    stated["seq"] = "sequence length"
    if missing := [what for column, what in stated.items() if not row[column]]:
        raise PlanError(f"its {missing[0]} isn't stated.")
    config = models.get(_NAMES["same"].get(row["model"], row["model"])) or models.get(row["model"])
    if config is None:
        raise PlanError(f"the settings of {row['model']} aren't known.")
    sizes = model_sizes(config, row["model"])
    sizes |= {"seq": count("seq"), "global_batch": count("gbs")}
    if row["model"] == "LLAMA2_70B":  # Llama 3's sizes but for this
        sizes |= {"vocab": 32000, "parameters": 0}
    notes, settled = row.get("notes") or "", row.get("settings")
    unstated = {} if settled else _NAMES["recomputed"].get(row["model"], {})
    modules = row.get("recompute_modules") or unstated.get(row["gpu"], "")
    depth = 0 if "w/o MTP" in notes else int(config.get("num_nextn_predict_layers") or 0)
    model = Model(name=row["model"], mtp=depth, **sizes)
    precision: Precision = _known("precision", row["precision"])
    if _plain(row["precision"]) == "UNKNOWN":
        assumed.append("FP8, as its precision isn't stated")
    recent = row.get("release", "") >= _OFTEN
    if settled and settled != "recipe":
        assumed.append("the settings of another release's recipe")
    elif model.experts and not settled:
        assumed.append("recomputation, dispatcher and graphs of recipes of its time, as its own isn't stated")
    is_dropless, backend = "dropless" in notes and not settled, row.get("moe_flex_dispatcher_backend")
    software, task = row["source"].partition(" ")[0], _known("task", row.get("task"))
    engine: Engine = _known("software", software)
    if others := {*re.findall(r"\w+", modules)} - {word.strip("'") for word in _AGAIN}:
        assumed.append(f"that {', '.join(sorted(others))} computed again takes no time")
    tp, pp, chunks, shards = count("tp"), count("pp"), count("vp"), count("dp_shard", 0)
    mbs, zero = count("mbs"), 3 if shards or _plain(row.get("use_megatron_fsdp")) == "TRUE" else 1
    if engine == "torchtitan" and pp > 1:
        # What is stated is a rank's batch. Parameters stay gathered from one micro-batch to the next.
        mbs, zero = max(mbs // pp, 1) if row["release"] < _SINGLE else 1, 1
        assumed.append("torchtitan's default number of micro-batches")
        chunks = chunks if row.get("vp") or "interleaved" not in notes.lower() else 2
    options = Options(
        recompute="full" if "full AC" in notes or row.get("recompute_num_layers") else "none",
        # Layers of each stage's chunk, one after the other (Megatron-core's method "block").
        recomputed=min(count("recompute_num_layers", model.layers) * pp * chunks / model.layers, 1.0),
        offloaded=min(count("cpu_offloading_num_layers", 0) / model.layers, 1.0),
        zero=zero,
        overlap=True,
        shard=0 if model.experts or zero < 3 else shards * count("cp"),
        sequence_parallel=tp > 1,
        attention="flash",
        precision="fp8 rows" if "rowwise" in notes else precision,
        gradient_bytes=4 if engine == "torchtitan" else 2,
        engine=engine,
        again=tuple(sorted({again for word, again in _AGAIN.items() if word in notes + modules})),
        cuda_graphs=_cuda_graphs(row),
        fast_dispatch=is_dropless or _known("dispatcher", backend) or recent and not settled,
        # Megatron-Bridge's recipes of dense models overlap it (tp_comm_overlap).
        overlap_tensor="async" in notes or engine == "megatron" and not model.experts,
        overlap_tokens=is_dropless or _plain(row.get("moe_a2a_overlap")) == "TRUE",
        adapters=task == "LoRA",
        unfused=("loss",) if engine == "torchtitan" and row.get("release", "") < _FUSED_LOSS else (),
    )
    degrees = (tp, pp, count("cp"), count("ep"))
    gpu, gpus = _gpu(row["gpu"]), count("num_gpus")
    layout = layout_of(model, gpu, gpus, mbs, degrees, options.recompute, chunks)
    name = f"{row['model']}, {gpus} × {row['gpu']}, {row['precision']}"
    group = f"{software}, {'fine-tuning' if task else 'experts' if model.experts else 'dense'}"
    return Run(name, group, layout, options, float(row["step_s"]), tuple(assumed), row)


def _cuda_graphs(row: Mapping[str, str]) -> CudaGraphs:
    impl, scope = row.get("cuda_graph_impl") or "none", row.get("cuda_graph_scope") or ""
    _known("graph", impl)
    drops = "tokendrop" in (row.get("notes") or "") and not row.get("settings")
    if (
        "FULL-ITERATION" in _plain(impl + scope)
        or drops
        and row["gpu"] in _NAMES["captured"].get(row["model"], ())
    ):
        return "full"
    modules = set(re.findall(r"\w+", scope))
    if _plain(impl) == "NONE":
        return "none"
    if not modules or "attn" in modules and modules & {"mlp", "moe"}:  # without a scope: whole layers
        return "layer"
    return "attention" if "attn" in modules else "none"


def _mpt(row: Mapping[str, str], _: object) -> Run:
    count, gbs, seq = int(row["num_gpus"]), int(row["gbs"]), int(row["seq"])
    name = f"MPT {row['model']}, {count} × {row['gpu']}, seq {seq}"
    seconds = gbs * seq / float(row["tokens_per_s_per_gpu"]) / count
    options = Options(
        recompute=_known("recomputation", row["recompute"]),
        zero=_known("sharding", row.get("sharding")),
        offload=_known("offload", row.get("offload")),
        overlap=True,
        attention="flash",
        precision=_known("precision", row["precision"]),
        gradient_bytes=2,
        engine="mpt",
    )
    model = replace(find_model(f"mpt-{row['model']}"), seq=seq, global_batch=gbs)
    layout = layout_of(model, _gpu(row["gpu"]), count, int(row["mbs"]), (1, 1, 1, 1), options.recompute)
    return Run(name, f"MPT, {row['gpu'].split('_')[0].upper()}", layout, options, seconds, (), row)


def _step(row: Mapping[str, str], _: object) -> Run:
    """A row of NeuSight's steps, in fp32 with eager attention; on one GPU its backward pass counts, as the
    forward pass waits for memory that was just given back."""
    if row["mode"] != "train":
        raise PlanError("it is inference.")
    ways, count, batch = row["parallelism"], int(row["num_gpus"]), int(row["batch"])
    name = f"{row['model']}, {row['device']}, batch {batch}, {ways}"
    seconds = float((row["bwall_ms"] if ways == "none" else row["e2e_ms"]) or "nan") / 1e3
    h, layers, heads, vocab = _NAMES["steps"][row["model"]]
    tp, pp, dp = (count if ways.startswith(way) else 1 for way in ("tp", "pp", "dp"))
    sizes = (h, int(row["seq"]), layers, vocab, heads, batch)
    stepwise = ways == "none" and row["model"].startswith("gpt")  # gelu_new of transformers
    model = Model(row["model"], *sizes, stepwise=stepwise, clamped=row["model"].startswith("opt"))
    layout = layout_of(model, _gpu(row["device"]), count, batch // dp, (tp, pp, 1, 1))
    vendor = "AMD" if "AMD" in row["device"] else "NVIDIA"
    options = Options(precision="fp32", engine="eager")
    group = f"NeuSight, {'backward' if ways == 'none' else 'four GPUs'}, {vendor}"
    return Run(name, group, layout, options, seconds, (), row, ways == "none")


def _vtrain(row: Mapping[str, str], _: object) -> Run:
    """A row of vTrain's runs on a node of A100; fp16, no recomputation and kernels that aren't fused are
    assumed, and messages as vTrain's own simulator counts them, as times suggest (docs/HOW_TRUE.md)."""
    n = {name: int(row[name]) for name in _VTRAIN.split()}
    degrees = tuple(n[degree] for degree in ("tp", "dp", "pp"))
    model = Model(f"gpt-{n['hidden']}", n["hidden"], n["seq"], n["layers"], 50257, n["heads"], n["gbs"])
    layout = layout_of(model, "A100", n["num_gpus"], n["mbs"], (n["tp"], n["pp"], 1, 1))
    options = Options(gradient_bytes=2, engine="eager", scatter_gather=True)
    name = f"hidden {n['hidden']}, {n['layers']} layers, tp, dp, pp {degrees}, mbs {n['mbs']}"
    message = 2 * n["mbs"] * n["seq"] * n["hidden"] * options.activation_bytes / _VTRAIN_LINK
    costs = [file for file in (_read_once(_VTRAIN_COSTS),) if model.name in file.models]
    notes, seconds = tuple(file.source for file in costs), float(row["step_ms"]) / 1e3
    run = Run(name, "vTrain, one node", layout, options, seconds, notes, row)
    return run._replace(left_out_with=f"layout {degrees}", message=message, costs=tuple(costs))


def _gpu(text: str) -> str:
    """The name in the table of GPUs."""
    if found := gpu_table.by_driver(text):
        return found
    raise PlanError(f"the GPU {text!r} isn't known." if text else "its GPU isn't stated.")


# What reads a row of each kind of table, and the columns that this needs.
_TABLES: list[tuple[Callable[[Mapping[str, str], Mapping[str, Any]], Run], str]] = [
    (_published, "source gpu num_gpus precision model gbs mbs seq tp pp step_s"),
    (_mpt, "gpu num_gpus precision gbs mbs seq recompute tokens_per_s_per_gpu model"),
    (_step, "device model mode seq batch parallelism num_gpus e2e_ms bwall_ms"),
    (_vtrain, f"{_VTRAIN} step_ms"),
]


def expressible(runs: list[Run]) -> Iterator[tuple[Run, Layout]]:
    """The rows that can be predicted, each with its layout."""
    return ((run, run.layout) for run in runs if isinstance(run.layout, Layout))


def refused(runs: list[Run]) -> Counter[str]:
    """Why rows can't be predicted, with their numbers."""
    return Counter(str(run.layout) for run in runs if isinstance(run.layout, PlanError))


def usable(path: str, models: str) -> list[tuple[Run, Layout]]:
    """The runs of a file that can be predicted; says why others can't."""
    runs = read_runs(Path(path), Path(models) if models else None)
    for reason, count in refused(runs).items():
        print(printable(f"refused: {count} rows: {reason}"), file=sys.stderr)
    return list(expressible(runs))
