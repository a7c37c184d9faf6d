"""Memory in an .et file: attributes of the nodes that allocated or freed some, one set for each device.

The names follow ``torch.cuda.memory_stats``, with the device in front: ``gpu0_allocated_bytes``. Nodes
without allocations and frees have none of them.
"""

from __future__ import annotations

from chakra_et.et.columns import ExecutionTrace

ALLOCATED = "allocated_bytes"
"""Allocated on the device after the node."""
PEAK = "allocated_bytes_peak"
"""The most that was allocated while it ran, from its beginning on."""
RESERVED = "reserved_bytes"
"""Reserved by the caching allocator after it; absent on a CPU."""
ALLOCATIONS, FREES = "allocations", "frees"
"""How many there were in the node."""
ALLOCATED_IN, FREED_IN = "allocated_bytes_in_node", "freed_bytes_in_node"
FIELDS = (ALLOCATED, PEAK, RESERVED, ALLOCATIONS, FREES, ALLOCATED_IN, FREED_IN)


def attribute(device: str, field: str) -> str:
    """The name of the attribute for one of ``FIELDS``."""
    return f"{device}_{field}"


def is_memory(name: str) -> bool:
    """Whether this is the name of such an attribute."""
    return name.endswith(tuple(f"_{field}" for field in FIELDS))


def devices(trace: ExecutionTrace) -> list[str]:
    """The devices of which a file has memory, such as ``["cpu", "gpu0"]``."""
    suffix = f"_{ALLOCATED}"
    return sorted(name.removesuffix(suffix) for name in trace.attributes if name.endswith(suffix))
