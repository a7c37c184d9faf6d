"""Return freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes

# Below this many rows the memory is small, and giving it back takes longer than it is worth.
WORTH_ROWS = 200_000


def give_back(rows: int) -> None:
    """Return what large arrays leave behind; ``rows``, of events or nodes, tell whether that is much.

    The C library of Linux keeps freed arrays of up to 32 MB, which add a fifth to the peak of a large
    conversion. Others return them on their own.
    """
    if rows >= WORTH_ROWS:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
