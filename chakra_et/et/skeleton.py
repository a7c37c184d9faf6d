"""``NAME.N.skeleton.parquet``: the skeleton of a rank as a table, a row for each node.

    SELECT kind, sum(duration_micros) FROM 'traces/gpt2.*.skeleton.parquet' GROUP BY kind

Columns: ``name``; ``type`` (``NodeType`` of the Chakra schema); ``start_micros``, ``duration_micros``;
``depends_on``: numbers of rows, from 0, that end before this one starts; and each attribute that the rank has
of those in ``ranks.contract``, null on nodes without, with ``step_index`` (which step of the file it belongs
to) and ``comm_ordinal`` (how many communications of the step were launched before it). A node also runs
behind the one before it with the same ``lane``. The metadata of the file: ``chakra_et.skeleton``, the version
of this format; ``chakra_et.metadata``, that of the .et file as JSON; ``chakra_et.kinds``, the kinds of value
of the attributes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from chakra_et.arrays import narrowed
from chakra_et.errors import TraceError
from chakra_et.et.columns import Attribute, ExecutionTrace, Ragged, Strings
from chakra_et.files import atomic_file, open_regular

VERSION = 1


def write_skeleton(path: Path, trace: ExecutionTrace) -> None:
    """Write the skeleton of ``contract``."""
    pa, pq = _pyarrow()
    count, deps = len(trace), trace.data_deps

    # From buffers, as other ways from numpy to pyarrow import pandas, which takes longer than the rest.
    def plain(values: np.ndarray, missing: np.ndarray | None = None) -> Any:
        present = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
        buffers = [present, pa.py_buffer(np.ascontiguousarray(values))]
        return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)

    def column(values: np.ndarray | Strings, rows: np.ndarray | None = None) -> Any:
        index = values.index.astype(np.int32) if isinstance(values, Strings) else values
        dense, missing = np.zeros(count, index.dtype), np.zeros(count, bool)
        if rows is not None:
            missing[:] = True
            missing[rows] = False
        dense[~missing] = index
        found = plain(dense, missing if missing.any() else None)
        if not isinstance(values, Strings):
            return found
        ends = np.cumsum([0, *map(len, values.table)], dtype=np.int32)
        texts = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values.table))]
        table = pa.Array.from_buffers(pa.string(), len(values.table), texts)
        return pa.DictionaryArray.from_arrays(found, table)

    columns = {
        "name": column(trace.names),
        "type": column(trace.types),
        "start_micros": column(trace.start_micros),
        "duration_micros": column(trace.duration_micros),
        "depends_on": pa.ListArray.from_arrays(
            plain(deps.offsets.astype(np.int32)), plain((deps.values - 1).astype(np.int32))
        ),
    }
    for name, attribute in trace.attributes.items():
        columns[name] = column(attribute.values, attribute.rows)
    metadata = {
        "chakra_et.skeleton": str(VERSION),
        "chakra_et.metadata": json.dumps(trace.metadata),
        "chakra_et.kinds": json.dumps({name: each.kind for name, each in trace.attributes.items()}),
    }
    table = pa.Table.from_arrays(list(columns.values()), list(columns), metadata=metadata)
    with atomic_file(path) as file:  # snappy: a third larger than zstd, and read 1.5 × as fast
        pq.write_table(table, file, compression="snappy", write_statistics=False)


def read_skeleton(path: str | Path) -> ExecutionTrace:
    """The skeleton as a trace. Raises ``TraceError`` for a file that isn't one."""
    pa, pq = _pyarrow()
    try:
        with pq.ParquetFile(open_regular(path), pre_buffer=False) as file:
            known = {key.decode(): text for key, text in (file.schema_arrow.metadata or {}).items()}
            version = int(known.get("chakra_et.skeleton", 0))
            if version != VERSION:
                raise TraceError(f"{path}: is a skeleton of version {version}, not {VERSION}: convert again")
            table = file.read(use_threads=False).combine_chunks()
            return _trace(table, *(json.loads(known[f"chakra_et.{of}"]) for of in ("metadata", "kinds")))
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise TraceError(f"{path}: isn't the skeleton of a rank ({error}): convert again") from None


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TraceError("skeletons need pyarrow: pip install pyarrow") from None
    return pyarrow, pyarrow.parquet


def _trace(table: Any, metadata: dict[str, Any], kinds: dict[str, str]) -> ExecutionTrace:
    """Columns without values in the same rows share these, as a job of many ranks holds all of them."""
    count = table.num_rows
    shared: dict[bytes, np.ndarray] = {}

    def values(name: str) -> Any:
        # From buffers, as pyarrow's own functions take longer than reading the file.
        column = table[name].chunk(0)
        index = column.indices if hasattr(column, "indices") else column
        present, data = index.buffers()
        dense = np.frombuffer(
            data, index.type.to_pandas_dtype(), count, index.offset * index.type.bit_width // 8
        )
        bits = b"" if present is None else present.to_pybytes()
        if bits not in shared:
            given = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[index.offset :][:count]
            shared[bits] = np.flatnonzero(given) if bits else np.arange(count)
        rows = shared[bits]
        found = dense[rows] if present is not None else dense
        if index is column:
            return rows, found
        return rows, Strings([text.encode() for text in column.dictionary.to_pylist()], found)

    attributes = {}
    for name, kind in kinds.items():
        rows, found = values(name)
        attributes[name] = Attribute(kind, rows, found if isinstance(found, Strings) else narrowed(found))
    deps = table["depends_on"].chunk(0)
    return ExecutionTrace(
        ids=np.arange(1, count + 1, dtype=np.uint64),
        names=values("name")[1],
        types=values("type")[1],
        start_micros=values("start_micros")[1],
        duration_micros=values("duration_micros")[1],
        data_deps=Ragged(
            np.from_dlpack(deps.offsets).astype(np.int64), (np.from_dlpack(deps.values) + 1).astype(np.uint64)
        ),
        ctrl_deps=Ragged.empty(count),
        attributes=attributes,
        metadata=metadata,
    )
