"""Strides of tensors: which operators have an argument whose elements don't lie one after another."""

from __future__ import annotations

from typing import Any

import msgspec

STRIDES = "input_strides"
"""The attribute of such operators in an .et file: the strides of all arguments, as JSON text."""


class Strided:
    """Finds the operators with a tensor that isn't contiguous. It remembers texts, most of which recur."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], bool] = {}

    def rows(self, shapes: list[bytes], strides: list[bytes]) -> list[int]:
        """Which of these operators are such, from the JSON texts of their arguments."""
        texts = list(zip(shapes, strides, strict=True))
        new = set(texts).difference(self._known)
        self._known |= {each: not contiguous(*each) for each in new}
        found = list(map(self._known.__getitem__, texts))
        return [row for row, is_such in enumerate(found) if is_such] if True in found else []


def contiguous(shapes: bytes, strides: bytes) -> bool:
    """Whether all tensors of an operator are contiguous, from the JSON texts of its arguments' shapes and
    strides. True where either isn't recorded as it should be.
    """
    try:
        dims, steps = msgspec.json.decode(shapes), msgspec.json.decode(strides)
    except msgspec.DecodeError:
        return True
    if not isinstance(dims, list) or not isinstance(steps, list):
        return True
    return all(_is_contiguous(d, s) for d, s in zip(dims, steps, strict=False))


def _is_contiguous(dims: Any, steps: Any) -> bool:
    if not is_shape(dims) or not is_shape(steps) or len(dims) != len(steps):
        return True
    expected = 1
    for size, step in zip(reversed(dims), reversed(steps), strict=True):
        if size != 1 and step != expected:
            return 0 in dims
        expected *= size
    return True


def is_shape(value: Any) -> bool:
    """Whether a decoded JSON value is a list of integers."""
    return isinstance(value, list) and all(type(size) is int for size in value)
