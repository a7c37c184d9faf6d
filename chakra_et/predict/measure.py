"""``chakra-et measure-network``: time collectives of several sizes and fit the α–β–γ model to them.

    torchrun --nproc-per-node 8 -m chakra_et measure-network --backend nccl --output network.json
    chakra-et predict NAME --network network.json --bandwidth 200Gbit/s

Run it under the launcher that starts the training, on the same machines. Rank 0 prints a table and writes the
file. Exit status: 0; 2 where there is nothing to measure.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from chakra_et import text
from chakra_et.cli import option, parse
from chakra_et.cost.network_fit import Sample, fit_model, write_model
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType

_POWERS = 10, 34
"""Of 2: the smallest size that is measured, and the largest that can be."""


@dataclass
class MeasureConfig:
    backend: Literal["gloo", "nccl"] = option("backend of torch.distributed", "gloo")
    output: str = option("JSON file to write", "network.json", short="-o")
    largest: int = option("the largest message has 2^N bytes", 25, least=_POWERS[0], most=_POWERS[1])
    repeats: int = option("measurements of each size, of which the median counts", 7, least=1)


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(
        MeasureConfig, argv, description="Time collectives and fit a model of the network to them."
    )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2 or "RANK" not in os.environ:
        raise TraceError(
            "measure-network needs two ranks or more: start it as `torchrun --nproc-per-node 2 -m chakra_et "
            "measure-network`"
        )
    import torch.distributed as dist

    dist.init_process_group(config.backend)
    try:
        samples = measure(config)
        if dist.get_rank() == 0:
            model = fit_model(samples, f"{config.backend} among {ranks} ranks")
            rows = [("collective", "ranks", "bytes", "measured µs", "model µs")]
            for each in samples:
                of = each.kind, each.size, each.ranks
                taken, modelled = (f"{ns / 1e3:,.1f}" for ns in (each.ns, model.time(*of)))
                rows.append((each.kind.name.lower(), str(each.ranks), f"{each.size:,}", taken, modelled))
            print("\n".join([*text.table(rows), model.describe()]))
            write_model(config.output, replace(model, measured=tuple(samples)), backend=config.backend)
            print(f"wrote {config.output}")
    finally:
        dist.destroy_process_group()
    return 0


def measure(config: MeasureConfig) -> list[Sample]:
    """The samples, the same on every rank: the median time of the slowest rank."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if config.backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    count = dist.get_world_size()
    # Two group sizes tell the latency of a message from the cost of a call.
    groups = {count: dist.group.WORLD} | ({2: dist.new_group([0, 1])} if count > 2 else {})
    kinds: dict[CollectiveType, Callable[[Any, Any, Any], None]] = {
        CollectiveType.ALL_REDUCE: lambda x, _, group: dist.all_reduce(x, group=group),
        CollectiveType.BROADCAST: lambda x, _, group: dist.broadcast(x, 0, group=group),
        CollectiveType.ALL_GATHER: lambda x, y, group: dist.all_gather(y, x, group=group),
    }
    found = []
    for ranks, group in groups.items():
        for kind, run in kinds.items():
            for power in range(_POWERS[0], config.largest + 1, 3):
                ns = torch.zeros(1, dtype=torch.float64, device=device)
                if dist.get_rank() < ranks:
                    ns[0] = _median(run, 1 << power, ranks, group, device, config.repeats)
                dist.all_reduce(ns, dist.ReduceOp.MAX)
                found.append(Sample(kind, 1 << power, ranks, float(ns)))
    return found


def _median(
    run: Callable[[Any, Any, Any], None], size: int, ranks: int, group: Any, device: Any, repeats: int
) -> float:
    """The median time of a collective, ns, each time from a common start. ``run`` takes the input, room for
    the output, and the process group."""
    import torch
    import torch.distributed as dist

    finish = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    source = torch.ones(size // 4, device=device)
    target = [torch.empty_like(source) for _ in range(ranks)]
    times = []
    for _ in range(repeats + 1):
        dist.barrier(group=group)
        finish(device)
        begin = time.perf_counter_ns()
        run(source, target, group)
        finish(device)
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times[1:])  # the first one sets up connections
