"""The cause that a statement reports, in one sentence: by a rule, its errno, its signal, or in its own
words.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from dataclasses import dataclass, replace

from megatron_lm.diagnosis.rules import (
    OF_ERRNO,
    OF_SIGNAL,
    PEER,
    PEER_ERRNOS,
    PEER_SIGNALS,
    PRIMARY,
    RULES,
    WEAK,
)
from megatron_lm.diagnosis.statements import Kind, Statement, ends_in_errno, starts_with_errno

ENDED_BY_SIGNAL = "it was ended by"
LONGEST = 300
UNKNOWN = len(RULES)


@dataclass(frozen=True)
class Cause:
    """sentence: what happened to "rank 3 on n2"; weight: PRIMARY, WEAK or PEER; order: of the rule, or
    later.
    """

    sentence: str
    weight: int
    order: int = UNKNOWN

    @property
    def is_known(self) -> bool:
        """Whether the sentence is more than the message itself."""
        return self.order < UNKNOWN


def explain(statement: Statement) -> Cause | None:
    """The cause; None if the statement reports no failure."""
    cause = None if statement.kind is Kind.DETAIL else _explained(statement)
    if cause is None:
        return None
    if statement.survived:
        cause = replace(cause, weight=max(cause.weight, WEAK))
    text = cause.sentence
    return replace(cause, sentence=text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")


def _explained(statement: Statement) -> Cause | None:
    whole = f"{statement.name}: {statement.text}" if statement.name else statement.text
    for order, rule in enumerate(RULES):
        if rule.kinds and statement.kind not in rule.kinds:
            continue
        if match := rule.pattern.search(whole):
            return Cause(_filled(rule.sentence, match, statement), rule.weight, order)
    weight = PRIMARY if statement.kind is Kind.EXCEPTION else WEAK
    if statement.kind is Kind.RECORD and re.search(r"\.(?:cpp|cc|hpp|cu|h):\d+$", statement.name):
        # What PyTorch's library records beside what a rule knows, such as which trace it could not find.
        weight = PEER
    if statement.kind is Kind.RANK_END:
        return _of_code(statement)
    if statement.kind is Kind.DEATH:
        aborted = "abort" in statement.text.lower()
        return Cause(f"a process crashed: {statement.text}", WEAK if aborted else PRIMARY, UNKNOWN - 1)
    if number := errno_of(statement.text):
        words = OF_ERRNO.get(number, os.strerror(number))
        return Cause(
            f"{words} ({_quoted(statement)})", PEER if number in PEER_ERRNOS else weight, UNKNOWN - 1
        )
    if statement.kind is Kind.EXCEPTION:
        return Cause(f"it raised {_quoted(statement)}", weight)
    if statement.kind is Kind.SLURM:
        return Cause(f"Slurm reports: {statement.text}", weight)
    return Cause(_quoted(statement), weight)


def errno_of(text: str) -> int | None:
    """The errno in a message, by number, name or text."""
    if match := re.search(r"\[Errno (\d+)\]|errno[:=] ?-?(\d+)|\brc = -(\d+)", text):
        return int(next(filter(None, match.groups())))
    for match in re.finditer(r"\b(E[A-Z]{3,})\b", text):
        if hasattr(errno, match[1]):
            return int(getattr(errno, match[1]))
    return ends_in_errno(text) or starts_with_errno(text)


def _of_code(statement: Statement) -> Cause | None:
    code = statement.code or 0
    number = -code if code < 0 else code - 128 if code > 128 else 0
    try:
        received = signal.Signals(number)
    except ValueError:
        return Cause(f"it ended with exit code {code}", WEAK) if code else None
    if received in PEER_SIGNALS:
        return Cause(f"{ENDED_BY_SIGNAL} {received.name}", PEER, UNKNOWN - 1)
    words = OF_SIGNAL.get(received, f"{ENDED_BY_SIGNAL} {received.name}")
    # A process that aborts has reported why.
    return Cause(words, WEAK) if received == signal.SIGABRT else Cause(words, PRIMARY, UNKNOWN - 1)


def _filled(sentence: str, match: re.Match[str], statement: Statement) -> str:
    groups = {name: value or "" for name, value in match.groupdict().items()}
    # NCCL gives the reason below "Last error:".
    last = re.search(r"Last error:\s*(.*)", statement.text)
    return sentence.format(**{**groups, "last": last[1] if last else statement.text, "text": statement.text})


def _quoted(statement: Statement) -> str:
    # The source of a record is a file of the logger's.
    name = "" if statement.kind is Kind.RECORD else statement.name
    return ": ".join(part for part in (name, re.sub(r"^rank \d+: ", "", statement.text)) if part)
