"""Settings, iterations, memory and timers from a node's output, in Megatron-LM's log format, and GPU use.

README.md shows each kind of line. Only complete lines count, so a file can be read while it is being written.
Timer names are matched whole, because some end in another's name: ``forward-recv`` and
``backward-send-forward-recv``.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chakra_et.files import open_regular

Times = npt.NDArray[np.float64]
SETTING = re.compile(rb"([A-Z][A-Z0-9_]*): ?(.*)\n")
ITERATION = re.compile(r" *(?:\[[^]]*\] *)?iteration +(\d+)/ *(\d+) \|(.*)\|\s*")
MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after (\d+) iterations\) memory \(MB\) \| allocated: (\S+) \| max allocated: (\S+) "
    r"\| reserved: (\S+) \| max reserved: (\S+)\s*"
)
GPU = re.compile(r"\[(\d+)\] (.*?) *\| *(-?\d+|\?)'C, *(\d+|\?) % \| *(\d+|\?) / *(\d+|\?) MB \|.*")
# Above a rank's time; a list of start or end times.
TIMER_LINE = re.compile(
    rb"^(?: +rank +(\d+): *\S+| *([A-Za-z][\w-]*) (start|end) time lst:(.*))$", re.MULTILINE
)


@dataclass(frozen=True)
class Iteration:
    """What is shown of an iteration line. seconds: mean time per iteration since the previous line. loss and
    grad_norm are None where the line has none, as after a skipped step.
    """

    number: int
    total: int
    seconds: float
    learning_rate: float
    global_batch_size: int
    loss: float | None
    grad_norm: float | None
    skipped: int


@dataclass(frozen=True)
class Memory:
    """One memory line; sizes in MB of 2**20 bytes."""

    rank: int
    after: int
    allocated: float
    max_allocated: float
    reserved: float
    max_reserved: float


@dataclass(frozen=True)
class Gpu:
    """One GPU line of ``slurm/node.sh``, in gpustat's format. Memory in MB; None where the driver gives no
    value.
    """

    index: int
    name: str
    celsius: int | None
    percent: int | None
    used: int | None
    total: int | None


class Lists(NamedTuple):
    """When a timer started and ended on one rank: epoch seconds, two float64 arrays of equal length."""

    start: Times
    end: Times


Timers = dict[tuple[int, str], Lists]  # by rank and name


def read(path: Path, most: int | None = None, partial: bool = False) -> bytes:
    """The complete lines of a file; empty if it does not exist.

    most: only that many bytes at its end; partial: with a last line that is not complete.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most) if most is not None else 0)
            data = file.read()
    except (FileNotFoundError, IsADirectoryError):
        return b""
    return data if partial else data[: data.rfind(b"\n") + 1]


def settings(data: bytes) -> dict[str, str]:
    """The last block of ``NAME: value`` lines, which starts with NODE_RANK, as each launch prints one.

    PRECISION follows later, because only the training knows which one it can use.
    """
    start = data.rfind(b"\nNODE_RANK: ") + 1
    if not data.startswith(b"NODE_RANK: ", start):
        return {}
    found, at = {}, start
    while match := SETTING.match(data, at):
        found[match[1].decode()], at = match[2].decode(errors="replace"), match.end()
    used = data.rfind(b"\nPRECISION: ", start)
    if used >= 0:
        found["PRECISION"] = data[used + 12 : data.find(b"\n", used + 1)].decode(errors="replace")
    return found


def iterations(data: bytes) -> list[Iteration]:
    """All iteration lines, in file order."""
    return [found for line in _with(data, b"iteration ") if (found := parse_iteration(line))]


def all_iterations(outputs: Iterable[bytes]) -> list[Iteration]:
    """All iteration lines of a run, in order; only the last rank's node has any."""
    found = [iteration for data in outputs for iteration in iterations(data)]
    return sorted(found, key=lambda iteration: iteration.number)


def typical(found: Sequence[Iteration]) -> float:
    """Median seconds per iteration, without the first line, which includes the warm-up, if there are more."""
    return statistics.median(iteration.seconds for iteration in (found[1:] or found))


def memory(data: bytes) -> list[Memory]:
    """All memory lines, in file order."""
    matches = filter(None, (MEMORY.fullmatch(line) for line in _with(data, b"[Rank ")))
    return [Memory(int(found[1]), int(found[2]), *map(float, found.groups()[2:])) for found in matches]


def timers(data: bytes) -> Timers:
    """All timers of one node's output. A list belongs to the nearest ``rank N:`` line above it."""
    pieces: dict[tuple[int, str], list[tuple[Times, Times]]] = {}
    rank, started, starts = None, b"", np.empty(0)
    for match in TIMER_LINE.finditer(data):
        of_rank, name, word, times = match.groups()
        if of_rank:
            rank = int(of_rank)
        elif word == b"start":
            started, starts = name, _numbers(times)
        elif rank is not None and name == started:
            # Fewer times in one of two lines: the rank stopped, or two ranks' lines interleaved.
            ends = _numbers(times)
            count = min(len(starts), len(ends))
            pieces.setdefault((rank, name.decode()), []).append((starts[:count], ends[:count]))
    return {key: Lists(*map(np.concatenate, zip(*pairs, strict=True))) for key, pairs in pieces.items()}


def parse_iteration(line: str) -> Iteration | None:
    """The iteration that a line of the log is about, None where it isn't such a line or is damaged."""
    match = ITERATION.fullmatch(line)
    if not match:
        return None
    parts = (part.rpartition(":") for part in match[3].split("|") if part.strip())
    try:
        fields = {name.strip(): float(value) for name, _, value in parts}
        return Iteration(
            int(match[1]),
            int(match[2]),
            fields["elapsed time per iteration (ms)"] / 1000,
            fields["learning rate"],
            int(fields["global batch size"]),
            fields.get("lm loss"),
            fields.get("grad norm"),
            int(fields["number of skipped iterations"]),
        )
    except (KeyError, ValueError, OverflowError):
        return None  # two ranks' lines interleaved


def parse_gpu(line: str) -> Gpu | None:
    match = GPU.fullmatch(line)
    if not match:
        return None
    index, name, *numbers = match.groups()
    return Gpu(int(index), name, *(None if number == "?" else int(number) for number in numbers))


def gpu_samples(data: bytes, count: int | None = None) -> dict[int, list[Gpu]]:
    """GPUs by second since the log began: lines carry no time, but one sample is taken per second.

    count: read about this many samples at most, evenly spread; None: all.
    """
    starts = [match.start() for match in re.finditer(rb"\n\[0\] ", b"\n" + data)]
    bounds = [*starts, len(data)]
    step = -(-len(starts) // count) if count and starts else 1
    found = {}
    for second in range(0, len(starts), step):
        lines = data[bounds[second] : bounds[second + 1]].decode(errors="replace").splitlines()
        found[second] = [gpu for line in lines if (gpu := parse_gpu(line))]
    return found


def _with(data: bytes, marker: bytes) -> Iterator[str]:
    """Each line that contains ``marker``; much faster than a loop over all lines."""
    at = data.find(marker)
    while at >= 0:
        stop = data.find(b"\n", at)
        yield data[data.rfind(b"\n", 0, at) + 1 : stop].decode(errors="replace")
        at = data.find(marker, stop)


def _numbers(text: bytes) -> Times:
    try:
        return np.array(text.split(), dtype=np.float64)
    except ValueError:
        return np.empty(0)  # two ranks' lines interleaved
