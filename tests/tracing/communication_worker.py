"""One traced step of four gloo ranks with every kind of communication: torchrun --nproc-per-node 4 FILE
DIR."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from chakra_et.capture.tracer import ChakraTracer

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
if sharded := hasattr(torch.distributed.fsdp, "fully_shard"):  # not before torch 2.6
    torch.distributed.fsdp.fully_shard(model, mesh=mesh["dp"])
# DDP reduces from C++, where nothing names the group.
replicated = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(48, 48), process_group=pair)
for _ in range(2):  # after the first pass, DDP broadcasts the buckets that it makes anew
    replicated(torch.ones(4, 48)).sum().backward()


def step() -> list[int]:
    # On a pair of ranks.
    (functional.all_reduce(torch.ones(64, 32), "sum", pair) + 1).sum()
    (functional.all_to_all_single(torch.arange(8.0), None, None, pair) * 2).sum()
    (functional.all_gather_tensor(torch.ones(4, 2), 0, pair) + 1).sum()
    replicated(torch.ones(4, 48)).sum().backward()
    # On all ranks.
    (functional.all_reduce(torch.ones(128), "sum", dist.group.WORLD) + 1).sum()
    received = torch.zeros(16)
    dist.scatter(received, [torch.ones(16)] * 4 if rank == 0 else None, src=0)
    dist.barrier()
    # From each rank to the next.
    received = torch.zeros(256)
    sent = dist.P2POp(dist.isend, torch.ones(256) * rank, (rank + 1) % 4)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, received, (rank - 1) % 4)]):
        work.wait()
    # Of whoever sends first.
    if rank:
        dist.send(torch.ones(8), 0, tag=5)
    sources = [dist.recv(torch.zeros(8), tag=5) for _ in range(3)] if rank == 0 else []
    # Tensor parallel in one dimension of the mesh, sharded in the other.
    model(torch.ones(8, 32)).sum().backward()
    return sources


with ChakraTracer(sys.argv[1], "all", 0, 1, 1, rank, 4) as tracer:
    for _ in range(2):
        sources = step()
        tracer.step()
if rank == 0:
    print("received from", *sources)
# From the second step on, DDP reduces other buckets than in the first one, the structure step.
layers = torch.nn.ModuleDict({"last": torch.nn.Linear(300, 100), "first": torch.nn.Linear(64, 300)})
forward = torch.nn.Sequential(layers["first"], torch.nn.ReLU(), layers["last"])
layers.forward = lambda values: forward(values).sum()
changing = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.1)
with ChakraTracer(sys.argv[1], "buckets", 0, 1, 2, rank, 4) as tracer:
    for _ in range(3):
        changing(torch.ones(4, 64)).backward()
        tracer.step()
print("sharded" if sharded else "not sharded")
dist.destroy_process_group()
