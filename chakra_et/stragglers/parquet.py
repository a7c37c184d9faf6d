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
    """The R rows of a trace: int64[R], but for ``start_s`` and ``end_s``, float64[R] in s.

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
    end_s: np.ndarray

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
    columns = {name: _column(path, table.column(name), name) for name in (*INTEGERS, *TIMES)}
    names = _column(path, table.column("optype"), "optype")
    place = {name: at for at, name in enumerate(OPTYPES)}
    optype = np.array([place.get(name, -1) for name in names])
    unknown = np.flatnonzero(optype < 0)
    if len(unknown):
        name = printable(repr(names[unknown[0]]))
        raise TraceError(
            f"{path}: optype {name} in row {unknown[0]} (from 0) is not known: use {', '.join(OPTYPES)}"
        )
    start, duration = columns.pop("start_ts"), columns.pop("duration")
    trace = PipelineTrace(path, optype, **columns, start_s=start, end_s=start + duration)
    negative = np.flatnonzero(duration < 0)
    if len(negative):
        raise TraceError(
            f"{path}: {trace.describe(negative[0])} lasts {duration[negative[0]]:g} s: durations must be 0 "
            "or more"
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


def _column(path: Path, column: Any, name: str) -> np.ndarray:
    """A column as int64 or float64 without gaps, ``optype`` as text or None."""
    import pyarrow

    is_text = name == "optype"
    kind = pyarrow.string() if is_text else pyarrow.float64() if name in TIMES else pyarrow.int64()
    word = "text" if is_text else "number" if name in TIMES else "integer"
    try:
        values: np.ndarray = column.cast(kind).to_numpy()
    except pyarrow.ArrowException:
        raise TraceError(
            f"{path}: column {name} holds {column.type}, not {word}s: write the trace anew"
        ) from None
    if not is_text and not np.isfinite(values).all():  # integers with gaps come as floats
        gap = int(np.argmin(np.isfinite(values)))
        raise TraceError(f"{path}: column {name} has no {word} in row {gap} (from 0): write the trace anew")
    return values
