"""What recording costs: CPU time of a small computation, once before the recording and once within it."""

from __future__ import annotations

import time

import torch

PASSES = 6
LAUNCHES = 200


def pass_us() -> dict[str, float]:
    """The shortest CPU time, in µs, of ``PASSES`` passes of a small training (``operators``) and then, with a
    GPU, of ``LAUNCHES`` small kernels (``launches``)."""
    found = {}
    with torch.inference_mode(False), torch.enable_grad():
        for name, run in (("operators", _train), ("launches", _launch)):
            if name == "operators" or torch.cuda.is_available():
                taken = []
                for _ in range(PASSES):
                    began = time.process_time()
                    run()
                    taken.append(time.process_time() - began)
                found[name] = round(min(taken) * 1e6, 3)
    return found


def _train() -> None:
    inputs = torch.ones(8, 8, device="cpu")
    weights = [torch.ones(8, 8, device="cpu", requires_grad=True) for _ in range(8)]
    for _ in range(2):
        outputs = inputs
        for weight in weights:
            # No matrix product: its threads would wait for each other on a busy machine.
            outputs = torch.tanh(outputs * weight.t() + weight)
        outputs.sum().backward()
        with torch.no_grad():
            for weight in weights:
                weight.add_(inputs, alpha=0.0).mul_(1.0)


def _launch() -> None:
    on_device = torch.ones(8, device="cuda")
    for _ in range(LAUNCHES):
        on_device.mul_(1.0)
    torch.cuda.synchronize()
