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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

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
NAME = r"(?P<name>(?:[A-Za-z_]\w*\.)*"
EXCEPTION = re.compile(NAME + r"[A-Za-z_]\w*)(?:: (?P<text>.*)|:?)$")
# Without a traceback above it, only a name that can't be anything else is an exception.
BARE = NAME + r"[A-Z]\w*(?:Error|Exception|Interrupt))(?:: (?P<text>.*)|\s*)"
STRERRORS = {os.strerror(number): number for number in errno.errorcode}
ENDS_IN_ERRNO = rf".*({'|'.join(map(re.escape, STRERRORS))})(?:\s*\(\d+\))?[\s.)'\"’]*"
PROGRAM = r"(?P<name>(?:[\w./@+-]*/)?[A-Za-z_][\w.+-]*)(?:\[\d+\])?: +"
DEATHS = (
    "Segmentation fault|Bus error|Aborted|Killed|Illegal instruction|Floating point exception|"
    "Trace/breakpoint trap"
)
SHELL_FAILURES = "command not found|cannot execute binary file|bad interpreter|syntax error"
# What a line with or without a logger's header is: (kind of statement, the whole line).
ENDS = [
    ("end", r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: \d+\) of binary: .*"),
    ("slurm", r"(?:\[\S+\] )*(?P<name>srun|slurm\w+|sbatch|salloc)(?:-\S+)?: (?:error|fatal): (?P<text>.*)"),
    # Without the name of one of Slurm's programs, only its plugins and jobs.
    ("slurm", r"(?:error|fatal): (?P<text>(?:\*\*\* (?:JOB|STEP) |Detected \d+ oom|Node failure on ).*)"),
    # How a shell, Python's fault handler and the kernel report that a signal ended a process.
    ("death", rf"(?:\S+: line \d+: +)?(?:\d+ )?(?P<text>(?:{DEATHS})(?: +\(core dumped\))?)(?:  .*)?"),
    ("death", r"Fatal Python error: (?P<text>.*)"),
    ("death", r"(?P<text>(?:Memory cgroup out|Out) of memory: Killed process \d+ .*)"),
]
RECORDS = [("record", r"(?P<text>.*)")]  # with a header
MESSAGES = [  # without one
    ("exception", BARE),
    ("tool", r"(?:ERROR|Error|FATAL|Fatal)(?: error)?: (?P<text>[^\d\s].*)"),
    ("tool", PROGRAM + r"(?P<text>(?:fatal error|error|ERROR|fatal|FATAL): .*)"),
    ("tool", PROGRAM + rf"(?P<text>{ENDS_IN_ERRNO})"),
    ("tool", rf"(?P<name>\S*sh): +(?P<text>.*(?:{SHELL_FAILURES}).*)"),
    # Our own scripts end with one sentence, which starts with their name.
    ("tool", r"(?P<name>(?:.*/.*|_0\d_\w+)\.(?:sh|py)): +(?P<text>(?!stopped$).*)"),
]
# A rank in torchrun's report.
REPORTED = re.compile(
    r"^\s*\[\d+\]:\n\s+time +: (?P<time>.*)\n.*\n\s+rank +: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)\n"
    r"\s+exitcode +: (?P<code>-?\d+).*\n.*\n\s+traceback : (?P<text>.*)",
    re.MULTILINE,
)
ATTEMPT = re.compile(
    r"^(?:attempt \d+ on \S+ at (?P<when>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)|"
    r"slurmstepd: error: \*\*\* JOB \d+ ON .* DUE TO JOB REQUEUE).*",
    re.MULTILINE,
)
# What never continues a message, beside statements: torch's stacks, the words between chained exceptions.
APART = (
    *("Traceback (", "Exception raised from", "frame #", "====="),
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
CONTINUED = 30  # lines of a message at most
NEAR_END = 5  # lines below the last statement of a process
LONGEST = 2_000  # lines over which a traceback can be spread among those of other ranks


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


@dataclass(frozen=True)
class Statement:
    """One report. kind: "exception"; "record" of level error; "tool", a message of a program; "death" of a
    process; "end" of a rank, as torchrun reports it; "slurm". name: of the exception, program or logger;
    text: the message; lines: as logged; code: exit code of an ended rank, -N for signal N.
    """

    kind: str
    name: str
    text: str
    lines: tuple[str, ...]
    rank: int | None = None
    local_rank: int | None = None
    when: datetime | None = None
    code: int | None = None


def read(text: str, base: datetime) -> list[Statement]:
    """The statements of the last attempt in a log, in order; ``base``: a time near the log's."""
    for match in [*ATTEMPT.finditer(text)][-1:]:
        text = text[match.end() :]
        base = datetime.fromisoformat(match["when"]) if match["when"] else base
    return list(_statements(split(text, base)))


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
        if at in used or line.level not in ("", *SEVERE):
            continue
        if text == START:
            yield from _traceback(lines, at, used)
        elif text.startswith(("Root Cause (first", "Failures:", "Other Failures:")):
            yield from _report(lines, at, used)
        else:
            yield from _single(lines, at, used)


def _traceback(lines: list[Line], at: int, used: set[int]) -> Iterator[Statement]:
    """One traceback, whose lines other ranks' lines may interrupt. Nothing for one that the process survived:
    of a destructor, or, with more than ``NEAR_END`` lines below it, of a thread or a warning.
    """
    first = lines[at]
    above = lines[at - 1] if at and lines[at - 1].rank == first.rank else Line(at, "", "")
    ours = [line for line in lines[at : at + LONGEST] if line.rank == first.rank]
    frames = 1
    while frames < len(ours) and (ours[frames].text.startswith((" ", "\t")) or not ours[frames].text.strip()):
        frames += 1
    used.update(line.number for line in ours[: frames + 1])
    match = EXCEPTION.fullmatch(ours[frames].text.strip()) if frames < len(ours) else None
    if not match:
        return
    text, count = _message(match["text"] or "", ours[frames + 1 :], used, first.level)
    mild = above.level in ("WARNING", "INFO", "DEBUG") or above.text.startswith("Exception in thread ")
    below = [line for line in lines[max(used) + 1 :] if line.text.strip()]
    if not above.text.startswith("Exception ignored in") and not (mild and len(below) > NEAR_END):
        raw = tuple(line.raw for line in ours[: frames + count])
        yield Statement("exception", match["name"], text, raw, first.rank, None, first.when)


def _message(text: str, below: Iterable[Line], used: set[int], level: str = "") -> tuple[str, int]:
    """A message with the lines below that continue it, and how many lines it has. level: of the first line,
    where the lines below have headers too.
    """
    parts = [text]
    for line in itertools.islice(below, CONTINUED):
        if line.level not in ("", level) or not line.text.strip() or line.text.startswith(APART):
            break
        if any(re.fullmatch(form, line.text) for _, form in (*ENDS, *MESSAGES[:1])):
            break
        used.add(line.number)
        parts.append(line.text)
    return " ".join(" ".join(parts).split()), len(parts)


def _report(lines: list[Line], at: int, used: set[int]) -> Iterator[Statement]:
    """The ranks in torchrun's report."""
    ends = (number for number in range(at + 1, len(lines)) if lines[number].text.startswith(("====", "----")))
    end = next(ends, len(lines))
    used.update(range(at, end))
    block = "\n".join(line.text for line in lines[at:end])
    name = FIRST_OF_NODE if block.lstrip().startswith("Root Cause") else "torchrun"
    for match in REPORTED.finditer(block):
        raw, when = tuple(match[0].split("\n")), _time(match["time"])
        rank, local, code = (int(match[which]) for which in ("rank", "local", "code"))
        yield Statement("end", name, match["text"], raw, rank, local, when, code)


def _single(lines: list[Line], at: int, used: set[int]) -> Iterator[Statement]:
    """The statement that one line makes, with the lines that continue it; none for nearly all lines."""
    line = lines[at]
    forms = ENDS + (RECORDS if line.level else MESSAGES)
    found_in = ((kind, match) for kind, form in forms if (match := re.fullmatch(form, line.text)))
    kind, match = next(found_in, ("", None))
    if match is None:
        return
    found = {"name": line.source if line.level else "", **match.groupdict(default="")}
    text, when = found.get("text", ""), line.when
    if kind in ("record", "exception"):
        below = itertools.takewhile(lambda each: each.rank == line.rank, lines[at + 1 :])
        text, _ = _message(text, below, used)
    elif kind == "slurm" and (moment := re.search(r"\bAT (\S+)", text)):
        when = _time(moment[1])
    local, code = (int(found[each]) if each in found else None for each in ("local", "code"))
    yield Statement(kind, found["name"], text, (line.raw,), line.rank, local, when, code)


def ends_in_errno(text: str) -> int | None:
    """The errno whose text ends a message; None if none does."""
    match = re.fullmatch(ENDS_IN_ERRNO, text)
    return STRERRORS[match[1]] if match else None


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        return None
