"""Settings, iterations, memory and timers from a node's output, in Megatron-LM's log format.

README.md shows each kind of line. Only complete lines count, so a file can be read while it is being written.
Timer names are matched whole, because some end in another's name: ``forward-recv`` and
``backward-send-forward-recv``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
SETTING = re.compile(r"([A-Z][A-Z0-9_]*): ?(.*)")
ITERATION = re.compile(r" *(?:\[[^]]*\] *)?iteration +(\d+)/ *(\d+) \|(.*)\|\s*")
MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after (\d+) iterations\) memory \(MB\) \| allocated: (\S+) \| max allocated: (\S+) "
    r"\| reserved: (\S+) \| max reserved: (\S+)\s*"
)
# A rank's time; a list of start or end times; the name above the ranks' times.
TIMER_LINE = re.compile(
    rb"^(?: +rank +(\d+): *(\S+)| *([A-Za-z][\w-]*) (start|end) time lst:(.*)| {2}([A-Za-z][\w-]*):)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Iteration:
    """One iteration line. seconds: mean time per iteration since the previous line. loss and grad_norm are
    None
    where the line has none, as after a skipped step."""

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
    """One memory line; sizes in MB of 2**20 bytes."""

    rank: int
    after: int
    allocated: float
    max_allocated: float
    reserved: float
    max_reserved: float


class Lists(NamedTuple):
    """When a timer started and ended on one rank: epoch seconds, two float64 arrays of equal length."""

    start: Times
    end: Times


@dataclass
class Timers:
    """milliseconds: name → rank → one value per log interval; lists: (rank, name) → ``Lists``."""

    milliseconds: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    lists: dict[tuple[int, str], Lists] = field(default_factory=dict)


def read(path: Path, most: int | None = None, partial: bool = False) -> bytes:
    """The complete lines of a file; empty if it does not exist.

    most: only that many bytes at its end; partial: with a last line that is not complete.
    """
    try:
        with path.open("rb") as file:
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
    found = {}
    for line in _lines(data, start):
        match = SETTING.fullmatch(line.decode(errors="replace"))
        if not match:
            break
        found[match[1]] = match[2]
    used = [line for line in _with(data[start:], b"PRECISION: ") if line.startswith("PRECISION: ")]
    return found | ({"PRECISION": used[-1].partition(": ")[2]} if used else {})


def iterations(data: bytes) -> list[Iteration]:
    """All iteration lines, in file order."""
    return [found for line in _with(data, b"iteration ") if (found := parse_iteration(line))]


def memory(data: bytes) -> list[Memory]:
    """All memory lines, in file order."""
    matches = filter(None, (MEMORY.fullmatch(line) for line in _with(data, b"[Rank ")))
    return [Memory(int(found[1]), int(found[2]), *map(float, found.groups()[2:])) for found in matches]


def timers(data: bytes) -> Timers:
    """All timers of one node's output. A list belongs to the nearest ``rank N:`` line above it."""
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
            # A rank that stopped between the two lines leaves start times without end times: keep pairs only.
            if word == b"start":
                del starts[len(ends) :]
                starts.append(times)
            elif len(starts) == len(ends) + 1:
                ends.append(times)
    for key, (starts, ends) in pieces.items():
        found.lists[key] = _paired(starts, ends)
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
        return None  # two ranks' lines interleaved


def _lines(data: bytes, start: int) -> Iterator[bytes]:
    while start < len(data):
        stop = data.find(b"\n", start)
        yield data[start:stop]
        start = stop + 1


def _with(data: bytes, marker: bytes) -> Iterator[str]:
    """Each line that contains ``marker``; much faster than a loop over all lines."""
    at = data.find(marker)
    while at >= 0:
        stop = data.find(b"\n", at)
        yield data[data.rfind(b"\n", 0, at) + 1 : stop].decode(errors="replace")
        at = data.find(marker, stop)


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


def _numbers(text: bytes) -> Times:
    try:
        return np.array(text.split(), dtype=np.float64)
    except ValueError:
        return np.empty(0)  # two ranks' lines interleaved


def _field(text: str) -> tuple[str, str]:
    name, _, value = text.rpartition(":")
    return name.strip(), value.strip()


def _optional(text: str | None) -> float | None:
    return None if text is None else float(text)
