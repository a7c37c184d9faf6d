"""Trace tensor parallelism with DTensor:  torchrun --nproc_per_node 2 examples/tensor_parallel.py"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from chakra_et import ChakraTracer

dist.init_process_group()
device = torch.device(f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu")
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).to(device)
for number, layer in enumerate(model):
    parallelize_module(layer, mesh, RowwiseParallel() if number % 2 else ColwiseParallel())
optimizer = torch.optim.AdamW(model.parameters())

with ChakraTracer("outputs", "tensor_parallel", active_steps=1) as tracer:
    for step in range(6):
        torch.manual_seed(step)  # every rank has the same batch
        batch = torch.randn(32, 256, device=device)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
        tracer.step()

dist.destroy_process_group()
