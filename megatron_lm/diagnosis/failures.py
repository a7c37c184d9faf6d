"""The failures of a run, by rank, and the one with which it began: from its logs, its nodes' ends and Slurm's
state of its jobs.

The cause that a statement reports is a sentence by a rule of ``messages.tsv``, whose head explains its
columns, by its errno, its signal, or in its own words. Patterns match what stays the same over versions:
names of exceptions, result codes, Slurm's phrases.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from chakra_et.text import shortened
from megatron_lm.diagnosis import statements
from megatron_lm.diagnosis.statements import FIRST_OF_NODE, STRERRORS, Statement, ends_in_errno
from megatron_lm.logs import records, runs
from megatron_lm.logs.runs import Node, Note, Run, State

LAST_LINES = 8
LONGEST = 300  # letters of a sentence
TAIL_BYTES, LAST_BYTES = 4_000_000, 2_000  # of a log that are searched; while the run goes on
LAUNCHERS = ("ChildFailedError", "SignalException")  # raised by torchrun, after what a rank raised
# How well a statement shows where a failure began. WEAK: the process may have gone on. PEER: another process
# went away or did not answer.
PRIMARY, WEAK, PEER = range(3)
WEIGHTS = {"primary": PRIMARY, "weak": WEAK, "peer": PEER}
MESSAGES = ("tool", "record", "exception")
KINDS = {"any": (*MESSAGES, "end", "death", "slurm"), "message": MESSAGES, "slurm": ("slurm",)}

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


@dataclass(frozen=True)
class Failure:
    """One failed rank, node or job. where: in words, empty for the job; lines: the last ones of its
    statement; weight: of its cause.
    """

    where: str
    node: str
    rank: int | None
    sentence: str
    weight: int
    when: datetime | None
    lines: tuple[str, ...]

    def __str__(self) -> str:
        at = f" at {self.when:%Y-%m-%d %H:%M:%S}" if self.when else ""
        return f"{self.where} failed first{at}: {self.sentence}" if self.where else f"{self.sentence}{at}"


class Log(NamedTuple):
    """A log to search. node: its name, or empty for the batch script's; first_rank: of the node, if known."""

    node: str
    path: Path
    first_rank: int | None = None


class Cause(NamedTuple):
    """sentence: what happened to "rank 3 on n2"; weight: PRIMARY, WEAK or PEER; order: of the rule, less than
    UNKNOWN if the sentence is more than the message itself.
    """

    sentence: str
    weight: int
    order: int = UNKNOWN


Finding = tuple[Statement, Cause]


def first_failure(run: Run, states: Mapping[str, State]) -> Failure | None:
    """The failure with which the run began; None if it runs, has ended well, or its logs report none."""
    notes = {node.name: note for node in run.nodes if (note := runs.note_of(node)) and note.word == "exit"}
    some_failed = any(note.number for note in notes.values())
    # After the last iteration nothing can fail the training.
    last = [found for node in run.nodes for found in records.iterations(node.read("out"))[-1:]]
    is_through = last and all(found.number == found.total for found in last) and not some_failed
    words = {known.word for known in states.values()} - {runs.COMPLETED, *runs.WAITING}
    if is_through or not words:
        return None
    # A run that goes on has handled what stands further up.
    most = TAIL_BYTES if some_failed or words - {*runs.ALIVE} else LAST_BYTES
    logs = [Log("", run.batch_output(job)) for job in run.jobs] + [log_of(node) for node in run.nodes]
    found = first(logs, notes, most)
    if found is not None and found.weight != PEER:
        return found
    for job, known in states.items():
        if known.word in OF_NAME:
            sentence = OF_NAME[known.word][1].format(job=job)
            return Failure("", "", None, sentence, PRIMARY, None, found.lines if found else ())
    return found


def log_of(node: Node) -> Log:
    """The error log of a node, with the first of its ranks if its settings are known."""
    known = records.settings(node.read("out"))
    numbers = [known.get(name, "") for name in ("NODE_RANK", "NPROC_PER_NODE")]
    first_rank = int(numbers[0]) * int(numbers[1]) if all(map(str.isdigit, numbers)) else None
    return Log(node.name, node.file("err"), first_rank)


def first(logs: Iterable[Log], ended: Mapping[str, Note], most: int = TAIL_BYTES) -> Failure | None:
    """The failure with which a run began; None if the last ``most`` bytes of the logs report none.

    ended: how each node's launch ended.
    """
    found = [failure for log in logs for failure in of_log(log, most)]
    for node, note in ended.items():
        # torchrun itself was killed: what its ranks fail with is a consequence.
        if note.when and note.number > 128 and (cause := _of_code(note.number)) and cause.weight == PRIMARY:
            when = datetime.fromtimestamp(note.when)
            sentence = f"its launcher, torchrun: {cause.sentence}"
            found.append(Failure(f"node {node}", node, None, sentence, PRIMARY, when, ()))

    def order(failure: Failure) -> tuple[int, datetime, bool, float]:
        end = ended[failure.node].when if failure.node in ended else None
        return failure.weight, failure.when or datetime.max, failure.rank is None, end or float("inf")

    return min(found, key=order, default=None)


def of_log(log: Log, most: int = TAIL_BYTES) -> list[Failure]:
    """The failures in the last ``most`` bytes of a log, one per rank at most."""
    try:
        base = datetime.fromtimestamp(log.path.stat().st_mtime)
    except OSError:
        return []
    text = records.read(log.path, most, partial=True).decode(errors="replace")
    read = statements.read(text, base)
    findings = [(statement, cause) for statement in read if (cause := _explained(statement))]
    # The first rank of the node, as torchrun's report gives it, or else as the run's settings do.
    known = ((one.rank, one.local_rank) for one, _ in findings)
    firsts = (rank - local for rank, local in known if rank is not None and local is not None)
    first_rank = next(firsts, log.first_rank)
    by_rank: dict[int | None, list[Finding]] = {}
    for finding in findings:
        by_rank.setdefault(_rank(finding[0], first_rank), []).append(finding)
    _give_to_ranks(by_rank)
    return [_failure(log, rank, group) for rank, group in by_rank.items()]


def _rank(statement: Statement, first_rank: int | None) -> int | None:
    if statement.rank is None and statement.local_rank is not None and first_rank is not None:
        return first_rank + statement.local_rank
    match = re.match(r"rank (\d+)(?: stops)?: ", statement.text)
    return statement.rank if statement.rank is not None or match is None else int(match[1])


def _give_to_ranks(by_rank: dict[int | None, list[Finding]]) -> None:
    """Tracebacks and crashes without a rank belong to the rank that torchrun saw fail first by itself; so do
    other messages where the log has nothing else of that rank.
    """
    ends = [
        (statement.when or datetime.max, rank)
        for rank, group in by_rank.items()
        for statement, cause in group
        if rank is not None and statement.kind == "end" and cause.weight != PEER
    ]
    if ends:
        _, rank = min(ends)
        bare = all(statement.kind == "end" for statement, _ in by_rank[rank])
        kinds = ("exception", "death", "tool", "record") if bare else ("exception", "death")
        for finding in by_rank.pop(None, []):
            its = finding[0].kind in kinds and not finding[0].name.endswith(LAUNCHERS)
            by_rank.setdefault(rank if its else None, []).append(finding)


def _failure(log: Log, rank: int | None, group: list[Finding]) -> Failure:
    # A rank's end explains least, but only torchrun's report of it has a time.
    informative = [
        (statement, cause)
        for statement, cause in group
        if (statement.kind != "end" or cause.order < UNKNOWN) and not statement.name.endswith(LAUNCHERS)
    ]
    statement, cause = min(informative or group, key=lambda one: (one[1].weight, one[1].order))
    when = statement.when or min((each.when for each, _ in group if each.when), default=None)
    where = f"node {log.node}" if log.node else ""
    if rank is not None and log.node:
        where = f"rank {rank} on {log.node}"
    sentence = shortened(cause.sentence, LONGEST)
    return Failure(where, log.node, rank, sentence, cause.weight, when, statement.lines[-LAST_LINES:])


def _explained(statement: Statement) -> Cause | None:
    """The cause; None if the statement reports no failure."""
    kind, text = statement.kind, statement.text
    whole = f"{statement.name}: {text}" if statement.name else text
    for order, (weight, kinds, pattern, sentence) in enumerate(RULES):
        if kind in kinds and (match := pattern.search(whole)):
            # NCCL gives the reason below "Last error:".
            last = re.search(r"Last error:\s*(.*)", text)
            groups = {name: value or "" for name, value in match.groupdict().items()}
            groups |= {"last": last[1] if last else text, "text": text}
            return Cause(sentence.format(**groups), weight, order)
    if kind == "end":
        cause = _of_code(statement.code or 0)
        # What ended before the others of its node was not ended because of them.
        if cause and statement.name == FIRST_OF_NODE:
            return cause._replace(weight=min(cause.weight, WEAK))
        return cause
    if kind == "death":
        aborted = "abort" in text.lower()
        return Cause(f"a process crashed: {text}", WEAK if aborted else PRIMARY, UNKNOWN - 1)
    weight = PRIMARY if kind == "exception" else WEAK
    if kind == "record" and re.search(r"\.(?:cpp|cc|hpp|cu|h):\d+$", statement.name):
        # What PyTorch's library records beside what a rule knows, such as which trace it could not find.
        weight = PEER
    # The source of a record is a file of the logger's.
    name = "" if kind == "record" else statement.name
    quoted = ": ".join(part for part in (name, re.sub(r"^rank \d+: ", "", text)) if part)
    if number := _errno_of(text):
        of_errno, words = OF_NAME.get(errno.errorcode.get(number, ""), (weight, os.strerror(number)))
        return Cause(f"{words} ({quoted})", max(weight, of_errno), UNKNOWN - 1)
    form = {"exception": "it raised {}", "slurm": "Slurm reports: {}"}.get(kind, "{}")
    return Cause(form.format(text if kind == "slurm" else quoted), weight)


def _errno_of(text: str) -> int | None:
    """The errno in a message: by number, by name, or by text at its end or, with a colon, at its start."""
    if match := re.search(r"\[Errno (\d+)\]|errno[:=] ?-?(\d+)", text):
        return int(match[1] or match[2])
    for name in re.findall(r"\b(E[A-Z]{3,})\b", text):
        if hasattr(errno, name):
            return int(getattr(errno, name))
    first = (number for words, number in STRERRORS.items() if text.startswith(f"{words}: "))
    return ends_in_errno(text) or next(first, None)


def _of_code(code: int) -> Cause | None:
    """What the exit code of a process means, -N or 128 + N for signal N; None for 0."""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return Cause(f"it ended with exit code {code}", WEAK) if code else None
    weight, words = OF_NAME.get(name, (PRIMARY, f"it was ended by {name}"))
    # A process that aborts has reported why.
    return Cause(words, weight, UNKNOWN if name == "SIGABRT" else UNKNOWN - 1)
