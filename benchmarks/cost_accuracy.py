#!/usr/bin/env python3
"""How far the times of kernels on GPUs (chakra_et/cost) are from public measurements that the fit never saw.

    python benchmarks/cost_accuracy.py                  leave out GPUs, and shapes of each GPU
    python benchmarks/cost_accuracy.py --tables DIR     fit to the given tables, judge those of DIR
    python benchmarks/cost_accuracy.py --write          fit to all, write kernel_times.json and grids.npz;
                                                        with --kinds attention only those kernels
    python benchmarks/cost_accuracy.py --plot X.svg     predicted over measured times of each class, too

The tables are those of ../shared/data/truth (its README.md names their sources). Each row of the result is
one GPU: mean error, all and from 20 µs on, signed, weighted by time, median, and the target of the mean.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.cost_picture import draw
from benchmarks.cost_tables import FILES, READERS, Table, by_gpu, read
from benchmarks.smoothing import ATTENTION, PRODUCT, smooth
from chakra_et import cli
from chakra_et.cost import gpus, grids, kernel_times
from chakra_et.cost.fit import fit
from chakra_et.cost.gpus import Gpu
from chakra_et.cost.kernel_times import LIKE, MODELS, KernelTimes, Values
from chakra_et.cost.kernel_times import kernel_times as shipped
from chakra_et.cost.operator_times import GDDR, GpuModel, OperatorCall, gpu_model
from chakra_et.errors import TraceError
from chakra_et.files import write_text

LONG = 20.0
"""µs from which a kernel counts as long."""
OF_KIND = ("burst", "hot")
"""Parameters that differ between kinds of memory: of the other kind, the prior says more."""
FIT_ROWS, FOLDS, SHAPES = 800, 3, 100
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


@dataclass(frozen=True)
class Row:
    """One line of the result; ``target``: of the mean error, all and long, in percent. ``batch``: of
    products in 32 bits."""

    judged: str
    gpu: str
    micros: np.ndarray
    errors: np.ndarray
    target: str = ""
    batch: np.ndarray | None = None

    def by_operator(self) -> list[Row]:
        """Products of 32 bits as linear and bmm, others as they are."""
        if self.batch is None:
            return [self]
        found = []
        for name, chosen, target in (("linear", self.batch == 1, "15"), ("bmm", self.batch > 1, "14")):
            if chosen.any():
                goal, words = target if self.target else "", self.judged.replace("products", name)
                found.append(Row(words, self.gpu, self.micros[chosen], self.errors[chosen], goal))
        return found

    def line(self) -> str:
        size, long = np.abs(self.errors), self.micros >= LONG
        means = [size.mean(), size[long].mean() if long.any() else np.nan]
        weighted, signed = np.average(size, weights=self.micros), np.average(self.errors, weights=self.micros)
        figures = [f"{each:.1%}" for each in means] + [f"{self.errors.mean():+.1%}", f"{weighted:.1%}"]
        figures += [f"{signed:+.1%}", f"{np.median(size):.1%}", self.target]
        return f"| {self.judged} | {self.gpu} | {len(size):,} | {' | '.join(figures)} |"


HEAD = (
    "| judged on | GPU | rows | mean | from 20 µs | signed | by time | signed | median | target, % |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


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
        folder, "neusight_kernels.parquet", ("device", "table", "op"), ("rows", "cols"), tuple(MOVING)
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


TITLES = {
    "16 bit": "products bf16",
    "8 bit": "fp8 products with quantisation",
    "float": "fp32 products",
    "attention": "attention forward",
}


def fitted(kind: str, table: Table) -> dict[str, float]:
    """The parameters of a kind of kernel by some of a table's rows."""
    model, some = MODELS[kind], table.some(FIT_ROWS)
    return fit(
        lambda values: model.micros(some.gpu, values, some.points),
        some.micros,
        model.start(table.gpu),
        model.widths,
    )


def grid_of(kind: str, table: Table, values: Values) -> grids.Grid:
    """What a table's kernels took beyond the model."""
    model = MODELS[kind]
    beyond = np.log(table.micros / model.micros(table.gpu, values, table.points))
    return smooth(model.place(table.points), beyond, ATTENTION if kind == "attention" else PRODUCT)


def own_times(kind: str, table: Table) -> KernelTimes:
    values = fitted(kind, table)
    grid = {} if kind == "float" else {kind: grid_of(kind, table, values)}
    return KernelTimes(table.gpu, {kind: values}, grid)


def judged(title: str, kind: str, table: Table, times: KernelTimes, target: str = "", name: str = "") -> Row:
    errors = times.micros(kind, table.points) / table.micros - 1
    return Row(title, name or table.gpu.name, table.micros, errors, target, batch_of(kind, table))


def batch_of(kind: str, table: Table) -> np.ndarray | None:
    return table.points[:, 0] if kind == "float" else None


def mean_parameters(gpu: Gpu, kind: str, fitted: Sequence[tuple[Gpu, Values]]) -> dict[str, float]:
    """Those of a GPU that wasn't measured: the geometric means over the ``fitted`` ones, and the prior where
    few say something; of attention the medians, as one library's kernels may be unlike all others (B200's
    don't pack heads)."""
    middle = np.median if kind == "attention" else np.mean
    found = {}
    for name, prior in MODELS[kind].start(gpu).items():
        alike = [each[name] for of, each in fitted if name not in OF_KIND or of.kind == gpu.kind]
        alike += [prior] if name in OF_KIND and kind != "attention" else []
        found[name] = float(np.exp(middle(np.log(alike)))) if alike else prior
    return found


def like(gpu: Gpu, of: KernelTimes) -> KernelTimes:
    """The times of a GPU that wasn't measured but is like one that was."""
    return KernelTimes(gpu, of.parameters, {kind: grid.faded(LIKE) for kind, grid in of.grids.items()})


def stranger(kind: str, gpu: Gpu, known: Sequence[KernelTimes]) -> KernelTimes:
    """A GPU of which nothing was measured, from those of others of its vendor; without any, as shipped."""
    alike = [(each.gpu, each.parameters[kind]) for each in known if each.gpu.vendor == gpu.vendor]
    return KernelTimes(gpu, {kind: mean_parameters(gpu, kind, alike)}, {}) if alike else shipped(gpu)


def with_some(kind: str, table: Table, start: KernelTimes, name: str = "") -> Row:
    """With ``SHAPES`` measured shapes, judged on the others."""
    given = np.isin(np.arange(len(table.micros)), drawn(table))
    some = table.where(given)
    times = kernel_times.calibrated(start, kind, some.points, some.micros)
    title = f"{TITLES[kind]}, GPU left out but for {SHAPES} shapes"
    return judged(title, kind, table.where(~given), times, TARGETS[kind]["shapes"], name)


def drawn(table: Table) -> np.ndarray:
    """Rows of a table that stand for what ``measure-gpu`` measures."""
    return np.random.default_rng(1).choice(len(table.micros), min(SHAPES, len(table.micros) // 2), False)


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


def write(folder: Path, kinds: Sequence[str]) -> None:
    """The fit to all given tables of these kinds of kernels; what is known of others stays."""
    made: dict[str, dict[str, Values]] = {}
    saved = dict(grids.load())
    for kind in kinds:
        times = [own_times(kind, table) for table in READERS[kind](folder).values()]
        for each in times:
            made.setdefault(each.gpu.name, {})[kind] = each.parameters[kind]
            saved |= {f"{each.gpu.name} {of}": grid for of, grid in each.grids.items()}
        for gpu in map(gpus.gpu, ("H100", "L40S")):
            values = mean_parameters(gpu, kind, [(each.gpu, each.parameters[kind]) for each in times])
            made.setdefault(f"nvidia {gpu.kind}", {})[kind] = values
    write_parameters(made)
    save(saved)


def save(by_name: Mapping[str, grids.Grid], path: Path = grids.FILE) -> None:
    """Write grids as ``grids.load`` reads them."""
    arrays: dict[str, np.ndarray] = {}
    for name, grid in by_name.items():
        arrays[name] = np.clip(np.rint(grid.logs / grids.STEP), -127, 127).astype(np.int8)
        arrays |= {f"{name}/{at}": sizes for at, sizes in enumerate(grid.axes)}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def write_parameters(made: Mapping[str, Mapping[str, Values]]) -> None:
    """Into ``kernel_times.json``, beside those of other GPUs and kinds of kernels."""
    old = json.loads(kernel_times.FILE.read_text(encoding="utf-8"))
    all_of = {name: {**old.get(name, {}), **made.get(name, {})} for name in sorted({*old, *made})}
    rounded = {
        name: {
            kind: {key: float(f"{each:.4g}") for key, each in values.items()} for kind, values in of.items()
        }
        for name, of in all_of.items()
    }
    text = json.dumps(rounded, indent=1)
    text = re.sub(r"\{([^{}]*)\}", lambda match: "{" + " ".join(match[1].split()) + "}", text)
    write_text(kernel_times.FILE, text + "\n")


def main() -> int:
    """Print the table."""
    options = cli.parse(Options, description=__doc__.splitlines()[0])
    if options.write:
        write(Path(options.given), options.kinds or tuple(READERS))
        return 0
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
    for kind, reader in READERS.items():
        if options.kinds and kind not in options.kinds:
            continue
        if judged and not (judged / FILES[kind]).exists():
            print(f"{judged / FILES[kind]} isn't there: {TITLES[kind]}: not judged", file=sys.stderr)
            continue
        tables = reader(Path(options.given))
        of_kind = other_rows(kind, tables, reader(judged)) if judged else given_rows(kind, tables)
        for row in of_kind:
            yield from row.by_operator()
    if "moving" in (options.kinds or ("moving",)) and (not judged or (judged / FILES["float"]).exists()):
        yield from moving_rows(Path(options.given), judged)


if __name__ == "__main__":
    sys.exit(main())
