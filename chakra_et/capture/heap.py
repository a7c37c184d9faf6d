"""Memory for the profiler, so that it takes none from the program's tensors.

The profiler's events are allocated between freed tensors, so that malloc can't join these, and the next large
tensors get new pages. The profiler added 2,000 to 9,000 page faults to a step of 100 ms. Therefore the heap
gets contiguous free memory before each recorded step, as much as it had free before the first.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

_SIZE = 64 << 10  # bytes of a piece; malloc takes those above 128 KiB from elsewhere
_LEAST, _MOST = 64, 4096  # pieces


class Reserve:
    """For glibc; does nothing where the heap isn't where ``sbrk`` has it. ``pins``: to drop at the end."""

    def __init__(self) -> None:
        self._libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._pieces = -1 if self._libc else 0
        self.pins: list[bytearray] = []

    def refill(self) -> None:
        """Take pieces until enough of them are in a row, and free them behind a pin, without which malloc
        would give them back to the system."""
        if not self._pieces:
            return
        malloc, sbrk = self._libc.malloc, self._libc.sbrk
        malloc.restype = sbrk.restype = ctypes.c_void_p
        taken: list[int] = []
        row, end = 0, sbrk(0)
        while not 0 <= self._pieces <= row and len(taken) < 16 * _MOST and (at := malloc(_SIZE)):
            if self._pieces < 0 and at >= end:
                self._pieces = min(max(len(taken), _LEAST), _MOST) if taken else 0
            # Between two of them are a header of malloc and perhaps what is left of an earlier piece.
            follows = taken and 0 < at - taken[-1] <= _SIZE + 128
            row = min(row, _MOST - 1) + 1 if follows else 1
            taken.append(at)
        for at in taken[-row:]:  # its pages
            piece = memoryview((ctypes.c_char * _SIZE).from_address(at)).cast("B")
            piece[:: mmap.PAGESIZE] = bytes(_SIZE // mmap.PAGESIZE)
        pin = bytearray(_SIZE + 64)  # behind the last piece, as no other hole is as large
        del pin[1:]
        self.pins.append(pin)
        for at in taken:
            self._libc.free(ctypes.c_void_p(at))
