"""Kernels that move numbers: how far elementwise ones, softmax and layer norm are from NeuSight's times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.cost_result import Row
from benchmarks.cost_tables import by_gpu, read
from chakra_et.cost.fit import fit
from chakra_et.cost.kernel_times import Values
from chakra_et.cost.operator_times import GDDR, GpuModel, OperatorCall, gpu_model

MOVING = {"elem": ("elementwise", "5"), "softmax": ("softmax", "12"), "ln": ("normalization", "12")}
_TWO_INPUTS = ("add", "mul", "div", "pow")
ROWS = {
    "softmax": {"memory": (0.85, 0.1), "held": (0.3, 0.5), "rise": (0.5, 0.5), "odd": (0.2, 0.5)},
    "normalization": {"memory": (0.85, 0.1), "held": (0.5, 0.5), "rise": (1.0, 0.5)},
}
"""Where the fit of softmax and layer norm starts, and how far it may go."""


@dataclass(frozen=True)
class Calls:
    """Measured kernels of a kind on one GPU that move numbers."""

    model: GpuModel
    calls: list[OperatorCall]
    micros: np.ndarray

    def said(self, values: Values) -> np.ndarray:
        """µs with these parameters, of HBM, in place of the model's own."""
        part = GDDR if self.model.gpu.kind == "GDDR" else 1.0
        own = {name: value * (part if name.endswith("memory") else 1) for name, value in values.items()}
        model = GpuModel(self.model.kernels, {**self.model.parameters, **own})
        return np.array([model.micros(call) for call in self.calls])


def read_moving(folder: Path) -> dict[str, list[Calls]]:
    """NeuSight's kernels that move numbers, fp32, by table."""
    rows = read(
        folder,
        "neusight_kernels.parquet",
        ("device", "table", "op"),
        ("rows", "cols", "latency_us"),
        tuple(MOVING),
    )
    found: dict[str, list[Calls]] = {}
    for gpu, table, each in by_gpu(rows, ("device", "table")):
        tensors = np.where(each.op.isin(_TWO_INPUTS), 3, 2)
        calls = [
            OperatorCall(
                MOVING[table][0], float(m) * n, 4.0 * m * n * moved, row=int(n), type="float", idle=True
            )
            for m, n, moved in zip(each.rows, each.cols, tensors, strict=True)
        ]
        of = Calls(gpu_model(gpu.name), calls, each.latency_us.to_numpy(float))
        found.setdefault(table, []).append(of)
    return found


def fitted_rows(kind: str, tables: Sequence[Calls]) -> dict[str, float]:
    """The parameters of kernels that go along rows, by these tables alone."""
    names = {name: name.rpartition(".")[2] for name in tables[0].model.parameters if name.startswith(kind)}
    priors = ROWS[kind]
    start = {name: priors[of][0] for name, of in names.items() if of in priors}
    return fit(
        lambda values: np.concatenate([each.said(values) for each in tables]),
        np.concatenate([each.micros for each in tables]),
        start,
        {name: priors[names[name]][1] for name in start},
    )


def moving_rows(given: Path, judged: Path | None) -> Iterator[Row]:
    """Elementwise kernels, and all of AMD's, by parameters that were fitted to H100 and MI300X; softmax and
    layer norm of NVIDIA's by those that come out of the other devices."""
    known = read_moving(given)
    for table, tables in (read_moving(judged) if judged else known).items():
        kind, target = MOVING[table]
        for each in tables:
            others = [of for of in known[table] if of.model.name != each.model.name]
            values = fitted_rows(kind, others) if table != "elem" and each.model.vendor == "nvidia" else {}
            errors = each.said(values) / each.micros - 1
            yield Row(f"{kind} fp32, device left out", each.model.name, each.micros, errors, target)
