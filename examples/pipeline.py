"""Trace pipeline parallelism:  torchrun --nproc_per_node 2 examples/pipeline.py"""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from chakra_et import ChakraTracer

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device(f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu")
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()).to(device)
stage = PipelineStage(model, rank, world, device, input_args=(torch.empty(8, 256, device=device),))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.AdamW(model.parameters())

with ChakraTracer("outputs", "pipeline", active_steps=1) as tracer:
    for _ in range(6):
        inputs = [torch.randn(32, 256, device=device)] if rank == 0 else []
        target = {"target": torch.zeros(32, 256, device=device)} if rank == world - 1 else {}
        optimizer.zero_grad()
        schedule.step(*inputs, **target)
        optimizer.step()
        tracer.step()

dist.destroy_process_group()
