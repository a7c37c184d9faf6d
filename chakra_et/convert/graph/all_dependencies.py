"""Find the dependencies of one rank: launches, waits, and threads that wake each other."""

from __future__ import annotations

from chakra_et.convert.graph import device_dependencies, host_waits, thread_dependencies
from chakra_et.convert.graph.dependencies import Collector, Dependencies, collected
from chakra_et.convert.graph.linked import LinkedRank


def find_dependencies(rank: LinkedRank) -> Dependencies:
    """All dependencies between threads, streams and communication of a rank."""
    found = Collector(first_lane=len(rank.timeline.lanes))
    device_dependencies.find(rank, found)
    thread_dependencies.find(rank, found)
    host_waits.find_spinning(rank, found)
    return collected(found, rank.timeline.lanes)
