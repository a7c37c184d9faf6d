#!/usr/bin/env python3
"""How much measured products scatter: no model of them can be closer than that (docs/HOW_TRUE.md).

    python benchmarks/cost_floor.py

By GPU, all relative to the fitted model: how far neighbours between m = 9 and 15 are apart, for which a
library takes the same kernel; how far a row is from the mean of m - 1's and m + 1's of its own (n, k); and
how far rows are from what ``smoothing.py`` makes of all, between m = 9 and 15 and elsewhere. Of batched
products in 32 bits: how far the time of one product is from that between the next smaller and the next larger
batch of its own (m, n, k), for which a library takes the same kernel; and how far off trees of the GPU's
other rows are, whole (n, k) and single rows left out. Of ``measure-gpu``'s 100 shapes: how
far off all others are by the parameters fitted to them, and with what they say of others as shipped; and what
more shapes say, up to all but those judged, by ``smoothing.py``. Of 8-bit products: how far the model is off
with parameters fitted to the GPU's own rows. Of bfloat16 products: how far off those of ``BETWEEN``
columns are, by all others. Of the H200's 8-bit products with few rows (``data/h200``): what they take per
1,024 elements of K, and per block of ``BLOCK`` elements that the quantising kernel reads one after the other;
and what they take with long K, by the model, and in 16 bits. Of Hopper, with and without cuBLAS's further
tiles (``MORE_TILES``), each with parameters fitted to H100's table: how far off other products of that table,
those of an H200 and those of a training step on it (``tests/fixtures/gpu``) are without grids, and, with
them, those of ``BETWEEN_ROWS`` rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.boosting import boosted, product_columns
from benchmarks.cost_accuracy import FOLDS, Options
from benchmarks.cost_fits import drawn, fitted, own_times, stranger
from benchmarks.cost_result import LONG as LONG_ENOUGH
from benchmarks.cost_tables import Table, read_float, read_products
from benchmarks.fit_gpus import read
from benchmarks.smoothing import PRODUCT, smooth
from chakra_et import cli
from chakra_et.cost import products
from chakra_et.cost.gpus import gpu
from chakra_et.cost.kernel_times import MODELS, KernelTimes, calibrated, kernel_times
from chakra_et.cost.operator_times import SETS
from chakra_et.errors import TraceError

MORE = (400, 1600, 6400)
"""Shapes."""
JUDGED = 4000
BETWEEN = (512, 1536, 3584, 7168, 12288)
BETWEEN_ROWS = (160, 161, 224, 225, 768, 769, 1280, 1281, 1792, 1793, 2304, 2305, 2816, 2817, 3328, 3329)
"""Columns that are left out together, and rows: with one more than a multiple of tiles, as those tables have
them, and without."""
H200 = Path(__file__).with_name("data") / "h200"
FEW_ROWS, BLOCK = 64, 4096
"""``gpu_truth.py``'s quantising kernel loads blocks of so many elements of a row, a program for each row."""
STEP = tuple(
    Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "gpu" / f"device-bound_{part}.json.gz"
    for part in ("device", "host")
)
COLUMNS, LONG = ((32, 256), (512, 2048), (2560, 8192)), (8192, 12288)


def scatter(points: np.ndarray, logs: np.ndarray) -> list[float]:
    """The four figures, from ``points[R, 3]`` (m, n, k) and the logarithm of measured over modelled time."""
    axes = [np.unique(column) for column in points.T]
    places = tuple(np.searchsorted(sizes, column) for sizes, column in zip(axes, points.T, strict=True))
    grid = np.full([len(sizes) for sizes in axes], np.nan)
    grid[places] = logs
    alike = (axes[0] >= 9) & (axes[0] <= 15)
    apart = np.abs(np.diff(grid[alike], axis=0))
    between = np.abs(np.exp((grid[2:] + grid[:-2]) / 2 - grid[1:-1]) - 1)
    beyond, same = np.abs(logs - smooth(points, logs, PRODUCT).at(points)), alike[places[0]]
    return [float(np.nanmean(each)) for each in (apart, between, beyond[same], beyond[~same])]


def between_batches(table: Table) -> np.ndarray:
    """Relative errors of what two neighbours in the batch say of the one between them."""
    batch, shapes = table.points[:, 0], table.points[:, 1:]
    each = np.log(table.micros / batch)
    order = np.lexsort((batch, *shapes.T))
    low, middle, high = order[:-2], order[1:-1], order[2:]
    chosen = (shapes[low] == shapes[high]).all(axis=1) & (batch[low] > 1)
    low, middle, high = low[chosen], middle[chosen], high[chosen]
    share = np.log(batch[middle] / batch[low]) / np.log(batch[high] / batch[low])
    errors: np.ndarray = np.exp((1 - share) * each[low] + share * each[high] - each[middle]) - 1
    return errors


def by_own_rows(table: Table) -> list[float]:
    """Errors of batched products by trees of the table's others: whole (n, k) left out, and single rows."""
    table = table.where(table.points[:, 0] > 1)
    batch, points = table.points[:, 0], table.points[:, 1:4]
    said = MODELS["float"].micros(table.gpu, fitted("float", table), table.points)
    beyond = np.log(table.micros / said)
    columns = [product_columns(points, table.gpu.units), np.log2(batch), np.log2(batch * points.prod(axis=1))]
    for edge in (64, 128):
        waves = batch * np.ceil(points[:, :2] / edge).prod(axis=1) / table.gpu.units
        columns += [waves, waves / np.ceil(waves)]
    seen, found = np.column_stack(columns), []
    for groups in (
        np.unique(points[:, 1:], axis=0, return_inverse=True)[1].reshape(-1),
        np.arange(len(batch)),
    ):
        fold, logs = (
            np.random.default_rng(0).permutation(groups.max() + 1)[groups] % FOLDS,
            np.empty(len(batch)),
        )
        for at in range(FOLDS):
            known = fold != at
            logs[~known] = boosted(seen[known], beyond[known], groups[known], seen[~known])
        found.append(float(np.abs(np.exp(logs - beyond) - 1).mean()))
    return found


def by_few(name: str, tables: Mapping[str, Table]) -> list[float]:
    """Errors of bfloat16 products with 100 measured shapes: without what these say of others, and as shipped;
    then with ``MORE`` shapes, and all but those judged, smoothed beyond the GPU's own parameters."""
    table, kind = tables[name], "16 bit"
    model, own = MODELS[kind], fitted(kind, table)
    known = [KernelTimes(of.gpu, {kind: fitted(kind, of)}, {}) for of in tables.values() if of is not table]
    given = np.isin(np.arange(len(table.micros)), drawn(kind, table))
    some, rest = table.where(given), table.where(~given)
    order = np.random.default_rng(5).permutation(len(rest.micros))
    others, rest = rest.where(order[:JUDGED]), rest.where(order[JUDGED:])
    times = calibrated(stranger(kind, table.gpu, known), kind, some.points, some.micros)

    def off(said: np.ndarray) -> float:
        return float(np.abs(said / others.micros - 1).mean())

    found = [off(each.micros(kind, others.points)) for each in (replace(times, nearby={}), times)]
    said = model.micros(table.gpu, own, others.points)
    for count in (*MORE, len(rest.micros)):
        part = rest.where(np.arange(len(rest.micros)) < count)
        beyond = np.log(part.micros / model.micros(table.gpu, own, part.points))
        grid = smooth(model.place(part.points), beyond, PRODUCT)
        found.append(off(said * np.exp(grid.at(model.place(others.points)))))
    return found


def own_parameters(kind: str, table: Table) -> float:
    """The model's error by parameters that were fitted to the table itself."""
    said = MODELS[kind].micros(table.gpu, fitted(kind, table), table.points)
    return float(np.abs(said / table.micros - 1).mean())


def between(table: Table, column: int, sizes: tuple[int, ...]) -> list[float]:
    """Errors for sizes between those that were measured, all and from 20 µs on; ``column`` of the points."""
    left = np.isin(table.points[:, column], sizes)
    said = own_times("16 bit", table.where(~left)).micros("16 bit", table.points[left])
    errors = np.abs(said / table.micros[left] - 1)
    return [float(errors.mean()), float(errors[table.micros[left] >= LONG_ENOUGH].mean())]


def along_k(table: Table, low: int, high: int) -> tuple[int, list[float], float, float]:
    """Of products of up to ``FEW_ROWS`` rows and ``low`` to ``high`` columns: how many, the µs of each, per
    1,024 elements of K and per block, the standard error of the last, and the mean error without blocks."""
    m, n, k = table.points[:, 1:4].T
    chosen = (m <= FEW_ROWS) & (n >= low) & (n <= high)
    micros, k = table.micros[chosen], k[chosen]
    parts = np.stack([np.ones(len(k)), k / 1024, np.ceil(k / BLOCK)], axis=1) / micros[:, None]
    said, *_ = np.linalg.lstsq(parts, np.ones(len(k)), rcond=None)
    left = np.sum((parts @ said - 1) ** 2) / (len(k) - 3)
    deviation = float(np.sqrt(left * np.linalg.inv(parts.T @ parts)[2, 2]))
    line, *_ = np.linalg.lstsq(parts[:, :2], np.ones(len(k)), rcond=None)
    return len(k), said.tolist(), deviation, float(np.abs(parts[:, :2] @ line - 1).mean())


def by_parameters(values: Mapping[str, float], tables: Sequence[Table]) -> list[float]:
    """Of each table the mean error by these parameters, from 20 µs on, by time, and signed by time."""
    found: list[float] = []
    for table in tables:
        errors = MODELS["16 bit"].micros(table.gpu, values, table.points) / table.micros - 1
        size, long = np.abs(errors), table.micros >= LONG_ENOUGH
        weighted = (float(np.average(each, weights=table.micros)) for each in (size, errors))
        found += [float(size.mean()), float(size[long].mean()), *weighted]
    return found


def training_step() -> Table:
    """The products of an H200's training step."""
    found = [each for each in read(*STEP) if each.work.product and each.work.kind == "matrix product"]
    points = np.array([[*(each.work.product or ()), SETS] for each in found], float)
    return Table(gpu("H200"), points, np.array([each.micros for each in found]))


def long_k(table: Table, low: int, high: int) -> float:
    """The median µs of such products with K in ``LONG``."""
    m, n, k = table.points[:, 1:4].T
    chosen = (m <= FEW_ROWS) & (n >= low) & (n <= high) & (k >= LONG[0]) & (k <= LONG[1])
    return float(np.median(table.micros[chosen]))


def main() -> int:
    options = cli.parse(Options, description=__doc__.splitlines()[0])
    return cli.run(lambda: show(options), TraceError)


def show(options: Options) -> None:
    """Print the tables. Raises ``TraceError``."""
    head = (
        "| 8-bit products on an H200 | rows | µs | per 1,024 of K | per block | mean error without blocks |"
    )
    print(f"{head} median with long K | model | of 16 bits |\n|{'---|' * 9}")
    (few,), (wide,) = (read_products(H200, dtype).values() for dtype in ("fp8", "bfloat16"))
    told = replace(few, micros=kernel_times(few.gpu).micros("8 bit", few.points))
    for low, high in COLUMNS:
        count, (each, per_k, per_block), deviation, off = along_k(few, low, high)
        fitted_line = f"{each:.1f} | {per_k:.2f} | {per_block:+.2f} ± {deviation:.2f} | {off:.1%}"
        medians = " | ".join(f"{long_k(table, low, high):.1f}" for table in (few, told, wide))
        print(f"| m to {FEW_ROWS}, n {low:,} to {high:,} | {count} | {fitted_line} | {medians} |", flush=True)
    hopper = next(
        table for table in read_products(Path(options.given), "bfloat16").values() if table.gpu.name == "H100"
    )
    judged = hopper.some(JUDGED, seed=7), wide, training_step()
    each = " | ".join(f"{name}: all | from 20 µs | by time | signed" for name in ("H100", "H200", "step"))
    print(f"\n| tiles on Hopper | {each} | rows between: all | from 20 µs |\n|{'---|' * 15}")
    for tiles, lacking in (("as on other GPUs", True), ("cuBLAS's, too", False)):
        with mock.patch.dict(products.MORE_TILES, clear=lacking):
            found = by_parameters(fitted("16 bit", hopper), judged) + between(hopper, 1, BETWEEN_ROWS)
        print(f"| {tiles} | {' | '.join(f'{of:+.1%}' for of in found)} |", flush=True)
    print()
    print(
        "| GPU | m 9 to 15: neighbours apart | m between neighbours | m 9 to 15: from smoothed | elsewhere |"
    )
    print("|---|---|---|---|---|")
    tables, narrow = (read_products(Path(options.given), dtype) for dtype in ("bfloat16", "fp8"))
    for kind, of_kind in (("16 bit", tables), ("8 bit", narrow)):
        for table in of_kind.values():
            said = MODELS[kind].micros(table.gpu, fitted(kind, table), table.points)
            figures = scatter(table.points[:, 1:4], np.log(table.micros / said))
            shown = " | ".join(f"{each:.1%}" for each in figures)
            print(f"| {table.gpu.name}, {kind}s | {shown} |", flush=True)
    counts = " | ".join(f"{count:,}" for count in MORE)
    print(f"\n| GPU | 100 shapes: parameters alone | as shipped | {counts} | all others |\n|{'---|' * 7}")
    for name, table in tables.items():
        figures = by_few(name, tables)
        print(f"| {table.gpu.name} | {' | '.join(f'{each:.1%}' for each in figures)} |", flush=True)
    print("\n| GPU | columns between those measured |\n|---|---|")
    for table in tables.values():
        print(f"| {table.gpu.name} | {between(table, 2, BETWEEN)[0]:.1%} |", flush=True)
    print("\n| GPU | 8-bit products by parameters of its own |\n|---|---|")
    for table in narrow.values():
        print(f"| {table.gpu.name} | {own_parameters('8 bit', table):.1%} |", flush=True)
    print("\n| GPU | batched products in 32 bits | a batch between its neighbours |", end="")
    print(f" by trees of other rows, (n, k) left out | single rows left out |\n|{'---|' * 5}")
    for table in read_float(Path(options.given)).values():
        errors, by_trees = between_batches(table), by_own_rows(table)
        shown = " | ".join(f"{each:.1%}" for each in (np.abs(errors).mean(), *by_trees))
        print(f"| {table.gpu.name} | {len(errors):,} | {shown} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
