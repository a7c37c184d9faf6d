"""One line of an error log without what loggers and launchers put before it: rank, time, level."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# Which rank wrote the line: torch's exception hook and logs.
RANK = re.compile(r"\[rank(?P<rank>\d+)\]:? ?")
CLOCK = r"(?P<time>\d\d:\d\d:\d\d(?:[.,]\d+)?)"
DATE = r"(?P<date>\d{4}-\d\d-\d\d)"
NAMES = r"(?P<level>DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL)"
# How loggers write time, level and source; day: month and day.
HEADERS = [
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
]
PATTERNS = [re.compile(header) for header in HEADERS]
# The rank within a record of torch: [Rank 3] …, [PG ID 0 PG GUID 0(default_pg) Rank 3] …
OWN_RANK = re.compile(r"\[(?:PG [^\]]*)?Rank (\d+)\]:? ")
SEVERE = ("E", "F", "ERROR", "CRITICAL", "FATAL")
MILD = ("I", "W", "V", "D", "DEBUG", "INFO", "NOTICE", "WARN", "WARNING", "TRACE")


@dataclass(frozen=True)
class Line:
    """text: without prefixes; raw, level: as logged; when: local time, None if the line has none."""

    number: int
    raw: str
    text: str
    rank: int | None = None
    level: str = ""
    source: str = ""
    when: datetime | None = None

    @property
    def is_severe(self) -> bool:
        return self.level in SEVERE

    @property
    def is_mild(self) -> bool:
        return self.level in MILD


def split(text: str, base: datetime) -> list[Line]:
    """The lines of a log; ``base``: a time near the log's, for headers without year or date."""
    rows = [ANSI.sub("", row.rpartition("\r")[2]) for row in text.replace("\r\n", "\n").split("\n")]
    return [_line(number, row, base) for number, row in enumerate(rows)]


def _line(number: int, raw: str, base: datetime) -> Line:
    text, rank = raw, None
    if match := RANK.match(text):
        rank, text = int(match["rank"]), text[match.end() :]
    for pattern in PATTERNS:
        if match := pattern.fullmatch(text):
            groups = match.groupdict()
            source = (groups.get("source") or "").strip()
            if rank is None:
                named = re.search(r"\brank (\d+)", source) or OWN_RANK.match(groups["text"])
                rank = int(named[1]) if named else None
            level = groups.get("level") or ""
            return Line(number, raw, groups["text"], rank, level, source, _time(groups, base))
    return Line(number, raw, text, rank)


def _time(groups: dict[str, str | None], base: datetime) -> datetime | None:
    clock, day = groups.get("time"), groups.get("date")
    if not clock:
        return None
    if short := groups.get("day"):
        day = f"{base.year}-{int(short[:-2]):02d}-{short[-2:]}"
    whole, _, fraction = clock.replace(",", ".").partition(".")
    try:
        return datetime.fromisoformat(f"{day or f'{base:%Y-%m-%d}'} {whole}.{fraction[:6]:0<6}")
    except ValueError:
        return None
