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

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# Which rank wrote the line: torch's exception hook and logs.
RANK = re.compile(r"\[rank(\d+)\]:? ?")
CLOCK = r"(?P<time>\d\d:\d\d:\d\d(?:[.,]\d+)?)"
DATE = r"(?P<date>\d{4}-\d\d-\d\d)"
NAMES = r"(?P<level>DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL)"
# How loggers write time, level and source; day: month and day.
HEADERS = [
    re.compile(header)
    for header in (
        # torch and glog: E1121 05:22:01.123000 12 torch/x.py:793] text
        rf"(?P<level>[IWEFVD])(?P<day>\d{{3,4}}) {CLOCK} +\d+ (?P<source>\S+:\d+)\] ?(?P<text>.*)",
        # torch's C++: [E1121 05:22:01.123456789 ProcessGroupNCCL.cpp:616] text
        rf"\[(?P<level>[IWEF])(?P<day>\d{{3,4}}) {CLOCK} (?P<source>\S+\.\w+:\d+)\] ?(?P<text>.*)",
        # NCCL: [2024-05-01 10:11:12] n1:123:456 [0] misc/socket.cc:58 NCCL WARN text
        rf"(?:\[?{DATE}[ T]{CLOCK}\S* )?(?P<source>[\w.-]+:\d+:\d+) \[-?\d+\] (?:\S+:\d+ )?"
        r"NCCL (?P<level>WARN|INFO|TRACE) ?(?P<text>.*)",
        # Python's logging with the time first: 2024-05-01 10:11:12,345 - x - ERROR - text
        rf"\[?(?:{DATE}[ T])?{CLOCK}[^\sA-Za-z]*(?P<source>[^:]{{0,60}}?)[\s|\[(-]+{NAMES}\b"
        r"[\s\])|:-]*(?P<text>.*)",
        # Its default, and those with nothing but a level: ERROR:root:text, [ERROR] text
        rf"{NAMES}:(?P<source>[\w.]+):(?P<text>.*)",
        rf"\[{NAMES}\] (?P<text>.*)",
    )
]
# The rank within a record of torch: [Rank 3] …, [PG ID 0 PG GUID 0(default_pg) Rank 3] …
OWN_RANK = re.compile(r"\[(?:PG [^\]]*)?Rank (\d+)\]:? ")
SEVERE = ("E", "F", "ERROR", "CRITICAL", "FATAL")

FIRST_OF_NODE = "root cause"  # name of the end of a rank that torchrun saw end first
START = "Traceback (most recent call last):"
EXCEPTION = re.compile(r"(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: (?P<text>.*)|:?)$")
# Without a traceback above it, only a name that can't be anything else is an exception.
BARE = re.compile(r"(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt))(?:: (?P<text>.*)|)$")
# What never continues a message: torch's stacks, and the words between chained exceptions.
APART = ("Traceback (", "Exception raised from", "frame #", "=====")
CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# How a shell and Python's fault handler report that a process was ended by a signal, and the kernel's report.
DEATH = re.compile(
    r"(?:\S+: line \d+: +)?(?:\d+ )?((?:Segmentation fault|Bus error|Aborted|Killed|Illegal instruction|"
    r"Floating point exception|Trace/breakpoint trap)(?: +\(core dumped\))?)(?:  .*)?$|"
    r"Fatal Python error: (.*)|((?:Memory cgroup out|Out) of memory: Killed process \d+ .*)"
)
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
FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\) of binary: ")
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


@dataclass(frozen=True)
class Line:
    """One line without what loggers and launchers put before it. raw, level: as logged; when: local time."""

    number: int
    raw: str
    text: str
    rank: int | None = None
    level: str = ""
    source: str = ""
    when: datetime | None = None

    @property
    def is_mild(self) -> bool:
        return bool(self.level) and self.level not in SEVERE


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


def read(text: str, base: datetime) -> list[Statement]:
    """The statements of the last attempt in a log, in order; ``base``: a time near the log's."""
    rows = text.split("\n")
    starts = [number for number, row in enumerate(rows) if ATTEMPT.match(row) or REQUEUED.match(row)]
    if starts:
        if match := ATTEMPT.match(rows[starts[-1]]):
            base = datetime.fromisoformat(match["when"])
        rows = rows[starts[-1] + 1 :]
    lines = split("\n".join(rows), base)
    filled = list(itertools.accumulate(bool(line.text.strip()) for line in lines))
    return [
        replace(found, lines_after=filled[-1] - filled[min(found.number + len(found.lines), len(lines)) - 1])
        for found in _statements(lines)
    ]


def split(text: str, base: datetime) -> list[Line]:
    """The lines of a log; ``base``: a time near the log's, for headers without year or date."""
    rows = [ANSI.sub("", row.rpartition("\r")[2]) for row in text.replace("\r\n", "\n").split("\n")]
    return [_line(number, row, base) for number, row in enumerate(rows)]


def _line(number: int, raw: str, base: datetime) -> Line:
    text, rank = raw, None
    if match := RANK.match(text):
        rank, text = int(match[1]), text[match.end() :]
    for header in HEADERS:
        if match := header.fullmatch(text):
            found = {"source": "", **{name: value or "" for name, value in match.groupdict().items()}}
            source = found["source"].strip()
            if rank is None:
                named = re.search(r"\brank (\d+)", source) or OWN_RANK.match(found["text"])
                rank = int(named[1]) if named else None
            return Line(number, raw, found["text"], rank, found["level"], source, _header_time(found, base))
    return Line(number, raw, text, rank)


def _header_time(found: dict[str, str], base: datetime) -> datetime | None:
    day = found.get("date") or f"{base:%Y-%m-%d}"
    if short := found.get("day"):
        day = f"{base.year}-{int(short[:-2]):02d}-{short[-2:]}"
    whole, _, fraction = found.get("time", "").replace(",", ".").partition(".")
    return _time(f"{day} {whole}.{fraction[:6]:0<6}")


def _statements(lines: list[Line]) -> Iterator[Statement]:
    used: set[int] = set()
    for at, line in enumerate(lines):
        text = line.text.strip()
        if at in used:
            continue
        if text == START and not line.is_mild:
            yield from _traceback(lines, at, used)
        elif text.startswith(("Root Cause (first", "Failures:", "Other Failures:")):
            yield from _report(lines, at, used)
        elif statement := _single(line, lines, used):
            yield statement


def _traceback(lines: list[Line], at: int, used: set[int]) -> Iterator[Statement]:
    """One traceback, whose lines other ranks' lines may interrupt. Nothing if it belongs to a warning."""
    first = lines[at]
    above = lines[at - 1] if at and lines[at - 1].rank == first.rank else Line(at, "", "")
    ours = [line for line in lines[at : at + LONGEST] if line.rank == first.rank]
    frames = 1
    while frames < len(ours) and (ours[frames].text.startswith((" ", "\t")) or not ours[frames].text.strip()):
        frames += 1
    used.update(line.number for line in ours[:frames])
    match = EXCEPTION.fullmatch(ours[frames].text.strip()) if frames < len(ours) else None
    if not match:
        return
    end = frames + 1
    while end < min(len(ours), frames + 1 + CONTINUED) and _continues(ours[end], first):
        end += 1
    used.update(line.number for line in ours[frames:end])
    if not above.text.startswith("Exception ignored in"):
        message = [match["text"] or "", *(line.text for line in ours[frames + 1 : end])]
        raw = tuple(line.raw for line in ours[:end])
        survived = above.text.startswith("Exception in thread ") or above.level in (
            "WARNING",
            "INFO",
            "DEBUG",
        )
        yield Statement(
            Kind.EXCEPTION, match["name"], _one_line(message), raw, at, first.rank, None, first.when,
            survived=survived,
        )  # fmt: skip


def _continues(line: Line, first: Line) -> bool:
    """Whether a line below an exception still belongs to its message."""
    text = line.text
    if (line.level and line.level != first.level) or not text.strip():
        return False
    if text.startswith(APART) or text in CHAINED:
        return False
    return not any(pattern.match(text) for pattern in (SLURM, BARE, ATTEMPT, FAILED))


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
        when = _time(match["time"])
        yield Statement(Kind.RANK_END, name, match["text"], raw, start, rank, local, when, code)


def _single(line: Line, lines: list[Line], used: set[int]) -> Statement | None:
    """The statement that one line makes, with the lines that continue it; None for nearly all lines."""
    if line.is_mild:
        return None
    text = line.text
    made = Statement(Kind.RECORD, line.source, text, (line.raw,), line.number, line.rank, None, line.when)
    if match := FAILED.match(text):
        return replace(made, kind=Kind.RANK_END, local_rank=int(match[2]), code=int(match[1]))
    if (match := SLURM.fullmatch(text)) and (match["name"] or UNNAMED.match(match["text"])):
        at_time = re.search(r"\bAT (\S+)", match["text"])
        when = _time(at_time[1]) if at_time else line.when
        return replace(made, kind=Kind.SLURM, name=match["name"] or "", text=match["text"], when=when)
    if match := DEATH.match(text):
        said = next(group for group in match.groups() if group is not None)
        return replace(made, kind=Kind.DEATH, name="", text=said)
    if line.level:
        return replace(made, text=_with_continuation(lines, line, used))
    if match := BARE.fullmatch(text.strip()):
        if text.startswith((" ", "\t")):
            return None
        message = _with_continuation(lines, line, used).removeprefix(match["name"]).removeprefix(": ")
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


def _with_continuation(lines: list[Line], first: Line, used: set[int]) -> str:
    """The text of a record with the lines below that have no header of their own and the same rank."""
    message = [first.text]
    for line in lines[first.number + 1 : first.number + CONTINUED]:
        if line.rank != first.rank or line.level or not _continues(line, first):
            break
        if PROGRAM.fullmatch(line.text) and ends_in_errno(line.text):
            break
        used.add(line.number)
        message.append(line.text)
    return _one_line(message)


def ends_in_errno(text: str) -> int | None:
    """The errno whose text ends a message; None if none does."""
    tail = re.sub(r"[\s.)'\"’]+$", "", re.sub(r"\s*\(\d+\)$", "", text))
    return next((number for words, number in STRERRORS.items() if tail.endswith(words)), None)


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        return None


def _one_line(parts: list[str]) -> str:
    return " ".join(" ".join(parts).split())
