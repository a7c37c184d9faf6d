"""Label collectives with their process group, for backends that don't record it.

NCCL's records name the group; gloo's operators don't. Inside ``named_groups``, every operation that Python
calls on a group runs within a record function ``process_group:NAME``, which the converter reads.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup

OPERATIONS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced",
    "_allgather_base", "allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced",
    "gather", "scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "alltoall", "alltoall_base", "all_to_all_single", "barrier", "send", "recv", "recv_anysource",
)  # fmt: skip
PREFIX = "process_group:"


@contextlib.contextmanager
def named_groups() -> Iterator[None]:
    """Label the operations of all process groups with their group."""
    originals = {name: vars(ProcessGroup)[name] for name in OPERATIONS if name in vars(ProcessGroup)}
    for name in originals:
        setattr(ProcessGroup, name, _labelled(getattr(ProcessGroup, name)))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(ProcessGroup, name, original)


def _labelled(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def call(group: ProcessGroup, *args: Any, **options: Any) -> Any:
        with record_function(f"{PREFIX}{group.group_name}"):
            return operation(group, *args, **options)

    return call
