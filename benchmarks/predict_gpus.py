"""The same model on two GPUs: what ``--gpu`` makes of one trace beside the other one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.predict_runs import Row
from chakra_et.convert.pair import convert_pair
from chakra_et.cost import networks
from chakra_et.cost.operator_times import CLASSES
from chakra_et.errors import TraceError
from chakra_et.predict.predict import predict
from chakra_et.simulate.run import Run, make_run
from chakra_et.text import shortened
from chakra_et.traces.sets import Pair
from chakra_et.transform.gpu import OtherGpu, kernel_kinds

SMALLEST_SHARE = 0.02
"""Kernel classes with less of the time than this have no row."""
HOST = CLASSES.index("memory copy")
"""Copies between host and GPU depend on the host, of which a trace of the other machine tells nothing."""


def gpu_rows(folder: Path, only: str = "") -> list[Row]:
    """All models in both directions: the time of each kernel class, of all kernels, and of the step."""
    models = sorted(path.name.removeprefix("h100_") for path in folder.glob("h100_*.json*"))
    models = [name for name in models if only in name and (folder / f"mi300_{name}").exists()]
    if not models:
        raise TraceError(f"no pairs h100_MODEL.json.gz and mi300_MODEL.json.gz in {folder}")
    rows = []
    for model in models:
        runs = {}
        for gpu, prefix in (("H100", "h100_"), ("MI300X", "mi300_")):
            runs[gpu] = make_run(
                model, [convert_pair(Pair(-1, None, folder / f"{prefix}{model}")).trace], [0]
            )
        for source, target in (("H100", "MI300X"), ("MI300X", "H100")):
            rows += pair_rows(shortened(model.split(".")[0], 24), runs[source], runs[target], source, target)
    return rows


def pair_rows(model: str, run: Run, truth: Run, source: str, target: str) -> list[Row]:
    """``run`` on ``source``, predicted for ``target``, beside ``truth``, measured there."""
    prediction = predict(run, [OtherGpu(source, target)])
    after = prediction.after.setting
    before, measured, predicted, doubt = (
        _by_class(each, times)
        for each, times in (
            (run, run.graph.own_ns),
            (truth, truth.graph.own_ns),
            (run, after.own_ns),
            (run, after.doubts[-1][0]),
        )
    )
    baseline = _baseline(run, before, source, target)
    head = f"{model} {source}→{target}"
    rows = [
        Row(
            f"{head}: {CLASSES[at]}",
            *(each[at] / 1e6 for each in (before, measured, predicted, baseline, doubt)),
        )
        for at in np.argsort(-measured).tolist()
        if measured[at] >= SMALLEST_SHARE * measured.sum() and before[at] and at != HOST
    ]
    sums = (each.sum() - each[HOST] for each in (before, measured, predicted, baseline))
    whole = float(np.hypot.reduce(np.delete(doubt, HOST)))
    rows.append(Row(f"{head}: all kernels", *(each / 1e6 for each in sums), uncertainty=whole / 1e6))
    here, there = prediction.ranks[0], predict(truth, [], False).ranks[0]
    steps = (here.median_ns("before_ns"), there.median_ns("before_ns"), here.median_ns("after_ns"))
    rows.append(
        Row(
            f"{head}: step (other host CPU)",
            *(each / 1e6 for each in steps),
            uncertainty=here.uncertainty_ms,
            is_noise=True,
        )
    )
    return rows


def _baseline(run: Run, before: np.ndarray, source: str, target: str) -> np.ndarray:
    """What the specified rates alone give: the part of each class's time that has more operations per byte
    than the ridge changes with the peak, the rest with the bandwidth."""
    gpus = [networks.gpu(name) for name in (source, target)]
    operations, moved = (gpus[0].peak / gpus[1].peak, gpus[0].memory / gpus[1].memory)
    intense = _compute_bound(run, gpus[0].peak / gpus[0].memory)
    scaled: np.ndarray = before * (operations * intense + moved * (1 - intense))
    scaled[HOST] = before[HOST]
    return scaled


def _by_class(run: Run, times: np.ndarray) -> np.ndarray:
    """ns of each kernel class."""
    nodes = np.flatnonzero(run.on_devices)
    return np.bincount(kernel_kinds(run)[nodes], times[nodes], len(CLASSES))


def _compute_bound(run: Run, ridge: float) -> np.ndarray:
    """The part of each class's time whose kernels have more operations per byte than the ridge."""
    nodes = np.flatnonzero(run.on_devices)
    classes = kernel_kinds(run)[nodes]
    operations, moved = (run.graph.attribute(name, 0)[nodes] for name in ("num_ops", "tensor_size"))
    times = run.graph.own_ns[nodes]
    intense = np.bincount(classes, times * (operations > ridge * np.maximum(moved, 1)), len(CLASSES))
    return intense / np.maximum(np.bincount(classes, times, len(CLASSES)), 1)
