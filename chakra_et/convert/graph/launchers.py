"""The operators that start communication."""

from __future__ import annotations

import numpy as np

from chakra_et.convert.graph.communication_arguments import Around
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import KERNEL

# Functional operators that only pass on or wait for a result.
_NOT_LAUNCHERS = ("wait_tensor", "_wrap_tensor_autograd")


class Launchers:
    """The rows of the operators that start communication, sorted by time and by record-function id."""

    PREFIXES = ("c10d::", "_c10d_functional")

    def __init__(self, device: DeviceTrace, around: Around) -> None:
        self._device = device
        self.around = around
        named = np.array(
            [name.startswith(self.PREFIXES) and not name.endswith(_NOT_LAUNCHERS) for name in device.names],
            dtype=bool,
        )
        self.rows = np.flatnonzero(named[device.name] & (device.category < KERNEL))
        self._starts = device.start[self.rows]
        self._by_id = self.rows[np.argsort(device.rf_id[self.rows], kind="stable")]
        self._ids = device.rf_id[self._by_id]

    def last_before(self, row: int) -> int:
        """The last launcher that was recorded before event ``row``, -1 for none."""
        device = self._device
        if device.rf_id[row] > 0:
            at = int(np.searchsorted(self._ids, device.rf_id[row], side="left")) - 1
            return int(self._by_id[at]) if at >= 0 else -1
        at = int(np.searchsorted(self._starts, device.start[row], side="right")) - 1
        return int(self.rows[at]) if at >= 0 else -1
