#!/usr/bin/env python3
"""How well published training runs are predicted, on models that no fit has seen.

    python benchmarks/recipe_accuracy.py                  (each model left out of the fit in turn)
    python benchmarks/recipe_accuracy.py --truth DIR      (other rows, by the constants that are shipped)
    python benchmarks/recipe_accuracy.py --rows           (every run)
    python benchmarks/recipe_accuracy.py --fit            (fits the constants to all rows and ships them)

The rows are those of training_runs.csv, mpt_fsdp.csv, neusight_steps.csv and vtrain_single.csv in the folder.
Rows that can't be expressed are counted with their reasons. "Since 26": without Megatron-Bridge's releases
before 26, whose MoE kernels and dispatch differ, and without runs that drop tokens. vTrain's rows are judged
twice: by the constants, and by layers that its other rows have taught (``fasop profile --from-runs``).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from chakra_et import cli, text
from chakra_et.cost.fit import fit
from chakra_et.files import write_json
from fasop.errors import PlanError
from fasop.exact import recipes
from fasop.exact.memory import MEMORY_MARGIN
from fasop.exact.recipes import prior
from fasop.exact.training_runs import Run, expressible, predicted, read_runs, refused
from fasop.plans.layout import Layout
from fasop.profiling.from_runs import from_runs

GIVEN = ROOT.parent / "shared" / "data" / "truth"
FILES = ("training_runs.csv", "mpt_fsdp.csv", "neusight_steps.csv", "vtrain_single.csv")
# Plans use their links' own; products in 16 bits were measured on A100.
FIXED = {"tensor: megatron", "products: before FP8"}
Pairs = list[tuple[Run, Layout]]
Values = dict[str, float]
NUDGE = 0.05  # of a constant's logarithm, by which its effect is measured
ALONE, LEARNED = ", by constants alone", ", by layers that runs taught (as evaluate --rows)"
MOST = 150  # runs of a group that weigh as much as each
ROUNDS = 3  # of fits to what is linear in the logarithms
# Constants of experts.
OF_EXPERTS = {"expert host", "experts: 8 bit", "experts: 16 bit", "tokens: exposed", "tokens: overlapped"}
# For constants that other runs have, too, runs with experts count by this share of their weight, as errors of
# the model of experts would spoil those; those of experts are then fitted to the runs with experts alone.
SHARE = 0.25


@dataclass
class Config:
    truth: Path = field(default=GIVEN, metadata={"help": "folder of the tables"})
    rows: bool = field(default=False, metadata={"help": "print every run"})
    fit: bool = field(default=False, metadata={"help": "write the constants, fitted to all rows"})


def steps(pairs: Pairs, values: Mapping[str, float]) -> np.ndarray:
    """Seconds of the runs by constants."""
    with mock.patch.object(recipes, "published", lambda: values):
        return np.array([predicted(run, layout)[0] for run, layout in pairs])


class _Recorder(dict[str, float]):
    """Constants that remember which of them were asked for."""

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, name: str, default: float = 0.0) -> float:  # type: ignore[override]
        self.asked.add(name)
        return super().get(name, default)


class Slopes(NamedTuple):
    """Of runs at some constants: logarithms of their seconds, and by how much each constant moves these
    [run, constant].
    """

    at: Values
    base: np.ndarray
    each: np.ndarray

    def seconds(self, values: Mapping[str, float], of: np.ndarray) -> np.ndarray:
        moved = np.array([np.log(values[name] / self.at[name]) for name in self.at])
        found: np.ndarray = np.exp(self.base[of] + self.each[of] @ moved)
        return found


def slopes(pairs: Pairs, values: Values) -> Slopes:
    used: list[set[str]] = []
    for pair in pairs:
        recorder = _Recorder(values)
        steps([pair], recorder)
        used.append(recorder.asked)
    names = sorted(set().union(*used) - FIXED)
    at = {name: values.get(name, prior(name)[0]) for name in names}
    base = np.log(steps(pairs, at))
    each = np.zeros((len(pairs), len(names)))
    for column, name in enumerate(names):
        rows = [row for row, asked in enumerate(used) if name in asked]
        more = at | {name: at[name] * float(np.exp(NUDGE))}
        each[rows, column] = (np.log(steps([pairs[row] for row in rows], more)) - base[rows]) / NUDGE
    return Slopes(at, base, each)


def fitted(near: Slopes, measured: np.ndarray, of: np.ndarray, weights: np.ndarray) -> Values:
    """Constants that suit some runs best, where their seconds are what the slopes say; those of experts suit
    runs with experts."""
    start = {name: prior(name)[0] for name in near.at}
    moving = [name for at, name in enumerate(near.at) if np.abs(near.each[of, at]).max(initial=0) > 1e-4]
    widths = {name: prior(name)[1] for name in moving}
    own = [at for at, name in enumerate(near.at) if name in OF_EXPERTS]
    routed = np.abs(near.each[:, own]).max(axis=1, initial=0) > 1e-4
    shares = weights * np.where(routed, SHARE, 1.0)
    values = fit(lambda values: near.seconds(values, of), measured[of], start, widths, shares[of])
    of_experts = of & routed
    if not of_experts.any():
        return values
    start = {name: start[name] if name in OF_EXPERTS else value for name, value in values.items()}
    widths = {name: width for name, width in widths.items() if name in OF_EXPERTS}
    return fit(
        lambda values: near.seconds(values, of_experts),
        measured[of_experts],
        start,
        widths,
        weights[of_experts],
    )


def fit_all(pairs: Pairs, weights: np.ndarray) -> tuple[Values, Slopes]:
    measured = np.array([run.seconds for run, _ in pairs])
    values: Values = dict(recipes.published())
    every = np.ones(len(pairs), dtype=bool)
    for _ in range(ROUNDS):
        near = slopes(pairs, values)
        values = fitted(near, measured, every, weights)
    return values, slopes(pairs, values)


def left_out(pairs: Pairs, near: Slopes, keys: list[str], weights: np.ndarray) -> np.ndarray:
    """Errors of runs, each by a fit without those of its key."""
    measured = np.array([run.seconds for run, _ in pairs])
    errors = np.empty(len(pairs))
    for key in sorted(set(keys)):
        own = np.array([each == key for each in keys])
        values = fitted(near, measured, ~own, weights)
        rows = [pair for pair, out in zip(pairs, own, strict=True) if out]
        errors[own] = steps(rows, values) / measured[own] - 1
    return errors


def learned_left_out(pairs: Pairs, near: Slopes, weights: np.ndarray) -> np.ndarray:
    """Errors of vTrain's runs, each by constants and layers that runs of other layouts gave."""
    measured = np.array([run.seconds for run, _ in pairs])
    errors = np.empty(len(pairs))
    of_vtrain = [run.left_out_with for run, _ in pairs]
    for key in sorted(filter(None, set(of_vtrain))):
        own = np.array([each == key for each in of_vtrain])
        values = fitted(near, measured, ~own, weights)
        others = [pair for pair, each in zip(pairs, of_vtrain, strict=True) if each not in ("", key)]
        with mock.patch.object(recipes, "published", return_value=values):
            costs = from_runs(others, "other layouts")[:1]
        rows = [(run._replace(costs=costs), at) for (run, at), out in zip(pairs, own, strict=True) if out]
        errors[own] = steps(rows, values) / measured[own] - 1
    return errors[np.array(of_vtrain) != ""]


def by_kind(pairs: Pairs, errors: np.ndarray) -> dict[str, float]:
    """Mean errors by GPU and kind of plan, of three runs and more."""
    found: dict[str, list[float]] = {}
    for (run, layout), error in zip(pairs, errors, strict=True):
        gpu = recipes.hardware(layout.cluster.gpus[0].name)
        name = recipes.kind_of_plan(gpu.name if gpu else "", layout.model, run.options)
        found.setdefault(name, []).append(abs(float(error)))
    return {name: float(f"{np.mean(each):.3g}") for name, each in sorted(found.items()) if len(each) > 2}


def ranking(pairs: Pairs, errors: np.ndarray) -> str:
    """How well runs of one model, batch and number of GPUs are ranked."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for at, (run, _) in enumerate(pairs):
        if run.left_out_with:
            key = tuple(run.row[name] for name in ("num_gpus", "gbs", "hidden", "layers"))
            alike.setdefault(key, []).append(at)
    measured = np.array([run.seconds for run, _ in pairs])
    made, taus, regrets = measured * (1 + errors), [], []
    for which in alike.values():
        a, b = measured[which], made[which]
        one, two = np.triu_indices(len(a), 1)
        if one.size:
            taus.append(float((np.sign(a[one] - a[two]) * np.sign(b[one] - b[two])).mean()))
            regrets.append(float(a[b.argmin()] / a.min() - 1))
    wide = [abs(error) for (run, _), error in zip(pairs, errors, strict=True) if _is_wide(run)]
    return (
        f"tp 4 and more {np.mean(wide):.1%} off; Kendall's tau {np.mean(taus):.2f}, first plan's "
        f"time over the best's {np.mean(regrets):+.1%}"
        if taus
        else "no plans to rank"
    )


def _is_wide(run: Run) -> bool:
    return bool(run.left_out_with) and int(run.row["tp"]) >= 4


def recent(run: Run) -> bool:
    return "tokendrop" not in run.row.get("notes", "") and run.row.get("release", "26") >= "26"


def lines(pairs: Pairs, errors: np.ndarray, of_fit: np.ndarray) -> list[list[str]]:
    def line(label: str, chosen: np.ndarray) -> list[str]:
        own = errors[chosen]
        within = f"{np.mean(np.abs(own) <= 0.12):.0%} / {np.mean(np.abs(own) <= 0.18):.0%}"
        mean = f"{np.abs(own).mean():.1%}"
        worst, fit = f"{max(own, key=abs):+.1%}", f"{np.abs(of_fit[chosen]).mean():.1%}"
        return [label, str(len(own)), mean, f"{own.mean():+.1%}", within, worst, fit]

    rows = [["runs", "rows", "mean error", "signed", "within 12 / 18%", "worst", "of the fit"]]
    for group in sorted({run.group for run, _ in pairs}):
        own = np.array([run.group == group for run, _ in pairs])
        rows.append(line(group, own))
        newer = own & np.array([recent(run) for run, _ in pairs])
        if "experts" in group and newer.any():
            rows.append(line(f"{group}, since 26", newer))
            for name in sorted({layout.model.name for run, layout in pairs if run.group == group}):
                rows.append(
                    line(f"- {name}", newer & np.array([layout.model.name == name for _, layout in pairs]))
                )
    return rows


def by_name(label: str, names: list[str], errors: np.ndarray) -> list[list[str]]:
    """Errors of the runs of each name, which a fit without these has made."""
    rows = [[f"{label} left out", "rows", "mean error", "signed", "worst"]]
    for name in sorted(set(names)):
        own = errors[np.array(names) == name]
        mean, signed, worst = np.abs(own).mean(), own.mean(), max(own, key=abs)
        rows.append([name, str(len(own)), f"{mean:.1%}", f"{signed:+.1%}", f"{worst:+.1%}"])
    return rows


def judge(truth: Path, every: bool = False, refit: bool = False) -> int:
    """Print what the tables of a folder say; returns an exit status."""
    files = [truth / name for name in FILES if (truth / name).exists()]
    if not files:
        print(f"{truth}: has none of {', '.join(FILES)}: give --truth DIR.", file=sys.stderr)
        return 1
    settings = truth if (truth / "models.yaml").exists() else GIVEN
    runs = []
    for path in files:
        try:
            runs += read_runs(path, settings / "models.yaml")
        except PlanError as why:
            print(f"left out: {why}", file=sys.stderr)
    # Layers that vTrain's rows have taught: constants are fitted, and judged, without them.
    learned = [pair for pair in expressible(runs) if pair[0].left_out_with]
    pairs = [(run._replace(costs=()), layout) for run, layout in expressible(runs)]
    groups = Counter(run.group for run, _ in pairs)
    # Many runs that differ little say no more than some would.
    weights = np.array([min(1.0, MOST / groups[run.group]) for run, _ in pairs])
    own = truth.resolve() == GIVEN.resolve()
    keys = [layout.model.name.replace("3.1", "3") for _, layout in pairs]
    keys = [run.left_out_with or key for (run, _), key in zip(pairs, keys, strict=True)]
    values = dict(recipes.published())
    if own or refit:
        values, near = fit_all(pairs, weights)
    if refit:
        moving = {name for at, name in enumerate(near.at) if np.abs(near.each[:, at]).max() > 1e-4}
        values = {name: float(f"{values[name]:.4g}") for name in sorted(moving)}
        about = f"Fitted to {len(pairs)} rows of {', '.join(path.name for path in files)}"
        about += " by benchmarks/recipe_accuracy.py --fit; what each means: fasop/exact/recipes.py."
    measured = np.array([run.seconds for run, _ in pairs])
    shipped = steps(pairs, values) / measured - 1
    errors = left_out(pairs, near, keys, weights) if own else shipped
    if refit:
        write_json(recipes.FILE, {"about": about, "constants": values, "errors": by_kind(pairs, errors)})
    by_layers = steps(learned, values) / np.array([run.seconds for run, _ in learned]) - 1
    alone = [(run._replace(group=run.group + ALONE * bool(run.left_out_with)), at) for run, at in pairs]
    of_fit = np.concatenate([shipped, by_layers])
    if own:
        by_layers = learned_left_out(pairs, near, weights)
    shown = [(run._replace(group=run.group + LEARNED), at) for run, at in learned]
    both, out = [*alone, *shown], np.concatenate([errors, by_layers])
    print("each model or layout left out of the fit in turn:" if own else "by the shipped constants:")
    print("\n".join(text.table(lines(both, out, of_fit), right=set(range(1, 7)))))
    if own:
        print(f"(of the fit itself: {np.abs(shipped).mean():.1%}, {len(values)} constants)")
        models = [layout.model.name.replace("3.1", "3") for _, layout in pairs]
        gpus = [layout.cluster.gpus[0].name for _, layout in pairs]
        print("\n".join(text.table(by_name("model", models, errors), right=set(range(1, 5)))))
        systems = [f"{run.group.split(',')[0]} on {gpu}" for (run, _), gpu in zip(pairs, gpus, strict=True)]
        for label, names in (("GPU", gpus), ("GPU of one software", systems)):
            without = left_out(pairs, near, names, weights)
            print("\n".join(text.table(by_name(label, names, without), right=set(range(1, 5)))))
    print(f"vTrain, {ranking(learned, by_layers)}\nby constants alone: {ranking(pairs, errors)}")
    parts = []  # of a GPU's memory that runs of training_runs.csv are predicted to need
    for run, layout in pairs:
        if "memory_gib" not in run.row:
            continue
        predicted_gib = predicted(run, layout)[1].memory
        parts.append(predicted_gib / layout.cluster.gpus[0].memory_gib)
        if published := run.row["memory_gib"]:
            print(f"memory of {run.name}: {predicted_gib:.1f} GiB, {published} GiB published")
    over, far = (sum(part > most for part in parts) for most in (1.0, MEMORY_MARGIN))
    if parts:
        print(f"{over} of {len(parts)} runs are predicted not to fit, {far} without the margin either")
    print(f"{sum(bool(run.assumed) for run in runs)} rows with assumptions")
    stated = [run for run in runs if run.row.get("tp", "1") and run.row.get("mode") != "inf"]
    print(f"expressed: {len(pairs)} of {len(stated)} rows with a stated layout; refused of all {len(runs)}:")
    for reason, count in refused(runs).most_common():
        print(f"  {count} × {reason}")
    if every:
        for (run, _), error in sorted(zip(both, out, strict=True), key=lambda each: each[1]):
            where = f"{run.group}: {run.name} {run.row.get('release', '')}"
            print(f"{error:+.1%} {where} {run.row.get('notes', '')}")
    return 0 if pairs else 1


def main() -> int:
    config = cli.parse(Config, description="Predict published training runs.")
    return judge(config.truth, config.rows, config.fit)


if __name__ == "__main__":
    sys.exit(main())
