"""Values of JSON fields: numbers that may be text or absent, strides of tensors, the list of repairs.

``chakra-et repair`` adds a last field to the object: ``"chakra_et_repairs": {repair: count}``. The conversion
lists them, so that a trace that was cut off does not pass for a whole one after its repair.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from chakra_et.findings import Findings
from chakra_et.names import Side

Number = int | float | str | None
MAX_RANKS = 1_000_000
STRIDES = "input_strides"
"""The attribute of operators with a tensor whose elements don't lie one after another, in an .et file: the
strides of all arguments, as JSON text."""
REPAIRS = "chakra_et_repairs"
MAX_LISTED_REPAIRS = 21
MAX_REPAIR_TEXT = 1000


def each(name: str, records: list[Any]) -> list[Any]:
    """The attribute ``name`` of each record; half the time of a comprehension over a million of them."""
    return list(map(attrgetter(name), records))


def as_column(values: list[Number], dtype: type = np.int64) -> np.ndarray:
    """Values as a column, with text converted to numbers; -1 (float64: NaN) for anything else."""
    missing = float("nan") if dtype is np.float64 else -1
    for _ in range(2):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            column: np.ndarray = np.array(values, dtype=dtype)
            if column.ndim == 1:
                return column
        values = [missing if value is None else value for value in values]
    return np.array([as_number(value, missing) for value in values], dtype=dtype)


def indices(values: list[Any], known: dict[Any, int], key: Callable[[Any], Any] = str) -> np.ndarray:
    """int32[values]: the index of ``key(value)`` in ``known``, to which new keys are added."""
    for are_new in (False, True):
        with contextlib.suppress(TypeError):  # not yet known, or not hashable, or not their own keys
            for value in dict.fromkeys(values) if are_new else ():
                known.setdefault(key(value), len(known))
            return np.array(list(map(known.get, values)), dtype=np.int32)
    return np.array([known.setdefault(key(value), len(known)) for value in values], dtype=np.int32)


def copies(texts: list[msgspec.Raw]) -> list[bytes]:
    """The texts without the pieces that they point into; half the time of a call of ``bytes`` for each."""
    found = b"\0".join(texts).split(b"\0")
    return found if len(found) == len(texts) else list(map(bytes, texts))


def as_number(value: Number, missing: float = -1) -> float | int:
    """The number in a field that may be a number, text or None; ``missing`` if it is not a number."""
    try:
        found = float(value) if isinstance(value, str) and not value.lstrip("-").isdigit() else value
        found = int(found) if isinstance(found, str) else found
    except (TypeError, ValueError):
        return missing
    if not isinstance(found, int | float) or not abs(found) < 2**63:
        return missing
    return found


def strided(shapes: list[bytes], strides: list[bytes], first: int) -> dict[int, str]:
    """Row → strides, of the operators with a tensor that isn't contiguous; rows are numbered from ``first``
    on. ``shapes``, ``strides``: of their arguments, JSON texts."""
    alone = [at for at, is_one in enumerate(map(contiguous, shapes, strides)) if not is_one]
    return {first + at: strides[at].decode("utf-8", "replace") for at in alone}


@functools.lru_cache(maxsize=65536)
def contiguous(shapes: bytes, strides: bytes) -> bool:
    """Whether all tensors of an operator are contiguous, from the JSON texts of its arguments' shapes and
    strides. True where either isn't recorded as it should be.
    """
    try:
        dims, steps = (msgspec.json.decode(text, type=list[Any]) for text in (shapes, strides))
    except msgspec.DecodeError:
        return True
    for shape, stride in zip(dims, steps, strict=False):
        if not is_shape(shape) or not is_shape(stride) or len(shape) != len(stride) or 0 in shape:
            continue
        expected = 1
        for size, step in zip(reversed(shape), reversed(stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
    return True


def is_shape(value: Any) -> bool:
    """Whether a decoded JSON value is a list of integers."""
    return isinstance(value, list) and all(type(size) is int for size in value)


def recorded_repairs(value: Any) -> dict[str, int]:
    """The repairs in the field's value, as far as they can be read; a file may hold anything there."""
    if not isinstance(value, dict):
        return {}
    known = [(text[:MAX_REPAIR_TEXT], n) for text, n in value.items() if type(n) is int and n > 0]
    return dict(known[:MAX_LISTED_REPAIRS])


def add_repairs(findings: Findings, side: Side, value: Any) -> None:
    """Count the repairs in the field's value among ``findings``."""
    for text, count in recorded_repairs(value).items():
        findings.add("host-repair" if side == "host" else "device-repair", count, text)
