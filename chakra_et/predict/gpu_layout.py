"""How the tensors of an elementwise operator lie in memory: what PyTorch's TensorIterator makes of them.

Dimensions that all tensors cross in one go count as one. If one dimension with neighbouring elements is left,
PyTorch has vectorized kernels; else each element's place is computed from its index (aten/src/ATen/native/
TensorIterator.cpp, aten/src/ATen/native/cuda/Loops.cuh).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = Sequence[int]


@dataclass(frozen=True)
class Layout:
    """``elements`` of the result; ``touched[operands]``: elements that each tensor has in memory, without
    those that broadcasting repeats; ``strided``: whether places are computed; ``apart``: so many elements in
    a row don't lie beside each other in one of the tensors, 0 for none.
    """

    elements: int
    touched: tuple[int, ...]
    strided: bool = False
    apart: int = 0


def contiguous_strides(shape: Shape) -> list[int]:
    """In elements."""
    strides = [1] * len(shape)
    for at in range(len(shape) - 2, -1, -1):
        strides[at] = strides[at + 1] * max(shape[at + 1], 1)
    return strides


def layout(shapes: Sequence[Shape], strides: Sequence[Shape | None], first_is_result: bool) -> Layout | None:
    """Of tensors with these shapes and strides (None: contiguous); None where shapes don't broadcast.

    ``first_is_result``: as with ``copy_`` and ``add_``; else the result lies like the first full-size tensor.
    """
    width = max((len(shape) for shape in shapes), default=0)
    padded = [[1] * (width - len(shape)) + list(shape) for shape in shapes]
    whole = [max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True)]
    if any(size not in (1, full) for sizes in padded for size, full in zip(sizes, whole, strict=True)):
        return None
    steps, touched = [], []
    for shape, own, sizes in zip(shapes, strides, padded, strict=True):
        given = list(own) if own is not None and len(own) == len(shape) else contiguous_strides(shape)
        given = [0] * (width - len(shape)) + given
        step = [0 if size == 1 else each for size, each in zip(sizes, given, strict=True)]
        steps.append(step)
        touched.append(math.prod(size for size, each in zip(sizes, step, strict=True) if each))
    elements = math.prod(whole)
    full = [step for step, count in zip(steps, touched, strict=True) if count == elements]
    like = steps[0] if first_is_result else (full[0] if full else contiguous_strides(whole))
    order = sorted((at for at in range(width) if whole[at] > 1), key=lambda at: (like[at], -at))
    sizes, crossed = _joined([whole[at] for at in order], [[step[at] for at in order] for step in steps])
    fastest = [step[0] if step else 1 for step in crossed]
    strided = len(sizes) > 1 or any(step != 1 for step in fastest)
    apart = sizes[0] if sizes and any(step > 1 for step in fastest) else 0
    return Layout(elements, tuple(touched), strided and elements > 1, apart)


def _joined(sizes: list[int], steps: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Neighbouring dimensions, fastest first, as one where every tensor crosses them in one go."""
    kept_sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in steps]
    for at, size in enumerate(sizes):
        if kept_sizes and all(
            own[-1] * kept_sizes[-1] == step[at] for own, step in zip(kept, steps, strict=True)
        ):
            kept_sizes[-1] *= size
            continue
        kept_sizes.append(size)
        for own, step in zip(kept, steps, strict=True):
            own.append(step[at])
    return kept_sizes, kept
