"""New traces out of the nodes of a given one: some left out, some copied, in any order."""

from __future__ import annotations

import dataclasses

import numpy as np

from chakra_et.et.columns import Attribute, ExecutionTrace, Ragged, Strings, TensorInfo


def take_rows(
    trace: ExecutionTrace, rows: np.ndarray, data_deps: Ragged, without: tuple[str, ...] = ()
) -> ExecutionTrace:
    """The nodes ``rows`` (int64[M]), in that order and as often as they are named, with ids 1 … M.

    ``data_deps``: all their dependencies, as new ids. They lack the attributes ``without``, and dep_kinds,
    which would be of other dependencies.
    """
    attributes = {
        name: taken
        for name, attribute in trace.attributes.items()
        if name not in ("dep_kinds", *without) and len((taken := _attribute(attribute, rows)).rows)
    }
    return dataclasses.replace(
        trace,
        ids=np.arange(1, len(rows) + 1, dtype=np.uint64),
        names=Strings(trace.names.table, trace.names.index[rows]),
        types=trace.types[rows],
        start_micros=trace.start_micros[rows],
        duration_micros=trace.duration_micros[rows],
        data_deps=data_deps,
        ctrl_deps=Ragged(np.zeros(len(rows) + 1, np.int64), np.zeros(0, np.uint64)),
        inputs=_tensors(trace.inputs, rows),
        outputs=_tensors(trace.outputs, rows),
        attributes=attributes,
    )


def _places(owners: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(Which of ``rows`` are among ``owners``, which ascend; where there)."""
    at = np.searchsorted(owners, rows)
    have = np.flatnonzero(np.append(owners, -1)[at] == rows)
    return have, at[have]


def _attribute(attribute: Attribute, rows: np.ndarray) -> Attribute:
    have, at = _places(attribute.rows, rows)
    values = attribute.values
    taken = Strings(values.table, values.index[at]) if isinstance(values, Strings) else values[at]
    return Attribute(attribute.kind, have, taken)


def _tensors(tensors: TensorInfo | None, rows: np.ndarray) -> TensorInfo | None:
    if tensors is None:
        return None
    have, at = _places(tensors.rows, rows)
    places = at.tolist()
    columns = ([column[n] for n in places] for column in (tensors.values, tensors.shapes, tensors.types))
    return TensorInfo(have, *columns)
