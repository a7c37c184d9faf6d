"""The process group of each operation, in traces of backends that don't tell it.

NCCL's records name their group; gloo's operators do not. While ``named_groups`` lasts, each operation that
Python asks of a group stands in a record function ``process_group:NAME``, which the converter knows.
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
    "_allgather_base", "allgather_into_tensor_coalesced", "all_gather_single", "gather", "scatter",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single",
    "alltoall", "alltoall_base", "all_to_all_single", "barrier", "send", "recv", "recv_anysource",
)  # fmt: skip
PREFIX = "process_group:"


@contextlib.contextmanager
def named_groups() -> Iterator[None]:
    """Let the operations of all process groups say which group's they are."""
    originals = {name: vars(ProcessGroup)[name] for name in OPERATIONS if name in vars(ProcessGroup)}
    for name in originals:
        setattr(ProcessGroup, name, _saying(getattr(ProcessGroup, name)))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(ProcessGroup, name, original)


def _saying(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def call(group: ProcessGroup, *args: Any, **options: Any) -> Any:
        with record_function(f"{PREFIX}{group.group_name}"):
            return operation(group, *args, **options)

    return call
