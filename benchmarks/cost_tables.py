"""The tables of ../shared/data/truth (its README.md names their sources) as shapes and times of kernels."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.cost import gpus
from chakra_et.cost.attention import BACKWARD_PASS, FORWARD, INTO_CACHE
from chakra_et.cost.gpus import Gpu
from chakra_et.errors import TraceError

DTYPES = ("bfloat16", "fp8", "fp8 alone")
_SETS = 6
"""Sets of operands that take turns in the measured products."""


@dataclass(frozen=True)
class Table:
    """Measured kernels of a kind on one GPU: ``points[R, D]`` of its model, ``micros[R]``."""

    gpu: Gpu
    points: np.ndarray
    micros: np.ndarray

    def where(self, chosen: np.ndarray) -> Table:
        return Table(self.gpu, self.points[chosen], self.micros[chosen])

    def some(self, count: int, seed: int = 0) -> Table:
        """So many rows, drawn by chance."""
        if len(self.micros) <= count:
            return self
        return self.where(np.sort(np.random.default_rng(seed).choice(len(self.micros), count, replace=False)))


def by_name(text: str) -> Gpu | None:
    """The GPU that a table means. aiconfigurator's RTX PRO 6000 is the Server Edition."""
    spaced = re.sub(r"[_\s]+", " ", text)
    name = gpus.by_driver(spaced) or gpus.by_driver(re.sub(r"[ -](?=\d)", "", spaced).upper())
    if name == "RTXPRO6000" and "work" not in spaced.lower():
        name = "RTXPRO6000-SERVER"
    return gpus.gpu(name) if name else None


def read(
    folder: Path, name: str, names: Sequence[str], numbers: Sequence[str], tables: Sequence[str] = ()
) -> Any:
    """The measured rows of a file, a frame; ``tables``: only of these. Rows that lack one of ``names``, or
    one of whose ``numbers`` isn't above 0, are left out and counted on the standard error. Raises
    ``TraceError``."""
    import pandas

    path = folder / name
    kind = path.suffix[1:]
    try:
        rows = pandas.read_csv(path) if kind == "csv" else pandas.read_parquet(path)
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: can't be read as {kind}: {error}") from None
    missing = [column for column in (*names, *numbers) if column not in rows]
    if missing:
        raise TraceError(f"{path}: lacks the columns {', '.join(missing)}")
    if tables:
        rows = rows[rows.table.isin(tables)]
    whole = np.array(rows[list(names)].notna().all(axis=1))
    for column in numbers:
        value = pandas.to_numeric(rows[column], errors="coerce").to_numpy(float, na_value=np.nan)
        whole &= (value > 0) & np.isfinite(value)
    needed = f"{', '.join(names)} and, above 0, {', '.join(numbers)}"
    if not whole.any():
        raise TraceError(f"{path}: has no row with {needed}")
    if not whole.all():
        _say(f"{path}: {np.count_nonzero(~whole)} rows without {needed} are left out")
    return rows[whole]


@functools.cache
def _say(text: str) -> None:
    """On the standard error, once."""
    print(text, file=sys.stderr)


def by_gpu(rows: Any, columns: Sequence[str]) -> Iterator[tuple[Gpu, str, Any]]:
    """GPU, a second name and rows, whatever the table calls the GPU; on the standard error, what each name
    was taken for."""
    first, second = columns
    known: dict[str, Gpu] = {}
    for name, count in rows[first].value_counts().sort_index().items():
        gpu = by_name(str(name))
        if gpu is None:
            print(f"{name} is no GPU of gpus.json: {count} rows are left out", file=sys.stderr)
            continue
        known[str(name)] = gpu
        if gpu.name != name:
            _say(f"{name} is taken for {gpu.name}")
    found = rows.assign(found=rows[first].astype(str).map({name: gpu.name for name, gpu in known.items()}))
    for (name, other), each in found.groupby(["found", second], observed=True):
        yield gpus.gpu(name), str(other), each


def read_products(folder: Path, dtype: str) -> dict[str, Table]:
    """By name of the GPU and framework, all products of a type of number."""
    rows = read(folder, "gemm.parquet", ("gpu", "framework", "dtype"), ("m", "n", "k", "latency_us"))
    others = rows.dtype[~rows.dtype.isin(DTYPES)].value_counts()
    for name, count in others.items():
        _say(f"{folder / 'gemm.parquet'}: rows of {name}, which isn't judged: {count}")
    found = {}
    for gpu, framework, each in by_gpu(rows[rows.dtype == dtype], ("gpu", "framework")):
        sizes = each[["m", "n", "k"]].to_numpy(float)
        ones = np.ones((len(sizes), 1))
        points = np.hstack([ones, sizes, _SETS * ones])
        found[f"{gpu.name} {framework}"] = Table(gpu, points, each.latency_us.to_numpy(float))
    return found


def read_attention(folder: Path) -> dict[str, Table]:
    """By name of the GPU and framework, the fastest of its kernels for each shape."""
    shape = ["batch", "heads", "kv_heads", "isl", "head_dim"]
    found = {}
    rows = read(folder, "attention.parquet", ("gpu", "framework"), (*shape, "latency_us"))
    for gpu, framework, each in by_gpu(rows, ("gpu", "framework")):
        each = each.sort_values("latency_us").drop_duplicates(shape)
        batch, heads, shared, tokens, size = each[shape].to_numpy(float).T
        ones = np.ones(len(each))
        points = np.stack([batch, heads, shared, tokens, tokens, size, ones, INTO_CACHE * ones], axis=1)
        found[f"{gpu.name} {framework}"] = Table(gpu, points, each.latency_us.to_numpy(float))
    return found


def read_own_attention(folder: Path, call: int) -> dict[str, Table]:
    """By name of the GPU and library, PyTorch's forward or backward passes as gpu_truth.py has them."""
    numbers = ["batch", "heads", "kv_heads", "length", "head_dim", "forward_us", "both_us"]
    rows, found = read(folder, "sdpa.csv", ("gpu", "kernel_source", "causal"), numbers), {}
    for gpu, source, each in by_gpu(rows, ("gpu", "kernel_source")):
        batch, heads, shared, tokens, size, forward, both = each[numbers].to_numpy(float).T
        calls = np.full(len(each), call)
        points = np.stack([batch, heads, shared, tokens, tokens, size, each.causal, calls], axis=1)
        found[f"{gpu.name} {source}"] = Table(gpu, points, forward if call == FORWARD else both - forward)
    return found


def read_float(folder: Path) -> dict[str, Table]:
    """By device, NeuSight's products without tensor cores, of the same operands as just before."""
    sizes = ["batch", "m", "n", "k"]
    numbers = (*sizes[1:], "latency_us")
    rows = read(folder, "neusight_kernels.parquet", ("device", "table"), numbers, ("linear", "bmm"))
    rows, found = rows.assign(library="PyTorch"), {}
    for gpu, library, each in by_gpu(rows, ("device", "library")):
        points = np.hstack([each[sizes].fillna(1).to_numpy(float), np.ones((len(each), 1))])
        found[f"{gpu.name} {library}"] = Table(gpu, points, each.latency_us.to_numpy(float))
    return found


READERS = {
    "16 bit": lambda folder: read_products(folder, "bfloat16"),
    "8 bit": lambda folder: read_products(folder, "fp8"),
    "float": read_float,
    "attention": read_attention,
}
JUDGED = {
    "8 bit alone": lambda folder: read_products(folder, "fp8 alone"),
    "PyTorch's attention": lambda folder: read_own_attention(folder, FORWARD),
    "PyTorch's attention, backward": lambda folder: read_own_attention(folder, BACKWARD_PASS),
}
"""Kinds of which no table is given: by what is shipped."""
FILES = {
    "16 bit": "gemm.parquet",
    "8 bit": "gemm.parquet",
    "float": "neusight_kernels.parquet",
    "attention": "attention.parquet",
    "8 bit alone": "gemm.parquet",
    "PyTorch's attention": "sdpa.csv",
    "PyTorch's attention, backward": "sdpa.csv",
}
