"""Tables of measured kernels and collectives, by which ``benchmarks/cost_accuracy.py`` judges.

git checks every file against the commit, and git-lfs every large one against its sha256. Columns and units
are those that ``benchmarks/cost_tables.py`` reads: sizes in elements, ``bytes`` in bytes, ``latency_us`` in
µs. Licences: aiconfigurator Apache-2.0, NeuSight MIT.
"""

from __future__ import annotations

import fnmatch
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from chakra_et.errors import TraceError
from chakra_et.files import atomic_file

TIMEOUT_S = 3600
GPUS = {"a100_sxm": "A100", "h100_sxm": "H100", "l40s": "L40S", "b200_sxm": "B200"}
DTYPES = ("bfloat16", "fp8")
ELEMENT_BYTES = 2
"""Of the half-precision collectives, whose sizes aiconfigurator counts in elements."""


class Table(NamedTuple):
    """``name``: the file written; ``paths``: patterns of those read; ``rows``: from a file's rows, as it has
    them, and its path in the repository to ours."""

    name: str
    paths: tuple[str, ...]
    rows: Callable[[Any, Path], Any]


class Source(NamedTuple):
    """``commit``: as much of it as is known."""

    repository: str
    commit: str
    tables: tuple[Table, ...]


def _of_framework(rows: Any, path: Path) -> Any:
    """The columns that products and attention share."""
    system = next(part for part in path.parts if part in GPUS)
    return rows[["framework", "version", "kernel_source"]].assign(
        gpu=GPUS[system], latency_us=rows.latency.astype(float) * 1000
    )


def _products(rows: Any, path: Path) -> Any:
    rows = rows[rows.gemm_dtype.isin(DTYPES)]
    return _of_framework(rows, path).assign(dtype=rows.gemm_dtype, m=rows.m, n=rows.n, k=rows.k)


def _attention(rows: Any, path: Path) -> Any:
    """Of whole prompts in 16 bits, without a window. Heads of 192 and 512 are left out: their values are of
    another width than their keys, or only special models have them."""
    whole = (rows.attn_dtype == "bfloat16") & (rows.kv_cache_dtype == "bfloat16")
    whole &= ~rows.head_dim.isin((192, 512))
    for column in ("step", "window_size"):
        if column in rows:
            whole &= rows[column].fillna(0).astype(int) == 0
    rows = rows[whole]
    return _of_framework(rows, path).assign(
        head_dim=rows.head_dim,
        heads=rows.num_heads,
        kv_heads=rows.num_key_value_heads.where(rows.num_key_value_heads > 0, rows.num_heads),
        isl=rows.isl,
        batch=rows.batch_size,
    )


def _collectives(rows: Any, path: Path) -> Any:
    rows = rows[rows.nccl_dtype == "half"]
    return rows[["num_gpus"]].assign(
        op=rows.op_name,
        gpu=next(GPUS[part] for part in path.parts if part in GPUS),
        nccl=path.parent.name,
        bytes=rows.message_size.astype(int) * ELEMENT_BYTES,
        latency_us=rows.latency.astype(float) * 1000,
    )


def _neusight(rows: Any, path: Path) -> Any:
    """NeuSight multiplies (B, M, N) by (N, K): its N is our k. Its vectors have B rows of H."""
    ours = {"B": "batch", "M": "m", "N": "k", "K": "n"} if "M" in rows else {"B": "rows", "H": "cols"}
    dims = rows[list(ours)].rename(columns=ours)
    grid, block = (
        rows[f"{of} x"].astype(str) + "x" + rows[f"{of} y"].astype(str) + "x" + rows[f"{of} z"].astype(str)
        for of in ("Grid", "Block")
    )
    return dims.reindex(columns=["batch", "m", "n", "k", "rows", "cols"]).assign(
        device=rows.Device,
        table=path.stem,
        op=rows.OPName,
        kernel=rows["Kernel Name"],
        grid=grid,
        block=block,
        latency_us=rows.Latency.astype(float) * 1000,
    )


_SYSTEMS = "aic-core/src/aiconfigurator_core/systems/data"
SOURCES = (
    Source(
        "ai-dynamo/aiconfigurator",
        "095f58a51c4ca8e61b66ec108d86f223f8d559ce",
        (
            Table(
                "gemm.parquet",
                tuple(f"{_SYSTEMS}/{system}/*sglang/0.5.10/gemm_perf.*" for system in GPUS),
                _products,
            ),
            # B200's table of 0.5.10 has times that are shorter than the chip's peak allows.
            Table(
                "attention.parquet",
                tuple(
                    f"{_SYSTEMS}/{system}/*sglang/{'0.5.14' if system == 'b200_sxm' else '0.5.10'}"
                    "/context_attention_perf.*"
                    for system in GPUS
                ),
                _attention,
            ),
            Table("nccl.csv", tuple(f"{_SYSTEMS}/{system}/*/nccl_perf.*" for system in GPUS), _collectives),
        ),
    ),
    Source(
        "sitar-lab/NeuSight",
        "6945927d9",
        (
            Table(
                "neusight_kernels.parquet",
                tuple(
                    f"scripts/asplos/data/dataset/train/{of}.csv"
                    for of in ("bmm", "elem", "linear", "ln", "softmax")
                ),
                _neusight,
            ),
        ),
    ),
)


def fetch_tables(folder: Path, base: str, sources: tuple[Source, ...] = SOURCES) -> None:
    """Write the tables into ``folder`` and print a line for each. ``base``: the address before
    OWNER/REPOSITORY. A table is written whole or not at all. Raises ``TraceError`` where git, git-lfs, the
    network, a file or a column is missing."""
    try:
        import pandas
        import pyarrow  # noqa: F401 - writes pandas' parquet
    except ImportError as error:
        raise TraceError(f"--tables needs pandas and pyarrow ({error}): pip install pandas pyarrow") from None
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        url = f"{base.rstrip('/')}/{source.repository}"
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _git(url, "clone", "--quiet", "--no-checkout", "--filter=blob:none", url, scratch)
            _git(url, "-C", scratch, "lfs", "install", "--local")
            names = _git(url, "-C", scratch, "ls-tree", "-r", "-z", "--name-only", source.commit).split("\0")
            attributes = fnmatch.filter(names, "*.gitattributes")  # they say which files git-lfs has
            if attributes:
                _git(url, "-C", scratch, "checkout", "--quiet", source.commit, "--", *attributes)
            for table in source.tables:
                chosen = [name for of in table.paths for name in fnmatch.filter(names, of)]
                if not chosen:
                    raise TraceError(f"{url} at {source.commit}: has no {' or '.join(table.paths)}")
                _git(url, "-C", scratch, "checkout", "--quiet", source.commit, "--", *chosen)
                frames = [_rows(table, Path(scratch), name, url) for name in chosen]
                rows = pandas.concat(frames, ignore_index=True)
                whole = rows.to_csv(index=False).encode() if table.name.endswith("csv") else rows.to_parquet()
                with atomic_file(folder / table.name) as file:
                    file.write(whole)
                of = f"{len(chosen)} files of {source.repository}"
                print(f"{folder / table.name}: {len(rows):,} rows of {of}")


def _rows(table: Table, folder: Path, name: str, url: str) -> Any:
    import pandas

    try:
        read = pandas.read_parquet if name.endswith("parquet") else pandas.read_csv
        return table.rows(read(folder / name), Path(name))
    except (AttributeError, KeyError, ValueError, OSError) as error:
        raise TraceError(f"{url}: {name}: isn't the table that is known here: {error}") from None


def _git(url: str, *words: str) -> str:
    """What git prints. Raises ``TraceError``."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TraceError(f"{url}: git can't fetch it: {error}") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise TraceError(f"{url}: git can't fetch it ({why}): check the network, and install git-lfs")
    return done.stdout
