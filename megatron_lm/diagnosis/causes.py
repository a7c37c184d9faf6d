"""The cause that a statement reports, in one sentence: by a rule of ``messages.tsv``, whose head explains its
columns, by its errno, its signal, or in its own words.

Patterns match what stays the same over versions: names of exceptions, result codes, Slurm's phrases.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

from megatron_lm.diagnosis.statements import FIRST_OF_NODE, STRERRORS, Kind, Statement, ends_in_errno

LONGEST = 300
# How well a statement shows where a failure began. WEAK: the process may have gone on. PEER: another process
# went away or did not answer.
PRIMARY, WEAK, PEER = range(3)
WEIGHTS = {"primary": PRIMARY, "weak": WEAK, "peer": PEER}
KINDS = {"any": tuple(Kind), "message": (Kind.TOOL, Kind.RECORD, Kind.EXCEPTION), "slurm": (Kind.SLURM,)}

_text = Path(__file__).with_name("messages.tsv").read_text(encoding="utf-8")
_rows = [line.split("\t") for line in _text.splitlines() if not line.startswith("#")]
# (weight, kinds of statements, pattern that is searched in "name: text", sentence with places for its groups)
RULES = [
    (WEIGHTS[weight], KINDS[kind], re.compile(pattern, re.IGNORECASE), sentence)
    for weight, kind, pattern, sentence in _rows
    if kind in KINDS
]
# Name of an errno, a signal or, where no log explains it, Slurm's state of a job → (weight, sentence)
OF_NAME = {name: (WEIGHTS[weight], words) for weight, kind, name, words in _rows if kind not in KINDS}
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
    for order, (weight, kinds, pattern, sentence) in enumerate(RULES):
        if kind in kinds and (match := pattern.search(whole)):
            # NCCL gives the reason below "Last error:".
            last = re.search(r"Last error:\s*(.*)", text)
            groups = {name: value or "" for name, value in match.groupdict().items()}
            groups |= {"last": last[1] if last else text, "text": text}
            return Cause(sentence.format(**groups), weight, order)
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
        of_errno, words = OF_NAME.get(errno.errorcode.get(number, ""), (weight, os.strerror(number)))
        return Cause(f"{words} ({quoted})", max(weight, of_errno), UNKNOWN - 1)
    form = {Kind.EXCEPTION: "it raised {}", Kind.SLURM: "Slurm reports: {}"}.get(kind, "{}")
    return Cause(form.format(text if kind is Kind.SLURM else quoted), weight)


def errno_of(text: str) -> int | None:
    """The errno in a message: by number, by name, or by text at its end or, with a colon, at its start."""
    if match := re.search(r"\[Errno (\d+)\]|errno[:=] ?-?(\d+)", text):
        return int(match[1] or match[2])
    for name in re.findall(r"\b(E[A-Z]{3,})\b", text):
        if hasattr(errno, name):
            return int(getattr(errno, name))
    first = (number for words, number in STRERRORS.items() if text.startswith(f"{words}: "))
    return ends_in_errno(text) or next(first, None)


def of_code(code: int) -> Cause | None:
    """What the exit code of a process means, -N or 128 + N for signal N; None for 0."""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return Cause(f"it ended with exit code {code}", WEAK) if code else None
    weight, words = OF_NAME.get(name, (PRIMARY, f"it was ended by {name}"))
    # A process that aborts has reported why.
    return Cause(words, weight, UNKNOWN if name == "SIGABRT" else UNKNOWN - 1)
