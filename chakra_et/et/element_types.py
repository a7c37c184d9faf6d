"""Bytes per element of tensors, by the type names of PyTorch, Kineto and the execution trace observer."""

from __future__ import annotations

import functools

_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1, "unsigned char": 1, "signed char": 1,
    "half": 2, "bfloat16": 2, "float16": 2, "short": 2, "int16": 2, "uint16": 2,
    "float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4,
    "double": 8, "float64": 8, "long": 8, "int64": 8, "long int": 8, "uint64": 8, "unsigned long": 8,
    "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip


@functools.cache
def item_bytes(dtype: str) -> int:
    """Bytes of one element; 0 for an unknown type."""
    name = dtype.lower().removeprefix("c10::").removeprefix("torch.")
    return 1 if name.startswith("float8") else _BYTES.get(name, 0)
