"""Writes what this machine's GPUs do, every second, until it is ended.

    python megatron_lm/gpu_log.py [--interval 1] >node.gpu

One line a GPU, in gpustat's format without its header (``logs.format_gpu``), the processes behind the
last bar. The k-th sample is k intervals after the first: the lines need no time. Without a GPU it says
``no GPU`` and why, once, and ends.
"""

from __future__ import annotations

import os
import pwd
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from chakra_et.cli import parse
from megatron_lm import logs

MIB = 2**20


@dataclass(frozen=True)
class GpuLogConfig:
    interval: float = field(default=1.0, metadata={"help": "seconds between two samples"})
    samples: int = field(default=0, metadata={"help": "end after this many; 0: never"})

    def __post_init__(self) -> None:
        if not 0.01 <= self.interval <= 3600:
            raise ValueError(f"--interval {self.interval}: from 0.01 to 3600 seconds")
        if self.samples < 0:
            raise ValueError(f"--samples {self.samples}: 0 or more")


def main(argv: list[str] | None = None) -> int:
    config = parse(GpuLogConfig, argv, description="Log GPU use, one line a GPU and second.")
    try:
        import pynvml
    except ImportError:
        print(f"{logs.NO_GPU}: nvidia-ml-py is not installed", flush=True)
        return 0
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        print(f"{logs.NO_GPU}: {error}", flush=True)
        return 0
    if not handles:
        print(logs.NO_GPU, flush=True)
        return 0
    start, done = time.monotonic(), 0
    while True:
        lines = [
            logs.format_gpu(sample(pynvml, index, handle)) + "\n" for index, handle in enumerate(handles)
        ]
        sys.stdout.write("".join(lines))
        sys.stdout.flush()
        done += 1
        if done == config.samples:
            return 0
        time.sleep(max(0.0, start + done * config.interval - time.monotonic()))


def sample(nvml: Any, index: int, handle: Any) -> logs.Gpu:
    """What NVML tells of one GPU now; None for what this GPU or driver does not know."""

    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except nvml.NVMLError:
            return None

    name = ask(nvml.nvmlDeviceGetName) or "GPU"
    memory = ask(nvml.nvmlDeviceGetMemoryInfo)
    use = ask(nvml.nvmlDeviceGetUtilizationRates)
    processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses) or []
    return logs.Gpu(
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
        return "?"  # of another container


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)
