"""What gloo doesn't record of its operations: the process group, and when its threads have ended them.

NCCL's records name the group; gloo's operators don't. Inside ``named_groups``, every operation that Python
calls on a group runs within a record function ``process_group:NAME (N bytes)``, which the converter reads:
the tensors of operators are recorded in one step only.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup, Work

OPERATIONS = re.compile("_?(all|reduce|gather|scatter|broadcast|barrier|send|recv)")
"""The beginnings of the names of the methods of a group that communicate."""
PREFIX = "process_group:"


@contextlib.contextmanager
def named_groups(note: Callable[[str], None]) -> Iterator[None]:
    """Label the operations of all process groups with their group, and ``note`` its name; and receives from
    any rank, behind them, with the rank in the group that they were of."""
    originals = {name: each for name, each in vars(ProcessGroup).items() if OPERATIONS.match(name)}
    work: Any = Work
    source_of = work._source_rank

    def source_rank(of: Any) -> int:
        rank: int = source_of(of)
        with record_function(f"{PREFIX}source {rank}"):
            return rank

    work._source_rank = source_rank
    for name in originals:
        setattr(ProcessGroup, name, _labelled(getattr(ProcessGroup, name), note))
    try:
        yield
    finally:
        work._source_rank = source_of
        for name, original in originals.items():
            setattr(ProcessGroup, name, original)


def _labelled(operation: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def call(group: ProcessGroup, *args: Any, **options: Any) -> Any:
        note(group.group_name)
        sent = next(filter(None, map(_bytes, reversed(args))), 0)  # inputs follow outputs
        with record_function(f"{PREFIX}{group.group_name} ({sent} bytes)"):
            return operation(group, *args, **options)

    return call


def _bytes(value: Any) -> int:
    """Of a tensor, or of all in nested lists; of a sparse one its indices and values."""
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    if not isinstance(value, Tensor) or value.layout not in (torch.strided, torch.sparse_coo):
        return 0
    return value._indices().nbytes + value._values().nbytes if value.is_sparse else value.nbytes


def threads() -> list[int]:
    """Ids (the system's) of gloo's threads in this process, oldest first; none outside Linux."""
    started = {thread: int(text.rpartition(")")[2].split()[19]) for thread, text in _read("stat").items()}
    return sorted(started, key=lambda thread: (started[thread], thread))


def wait_until_idle(seconds: float = 2.0) -> bool:
    """Wait until gloo's threads in this process are asleep; False if they aren't after ``seconds``.

    A gloo thread wakes the caller before it has ended the operation. What it still uses must not go away: the
    observer that records it, and the interpreter. After a backward pass the operation holds a Python object
    (torch 2.13), and a thread that frees one while the interpreter shuts down aborts the process: "terminate
    called without an active exception" (pytorch/pytorch#190489). ``destroy_process_group`` doesn't end these
    threads while a DDP model is alive.
    """
    end = time.monotonic() + seconds
    before, now = None, _states()
    while now and (now != before or any(state != "S" for state, _ in now.values())):
        if time.monotonic() > end:
            return False
        time.sleep(0.002)  # lets a thread that waits for the interpreter's lock go on
        before, now = now, _states()
    return True


def polling_clocks() -> list[int]:
    """For ``time.clock_gettime``: the CPU time of each of gloo's threads that move messages. They run no
    operators, and while a message is there that nobody receives yet, they ask again and again (0.5 to 18 ms
    in a step with 8 ms of work)."""
    return [~thread << 3 | 6 for thread in _read("comm", "gloo_tcp_loop")]  # a formula of Linux


def _states() -> dict[int, tuple[str, str]]:
    """State of each gloo thread, and how often it has gone to sleep."""
    found = {}
    for thread, text in _read("status").items():
        status = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        found[thread] = (status["State"][0], status["voluntary_ctxt_switches"])
    return found


def _read(name: str, kind: str = "pt_gloo_runloop") -> dict[int, str]:
    """A file of /proc for each gloo thread of this process that is of this kind."""
    found = {}
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                if (task / "comm").read_text(errors="replace").startswith(kind):
                    found[int(task.name)] = (task / name).read_text(errors="replace")
    return found
