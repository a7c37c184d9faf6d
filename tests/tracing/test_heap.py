"""Free memory ahead of the profiler's: large tensors get no new pages while it records."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

# Freed blocks that can't be joined, as something lies between them, and then larger ones.
PROGRAM = """
import ctypes, resource
from chakra_et.capture.heap import Reserve

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

blocks = [bytearray(1 << 20 if number % 2 else 1 << 18) for number in range(64)]
del blocks[1::2]
reserve = Reserve()
for _ in range(REFILLS):
    reserve.refill()
sbrk = ctypes.CDLL(None).sbrk
sbrk.restype = ctypes.c_void_p
end, before = sbrk(0), faults()
larger = [bytearray(3 << 19) for _ in range(16)]
taken = faults() - before
del larger
reserve.refill()
print(taken, sbrk(0) - end)
"""


def outcome(refills: int) -> list[int]:
    """Page faults of 24 MiB in blocks, and how far the heap has grown in all."""
    keeps = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11)}
    program = PROGRAM.replace("REFILLS", str(refills))
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | keeps, capture_output=True, text=True
    )
    assert not ran.returncode, ran.stderr
    return [int(word) for word in ran.stdout.split()]


def test_large_blocks_have_no_page_faults_after_a_refill():
    """GELU's tensors had 3,000 to 8,000 faults per recorded step, and took twice as long as untraced."""
    without, _ = outcome(0)
    assert without > 4000
    refilled, _ = outcome(1)
    assert refilled < 200


def test_memory_that_is_still_free_is_not_reserved_again():
    _, grown = outcome(3)
    assert grown < 1 << 20
