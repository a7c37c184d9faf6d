"""Records what this machine's GPUs do, every second, until it is stopped; ``node.sh`` runs it on every node.

    python megatron_lm gpu_log [--interval 1] >node.gpu

Prints one line per GPU and sample (``logs/gpus.py``). The k-th sample is k intervals after the first, so
lines carry no time. Without a GPU it prints ``no GPU`` and the reason once, and ends.
"""

from __future__ import annotations

import os
import pwd
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chakra_et import cli
from megatron_lm.logs import gpus

MIB = 2**20


@dataclass(frozen=True)
class GpuLogConfig:
    """How often to sample."""

    interval: float = field(default=1.0, metadata={"help": "seconds between samples"})
    samples: int = field(default=0, metadata={"help": "stop after this many samples; 0: never"})

    def __post_init__(self) -> None:
        if not 0.01 <= self.interval <= 3600:
            raise ValueError(f"--interval {self.interval}: give 0.01 to 3600 seconds")
        if self.samples < 0:
            raise ValueError(f"--samples {self.samples}: give 0 or more")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(GpuLogConfig, argv, description="Record GPU use, one line per GPU and second.")
    try:
        import pynvml
    except ImportError:
        print(f"{gpus.NO_GPU}: nvidia-ml-py is not installed", flush=True)
        return 0
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        print(f"{gpus.NO_GPU}: {error}", flush=True)
        return 0
    if not handles:
        print(gpus.NO_GPU, flush=True)
        return 0
    start, done = time.monotonic(), 0
    while True:
        lines = [gpus.format_line(sample(pynvml, i, handle)) + "\n" for i, handle in enumerate(handles)]
        sys.stdout.write("".join(lines))
        sys.stdout.flush()
        done += 1
        if done == config.samples:
            return 0
        time.sleep(max(0.0, start + done * config.interval - time.monotonic()))


def sample(nvml: Any, index: int, handle: Any) -> gpus.Gpu:
    """One GPU as NVML reports it now; None for values that this GPU or driver does not provide."""

    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except nvml.NVMLError:
            return None

    name = ask(nvml.nvmlDeviceGetName) or "GPU"
    memory = ask(nvml.nvmlDeviceGetMemoryInfo)
    use = ask(nvml.nvmlDeviceGetUtilizationRates)
    processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses) or []
    return gpus.Gpu(
        index,
        name if isinstance(name, str) else name.decode(),
        ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        use.gpu if use else None,
        memory.used // MIB if memory else None,
        memory.total // MIB if memory else None,
        tuple(f"{_user(process.pid)}({(process.usedGpuMemory or 0) // MIB}M)" for process in processes),
    )


def _user(pid: int) -> str:
    try:
        return pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    except (OSError, KeyError):
        return "?"  # a process of another container
