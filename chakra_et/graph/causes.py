"""What made each piece of work start when it did: launches, waits, threads that wake each other."""

from __future__ import annotations

import numpy as np

from chakra_et.graph import device_dependencies as device_causes
from chakra_et.graph import thread_dependencies as thread_causes
from chakra_et.graph.communication import Communication
from chakra_et.graph.dependencies import Causes, EdgeKind
from chakra_et.graph.device_dependencies import launch_calls
from chakra_et.graph.link import Link
from chakra_et.graph.timeline import Timeline
from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.host import HostTrace

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
