"""Small models whose steps are measured, without and with recording; also a program of its own.

    python -m chakra_et.doctor.workload '{"name": "base", "layers": 2}'

prints one JSON line: the times of untraced steps, ms. With "trace" it also records a run of that name.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[], None]
VOCABULARY, WIDTH = 1024, 64
WAIT_STEPS = 8


@dataclass(frozen=True)
class Workload:
    """A model, and how its steps run. ``hidden``: width; ``mode``: eager, compile, graphs or checkpoint;
    ``backend``: of DistributedDataParallel, "" for one process without it; ``noise``: elements of
    an elementwise operator (erfinv) in a step; ``kind``: transformer, launches (tiny operators),
    copies (large elementwise ones) or products (large matrix products)."""

    name: str
    kind: str = "transformer"
    layers: int = 2
    hidden: int = 128
    batch: int = 2
    seq: int = 64
    mode: str = "eager"
    backend: str = ""
    noise: int = 1 << 16
    steps: int = 3
    trace: str = ""


class Transformer(nn.Module):
    """Blocks with pre-normalization, as in BERT and GPT-2."""

    def __init__(self, given: Workload) -> None:
        super().__init__()
        self.given, hidden = given, given.hidden
        self.embed = nn.Embedding(VOCABULARY, hidden)
        size = (hidden, max(hidden // WIDTH, 1), 4 * hidden)
        how: dict[str, Any] = {"activation": "gelu", "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(*size, **how) for _ in range(given.layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(tokens)
        for block in self.blocks:
            again = self.given.mode == "checkpoint"
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x


def device() -> torch.device:
    """The GPU of this process, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def make_step(given: Workload) -> Step:
    """One step of the workload on ``device()``, ready to be called; on a CPU with one thread, as recorded."""
    where = device()
    on_gpu = where.type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    if given.kind != "transformer":
        return _plain_step(given, where)
    kind = torch.bfloat16 if on_gpu else torch.float32
    with where:  # whose random numbers come sooner
        model: nn.Module = Transformer(given).to(kind)
    if given.mode == "compile":
        model.compile()
    if given.backend:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=given.mode == "graphs" and on_gpu)
    tokens = torch.randint(0, VOCABULARY, (given.batch, given.seq), device=where)
    noise = torch.rand(given.noise, device=where)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        torch.erfinv(noise)
        model(tokens).float().square().mean().backward()
        optimizer.step()

    return graphed(step) if given.mode == "graphs" and on_gpu else step


def graphed(step: Step) -> Step:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _plain_step(given: Workload, where: torch.device) -> Step:
    on_gpu = where.type == "cuda"
    call: Callable[[], object]
    if given.kind == "launches":
        count, call = 400, partial(torch.zeros(16, device=where).add_, 1.0)
    elif given.kind == "copies":
        count, call = 20, partial(torch.zeros(1 << (28 if on_gpu else 22), device=where).add_, 1.0)
    else:
        size = 8192 if on_gpu else 512
        a = torch.randn(size, size, device=where, dtype=torch.bfloat16 if on_gpu else torch.float32)
        count, call = 10, partial(torch.mm, a, a, out=torch.empty_like(a))

    def step() -> None:
        for _ in range(count):
            call()

    return step


def wait() -> None:
    """Until the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_ms(steps: Sequence[Step], count: int, rounds: int) -> list[float]:
    """The mean time of each step in ms, the median over rounds in which the steps take turns."""
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for times, step in zip(found, steps, strict=True):
            step()
            wait()
            begin = time.perf_counter()
            for _ in range(count):
                step()
            wait()
            times.append((time.perf_counter() - begin) / count * 1e3)
    return [statistics.median(times) for times in found]


def run(given: Workload) -> dict[str, Any]:
    """Time untraced steps, then record where that is asked for."""
    if given.backend:
        dist.init_process_group(given.backend)
    step = make_step(given)
    for _ in range(3):
        step()
    (untraced,) = step_ms([step], given.steps, 3)
    if given.trace:
        from chakra_et.capture.tracer import ChakraTracer

        with ChakraTracer(given.trace, given.name, WAIT_STEPS, 1, 3) as tracer:
            for _ in range(WAIT_STEPS + 5):
                step()
                tracer.step()
    wait()
    if given.backend:
        dist.destroy_process_group()
    return {"untraced_ms": untraced}


def launched(given: Workload, ranks: int = 1, timeout: float = 240.0) -> dict[str, Any]:
    """Run a workload in processes of its own. Raises ``RuntimeError`` with the last line of what it said."""
    Path(given.trace or ".").mkdir(parents=True, exist_ok=True)
    words = ["-m", "chakra_et.doctor.workload", json.dumps(asdict(given))]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *(launcher if given.backend else []), *words]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{given.name}: not done after {timeout:.0f} s") from None
    if ran.returncode:
        said = [line for line in ran.stderr.splitlines() if line.strip()] or ["nothing said"]
        raise RuntimeError(f"{given.name}: {said[-1]}")
    return json.loads(ran.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    timed = run(Workload(**json.loads(sys.argv[1])))
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(timed))
