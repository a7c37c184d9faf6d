"""What a machine's GPUs do, recorded every second until it is stopped, and read back; ``node.sh`` records
each node's.

    python megatron_lm gpu_log [--interval 1] >node.gpu

Prints one line per GPU and sample, in gpustat's format without header. The k-th sample is k intervals after
the first, so lines carry no time. Without a GPU it prints ``no GPU`` and the reason once, and ends. Needs
nothing but NVML, because nodes whose ranks train in a container record with the system's Python.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chakra_et import cli

NO_GPU = "no GPU"
MIB = 2**20
LINE = re.compile(r"\[(\d+)\] (.*?) *\| *(-?\d+|\?)'C, *(\d+|\?) % \| *(\d+|\?) / *(\d+|\?) MB \|(.*)")


@dataclass(frozen=True)
class Gpu:
    """One line. Memory in MB; None where the driver gives no value. processes: each as ``user(MB)``."""

    index: int
    name: str
    celsius: int | None
    percent: int | None
    used: int | None
    total: int | None
    processes: tuple[str, ...]


def parse_line(line: str) -> Gpu | None:
    """None for any other line."""
    match = LINE.fullmatch(line)
    if not match:
        return None
    index, name, *numbers, processes = match.groups()
    celsius, percent, used, total = (None if number == "?" else int(number) for number in numbers)
    return Gpu(int(index), name, celsius, percent, used, total, tuple(processes.split()))


def format_line(gpu: Gpu) -> str:
    """The line of one GPU, without its line break."""
    celsius, percent, used, total = (
        "?" if number is None else str(number) for number in (gpu.celsius, gpu.percent, gpu.used, gpu.total)
    )
    processes = "".join(f" {process}" for process in gpu.processes)
    use = f"{celsius:>2}'C, {percent:>3} % | {used:>5} / {total:>5} MB"
    return f"[{gpu.index}] {gpu.name:<16} | {use} |{processes}"


def samples(data: bytes, count: int | None = None) -> dict[int, list[Gpu]]:
    """GPUs by second since the log began, because one sample is taken per second.

    count: read about this many samples at most, evenly spread; None: all.
    """
    starts = [match.start() for match in re.finditer(rb"\n\[0\] ", b"\n" + data)]
    bounds = [*starts, len(data)]
    step = -(-len(starts) // count) if count and starts else 1
    found = {}
    for second in range(0, len(starts), step):
        lines = data[bounds[second] : bounds[second + 1]].decode(errors="replace").splitlines()
        found[second] = [gpu for line in lines if (gpu := parse_line(line))]
    return found


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
        print(f"{NO_GPU}: nvidia-ml-py is not installed", flush=True)
        return 0
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        print(f"{NO_GPU}: {error}", flush=True)
        return 0
    if not handles:
        print(NO_GPU, flush=True)
        return 0
    start, done = time.monotonic(), 0
    while True:
        print("\n".join(format_line(sample(pynvml, i, each)) for i, each in enumerate(handles)), flush=True)
        done += 1
        if done == config.samples:
            return 0
        time.sleep(max(0.0, start + done * config.interval - time.monotonic()))


def sample(nvml: Any, index: int, handle: Any) -> Gpu:
    """One GPU as NVML reports it now; None for values that this GPU or driver does not provide."""

    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except nvml.NVMLError:
            return None

    def user(pid: int) -> str:
        try:
            return pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
        except (OSError, KeyError):
            return "?"  # a process of another container

    name = ask(nvml.nvmlDeviceGetName) or "GPU"
    memory = ask(nvml.nvmlDeviceGetMemoryInfo)
    use = ask(nvml.nvmlDeviceGetUtilizationRates)
    processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses) or []
    return Gpu(
        index,
        name if isinstance(name, str) else name.decode(),
        ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        use.gpu if use else None,
        memory.used // MIB if memory else None,
        memory.total // MIB if memory else None,
        tuple(f"{user(process.pid)}({(process.usedGpuMemory or 0) // MIB}M)" for process in processes),
    )
