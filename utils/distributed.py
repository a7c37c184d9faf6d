"""Start a process group from the launcher's environment; end every failure with one sentence and a status."""

from __future__ import annotations

import datetime
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from chakra_et.capture import gloo
from chakra_et.jobs import default_workers
from chakra_et.redact import redacted
from utils import watch as watching
from utils.watch import PeerFailure, Watch, describe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """This process in the world; ``local_rank`` and ``local_size`` count the processes of its node."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    def sum(self, *values: torch.Tensor | float) -> list[float]:
        """Sum scalars over all ranks, each separately, in one collective."""
        parts = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values]
        total = torch.stack(parts)
        if self.size > 1:
            dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def agree(self, number: int) -> bool:
        """Whether every rank passes the same number (below 2^62)."""
        extremes = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        if self.size > 1:
            dist.all_reduce(extremes, dist.ReduceOp.MAX)
        return bool(extremes.tolist() == [number, -number])


def setup_logging(rank: int) -> None:
    """Log to stderr, without secrets; ranks other than 0 log warnings only."""
    form = f"%(asctime)s rank {rank} %(levelname)s %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, datefmt="%H:%M:%S", force=True)
    formatter: Any = logging.getLogger().handlers[0].formatter  # also the progress bar's
    line = formatter.format
    formatter.format = lambda record: redacted(line(record))
    for name in ("chakra_et", "utils", "gpt2", "bert", "__main__"):
        logging.getLogger(name).setLevel(logging.WARNING if rank else logging.INFO)


def read_world() -> World:
    """Read the world from the variables that torchrun and other launchers set; one process without them.

    Raises ValueError if this node has fewer GPUs than processes.
    """
    environment = os.environ
    rank, size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    local_rank = int(environment.get("LOCAL_RANK", 0))
    local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= (count := torch.cuda.device_count()):
            how = "launch one process per GPU, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
            raise ValueError(f"this node has {local_size} processes but {count} GPU(s): {how}")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    return World(rank, size, local_rank, local_size, device)


def set_threads(local_size: int) -> None:
    """Split the node's cores between its processes, unless the user has set OMP_NUM_THREADS.

    A value of 1 under torchrun does not count: torchrun sets it by itself.
    """
    chosen = os.environ.get("OMP_NUM_THREADS")
    if chosen is None or (chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        torch.set_num_threads(max(1, default_workers() // local_size))


def run(main: Callable[[World, Watch], int], dist_timeout: float) -> NoReturn:
    """Run ``main`` on this rank and exit with its status.

    A failure on one rank ends all ranks: within seconds if the process died or raised, after ``dist_timeout``
    seconds if it hangs. Each rank logs one sentence; an unexpected exception is logged with its traceback.
    """
    rank = int(os.environ.get("RANK", 0))
    watch = None
    try:
        setup_logging(rank)
        world = read_world()
        set_threads(world.local_size)
        group_store, watch_store = _connect(world, dist_timeout)
        watch = Watch(world.rank, world.size, dist_timeout, watch_store)
        watching.forget_signals_in_children()
        watch.start()
        watch.barrier("start", timeout=dist_timeout)
        if group_store is not None:
            # NCCL aborts at its timeout, gloo names no rank at its own: the watch must come first.
            limit = datetime.timedelta(seconds=dist_timeout + 60)
            known: dict[str, Any] = {"rank": world.rank, "world_size": world.size, "timeout": limit}
            dist.init_process_group(world.backend, store=group_store, **known)
        code = main(world, watch)
        watch.close()
    except BaseException as error:
        watching.leave(_explain(error, rank, watch))
    if dist.is_initialized():
        dist.destroy_process_group()
    gloo.wait_until_idle()  # what still refers to a group, as Megatron does, keeps its threads alive
    sys.exit(code)


def _connect(world: World, timeout: float) -> tuple[Store | None, Store | None]:
    """Open two connections to the rendezvous store: one for the process group, one for the watch."""
    environment = os.environ
    if "RANK" not in environment:
        return None, None
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # A restarted attempt must not find the keys of the previous one.
    prefix = f"attempt_{environment.get('TORCHELASTIC_RESTART_COUNT', 0)}"

    def connect(master: bool, part: str) -> Store:
        limit = datetime.timedelta(seconds=timeout)
        store = TCPStore(host, port, world.size, is_master=master, timeout=limit, wait_for_workers=False)
        return PrefixStore(f"{prefix}/{part}", store)

    return connect(world.rank == 0 and not hosted, "group"), connect(False, "watch")


def _explain(error: BaseException, rank: int, watch: Watch | None) -> int:
    """Log why this rank ends, report it to the other ranks, and return the exit status."""
    # An import that a signal interrupts may raise an error of its own instead of SystemExit.
    received = watch.interrupted_by if watch is not None else 0
    if received or isinstance(error, (SystemExit, KeyboardInterrupt)):
        code = 128 + received if received else 130
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
        sentence = watching.ended_by(code - 128)
        if watch is not None:
            watch.fail(sentence)
        log.error("rank %d: %s", rank, sentence)
        return code
    if watching.blames_others(error):
        verdict = watch.wait_for_verdict() if watch is not None else None
        failure = str(error) if isinstance(error, PeerFailure) else f"a collective failed ({describe(error)})"
        log.error("rank %d stops: %s", rank, verdict or failure)
        return 1
    if watch is None or not watch.fail(describe(error)):  # no other rank has logged it
        unexpected = None if watching.is_expected(error) else error
        log.error("rank %d: %s", rank, describe(error), exc_info=unexpected)
    return 1
