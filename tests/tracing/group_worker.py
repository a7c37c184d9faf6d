"""One rank with several process groups: what ``test_groups.py`` traces."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from chakra_et.capture.tracer import ChakraTracer

dist.init_process_group("gloo")
rank = dist.get_rank()
pair, back = dist.new_group([0, 1], group_desc="PAIR"), dist.new_group([0, 1], group_desc="BACK")
alone = [dist.new_group([0]), dist.new_group([1])][rank]
tensor = torch.ones(100)
with ChakraTracer(sys.argv[1], "groups", 0, 1, 2, rank, 2) as tracer:
    for _ in range(3):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor[:50], group=pair)
        dist.broadcast(tensor, 0, group=back)
        dist.all_reduce(tensor, group=alone)
        dist.all_reduce(tensor[:0], group=back)
        work = dist.all_reduce(tensor, group=pair, async_op=True)
        work.wait()
        if rank == 0:
            dist.send(tensor[:10], 1, group=back)
        else:
            dist.recv(tensor[:10], 0, group=back)
        tracer.step()
dist.destroy_process_group()
