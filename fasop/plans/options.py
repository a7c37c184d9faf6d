"""How a job is run, apart from its degrees: what a launcher needs besides tp, dp, pp and the micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

Recompute = Literal["none", "selective", "full"]
Attention = Literal["unfused", "flash"]
Precision = Literal["mixed", "fp32"]
Engine = Literal["megatron", "deepspeed"]


@dataclass(frozen=True)
class Options:
    """recompute: activations computed again in the backward pass; zero: what the data-parallel ranks share
    (ZeRO stage: 1 the optimizer states, 2 the gradients too, 3 the parameters too); overlap: gradients are
    reduced beside the last backward pass; sequence_parallel: what tensor parallelism leaves whole is split by
    tokens; attention: whether scores are stored; precision: 16-bit computation with fp32 master weights, or
    fp32; gradient_bytes: of a gradient when it is reduced; engine: whose schedule and messages;
    scatter_gather: tensor-parallel ranks send a share of a stage's output each, not all of it; per_stage:
    each stage has a tp, micro-batch and recomputation of its own.
    """

    recompute: Recompute = "none"
    zero: Annotated[int, Meta(ge=0, le=3)] = 0
    overlap: bool = False
    sequence_parallel: bool = False
    attention: Attention = "unfused"
    precision: Precision = "mixed"
    gradient_bytes: Annotated[int, Meta(ge=2, le=4, multiple_of=2)] = 4
    engine: Engine = "megatron"
    scatter_gather: bool = False
    per_stage: bool = False

    @property
    def activation_bytes(self) -> int:
        return 2 if self.precision == "mixed" else 4
