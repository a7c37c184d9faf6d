"""How a job is run, apart from its degrees: what a launcher needs besides tp, dp, pp and the micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

Recompute = Literal["none", "selective", "full"]
Attention = Literal["unfused", "flash", "flash2"]
Precision = Literal["mixed", "bf16", "fp8", "fp8 rows", "fp8 blocks", "mxfp8", "nvfp4", "fp32"]
Engine = Literal["megatron", "deepspeed", "torchtitan", "mlperf", "mpt", "eager"]
# Of products in fewer bits: bytes of a number, and the peak of a GPU that has them. MXFP8 came with NVFP4.
NARROW = dict.fromkeys(("fp8", "fp8 rows", "fp8 blocks"), (1.0, "8 bit"))
NARROW |= {"mxfp8": (1.0, "4 bit"), "nvfp4": (0.5, "4 bit")}
CudaGraphs = Literal["none", "attention", "layer", "full"]
Unfused = Literal["norm", "loss"]
Again = Literal["operators", "experts", "dense", "latent", "attention", "elementwise"]


# What people run today, unless they say otherwise, where no costs were measured some other way.
MODERN: dict[str, Any] = {"attention": "flash", "sequence_parallel": True, "zero": 1}


@dataclass(frozen=True)
class Options:
    """recompute: activations computed again in the backward pass; zero: what the data-parallel ranks share
    (ZeRO stage: 1 the optimizer states, 2 the gradients too, 3 the parameters too); overlap: gradients are
    reduced beside the last backward pass; sequence_parallel: what tensor parallelism leaves whole is split by
    tokens; attention: whether scores are stored; precision: 16-bit computation with fp32 master weights
    (mixed, or bf16), its products in 8 or 4 bits (scaled by tensors, rows or blocks), or fp32;
    gradient_bytes: of a gradient, kept and reduced; engine: whose schedule, messages and kernels;
    scatter_gather: tensor-parallel ranks send a share of a stage's output each, not all of it; per_stage:
    each stage has a tp, micro-batch and recomputation of its own.
    shard: data-parallel ranks among which ZeRO-3 shares the parameters, of which each such group has a copy
    (HSDP; 0: all); offload: the optimizer's states and its step are the host's.
    As recipes set it: again: modules that the backward pass computes again; cuda_graphs: no host starts the
    kernels (True or "full"), or one launch starts those of a layer's pass, or of its attention ("layer",
    "attention"); fast_dispatch: tokens go
    to experts by kernels made for it (DeepEP, HybridEP); overlap_tensor, overlap_tokens: that communication
    runs beside computation; adapters: only LoRA's are trained; unfused: normalization or loss run, and keep,
    each of their steps; recomputed, offloaded: shares of the layers that full recomputation computes again,
    and whose activations wait in the host's memory.
    """

    recompute: Recompute = "none"
    zero: Annotated[int, Meta(ge=0, le=3)] = 0
    overlap: bool = False
    shard: Annotated[int, Meta(ge=0, le=100_000)] = 0
    offload: bool = False
    sequence_parallel: bool = False
    attention: Attention = "unfused"
    precision: Precision = "mixed"
    gradient_bytes: Annotated[int, Meta(ge=2, le=4, multiple_of=2)] = 4
    engine: Engine = "megatron"
    scatter_gather: bool = False
    per_stage: bool = False
    again: tuple[Again, ...] = ()
    cuda_graphs: CudaGraphs | bool = False
    fast_dispatch: bool = False
    overlap_tensor: bool = False
    overlap_tokens: bool = False
    adapters: bool = False
    unfused: tuple[Unfused, ...] = ()
    recomputed: Annotated[float, Meta(ge=0, le=1)] = 1.0
    offloaded: Annotated[float, Meta(ge=0, le=1)] = 0.0

    def __post_init__(self) -> None:
        if self.cuda_graphs in ("none", "full"):
            object.__setattr__(self, "cuda_graphs", self.cuda_graphs == "full")
        if self.precision == "bf16":
            object.__setattr__(self, "precision", "mixed")

    def shared(self, replicas: int) -> int:
        """Ranks that share a parameter's states, of so many that have it."""
        return math.gcd(replicas, self.shard or replicas) if self.zero == 3 else replicas

    @property
    def fused(self) -> bool:
        """Whether Megatron-core's fused kernels run."""
        return self.engine in ("megatron", "mlperf") and self.attention != "unfused"

    @property
    def fused_loss(self) -> bool:
        """Whether Transformer Engine computes the loss (``cross_entropy_fusion_impl``), as Megatron-Bridge's
        recipes set it, but for adapters.
        """
        is_other = self.adapters or self.engine == "mlperf" or "loss" in self.unfused
        return self.fused and not is_other

    @property
    def activation_bytes(self) -> int:
        return 4 if self.precision == "fp32" else 2

    @property
    def gathered_bytes(self) -> int:
        """Of a parameter, or of an input of tensor-parallel products, when ranks gather it: cast before where
        all of it has one scale, or blocks have theirs (``fp8_param_gather`` of Megatron-core).
        """
        is_cast = self.precision in ("fp8", "mxfp8") and self.engine in ("megatron", "mlperf", "torchtitan")
        return 1 if is_cast else self.activation_bytes
