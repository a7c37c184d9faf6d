#!/usr/bin/env python3
"""How well published training runs are predicted, on models that no fit has seen.

    python benchmarks/recipe_accuracy.py                  (each model left out of the fit in turn)
    python benchmarks/recipe_accuracy.py --truth DIR      (other rows, by the constants that are shipped)
    python benchmarks/recipe_accuracy.py --rows           (every run)
    python benchmarks/recipe_accuracy.py --fit            (fits the constants to all rows and ships them)

The rows are those of training_runs.csv, mpt_fsdp.csv and neusight_steps.csv in the folder. Rows that can't be
expressed are counted with their reasons. "Since 26": without Megatron-Bridge's releases before 26, whose MoE
kernels and dispatch differ, and without runs that drop tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from chakra_et import cli, text
from chakra_et.cost.fit import fit
from chakra_et.files import write_json
from fasop.exact import recipes
from fasop.exact.recipes import PRIORS, Recipe
from fasop.inputs.training_runs import Run, expressible, read_runs, refused

GIVEN = ROOT.parent / "shared" / "data" / "truth"
FILES = ("training_runs.csv", "mpt_fsdp.csv", "neusight_steps.csv")
Pairs = list[tuple[Run, Recipe]]


@dataclass
class Config:
    truth: Path = field(default=GIVEN, metadata={"help": "folder of the tables"})
    rows: bool = field(default=False, metadata={"help": "print every run"})
    fit: bool = field(default=False, metadata={"help": "write the constants, fitted to all rows"})


def model_of(pairs: Pairs) -> tuple[Callable[..., np.ndarray], dict[str, float], dict[str, float]]:
    """Seconds of the runs by constants, and the prior of these: values and widths."""
    found = [recipes.parts(recipe) for _, recipe in pairs]
    stacked = {part: np.array([each[part] for each in found]) for part in PRIORS}
    names = recipes.names_of([recipes.constants_of(recipe) for _, recipe in pairs])
    prior = {name: PRIORS[part] for part in PRIORS for name in names[part]}
    # A constant of a part that no run has says nothing.
    used = {n for part in PRIORS for n, each in zip(names[part], stacked[part], strict=True) if each}
    start = {name: value for name, (value, _) in prior.items()}
    widths = {name: width for name, (_, width) in prior.items() if name in used}
    return lambda values: recipes.total(stacked, names, {**start, **values}), start, widths


def fitted(pairs: Pairs) -> dict[str, float]:
    seconds, start, widths = model_of(pairs)
    found = fit(seconds, np.array([run.seconds for run, _ in pairs]), start, widths)
    return {name: found[name] for name in widths}


def left_out(pairs: Pairs) -> np.ndarray:
    """Errors of runs, each by a fit without its model (of any source)."""
    keys = [recipe.model.name.replace("3.1", "3") for _, recipe in pairs]
    errors = np.empty(len(pairs))
    for key in sorted(set(keys)):
        own = np.array([each == key for each in keys])
        values = fitted([pair for pair, out in zip(pairs, own, strict=True) if not out])
        rows = [pair for pair, out in zip(pairs, own, strict=True) if out]
        errors[own] = model_of(rows)[0](values) / np.array([run.seconds for run, _ in rows]) - 1
    return errors


def recent(run: Run) -> bool:
    return "tokendrop" not in run.row.get("notes", "") and run.row.get("release", "26") >= "26"


def lines(pairs: Pairs, errors: np.ndarray) -> list[list[str]]:
    def line(label: str, chosen: np.ndarray) -> list[str]:
        own = errors[chosen]
        within = f"{np.mean(np.abs(own) <= 0.12):.0%} / {np.mean(np.abs(own) <= 0.18):.0%}"
        mean = f"{np.abs(own).mean():.1%}"
        return [label, str(len(own)), mean, f"{own.mean():+.1%}", within, f"{max(own, key=abs):+.1%}"]

    rows = [["runs", "rows", "mean error", "signed", "within 12 / 18%", "worst"]]
    for group in sorted({run.group for run, _ in pairs}):
        own = np.array([run.group == group for run, _ in pairs])
        rows.append(line(group, own))
        newer = own & np.array([recent(run) for run, _ in pairs])
        if "experts" in group and newer.any():
            rows.append(line(f"{group}, since 26", newer))
            for name in sorted({recipe.model.name for run, recipe in pairs if run.group == group}):
                rows.append(
                    line(f"- {name}", newer & np.array([recipe.model.name == name for _, recipe in pairs]))
                )
    return rows


def judge(truth: Path, every: bool = False, refit: bool = False) -> int:
    """Print what the tables of a folder say; returns an exit status."""
    files = [truth / name for name in FILES if (truth / name).exists()]
    if not files:
        print(f"{truth}: has none of {', '.join(FILES)}: give --truth DIR.", file=sys.stderr)
        return 1
    settings = truth if (truth / "models.yaml").exists() else GIVEN
    runs = [run for path in files for run in read_runs(path, settings / "models.yaml")]
    pairs = list(expressible(runs))
    if refit:
        values = {name: float(f"{value:.4g}") for name, value in sorted(fitted(pairs).items())}
        about = f"Fitted to {len(pairs)} rows of {', '.join(path.name for path in files)}"
        about += " by benchmarks/recipe_accuracy.py --fit; what each means: fasop/exact/recipes.py."
        write_json(recipes.FILE, {"about": about, "constants": values})
        recipes.published.cache_clear()
    steps = [recipes.step(recipe) for _, recipe in pairs]
    shipped = np.array([one.seconds / run.seconds - 1 for one, (run, _) in zip(steps, pairs, strict=True)])
    own = truth.resolve() == GIVEN.resolve()
    errors = left_out(pairs) if own else shipped
    print("each model left out of the fit in turn:" if own else "by the shipped constants:")
    print("\n".join(text.table(lines(pairs, errors), right=set(range(1, 6)))))
    if own:
        print(f"(of the fit itself: {np.abs(shipped).mean():.1%}, {len(recipes.published())} constants)")
    guessed, assumed = sum(bool(one.guessed) for one in steps), sum(bool(run.assumed) for run in runs)
    print(f"{guessed} rows with a constant that no run has set, {assumed} with assumptions")
    stated = [run for run in runs if run.row.get("tp", "1") and run.row.get("mode") != "inf"]
    print(f"expressed: {len(pairs)} of {len(stated)} rows with a stated layout; refused of all {len(runs)}:")
    for reason, count in refused(runs).most_common():
        print(f"  {count} × {reason}")
    if every:
        for (run, _), one, error in sorted(zip(pairs, steps, errors, strict=True), key=lambda each: each[2]):
            shares = {part: f"{seconds / one.seconds:.0%}" for part, seconds in one.parts.items()}
            print(f"{error:+.1%} {run.name} {run.row.get('release', '')} {json.dumps(shares)}")
    return 0


def main() -> int:
    config = cli.parse(Config, description="Predict published training runs.")
    return judge(config.truth, config.rows, config.fit)


if __name__ == "__main__":
    sys.exit(main())
