"""One rank of the small training jobs that ``predict_benchmark.py`` measures.

    python benchmarks/predict_workload.py PLAN.json RANK

The plan is JSON: ``world_size``, ``init`` (an init_method of torch.distributed), ``output`` (folder of the
traces), ``interface`` of each rank (null: the network is not shaped), ``rounds``, ``warmup`` and ``active``
steps, and ``cases``. The cases are run one after the other, ``rounds`` times, so that whatever else the
machine does meets all of them alike; each time ``active`` steps are traced as ``CASE_rROUND``. A case with
``ranks`` divides all processes into jobs of as many ranks, of which the first one's traces count.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from chakra_et.capture.tracer import ChakraTracer

MODEL = {"batch": 10, "sequence": 72, "hidden": 256, "layers": 4, "heads": 4, "vocabulary": 1500}
"""Sizes that can be told apart in the shape of any tensor."""

times = {"gelu": 1, "gelu_backward": 1, "lerp": 1}
"""How many times each of the operators that can be slowed is run."""


class Gelu(torch.autograd.Function):
    """GELU whose forward and backward run as often as ``times`` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        for _ in range(times["gelu"]):
            y = torch.ops.aten.gelu(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        for _ in range(times["gelu_backward"]):
            out = torch.ops.aten.gelu_backward(gradient, x)
        return out


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
    """A running mean of the gradients; the mean is taken as often as ``times`` says."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [_local(p) for p in model.parameters()]
        self.owners = list(model.parameters())
        self.means = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        gradients = [_local(p.grad) for p in self.owners]
        with torch.profiler.record_function("Optimizer.step#Momentum.step"):
            for _ in range(times["lerp"]):
                torch._foreach_lerp_(self.means, gradients, 0.1)
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
        for part in range(self.accumulation):
            last = part == self.accumulation - 1
            if isinstance(self.model, DistributedDataParallel):
                self.model.require_backward_grad_sync = last
            logits = self.model(self.batch[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), self.batch[:, 1:].flatten()).backward()
        self.optimizer.step()


def shape(interface: str | None, rate: str | None) -> None:
    """Limit what this rank sends; None: no limit."""
    if interface is None:
        return
    subprocess.run(["tc", "qdisc", "del", "dev", interface, "root"], stderr=subprocess.DEVNULL)
    if rate:
        bucket = ["tbf", "rate", rate, "burst", "128kb", "limit", "4mb"]
        subprocess.run(["tc", "qdisc", "add", "dev", interface, "root", *bucket], check=True)


def come_first() -> None:
    """Go before other programs of the machine, where that is allowed: their share of the time is noise
    here.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-20")
    with contextlib.suppress(OSError):
        os.nice(-20)


def main() -> None:
    come_first()
    plan, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    world_size, interface = plan["world_size"], (plan.get("interface") or {}).get(str(rank))
    dist.init_process_group("gloo", init_method=plan["init"], rank=rank, world_size=world_size)
    groups = {
        size: [dist.new_group(range(at, at + size)) for at in range(0, world_size, size)]
        for size in sorted({case.get("ranks", world_size) for case in plan["cases"]} - {1, world_size})
    }
    jobs: dict[str, Job] = {}
    walls: dict[str, list[float]] = {}
    for number in range(plan["rounds"]):
        for case in plan["cases"]:
            ranks = case.get("ranks", world_size)
            key = json.dumps(
                {name: case.get(name) for name in ("model", "accumulation", "wrapper", "bucket_mb", "ranks")}
            )
            if key not in jobs:
                jobs[key] = Job(case, groups[ranks][rank // ranks] if ranks in groups else None)
            job = jobs[key]
            torch.set_num_threads(case.get("threads", 1))
            slow = case.get("slow", {}) if rank in case.get("slow_ranks", range(world_size)) else {}
            times.update({name: slow.get(name, 1) for name in times})
            dist.barrier()
            shape(interface, case.get("network"))
            for _ in range(plan["warmup"]):
                job.step()
            began = []
            for _ in range(plan.get("plain", 2)):
                began.append(time.perf_counter())
                job.step()
            began.append(time.perf_counter())
            walls.setdefault(case["name"], []).extend(b - a for a, b in zip(began, began[1:], strict=False))
            name = f"{case['name']}_r{number}"
            with ChakraTracer(plan["output"], name, 0, 1, plan["active"], rank, world_size) as tracer:
                for _ in range(1 + plan["active"]):
                    job.step()
                    tracer.step()
            shape(interface, None)
    Path(plan["output"], f"walls_{rank}.json").write_text(json.dumps(walls))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
