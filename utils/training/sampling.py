"""Which samples each rank sees at each step: a pure function of seed, epoch and step, for any world size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler


@dataclass(frozen=True)
class BatchPlan:
    """How a data set of ``samples`` is split into global batches, and those into ranks' micro-batches.

    micro_batch: samples per forward pass on one rank; accumulation: forward passes per optimizer step on one
    rank; seed: of the order.
    """

    samples: int
    micro_batch: int
    world_size: int
    accumulation: int
    seed: int

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch * self.world_size * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    def order(self, epoch: int) -> torch.Tensor:
        """The sample indices of an epoch, a whole number of global batches.

        The last batch is filled up from the beginning of the epoch, so that every step has the same size.
        """
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "order", epoch))
        permutation = torch.randperm(self.samples, generator=generator)
        wanted = self.steps_per_epoch * self.global_batch
        return permutation.repeat(-(-wanted // self.samples))[:wanted]


class MicroBatches(Sampler[list[int]]):
    """The micro-batches of one rank in one epoch, from optimizer step ``first_step`` of that epoch on.

    Global batch k is order[k·G : (k+1)·G]; micro-batch m of rank r starts at (m·world + r)·B within it. The
    samples of a step therefore depend on G alone, not on how ranks and accumulation share it.
    """

    def __init__(self, plan: BatchPlan, rank: int, epoch: int, first_step: int = 0):
        self.plan, self.rank, self.epoch, self.first_step = plan, rank, epoch, first_step

    def __len__(self) -> int:
        return (self.plan.steps_per_epoch - self.first_step) * self.plan.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        plan = self.plan
        blocks = plan.order(self.epoch).view(-1, plan.world_size, plan.micro_batch)
        yield from blocks[self.first_step * plan.accumulation :, self.rank].tolist()


def derived_seed(*parts: object) -> int:
    """A 32-bit hash of ``parts``, the same on every machine.

    32 bits, because PyTorch's CPU generator ignores the rest.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
