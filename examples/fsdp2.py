"""Trace fully sharded data parallelism (FSDP2):  torchrun --nproc_per_node 2 examples/fsdp2.py"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from chakra_et import ChakraTracer

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before PyTorch 2.6
    from torch.distributed._composable.fsdp import fully_shard

dist.init_process_group()
device = torch.device(f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu")
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).to(device)
for module in (*model, model):
    fully_shard(module, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())

with ChakraTracer("outputs", "fsdp2", active_steps=1) as tracer:
    for _ in range(6):
        batch = torch.randn(32, 256, device=device)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
        tracer.step()

dist.destroy_process_group()
