"""Predictions against measured steps of the changed workload, both in turns in one process."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from chakra_et.doctor.captures import converted
from chakra_et.doctor.results import Line, at_most, equal
from chakra_et.doctor.workload import Workload, changed, launched, make_step, step_ms
from chakra_et.errors import TraceError
from chakra_et.predict.command import PredictConfig, changes
from chakra_et.predict.predict import predict
from chakra_et.simulate.run import load_run

MOST_MEAN, MOST_WORST = 0.03, 0.08


def variants(base: Workload) -> list[tuple[Workload, dict[str, object]]]:
    """Changed workloads, each with the flags of ``chakra-et predict`` that say the same."""
    wide = tuple(f"{n}={2 * n}" for n in (base.hidden, 3 * base.hidden, 4 * base.hidden))
    return [
        (changed(base, name="batch", batch=2 * base.batch), {"batch": "2x"}),
        (changed(base, name="sequence", seq=2 * base.seq), {"seq": "2x"}),
        (changed(base, name="layers", layers=2 * base.layers), {"layers": "2x"}),
        (changed(base, name="hidden", hidden=2 * base.hidden), {"resize": wide}),
        (changed(base, name="slower-kernel", repeats=4 * base.repeats), {"scale": ("erfinv=4",)}),
    ]


def check(folder: Path, on_gpu: bool) -> Iterator[Line]:
    """One line for each change, and two for all."""
    base = Workload("base", layers=2, hidden=192, batch=4, seq=80, repeats=2, steps=2)
    if on_gpu:
        base = changed(base, layers=8, hidden=1024, batch=8, seq=384, steps=10)
    try:
        launched(changed(base, trace=str(folder)))
        converted(folder, "base")
        run = load_run(str(folder / "base"))
    except (RuntimeError, OSError, ValueError) as error:
        yield equal("base", f"failed: {error}", "a capture that converts")
        return
    errors = []
    for given, flags in variants(base):
        before, after = step_ms([make_step(base), make_step(given)], base.steps, 5 if on_gpu else 2)
        config = PredictConfig(name="base", **flags)  # type: ignore[arg-type]
        try:
            found = predict(run, changes(config, run), explain=False)
        except TraceError as error:
            yield equal(f"{given.name}: predicted", f"refused: {error}", "a prediction")
            continue
        told = found.after_ms / found.before_ms
        errors.append(abs(told * before / after - 1))
        yield at_most(
            f"{given.name}: predicted × {told:.3f}, measured × {after / before:.3f}",
            errors[-1],
            MOST_WORST,
            on_gpu,
        )
    if errors:
        yield at_most("mean of all changes", statistics.fmean(errors), MOST_MEAN, on_gpu)
