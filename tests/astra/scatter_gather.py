"""Scatters, gathers, reduces and waits at a barrier:  torchrun --nproc_per_node 4 scatter_gather.py"""

import torch
import torch.distributed as dist

from chakra_et import ChakraTracer

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
part, whole = torch.zeros(1 << 16), [torch.ones(1 << 16) * at for at in range(world)]

with ChakraTracer("outputs", "scatter_gather", active_steps=1) as tracer:
    for _ in range(6):
        dist.scatter(part, whole if rank == 0 else None)
        result = (part @ part).repeat(1 << 14)
        dist.gather(result, [torch.empty_like(result) for _ in range(world)] if rank == 1 else None, dst=1)
        dist.reduce(result, 0)
        dist.barrier()
        tracer.step()

dist.destroy_process_group()
