"""The same model under DDP, FSDP2 and with more layers on two gloo ranks: torchrun --nproc-per-node 2 FILE
DIR."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn

from chakra_et.capture.tracer import ChakraTracer

WIDTH, INNER, WORDS = 255, 301, 101
"""Odd, so that pieces are padded."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """``words``: it begins with an embedding, so that the first block's input needs a gradient."""

    def __init__(self, layers: int, words: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH) if words else None
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) if self.words else x
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
for name, wrapper, layers, words in (
    ("ddp", "ddp", 4, True),
    ("fsdp2", "fsdp2", 4, True),
    ("deep", "ddp", 8, True),
    ("deepfsdp2", "fsdp2", 8, True),
    ("bare", "ddp", 4, False),
    ("barefsdp2", "fsdp2", 4, False),
):
    torch.manual_seed(0)
    model: nn.Module = Model(layers, words)
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    else:
        for block in model.blocks:
            torch.distributed.fsdp.fully_shard(block)
        torch.distributed.fsdp.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, foreach=False)
    batch = torch.randint(WORDS, (3, 7)) if words else torch.ones(3, 7, WIDTH)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step(model, optimizer, batch)
    with ChakraTracer(sys.argv[1], name, 0, 1, 2, rank, 2) as tracer:
        for _ in range(3):
            step(model, optimizer, batch)
            tracer.step()
dist.destroy_process_group()
