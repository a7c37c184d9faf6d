#!/usr/bin/env python3
"""How far the times of kernels on GPUs (chakra_et/cost) are from public measurements that the fit never saw.

    python benchmarks/cost_accuracy.py                  leave out GPUs, and shapes of each GPU
    python benchmarks/cost_accuracy.py --tables DIR     fit to the given tables, judge those of DIR
    python benchmarks/cost_accuracy.py --write          fit to all, write kernel_times.json and grids.npz;
                                                        with --kinds attention only those kernels
    python benchmarks/cost_accuracy.py --plot X.svg     predicted over measured times of each class, too

The tables are those of ../shared/data/truth (its README.md names their sources), or of
``scripts/public_traces.py FOLDER --tables`` with ``--given FOLDER``. Each row of the result is
one GPU: mean error, all and from 20 µs on, signed, weighted by time, median, and the target of the mean.
``cost_tables.py`` reads the tables, ``cost_fits.py`` fits the models to them; ``cost_moving.py`` judges
elementwise kernels, softmax and layer norm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.cost_fits import SHAPES, drawn, fitted, like, own_times, stranger, write
from benchmarks.cost_moving import moving_rows
from benchmarks.cost_picture import draw
from benchmarks.cost_result import HEAD, Row
from benchmarks.cost_tables import FILES, JUDGED, READERS, Table
from chakra_et import cli
from chakra_et.cost.attention import BACKWARD_PASS
from chakra_et.cost.kernel_times import MODELS, KernelTimes, calibrated, kernel_times
from chakra_et.cost.operator_times import OperatorCall, gpu_model
from chakra_et.errors import TraceError

FOLDS = 3
UNLIKELY = 30.0
"""A median so many times off is a wrong unit."""


@dataclass
class Options:
    """What is judged."""

    given: str = field(default="../shared/data/truth", metadata={"help": "folder of the tables to fit to"})
    tables: str = field(default="", metadata={"help": "folder of other tables to judge"})
    kinds: tuple[str, ...] = field(default=(), metadata={"help": "only these kinds of kernels"})
    write: bool = field(default=False, metadata={"help": "write the fit to all given tables"})
    plot: str = field(default="", metadata={"help": "SVG file of a picture, of all that is judged"})


TITLES = {
    "16 bit": "products bf16",
    "8 bit": "fp8 products with quantisation",
    "float": "fp32 products",
    "attention": "attention forward",
    "8 bit alone": "fp8 products alone",
    "PyTorch's attention": "PyTorch's attention forward",
    "PyTorch's attention, backward": "PyTorch's attention backward",
}


def judged(title: str, kind: str, table: Table, times: KernelTimes, target: str = "", name: str = "") -> Row:
    errors = times.micros(kind, table.points) / table.micros - 1
    return Row(title, name or table.gpu.name, table.micros, errors, target, batch_of(kind, table))


def batch_of(kind: str, table: Table) -> np.ndarray | None:
    return table.points[:, 0] if kind == "float" else None


def with_some(kind: str, table: Table, start: KernelTimes, name: str = "") -> Row:
    """With ``SHAPES`` measured shapes, judged on the others."""
    given = np.isin(np.arange(len(table.micros)), drawn(kind, table))
    some = table.where(given)
    times = calibrated(start, kind, some.points, some.micros)
    title = f"{TITLES[kind]}, GPU left out but for {SHAPES} shapes"
    return judged(title, kind, table.where(~given), times, TARGETS[kind]["shapes"], name)


def shapes_left_out(kind: str, table: Table) -> Row:
    """Whole (n, k) of products left out, or shapes of attention."""
    columns = [0, 1, 2, 3, 5] if kind == "attention" else [2, 3]
    group = np.unique(table.points[:, columns], axis=0, return_inverse=True)[1].reshape(-1)
    fold = np.random.default_rng(0).permutation(group.max() + 1)[group] % FOLDS
    said = np.empty(len(fold))
    for at in range(FOLDS):
        said[fold == at] = own_times(kind, table.where(fold != at)).micros(kind, table.points[fold == at])
    target = TARGETS[kind]["rows"]
    if kind == "16 bit" and table.gpu.name == "L40S":
        target = "8"
    return Row(
        f"{TITLES[kind]}, {'shapes' if kind == 'attention' else 'whole (n, k)'} left out",
        table.gpu.name,
        table.micros,
        said / table.micros - 1,
        target,
        batch_of(kind, table),
    )


def ratios(
    kind: str, target: str, title: str, a: tuple[Table, KernelTimes], b: tuple[Table, KernelTimes]
) -> Iterator[Row]:
    """What ``b`` takes over what ``a`` takes, by the models, for shapes measured on both, if any."""
    at = {tuple(point): micros for point, micros in zip(a[0].points.tolist(), a[0].micros, strict=True)}
    both = np.array([tuple(point) in at for point in b[0].points.tolist()])
    if not both.any():
        return
    table = b[0].where(both)
    before = np.array([at[tuple(point)] for point in table.points.tolist()])
    said = b[1].micros(kind, table.points) / a[1].micros(kind, table.points)
    errors = said / (table.micros / before) - 1
    yield Row(title, f"{a[0].gpu.name} → {b[0].gpu.name}", table.micros, errors, target)


TARGETS: dict[str, dict[str, str]] = {
    "16 bit": {
        "framework": "7 / 6",
        "rows": "6",
        "relative": "9 / 7.5",
        "none": "13 / 11",
        "shapes": "9 / 7.5",
    },
    "8 bit": {"framework": "20 / 30 (trtllm)", "rows": "8", "relative": "15", "none": "15", "shapes": ""},
    "float": {"framework": "15", "rows": "", "relative": "15", "none": "15", "shapes": ""},
    "attention": {"framework": "15", "rows": "5", "relative": "12", "none": "20", "shapes": ""},
}
GDDR_TARGET = {"L40S 16 bit": "18 / 14", "RTXPRO6000-SERVER attention": "25"}


def given_rows(kind: str, tables: Mapping[str, Table]) -> Iterator[Row]:
    """Shapes and GPUs left out of the given tables."""
    known = {name: KernelTimes(of.gpu, {kind: fitted(kind, of)}, {}) for name, of in tables.items()}
    for table in tables.values():
        yield shapes_left_out(kind, table)
    left = {
        name: stranger(kind, table.gpu, [known[other] for other in known if other != name])
        for name, table in tables.items()
    }
    for name, table in tables.items():
        target = GDDR_TARGET.get(f"{table.gpu.name} {kind}", TARGETS[kind]["none"])
        yield judged(f"{TITLES[kind]}, GPU left out, no relative", kind, table, left[name], target)
    for name, table in tables.items():
        yield with_some(kind, table, left[name])
    if kind == "16 bit":
        title = "ratio of two GPUs, the second left out, no relative"
        for name, table in tables.items():
            other = next(each for each in tables.values() if each is not table)
            first = other, own_times(kind, other)
            yield from ratios(kind, "15", title, first, (table.some(5000), left[name]))


def other_rows(kind: str, tables: Mapping[str, Table], others: Mapping[str, Table]) -> Iterator[Row]:
    """Other tables by a fit to the given ones."""
    known = {table.gpu.name: own_times(kind, table) for table in tables.values()}
    for name, table in others.items():
        gpu, targets = table.gpu, TARGETS[kind]
        if gpu.name in known:
            title = f"{TITLES[kind]}, fitted GPU, other framework"
            yield judged(title, kind, table, known[gpu.name], targets["framework"], name)
            continue
        times = stranger(kind, gpu, list(known.values()))
        relation = "no relative"
        if gpu.like in known:
            of = known[gpu.like]
            times, relation = like(gpu, of), "relative in the fit"
        none = GDDR_TARGET.get(f"{gpu.name} {kind}", targets["none"])
        target = targets["relative"] if gpu.like in known else none
        yield judged(f"{TITLES[kind]}, GPU left out, {relation}", kind, table, times, target, name)
        if len(table.micros) >= 2 * SHAPES:
            yield with_some(kind, table, times, name)
        first = next((each for each in tables.values() if each.gpu.name == gpu.like), None)
        target, first = "10" if first else "15", first or next(iter(tables.values()))
        of = known[first.gpu.name]
        yield from ratios(kind, target, f"ratio of two GPUs, {relation}", (first, of), (table, times))


def shipped_rows(kind: str, tables: Mapping[str, Table]) -> Iterator[Row]:
    """Tables of a kind that is given for no GPU, by the models that are shipped."""
    for name, table in tables.items():
        if name.endswith("flash"):
            said = np.array([flash_micros(table.gpu.name, *point) for point in table.points.tolist()])
        else:
            said = kernel_times(table.gpu).micros(kind if kind in MODELS else "attention", table.points)
        yield Row(f"{TITLES[kind]}, as shipped", name, table.micros, said / table.micros - 1, "15")


def flash_micros(
    gpu: str, batch: int, heads: int, shared: int, queries: int, keys: int, size: int, causal: int, call: int
) -> float:
    """What the model of PyTorch's own FlashAttention says, which isn't that of other libraries' attention."""
    asked, kept = batch * heads * queries * size, batch * shared * keys * size
    passes = 2.5 if call == BACKWARD_PASS else 1
    operations = passes * 4.0 * asked * keys * (max(1 - (queries - 1) / 2 / keys, 0.5) if causal else 1)
    moved = 2.0 * (2 * asked + 2 * kept) * (2 if call == BACKWARD_PASS else 1)
    shape = {"batch": batch * heads, "queries": queries, "keys": keys, "size": size, "causal": bool(causal)}
    return gpu_model(gpu).micros(OperatorCall("attention", operations, moved, **shape))


def main() -> int:
    """Print the table."""
    options = cli.parse(Options, description=__doc__.splitlines()[0])
    if options.write:
        return cli.run(lambda: write(Path(options.given), options.kinds or tuple(READERS)), TraceError)
    return cli.run(lambda: judge(options), TraceError)


def judge(options: Options) -> int:
    """Print the rows, and draw them; 1 if one was refused. Raises ``TraceError``."""
    refused = 0
    print(HEAD, flush=True)
    pictured: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for row in all_rows(options):
        slower = float(np.median(1 / (1 + row.errors)))
        if not 1 / UNLIKELY < slower < UNLIKELY:
            refused += 1
            print(
                f"error: {row.judged}, {row.gpu}, {len(row.errors)} rows: half took {slower:.2g} times "
                "what the model says or worse: latency_us must be in µs: not judged",
                file=sys.stderr,
            )
            continue
        print(row.line(), flush=True)
        if not row.judged.startswith("ratio"):
            pictured.setdefault(row.judged, []).append((row.micros, row.errors))
    if options.plot:
        draw(pictured, Path(options.plot))
    return 1 if refused else 0


def all_rows(options: Options) -> Iterator[Row]:
    """Of each kind of kernels that is asked for."""
    judged = Path(options.tables) if options.tables else None
    for kind, reader in (READERS | (JUDGED if judged else {})).items():
        if options.kinds and kind not in options.kinds:
            continue
        if judged and not (judged / FILES[kind]).exists():
            print(f"{judged / FILES[kind]} isn't there: {TITLES[kind]}: not judged", file=sys.stderr)
            continue
        if judged and kind in JUDGED:
            yield from shipped_rows(kind, reader(judged))
            continue
        tables = reader(Path(options.given))
        of_kind = other_rows(kind, tables, reader(judged)) if judged else given_rows(kind, tables)
        for row in of_kind:
            yield from row.by_operator()
    if "moving" in (options.kinds or ("moving",)) and (not judged or (judged / FILES["float"]).exists()):
        yield from moving_rows(Path(options.given), judged)


if __name__ == "__main__":
    sys.exit(main())
