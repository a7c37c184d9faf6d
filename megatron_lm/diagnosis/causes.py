"""The cause that a statement reports, in one sentence: by a rule, its errno, its signal, or in its own
words.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from typing import NamedTuple

from megatron_lm.diagnosis.rules import OF_ERRNO, OF_SIGNAL, PEER, PRIMARY, RULES, WEAK
from megatron_lm.diagnosis.statements import FIRST_OF_NODE, Kind, Statement, ends_in_errno, starts_with_errno

LONGEST = 300
UNKNOWN = len(RULES)


class Cause(NamedTuple):
    """sentence: what happened to "rank 3 on n2"; weight: PRIMARY, WEAK or PEER; order: of the rule, less than
    UNKNOWN if the sentence is more than the message itself.
    """

    sentence: str
    weight: int
    order: int = UNKNOWN


def explain(statement: Statement) -> Cause | None:
    """The cause; None if the statement reports no failure."""
    cause = _explained(statement)
    if cause is None:
        return None
    text, weight = cause.sentence, max(cause.weight, WEAK if statement.survived else PRIMARY)
    return cause._replace(weight=weight, sentence=text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")


def _explained(statement: Statement) -> Cause | None:
    kind, text = statement.kind, statement.text
    whole = f"{statement.name}: {text}" if statement.name else text
    for order, rule in enumerate(RULES):
        if kind in rule.kinds and (match := rule.pattern.search(whole)):
            # NCCL gives the reason below "Last error:".
            last = re.search(r"Last error:\s*(.*)", text)
            groups = {name: value or "" for name, value in match.groupdict().items()}
            groups |= {"last": last[1] if last else text, "text": text}
            return Cause(rule.sentence.format(**groups), rule.weight, order)
    if kind is Kind.RANK_END:
        cause = of_code(statement.code or 0)
        # What ended before the others of its node was not ended because of them.
        if cause and statement.name == FIRST_OF_NODE:
            return cause._replace(weight=min(cause.weight, WEAK))
        return cause
    if kind is Kind.DEATH:
        aborted = "abort" in text.lower()
        return Cause(f"a process crashed: {text}", WEAK if aborted else PRIMARY, UNKNOWN - 1)
    weight = PRIMARY if kind is Kind.EXCEPTION else WEAK
    if kind is Kind.RECORD and re.search(r"\.(?:cpp|cc|hpp|cu|h):\d+$", statement.name):
        # What PyTorch's library records beside what a rule knows, such as which trace it could not find.
        weight = PEER
    # The source of a record is a file of the logger's.
    name = "" if kind is Kind.RECORD else statement.name
    quoted = ": ".join(part for part in (name, re.sub(r"^rank \d+: ", "", text)) if part)
    if number := errno_of(text):
        of_errno, words = OF_ERRNO.get(number, (weight, os.strerror(number)))
        return Cause(f"{words} ({quoted})", max(weight, of_errno), UNKNOWN - 1)
    form = {Kind.EXCEPTION: "it raised {}", Kind.SLURM: "Slurm reports: {}"}.get(kind, "{}")
    return Cause(form.format(text if kind is Kind.SLURM else quoted), weight)


def errno_of(text: str) -> int | None:
    """The errno in a message, by number, name or text."""
    if match := re.search(r"\[Errno (\d+)\]|errno[:=] ?-?(\d+)", text):
        return int(match[1] or match[2])
    for match in re.finditer(r"\b(E[A-Z]{3,})\b", text):
        if hasattr(errno, match[1]):
            return int(getattr(errno, match[1]))
    return ends_in_errno(text) or starts_with_errno(text)


def of_code(code: int) -> Cause | None:
    """What the exit code of a process means, -N or 128 + N for signal N; None for 0."""
    number = -code if code < 0 else code - 128
    try:
        received = signal.Signals(number)
    except ValueError:
        return Cause(f"it ended with exit code {code}", WEAK) if code else None
    weight, words = OF_SIGNAL.get(received, (PRIMARY, f"it was ended by {received.name}"))
    # A process that aborts has reported why.
    return Cause(words, weight, UNKNOWN if received == signal.SIGABRT else UNKNOWN - 1)
