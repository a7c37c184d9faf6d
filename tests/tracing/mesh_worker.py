"""One of four ranks that combine FSDP2 and tensor parallelism: what ``test_groups.py`` traces."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from chakra_et import ChakraTracer

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters())
with ChakraTracer(sys.argv[1], "mesh", 0, 1, 1) as tracer:
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.randn(4, 16)), torch.zeros(4, 16)).backward()
        optimizer.step()
        tracer.step()
dist.destroy_process_group()
