"""The small training jobs that ``predict_benchmark.py`` measures: a GPT for one rank, or under DDP or
FSDP2."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MODEL = {"batch": 10, "sequence": 72, "hidden": 256, "layers": 4, "heads": 4, "vocabulary": 1500}
"""Sizes that can be told apart in the shape of any tensor."""

times = {"gelu": 1, "clamp": 1, "lerp": 1}
"""How many times as long each of the operators ``slowable::NAME`` takes as its work."""


def slowable(name: str, schema: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """``work`` as an operator of PyTorch's that afterwards keeps its core busy as long as ``times`` says.

    Work that is repeated would not take as many times as long: the caches then hold what it reads.
    """

    def slowed(*inputs: Any) -> Any:
        begin = time.perf_counter_ns()
        result = work(*inputs)
        end = begin + times[name] * (time.perf_counter_ns() - begin)
        while time.perf_counter_ns() < end:
            pass
        return result

    library.define(f"{name}{schema}")
    library.impl(name, slowed, "CPU")
    return getattr(torch.ops.slowable, name)


library = torch.library.Library("slowable", "DEF")
_gelu = slowable("gelu", "(Tensor x) -> Tensor", F.gelu)
_clamp = slowable("clamp", "(Tensor x) -> Tensor", lambda x: torch.clamp(x, -1, 1))


def _towards(means: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    torch._foreach_lerp_(means, values, 0.1)


_lerp = slowable("lerp", "(Tensor(a!)[] means, Tensor[] values) -> ()", _towards)


class Gelu(torch.autograd.Function):
    """GELU whose gradient is clamped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gelu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return _clamp(torch.ops.aten.gelu_backward(gradient, x))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, hidden))
        return x + self.down(Gelu.apply(self.up(self.norm_2(x))))


class Model(nn.Module):
    """A GPT without tied weights."""

    def __init__(
        self, sequence: int, hidden: int, layers: int, heads: int, vocabulary: int, **_: Any
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.places = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Momentum:
    """A running mean of the gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [_local(p) for p in model.parameters()]
        self.owners = list(model.parameters())
        self.means = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        gradients = [_local(p.grad) for p in self.owners]
        with torch.profiler.record_function("Optimizer.step#Momentum.step"):
            _lerp(self.means, gradients)
            torch._foreach_add_(self.parameters, self.means, alpha=-1e-4)
        for p in self.owners:
            p.grad = None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Job:
    """A model, wrapped for its ranks, with an optimizer and a batch."""

    def __init__(self, case: dict[str, Any], group: Any) -> None:
        sizes = MODEL | case.get("model", {})
        torch.manual_seed(0)
        self.model: nn.Module = Model(**sizes)
        self.accumulation = case.get("accumulation", 1)
        ranks = case.get("ranks", dist.get_world_size())
        wrapper = case.get("wrapper", "ddp" if ranks > 1 else "none")
        if wrapper == "ddp":
            self.model = DistributedDataParallel(
                self.model, bucket_cap_mb=case.get("bucket_mb", 25), process_group=group
            )
        elif wrapper == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = Momentum(self.model)
        self.batch = torch.randint(sizes["vocabulary"], (sizes["batch"], sizes["sequence"] + 1))

    def step(self) -> None:
        """A training step."""
        for part in range(self.accumulation):
            last = part == self.accumulation - 1
            if isinstance(self.model, DistributedDataParallel):
                self.model.require_backward_grad_sync = last
            logits = self.model(self.batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), self.batch[:, 1:].flatten())
            loss.backward()
        self.optimizer.step()
