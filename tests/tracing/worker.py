"""A small DDP training run under the tracer, with one fault: the process under test.

Usage: [torchrun …] worker.py FOLDER NAME STEPS [--active N] [--gzip] [--fault KIND:STEP:RANK]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from chakra_et.capture.tracer import ChakraTracer


class _Ones(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(8) * index


def _commit(fault: str, folder: str) -> None:
    """Do the fault of this step and rank."""
    if fault == "raise":
        time.sleep(0.5)
        raise RuntimeError("the loss is not a number")
    if fault == "kill":
        time.sleep(0.5)  # the other rank may still be reading the last step's data
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "wait":
        Path(folder, "waiting").touch()
        time.sleep(120)
    if fault == "fork":
        loader = torch.utils.data.DataLoader(
            _Ones(), batch_size=1000, num_workers=2, multiprocessing_context="fork"
        )
        assert sum(len(batch) for batch in loader) == 4000
    if fault == "tiny-files":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def _interrupt(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("name")
    parser.add_argument("steps", type=int)
    parser.add_argument("--active", type=int, default=3)
    parser.add_argument("--gzip", action="store_true")
    parser.add_argument("--fault", default="::")
    parser.add_argument("--groups", action="store_true")
    parser.add_argument("--strict", action="store_true")
    args = parser.parse_args()
    fault, fault_step, fault_rank = args.fault.split(":")

    signal.signal(signal.SIGTERM, _interrupt)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    logging.basicConfig(level=logging.INFO, format=f"rank {rank} %(levelname)s %(message)s")
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
    model: torch.nn.Module = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    if world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    pair = dist.new_group([0, 1], group_desc="pair") if args.groups else None
    optimizer = torch.optim.AdamW(model.parameters())

    longest = 0.0
    options = {"gzip": args.gzip, "strict": args.strict, "run_info": {"model": "mlp"}}
    with ChakraTracer(args.folder, args.name, 1, 1, args.active, rank, world, **options) as tracer:
        for step in range(args.steps):
            if fault and step == int(fault_step) and rank == int(fault_rank):
                _commit(fault, args.folder)
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).sum()
            loss.backward()
            optimizer.step()
            if pair is not None and rank < 2:
                dist.all_reduce(loss.detach(), group=pair)
            if (fault, step, rank) == ("uncounted", int(fault_step or -1), int(fault_rank or -1)):
                continue
            began = time.monotonic()
            tracer.step()
            longest = max(longest, time.monotonic() - began)
    print(json.dumps({"rank": rank, "steps": args.steps}))
    print(f"rank {rank}: the longest call of step() took {longest:.2f} s")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
