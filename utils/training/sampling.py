"""Which samples each rank sees when: a pure function of (seed, epoch, step), the same for any world size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler


@dataclass(frozen=True)
class BatchPlan:
    """How a data set is cut into global batches, and these into the micro-batches of the ranks.

    Attributes:
        samples: size of the data set.
        micro_batch: samples in one forward pass of one rank.
        world_size: number of ranks.
        accumulation: forward passes of one rank for each optimizer step.
        seed: seed of the order.
    """

    samples: int
    micro_batch: int
    world_size: int
    accumulation: int
    seed: int

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.micro_batch * self.world_size * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    def order(self, epoch: int) -> torch.Tensor:
        """The sample indices of an epoch, a whole number of global batches.

        The last batch is filled up from the epoch's beginning: every step has the same shape.
        """
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "order", epoch))
        permutation = torch.randperm(self.samples, generator=generator)
        wanted = self.steps_per_epoch * self.global_batch
        return permutation.repeat(-(-wanted // self.samples))[:wanted]


class MicroBatches(Sampler[list[int]]):
    """The micro-batches of one rank in one epoch, from optimizer step ``first_step`` of that epoch on.

    Global batch k is order[k·G : (k+1)·G]; its micro-batch m on rank r starts at (m·world + r)·B. So
    the set of samples in a step depends on G alone, not on how ranks and accumulation share it.
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
    """A 32-bit seed that differs for every tuple of ``parts`` and is the same on every machine.

    32 bits, because PyTorch's CPU generator looks at no more.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
