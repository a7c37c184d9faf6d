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
"""Slower than this, relative to undisturbed cores, a core is disturbed: undisturbed probes differ by 1 to
2%."""
_SIZE, _PRODUCTS, _TRIES = 48, 60, 3


class CoreProbe:
    """Probes ``cores`` from the calling thread; about 0.5 ms each."""

    def __init__(self, cores: Iterable[int]):
        self.cores = sorted(cores)
        self._input, self._output = np.ones((2, _SIZE, _SIZE), np.float32)

    def slowest_us(self) -> float:
        """What the probe takes on the slowest core, µs."""
        allowed = os.sched_getaffinity(0)
        try:
            return max(self._time(core) for core in self.cores) / 1e3
        finally:
            os.sched_setaffinity(0, allowed)

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


def is_disturbed(probes_us: np.ndarray) -> np.ndarray:
    """Which of many probes were of disturbed cores; bool. The second percentile is taken for undisturbed: the
    fastest ones may be 8% faster than most."""
    found: np.ndarray = probes_us > DISTURBED * np.percentile(probes_us, 2)
    return found
