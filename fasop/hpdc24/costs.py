"""Unit costs as the published tool looks them up: measured at micro-batch 1, grown by its factors.

Source: FASOP (HPDC 2024), as its published tool applies them. Degrees and depths that it has not are scaled
as in the ``exact`` cost model, which ``notes`` names.
"""

from __future__ import annotations

from dataclasses import replace

from fasop.errors import PlanError, nearest
from fasop.exact.unit_times import Compute
from fasop.inputs.costs import CostFile, Growth
from fasop.inputs.models import Model
from fasop.plans.options import Options

PASSES = 3.0  # the tool's unit is a whole pass, multiplied before anything else


def published_costs(cost_files: list[CostFile], model: Model) -> Compute:
    """Costs whose ``forward`` is a whole pass. Raises ``PlanError`` where no file has the model's costs."""
    found = Compute([_as_applied(file) for file in cost_files], model, Options())
    if not found.sources:
        known = sorted({entry.model for file in cost_files for entry in file.entries})
        raise PlanError(
            f"no costs for model {model.name}: set 'costs' in the models file, measure it with "
            f"'python -m fasop profile', or use --cost-model exact: {nearest(model.name, known)}"
        )
    return found


def _as_applied(file: CostFile) -> CostFile:
    entries = [replace(e, forward=tuple(PASSES * value for value in e.forward)) for e in file.entries]
    growth: Growth = {}
    for table in (file.growth, file.growth_hpdc24):
        for name, gpus in (table or {}).items():
            for gpu, kinds in gpus.items():
                growth.setdefault(name, {}).setdefault(gpu, {}).update(kinds)
    settings = {"collectives": "excluded", "precision": "", "attention": ""}
    return replace(file, entries=tuple(entries), growth=growth or None, **settings)  # type: ignore[arg-type]
