"""What made each piece of work start when it did: launches, waits, threads that wake each other."""

from __future__ import annotations

import numpy as np

from chakra_et import device_causes, thread_causes
from chakra_et.cause_types import Causes, EdgeKind
from chakra_et.collectives import Communication
from chakra_et.device_causes import launch_calls
from chakra_et.device_trace import DeviceTrace
from chakra_et.host_trace import HostTrace
from chakra_et.link import Link
from chakra_et.timeline import Timeline

__all__ = ["Causes", "EdgeKind", "find", "launch_calls"]


def find(
    host: HostTrace,
    device: DeviceTrace,
    linked: Link,
    time: Timeline,
    calls: np.ndarray,
    items: list[Communication],
) -> Causes:
    """Collect the causes of one rank's events. Adds lanes for CPU communication to ``time.lanes``."""
    causes = Causes()
    device_causes.find(device, time, calls, causes)
    thread_causes.find(host, device, linked, time, items, causes)
    return causes
