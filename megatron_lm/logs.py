"""Reads what a run writes: settings, iterations, memory, timers, GPU use.

Formats: those of Megatron-LM (iteration, memory and timer lines) and of gpustat (GPU lines); README.md
shows each. A line counts only when its end is there, so a file that is still being written can be read
at any moment. Names are matched whole: ``forward-recv`` is not the end of ``backward-send-forward-recv``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

SETTING = re.compile(r"([A-Z][A-Z0-9_]*): ?(.*)")
ITERATION = re.compile(r" *(?:\[[^]]*\] *)?iteration +(\d+)/ *(\d+) \|(.*)\|\s*")
MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after (\d+) iterations\) memory \(MB\) \| allocated: (\S+) \| max allocated: (\S+) "
    r"\| reserved: (\S+) \| max reserved: (\S+)\s*"
)
GPU = re.compile(r"\[(\d+)\] (.*?) *\| *(-?\d+|\?)'C, *(\d+|\?) % \| *(\d+|\?) / *(\d+|\?) MB \|(.*)")
# A rank's time, a start or end list, the name above the ranks' times.
TIMER_LINE = re.compile(
    rb"^(?: +rank +(\d+): *(\S+)| *([A-Za-z][\w-]*) (start|end) time lst:(.*)| {2}([A-Za-z][\w-]*):)$",
    re.MULTILINE,
)
NO_GPU = "no GPU"


@dataclass(frozen=True)
class Iteration:
    """One iteration line. seconds: the mean since the line before; loss and grad_norm: None when the line
    has none, as after a skipped step."""

    number: int
    total: int
    consumed_samples: int
    seconds: float
    learning_rate: float
    global_batch_size: int
    loss: float | None
    loss_scale: float
    grad_norm: float | None
    skipped: int
    nan: int


@dataclass(frozen=True)
class Memory:
    """One memory line; MB as torch counts them (2**20 bytes)."""

    rank: int
    after: int
    allocated: float
    max_allocated: float
    reserved: float
    max_reserved: float


@dataclass(frozen=True)
class Gpu:
    """One GPU line; None for what the driver does not tell. processes: as ``user(MB)``, one each."""

    index: int
    name: str
    celsius: int | None
    percent: int | None
    used: int | None
    total: int | None
    processes: tuple[str, ...]


class Lists(NamedTuple):
    """When a timer started and ended on one rank: epoch seconds, float64, of one length."""

    start: np.ndarray
    end: np.ndarray


@dataclass
class Timers:
    """milliseconds: name → rank → one value for each time it was logged; lists: (rank, name) → ``Lists``."""

    milliseconds: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    lists: dict[tuple[int, str], Lists] = field(default_factory=dict)


def read(path: Path) -> bytes:
    """The complete lines of a file; empty where there is none."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        return b""
    return data[: data.rfind(b"\n") + 1]


def settings(data: bytes) -> dict[str, str]:
    """The last block of ``NAME: value`` lines that a launch echoed, from NODE_RANK on."""
    start = data.rfind(b"\nNODE_RANK: ") + 1
    if not data.startswith(b"NODE_RANK: ", start):
        return {}
    found = {}
    for line in _lines(data, start):
        match = SETTING.fullmatch(line.decode(errors="replace"))
        if not match:
            break
        found[match[1]] = match[2]
    return found


def iterations(data: bytes) -> list[Iteration]:
    """Every iteration line, in the file's order."""
    return [found for line in _with(data, b"iteration ") if (found := parse_iteration(line))]


def memory(data: bytes) -> list[Memory]:
    """Every memory line, in the file's order."""
    found = []
    for line in _with(data, b"[Rank "):
        match = MEMORY.fullmatch(line)
        if match:
            rank, after, *sizes = match.groups()
            found.append(Memory(int(rank), int(after), *map(float, sizes)))
    return found


def timers(data: bytes) -> Timers:
    """Every timer of one node's output. A list belongs to the last ``rank N:`` line above it."""
    found = Timers()
    pieces: dict[tuple[int, str], tuple[list[bytes], list[bytes]]] = {}
    rank, name, below = None, "", -1
    for match in TIMER_LINE.finditer(data):
        rank_text, milliseconds, of_list, word, times, heading = match.groups()
        if heading:
            name, below = heading.decode(), match.end() + 1
        elif rank_text:
            rank = int(rank_text)
            if match.start() == below:
                with contextlib.suppress(ValueError):
                    of_rank = found.milliseconds.setdefault(name, {}).setdefault(rank, [])
                    of_rank.append(float(milliseconds))
                below = match.end() + 1
        elif rank is not None:
            starts, ends = pieces.setdefault((rank, of_list.decode()), ([], []))
            # A writer that was stopped between the two leaves a start without its end: pairs only.
            if word == b"start":
                del starts[len(ends) :]
                starts.append(times)
            elif len(starts) == len(ends) + 1:
                ends.append(times)
    for key, (starts, ends) in pieces.items():
        found.lists[key] = _paired(starts, ends)
    return found


def gpus(data: bytes, samples: int | None = None) -> dict[int, list[Gpu]]:
    """GPU lines by second since the log began, as one sample is taken each second.

    samples: read at most about this many, evenly spread; None: all.
    """
    first = [0] if data.startswith(b"[0] ") else []
    at = data.find(b"\n[0] ")
    while at >= 0:
        first.append(at + 1)
        at = data.find(b"\n[0] ", at + 1)
    bounds = [*first, len(data)]
    step = -(-len(first) // samples) if samples and first else 1
    found = {}
    for second in range(0, len(first), step):
        lines = data[bounds[second] : bounds[second + 1]].decode(errors="replace").splitlines()
        found[second] = [gpu for line in lines if (gpu := parse_gpu(line))]
    return found


def parse_iteration(line: str) -> Iteration | None:
    match = ITERATION.fullmatch(line)
    if not match:
        return None
    fields = dict(_field(part) for part in match[3].split("|"))
    try:
        return Iteration(
            int(match[1]),
            int(match[2]),
            int(fields["consumed samples"]),
            float(fields["elapsed time per iteration (ms)"]) / 1000,
            float(fields["learning rate"]),
            int(fields["global batch size"]),
            _optional(fields.get("lm loss")),
            float(fields["loss scale"]),
            _optional(fields.get("grad norm")),
            int(fields["number of skipped iterations"]),
            int(fields["number of nan iterations"]),
        )
    except (KeyError, ValueError):
        return None  # two ranks wrote into one line


def parse_gpu(line: str) -> Gpu | None:
    match = GPU.fullmatch(line)
    if not match:
        return None
    index, name, *numbers, processes = match.groups()
    celsius, percent, used, total = (None if number == "?" else int(number) for number in numbers)
    return Gpu(int(index), name, celsius, percent, used, total, tuple(processes.split()))


def format_gpu(gpu: Gpu) -> str:
    """The line of one GPU, as gpustat prints it without its header."""
    celsius, percent, used, total = (
        "?" if number is None else str(number) for number in (gpu.celsius, gpu.percent, gpu.used, gpu.total)
    )
    processes = "".join(f" {process}" for process in gpu.processes)
    use = f"{celsius:>2}'C, {percent:>3} % | {used:>5} / {total:>5} MB"
    return f"[{gpu.index}] {gpu.name:<16} | {use} |{processes}"


def _lines(data: bytes, start: int) -> Iterator[bytes]:
    while start < len(data):
        stop = data.find(b"\n", start)
        yield data[start:stop]
        start = stop + 1


def _located(data: bytes, marker: bytes) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of each line with ``marker`` in it: much faster than looking at every line."""
    at = data.find(marker)
    while at >= 0:
        start = data.rfind(b"\n", 0, at) + 1
        stop = data.find(b"\n", at)
        yield start, data[start:stop]
        at = data.find(marker, stop)


def _with(data: bytes, marker: bytes) -> Iterator[str]:
    for _, line in _located(data, marker):
        yield line.decode(errors="replace")


def _paired(starts: list[bytes], ends: list[bytes]) -> Lists:
    starts = starts[: len(ends)]
    if all(start.count(b" ") == end.count(b" ") for start, end in zip(starts, ends, strict=True)):
        start, end = _numbers(b" ".join(starts)), _numbers(b" ".join(ends))
        if len(start) == len(end):
            return Lists(start, end)
    pairs = [(_numbers(start), _numbers(end)) for start, end in zip(starts, ends, strict=True)]
    counts = [min(map(len, pair)) for pair in pairs]
    return Lists(
        *(np.concatenate([pair[i][:n] for pair, n in zip(pairs, counts, strict=True)]) for i in (0, 1))
    )


def _numbers(text: bytes) -> np.ndarray:
    try:
        return np.array(text.split(), dtype=np.float64)
    except ValueError:
        return np.empty(0)  # two ranks wrote into one line


def _field(text: str) -> tuple[str, str]:
    name, _, value = text.rpartition(":")
    return name.strip(), value.strip()


def _optional(text: str | None) -> float | None:
    return None if text is None else float(text)
