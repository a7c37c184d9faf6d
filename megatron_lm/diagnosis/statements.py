"""The failures that a log reports, recognized by the form of a message.

A line that contains "error" reports nothing by itself. What counts is: a traceback or exception that is not
part of a warning; a record of level error; a message of a program in the form ``program: … : <text of an
errno>``; the end of a process by a signal; torchrun's report of failed ranks; Slurm's reports.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum

from megatron_lm.diagnosis.lines import Line, split


class Kind(Enum):
    """The form of a statement."""

    EXCEPTION = "exception"
    RECORD = "record of level error"
    TOOL = "message of a program"
    DEATH = "death of a process"
    RANK_END = "end of a rank, as torchrun reports it"
    SLURM = "message of Slurm"


@dataclass(frozen=True)
class Statement:
    """One report. name: of the exception, program or logger; text: the message; lines: as logged;
    survived: perhaps, as the exception of a thread or one that a record of another level reports;
    lines_after: filled lines that follow in the log; code: exit code of an ended rank, -N for signal N."""

    kind: Kind
    name: str
    text: str
    lines: tuple[str, ...]
    number: int
    rank: int | None = None
    local_rank: int | None = None
    when: datetime | None = None
    code: int | None = None
    survived: bool = False
    lines_after: int = 0


FIRST_OF_NODE = "root cause"  # name of the end of a rank that torchrun saw end first
START = "Traceback (most recent call last):"
EXCEPTION = re.compile(r"(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: (?P<text>.*)|:?)$")
# Without a traceback above it, only a name that can't be anything else is an exception.
BARE = re.compile(r"(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt))(?:: (?P<text>.*)|)$")
CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# How a shell and Python's fault handler report that a process was ended by a signal, and the kernel's report.
SIGNALS = (
    "Segmentation fault|Bus error|Aborted|Killed|Illegal instruction|Floating point exception|"
    "Trace/breakpoint trap"
)
DEATHS = [
    re.compile(rf"(?:\S+: line \d+: +)?(?:\d+ )?(?P<text>(?:{SIGNALS})(?: +\(core dumped\))?)(?:  .*)?$"),
    re.compile(r"Fatal Python error: (?P<text>.*)"),
    re.compile(r"(?P<text>(?:Memory cgroup out|Out) of memory: Killed process \d+ .*)"),
]
SLURM = re.compile(
    r"(?:\[\S+\] )*(?:(?P<name>srun|slurmstepd|slurmd|sbatch|salloc)(?:-\S+)?: )?(?:error|fatal): "
    r"(?P<text>.*)"
)
# Without the name of one of Slurm's programs, only its plugins and jobs.
UNNAMED = re.compile(r"\*\*\* (?:JOB|STEP) |Detected \d+ oom|Node failure on ")
PROGRAM = re.compile(r"(?P<name>(?:[\w./@+-]*/)?[A-Za-z_][\w.+-]*)(?:\[\d+\])?: +(?P<text>.*)")
ERROR = re.compile(r"(?:fatal error|error|ERROR|fatal|FATAL): ")
OWN_SCRIPT = re.compile(r".*/.*\.(?:sh|py)|_0\d_\w+\.(?:sh|py)")
SHELL = re.compile(r"\S*(?:bash|sh|zsh)|.*\.sh")
SHELL_FAILURES = ("command not found", "cannot execute binary file", "bad interpreter", "syntax error")
FAILED = re.compile(
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: \d+\) of binary: "
)
# A rank in torchrun's report.
REPORTED = re.compile(
    r"^\s*\[\d+\]:\n\s+time +: (?P<time>.*)\n.*\n\s+rank +: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)\n"
    r"\s+exitcode +: (?P<code>-?\d+).*\n.*\n\s+traceback : (?P<text>.*)",
    re.MULTILINE,
)
STRERRORS = {os.strerror(number): number for number in errno.errorcode}
CONTINUED = 30  # lines of a message at most
LONGEST = 2_000  # lines over which a traceback can be spread among those of other ranks
REQUEUED = re.compile(r"slurmstepd: error: \*\*\* JOB \d+ ON .* DUE TO JOB REQUEUE")
ATTEMPT = re.compile(r"attempt \d+ on \S+ at (?P<when>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")


def read(text: str, base: datetime) -> list[Statement]:
    """The statements of the last attempt in a log, in order; ``base``: a time near the log's."""
    rows = text.split("\n")
    starts = [number for number, row in enumerate(rows) if ATTEMPT.match(row) or REQUEUED.match(row)]
    if starts:
        first = rows[starts[-1]]
        if match := ATTEMPT.match(first):
            base = datetime.fromisoformat(match["when"])
        rows = rows[starts[-1] + 1 :]
    lines = split("\n".join(rows), base)
    filled = list(itertools.accumulate(bool(line.text.strip()) for line in lines))
    return [
        replace(found, lines_after=filled[-1] - filled[min(found.number + len(found.lines), len(lines)) - 1])
        for found in _statements(lines)
    ]


def _statements(lines: list[Line]) -> Iterator[Statement]:
    used: set[int] = set()
    for at, line in enumerate(lines):
        if at in used:
            continue
        found: list[Statement] = []
        if line.text.strip() == START and not line.is_mild:
            found = list(_traceback(lines, at, used))
        elif line.text.strip().startswith(("Root Cause (first", "Failures:", "Other Failures:")):
            found = list(_report(lines, at, used))
        elif statement := _single(line, lines, at, used):
            found = [statement]
        yield from found


def _traceback(lines: list[Line], at: int, used: set[int]) -> Iterator[Statement]:
    """One traceback, whose lines other ranks' lines may interrupt. Nothing if it belongs to a warning."""
    rank = lines[at].rank
    previous = next((line for line in reversed(lines[:at]) if line.rank == rank), None)
    ours = [number for number in range(at, min(at + LONGEST, len(lines))) if lines[number].rank == rank]
    frames = 1
    while frames < len(ours) and _is_frame(lines[ours[frames]].text):
        frames += 1
    used.update(ours[:frames])
    if frames >= len(ours):
        return
    end = ours[frames]
    match = EXCEPTION.fullmatch(lines[end].text.strip())
    if not match:
        return
    used.add(end)
    message, last = [match["text"] or ""], frames
    for number in ours[frames + 1 : frames + 1 + CONTINUED]:
        if not _continues(lines[number], lines[at]):
            break
        used.add(number)
        message.append(lines[number].text.strip())
        last += 1
    before = previous if previous is not None and previous.number == at - 1 else None
    if before is not None and before.text.startswith("Exception ignored in"):
        return
    survived = before is not None and (
        before.text.startswith("Exception in thread ") or before.level in ("WARNING", "INFO", "DEBUG")
    )
    yield Statement(
        Kind.EXCEPTION,
        match["name"],
        _one_line(message),
        tuple(lines[number].raw for number in ours[: last + 1]),
        at,
        rank,
        None,
        lines[at].when,
        survived=survived,
    )


def _is_frame(text: str) -> bool:
    return text.startswith((" ", "\t")) or not text.strip()


def _continues(line: Line, first: Line) -> bool:
    """Whether a line below an exception still belongs to its message."""
    text = line.text
    if line.level and line.level != first.level:
        return False
    if text.startswith(("Traceback (", "Exception raised from", "frame #", "=====")) or text in CHAINED:
        return False
    if not text.strip():
        return False
    return not any(pattern.match(text) for pattern in (SLURM, BARE, ATTEMPT)) and not FAILED.match(text)


def _report(lines: list[Line], at: int, used: set[int]) -> Iterator[Statement]:
    """The ranks in torchrun's report."""
    ends = (number for number in range(at + 1, len(lines)) if lines[number].text.startswith(("====", "----")))
    end = next(ends, len(lines))
    used.update(range(at, end))
    block = "\n".join(line.text for line in lines[at:end])
    name = FIRST_OF_NODE if block.lstrip().startswith("Root Cause") else "torchrun"
    for match in REPORTED.finditer(block):
        start = at + block.count("\n", 0, match.start())
        raw = tuple(line.raw for line in lines[start : start + 7])
        rank, local, code = int(match["rank"]), int(match["local"]), int(match["code"])
        when = _time(match["time"], "%Y-%m-%d_%H:%M:%S")
        yield Statement(Kind.RANK_END, name, match["text"], raw, start, rank, local, when, code)


def _single(line: Line, lines: list[Line], at: int, used: set[int]) -> Statement | None:
    """The statement that one line makes, with the lines that continue it; None for nearly all lines."""
    if line.is_mild:
        return None
    text = line.text
    made = Statement(Kind.RECORD, line.source, text, (line.raw,), at, line.rank, None, line.when)
    if match := FAILED.match(text):
        return replace(made, kind=Kind.RANK_END, local_rank=int(match["local"]), code=int(match["code"]))
    if (match := SLURM.fullmatch(text)) and (match["name"] or UNNAMED.match(match["text"])):
        at_time = re.search(r"\bAT (\S+)", match["text"])
        when = _time(at_time[1], "%Y-%m-%dT%H:%M:%S") if at_time else line.when
        return replace(made, kind=Kind.SLURM, name=match["name"] or "", text=match["text"], when=when)
    for pattern in DEATHS:
        if match := pattern.match(text):
            return replace(made, kind=Kind.DEATH, name="", text=match["text"])
    if line.is_severe:
        return replace(made, text=_with_continuation(lines, at, used))
    if match := BARE.fullmatch(text.strip()):
        if text.startswith((" ", "\t")):
            return None
        message = _with_continuation(lines, at, used).removeprefix(match["name"]).removeprefix(": ")
        return replace(made, kind=Kind.EXCEPTION, name=match["name"], text=message)
    if re.match(r"(?:ERROR|Error|FATAL|Fatal)(?: error)?: [^\d\s]", text):
        return replace(made, kind=Kind.TOOL, name="", text=text.partition(": ")[2])
    if match := PROGRAM.fullmatch(text):
        name, message = match["name"], match["text"]
        tool = ERROR.match(message) or ends_in_errno(message) is not None
        shell = SHELL.fullmatch(name) and any(words in message for words in SHELL_FAILURES)
        # Our own scripts end with one sentence, which starts with their name.
        if tool or shell or (OWN_SCRIPT.fullmatch(name) and message != "stopped"):
            return replace(made, kind=Kind.TOOL, name=name, text=message)
    return None


def _with_continuation(lines: list[Line], at: int, used: set[int]) -> str:
    """The text of a record with the lines below that have no header of their own and the same rank."""
    message = [lines[at].text]
    for number in range(at + 1, min(at + CONTINUED, len(lines))):
        line = lines[number]
        if line.rank != lines[at].rank or line.level or not _continues(line, lines[at]):
            break
        if PROGRAM.fullmatch(line.text) and ends_in_errno(line.text):
            break
        used.add(number)
        message.append(line.text.strip())
    return _one_line(message)


def ends_in_errno(text: str) -> int | None:
    """The errno whose text ends a message; None if none does."""
    tail = re.sub(r"[\s.)'\"’]+$", "", re.sub(r"\s*\(\d+\)$", "", text))
    return next((number for words, number in STRERRORS.items() if tail.endswith(words)), None)


def starts_with_errno(text: str) -> int | None:
    """The errno whose text and a colon start a message, before the file that it is about."""
    return next((number for words, number in STRERRORS.items() if text.startswith(f"{words}: ")), None)


def _time(text: str, form: str) -> datetime | None:
    try:
        return datetime.strptime(text, form)
    except ValueError:
        return None


def _one_line(parts: list[str]) -> str:
    return " ".join(" ".join(parts).split())
