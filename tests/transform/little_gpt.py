"""Capture a few steps of a small GPT in one process:  python -m tests.transform.little_gpt FOLDER CASE…

CASE is NAME:WRAPPER:LAYERS:BATCH:SEQUENCE, the wrapper ``ddp``, ``none`` or ``stack`` (none, with Python
frames).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import chakra_et.capture.recorder as recorder
from benchmarks.predict_workload import Model
from chakra_et.capture.tracer import ChakraTracer

SIZES = {"hidden": 64, "heads": 2, "vocabulary": 300}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=0, world_size=1)
    plain = recorder.profile
    for case in sys.argv[2:]:
        name, wrapper, *numbers = case.split(":")
        layers, batch, sequence = map(int, numbers)
        torch.manual_seed(0)
        model: Any = Model(144, layers=layers, **SIZES)
        if wrapper == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        recorder.profile = (
            (lambda **named: plain(**named, with_stack=True)) if wrapper == "stack" else plain  # type: ignore[assignment,misc]
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.randint(SIZES["vocabulary"], (batch, sequence + 1))
        with ChakraTracer(folder, name, 0, 1, 2, 0, 1) as tracer:
            for _ in range(3):
                logits = model(tokens[:, :-1])
                F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
