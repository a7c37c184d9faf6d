"""Trace a plain training loop under DDP:  torchrun --nproc_per_node 2 examples/ddp.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from chakra_et import ChakraTracer

dist.init_process_group()
device = torch.device(f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu")
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
model = DistributedDataParallel(model.to(device))
optimizer = torch.optim.AdamW(model.parameters())

with ChakraTracer("outputs", "ddp", active_steps=1) as tracer:
    for _ in range(6):
        batch = torch.randn(32, 256, device=device)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
        tracer.step()

dist.destroy_process_group()
