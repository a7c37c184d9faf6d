"""What a machine's GPUs do, as ``slurm/node.sh`` records it with nvidia-smi: one line per GPU and second, in
gpustat's format without header. The k-th sample is k seconds after the first, so lines carry no time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
