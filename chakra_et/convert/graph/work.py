"""Floating-point operations and bytes of device work, from the operators that launch it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.arrays import coded, coded_pairs, first_rows, unique
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.cost.operator_work import DEPTH, WITH_VALUES, Counted, operator_work, rule_of
from chakra_et.traces.device_format import CPU_OP, KERNEL, MEMCPY, MEMSET

# Twice the bandwidth (8 TB/s) and the sparse 4-bit rate (20 PFLOP/s) of NVIDIA's B200, its data sheet, 2024.
MOST_BYTES_PER_NS = 16_000
MOST_OPERATIONS_PER_NS = 40_000_000


@dataclass(eq=False, repr=False)
class Work:
    """Operations and bytes per row of the device trace, int64; 0 if not known."""

    operations: np.ndarray
    bytes: np.ndarray


def find_work(rank: LinkedRank, parent: np.ndarray) -> Work:
    """Operations and bytes of each kernel, copy and memset; ``parent`` is the hierarchy's.

    The kernels of one operator share its work, see ``divided``.
    """
    device = rank.device
    operations = np.zeros(len(device), dtype=np.int64)
    moved = np.zeros(len(device), dtype=np.int64)
    copies = np.flatnonzero((device.category == MEMCPY) | (device.category == MEMSET))
    moved[copies] = np.maximum(device.bytes[copies], 0)
    kernels = np.flatnonzero((device.category == KERNEL) & ~rank.communication_rows.gpu)
    kernels = kernels[parent[kernels] >= 0]
    operators, of = coded(parent[kernels])
    works = _works(rank, parent, operators)
    length = (device.end - device.start)[kernels]
    operations[kernels], moved[kernels] = divided(works, of, length)
    return Work(operations, moved)


def _works(rank: LinkedRank, parent: np.ndarray, operators: np.ndarray) -> np.ndarray:
    """``work_of`` each operator, as for ``divided``; calls of one name with the same shapes are looked up
    once."""
    host, names = rank.host, rank.device.names
    row, name = rank.link.host_row[operators], rank.device.name[operators]
    by_shape = np.zeros(len(names), dtype=bool)
    by_shape[[code for code in unique(name).tolist() if rule_of(names[code]) not in WITH_VALUES]] = True
    alike = by_shape[name] & (row >= 0) & (rank.device.category[operators] == CPU_OP)
    texts = (*host.inputs[1:], *host.outputs[1:])
    _, call = coded_pairs(alike.astype(np.int8), name)
    for column in texts:
        _, call = coded_pairs(call, column.codes[row])
    _, first = first_rows(call)
    of_call = np.full((len(first), 2), -1, dtype=np.int64)
    for number, at in enumerate(first.tolist()):
        shapes = (column[row[at]] for column in texts)
        # Without a result of its own, it has that of an operator around it, which may be another.
        if alike[at] and operator_work(names[name[at]], b"[]", *shapes) is not None:
            of_call[number] = work_of(rank, parent, int(operators[at])) or (0, 0)
    works: np.ndarray = of_call[call]
    for at in np.flatnonzero(works[:, 0] < 0).tolist():
        works[at] = work_of(rank, parent, int(operators[at])) or (0, 0)
    return works


def divided(works: np.ndarray, of: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(operations, bytes) of each kernel: those of its operator, divided by the kernels' durations.

    ``works``: int64[operators, 2], operations and bytes of each, 0 if not known; ``of``: each kernel's
    operator; ``length``: each kernel's duration in ns.
    0 if no device could do as much in that time: an operator that takes a few rows of a large table does not
    read all of it.
    """
    whole = works.astype(np.float64)
    total = np.maximum(np.bincount(of, length, len(whole)), 1)
    most = np.column_stack((MOST_OPERATIONS_PER_NS * total, MOST_BYTES_PER_NS * total))
    whole[(whole > most).any(axis=1)] = 0
    shares = np.rint(whole[of] * (length / total[of])[:, None]).astype(np.int64)
    return shares[:, 0], shares[:, 1]


def operator_around(rank: LinkedRank, parent: np.ndarray, row: int) -> int:
    """The row of the innermost operator with arguments at or around ``row``, -1 for none."""
    for _ in range(DEPTH):
        if row < 0:
            break
        if rank.device.category[row] == CPU_OP and rank.link.host_row[row] >= 0:
            return row
        row = int(parent[row])
    return -1


def work_of(rank: LinkedRank, parent: np.ndarray, operator: int) -> Counted:
    """(operations, bytes) of the operator at row ``operator``, or of the next one around it that has
    shapes."""
    host, names = rank.host, rank.device.names
    for _ in range(DEPTH):
        operator = operator_around(rank, parent, operator)
        if operator < 0:
            break
        row = int(rank.link.host_row[operator])
        name = names[rank.device.name[operator]]
        # Only some formulas look at values, and ids of tensors in them make every call a new one.
        values = host.inputs[0][row] if rule_of(name) in WITH_VALUES else b"[]"
        texts = (column[row] for column in (*host.inputs[1:], *host.outputs[1:]))
        work = operator_work(name, values, *texts)
        if work is not None:
            return work
        operator = int(parent[operator])
    return None
