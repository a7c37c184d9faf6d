"""Read a job from a Parquet trace and its YAML file, as the artifact of the paper has them.

Layout: ByteDance-Seed/StragglerAnalysis on GitHub (readme.md, commit 8efcd7f). One row per operation; times
in seconds from the start of the step; ``mc`` and ``gmc`` number the model chunks of the stage and of the
model, -1 where an operation has none. The durations of communication include waiting.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.files import open_regular
from chakra_et.stragglers.operations import JobMeta
from chakra_et.text import printable
from chakra_et.yaml_file import read_yaml

INTEGERS = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "gmc")
TIMES = ("start_ts", "duration")
INSTALL = "pip install 'mosim-llms[stragglers]'"

FORWARD, BACKWARD = "forward", "backward"
COMPUTE = {FORWARD: "forward-compute", BACKWARD: "backward-compute"}
MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
ALL_GATHER, REDUCE_SCATTER = "params-all-gather", "grads-reduce-scatter"
SEPARATE_ALL_REDUCE = "separate-grads-all-reduce"
GC, LAYERNORM, EMBEDDING = "gc", "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
CLIP, OPTIMIZER = "optimizer-clip-main-grad", "optimizer"
OPTYPES = (
    *COMPUTE.values(), *MESSAGES, ALL_GATHER, REDUCE_SCATTER, SEPARATE_ALL_REDUCE, GC, LAYERNORM, EMBEDDING,
    CLIP, OPTIMIZER,
)  # fmt: skip


@dataclass(frozen=True)
class PipelineTrace:
    """The R rows of a trace: int64[R], but for ``start_s`` and ``duration_s``, float64[R] in s.

    ``optype``: index into ``OPTYPES``.
    """

    path: Path
    optype: np.ndarray
    dp_rank: np.ndarray
    stage: np.ndarray
    rank: np.ndarray
    step: np.ndarray
    seq_id: np.ndarray
    mc: np.ndarray
    gmc: np.ndarray
    start_s: np.ndarray
    duration_s: np.ndarray

    def __len__(self) -> int:
        return len(self.optype)

    @property
    def end_s(self) -> np.ndarray:
        end_s: np.ndarray = self.start_s + self.duration_s
        return end_s

    def describe(self, row: int) -> str:
        """``forward-send 3 of step 23, dp_rank 1, stage 2``, for messages."""
        return (
            f"{OPTYPES[self.optype[row]]} {self.seq_id[row]} of step {self.step[row]}, "
            f"dp_rank {self.dp_rank[row]}, stage {self.stage[row]}"
        )


def read_trace(path: Path) -> PipelineTrace:
    """Read the columns that the analysis needs.

    Raises ``TraceError`` for a file that is not Parquet, lacks columns, or holds values that can't be used.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise TraceError(f"{path}: reading Parquet needs pyarrow: {INSTALL}") from None
    wanted = [*INTEGERS, "optype", *TIMES]
    try:
        with open_regular(path) as opened, parquet.ParquetFile(opened) as file:
            absent = [name for name in wanted if name not in file.schema_arrow.names]
            if absent:
                raise TraceError(
                    f"{path}: has no column {', '.join(absent)}: a trace needs {', '.join(wanted)}"
                )
            table = file.read(columns=wanted)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise TraceError(f"{path}: no such file: check the path") from None
        reason = printable(str(error).partition("\n")[0])
        raise TraceError(
            f"{path}: can't be read as Parquet ({reason}): give the trace as a .parquet file"
        ) from None
    if not table.num_rows:
        raise TraceError(f"{path}: holds no operations: give the trace of at least one step")
    columns = {name: _column(path, table, name) for name in (*INTEGERS, *TIMES)}
    trace = PipelineTrace(
        path=path,
        optype=_optypes(path, table.column("optype")),
        start_s=columns.pop("start_ts"),
        duration_s=columns.pop("duration"),
        **columns,
    )
    negative = np.flatnonzero(trace.duration_s < 0)
    if len(negative):
        raise TraceError(
            f"{path}: {trace.describe(negative[0])} lasts {trace.duration_s[negative[0]]:g} s: durations "
            "must be 0 or more"
        )
    return trace


def read_meta(path: Path) -> JobMeta:
    """Read the job's YAML file. Raises ``TraceError`` for one that is not that, or contradicts itself."""
    try:
        content = read_yaml(path)
    except ImportError:
        raise TraceError(f"{path}: reading YAML needs PyYAML: {INSTALL}") from None
    names = [field.name for field in fields(JobMeta)]
    if not isinstance(content, dict) or "trial_name" not in content:
        raise TraceError(
            f"{path}: is not the description of a job: it needs trial_name and {', '.join(names[2:])}"
        )
    unknown = [str(name) for name in content if name not in names]
    if unknown:
        raise TraceError(f"{path}: {printable(unknown[0])} is not a field of a job: use {', '.join(names)}")
    sizes = {name: content[name] for name in content if name != "trial_name"}
    for name, size in sizes.items():
        lowest = 0 if name == "run_id" else 1
        if type(size) is not int or size < lowest:
            raise TraceError(
                f"{path}: {name} must be an integer from {lowest} on, not {printable(repr(size))}"
            )
    meta = JobMeta(trial_name=str(content["trial_name"]), **sizes)
    product = meta.dp_size * meta.pp_size * meta.tp_size
    if meta.world_size not in (product, product * meta.dsp_size):  # dsp ranks may count as dp ranks
        raise TraceError(
            f"{path}: world_size is {meta.world_size}, but dp_size × pp_size × tp_size × dsp_size is "
            f"{product * meta.dsp_size}: correct the file"
        )
    return meta


def _column(path: Path, table: Any, name: str) -> np.ndarray:
    """A column without gaps, int64 or float64."""
    import pyarrow

    column = table.column(name)
    kind, word = (pyarrow.float64(), "number") if name in TIMES else (pyarrow.int64(), "integer")
    try:
        values: np.ndarray = column.cast(kind).to_numpy()
    except pyarrow.ArrowException:
        raise TraceError(
            f"{path}: column {name} holds {column.type}, not {word}s: write the trace anew"
        ) from None
    gaps = np.flatnonzero(column.is_null().to_numpy() if column.null_count else ~np.isfinite(values))
    if len(gaps):
        raise TraceError(
            f"{path}: column {name} has no {word} in row {gaps[0]} (from 0): write the trace anew"
        )
    return values


def _optypes(path: Path, column: Any) -> np.ndarray:
    """Each row's index into ``OPTYPES``."""
    coded = column.combine_chunks()
    coded = coded if hasattr(coded, "dictionary") else coded.dictionary_encode()
    names = coded.dictionary.to_pylist()
    index = coded.indices.to_numpy(zero_copy_only=False)
    place = {name: at for at, name in enumerate(OPTYPES)}
    codes = np.array([place.get(name, -1) for name in names], dtype=np.int64)
    if column.null_count or (codes[index] < 0).any():  # a gap's index is any number
        row = int(np.flatnonzero(column.is_null().to_numpy() if column.null_count else codes[index] < 0)[0])
        name = printable(repr(column[row].as_py()))
        raise TraceError(
            f"{path}: optype {name} in row {row} (from 0) is not known: use {', '.join(OPTYPES)}"
        )
    optype: np.ndarray = codes[index]
    return optype
