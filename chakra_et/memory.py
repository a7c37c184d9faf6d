"""Return freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes

# Below this many nodes the memory is small, and giving it back takes longer than it is worth.
WORTH_NODES = 200_000


def give_back(nodes: int) -> None:
    """Return what large arrays leave behind to the system; ``nodes`` of the graph tell whether it is much.

    The C library of Linux keeps freed arrays of up to 32 MB, which add a fifth to the peak of a large
    conversion. Others return them on their own.
    """
    if nodes >= WORTH_NODES:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
