"""Which call launched each piece of device work."""

from __future__ import annotations

import numpy as np

from chakra_et.traces.device import DRIVER, KERNEL, RUNTIME, SYNC, DeviceTrace


def launch_calls(device: DeviceTrace) -> np.ndarray:
    """For each row on the GPU the row of the call that launched it, -1 where the trace has none.

    By correlation id; by external id (the operator, not the call) where the runtime call is missing.
    """
    calls = np.full(len(device), -1, dtype=np.int64)
    gpu = np.flatnonzero((device.category >= KERNEL) & (device.category != SYNC))
    for id_of, candidates in (
        (device.correlation, (device.category == RUNTIME) | (device.category == DRIVER)),
        (device.external_id, device.category < RUNTIME),
    ):
        missing = gpu[(calls[gpu] < 0) & (id_of[gpu] > 0)]
        rows = np.flatnonzero(candidates & (id_of > 0))
        # A runtime call wraps the driver call of the same id and sorts before it.
        rows = rows[np.lexsort((device.category[rows], id_of[rows]))]
        if not len(missing) or not len(rows):
            continue
        at = np.searchsorted(id_of[rows], id_of[missing])
        found = at < len(rows)
        found[found] = id_of[rows[at[found]]] == id_of[missing[found]]
        calls[missing[found]] = rows[at[found]]
    return calls
