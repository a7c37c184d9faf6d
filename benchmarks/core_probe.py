"""Whether something outside this machine slows its cores: a probe that a benchmark calls between steps.

The cores of a virtual machine are hardware threads. While another machine works on the other thread of such
a core, all that runs here takes about 1.3 times as long, for a tenth of a second up to minutes, and nothing
counts it as stolen time. The probe is arithmetic on data in the L1 cache, timed in CPU time, so neither other
programs of this machine nor what was measured before make it slower.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import numpy as np

DISTURBED = 1.05
"""Slower than this, a core is disturbed: undisturbed probes differ by 1 to 2%."""
_SIZE, _PRODUCTS, _TRIES = 48, 60, 3


class CoreProbe:
    """Probes ``cores`` from the calling thread; about 0.5 ms each, 0.5 s to create."""

    def __init__(self, cores: Iterable[int]):
        self.cores = sorted(cores)
        self._input, self._output = np.ones((2, _SIZE, _SIZE), np.float32)
        deadline = time.monotonic() + 0.5
        self._fastest = float("inf")
        while time.monotonic() < deadline:
            self.slowdown()

    def slowdown(self) -> float:
        """How much slower the slowest core is than the fastest probe until now was: 1.0 or more."""
        allowed = os.sched_getaffinity(0)
        try:
            taken = [self._time(core) for core in self.cores]
        finally:
            os.sched_setaffinity(0, allowed)
        self._fastest = min(self._fastest, *taken)
        return max(taken) / self._fastest

    def _time(self, core: int) -> float:
        """The shortest of a few tries, CPU ns."""
        os.sched_setaffinity(0, {core})
        tries = []
        for _ in range(_TRIES):
            begin = time.thread_time_ns()
            for _ in range(_PRODUCTS):
                np.matmul(self._input, self._input, out=self._output)
            tries.append(time.thread_time_ns() - begin)
        return float(min(tries))
