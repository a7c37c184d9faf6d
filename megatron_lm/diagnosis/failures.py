"""The failures of a run, by rank, and the one with which it began: from its logs, its nodes' ends and Slurm's
state of its jobs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from megatron_lm.diagnosis import statements
from megatron_lm.diagnosis.causes import OF_NAME, PEER, PRIMARY, UNKNOWN, Cause, explain, of_code
from megatron_lm.diagnosis.statements import Kind, Statement
from megatron_lm.logs import records, runs
from megatron_lm.logs.runs import Node, Run, State

LAST_LINES = 8
TAIL_BYTES = 4_000_000  # of a log that is searched
NEAR_END = 5  # lines after a statement with which a log ends
PROOF = (Kind.RANK_END, Kind.DEATH, Kind.SLURM)  # a process has ended
LAUNCHERS = ("ChildFailedError", "SignalException")  # raised by torchrun, after what a rank raised


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


@dataclass(frozen=True)
class Log:
    """A log to search. node: its name, or empty for the batch script's; first_rank: of the node, if known."""

    node: str
    path: Path
    first_rank: int | None = None


class _Finding(NamedTuple):
    statement: Statement
    cause: Cause

    @property
    def is_launcher(self) -> bool:
        return self.statement.name.endswith(LAUNCHERS)


def first_failure(run: Run, states: Mapping[str, State]) -> Failure | None:
    """The failure with which the run began; None if it runs, has ended well, or its logs report none."""
    words = {known.word for known in states.values()}
    notes = {node.name: note for node in run.nodes if (note := runs.note_of(node))}
    codes = [note.number for note in notes.values() if note.word == "exit"]
    # After the last iteration nothing can fail the training.
    last = [found for node in run.nodes for found in records.iterations(node.read("out"))[-1:]]
    is_through = last and all(found.number == found.total for found in last) and not any(codes)
    if words <= {runs.COMPLETED} or is_through:
        return None
    has_failed = bool(words - {runs.COMPLETED, runs.UNKNOWN, *runs.ALIVE})
    logs = [Log("", run.batch_output(job)) for job in run.jobs] + [log_of(node) for node in run.nodes]
    ended = {
        name: (note.number, note.when) for name, note in notes.items() if note.when and note.word == "exit"
    }
    found = first(logs, ended, has_failed)
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


def first(logs: Iterable[Log], ended: Mapping[str, tuple[int, float]], has_failed: bool) -> Failure | None:
    """The failure with which a run began; None if the logs report none.

    ended: exit code of each node's launch, and when it ended, in epoch seconds. has_failed: the run is known
    to have failed; if not, a statement counts only where a process has ended, or the log itself.
    """
    found = [failure for log in logs for failure in of_log(log, has_failed)]
    for node, (code, end) in ended.items():
        # torchrun itself was killed: what its ranks fail with is a consequence.
        if code > 128 and (cause := of_code(code)) and cause.weight == PRIMARY:
            when = datetime.fromtimestamp(end)
            sentence = f"its launcher, torchrun: {cause.sentence}"
            found.append(Failure(f"node {node}", node, None, sentence, PRIMARY, when, ()))

    def order(failure: Failure) -> tuple[int, datetime, bool, float]:
        _, end = ended.get(failure.node, (0, float("inf")))
        return failure.weight, failure.when or datetime.max, failure.rank is None, end

    return min(found, key=order, default=None)


def of_log(log: Log, has_failed: bool) -> list[Failure]:
    """The failures in one log, one per rank at most."""
    try:
        base = datetime.fromtimestamp(log.path.stat().st_mtime)
    except OSError:
        return []
    text = records.read(log.path, TAIL_BYTES, partial=True).decode(errors="replace")
    findings = [
        _Finding(statement, cause)
        for statement in statements.read(text, base)
        if (cause := explain(statement)) and not (statement.survived and statement.lines_after > NEAR_END)
    ]
    if not has_failed and not any(finding.statement.kind in PROOF for finding in findings):
        findings = [finding for finding in findings if finding.statement.lines_after <= NEAR_END]
    # The first rank of the node, as torchrun's report gives it, or else as the run's settings do.
    known = ((one.statement.rank, one.statement.local_rank) for one in findings)
    firsts = (rank - local for rank, local in known if rank is not None and local is not None)
    first_rank = next(firsts, log.first_rank)
    by_rank: dict[int | None, list[_Finding]] = {}
    for finding in findings:
        by_rank.setdefault(_rank(finding.statement, first_rank), []).append(finding)
    _give_to_ranks(by_rank)
    return [_failure(log, rank, group) for rank, group in by_rank.items()]


def _rank(statement: Statement, first_rank: int | None) -> int | None:
    if statement.rank is None and statement.local_rank is not None and first_rank is not None:
        return first_rank + statement.local_rank
    match = re.match(r"rank (\d+)(?: stops)?: ", statement.text)
    return statement.rank if statement.rank is not None or match is None else int(match[1])


def _give_to_ranks(by_rank: dict[int | None, list[_Finding]]) -> None:
    """Tracebacks and crashes without a rank belong to the rank that torchrun saw fail first by itself."""
    loose, named = by_rank.pop(None, []), [rank for rank in by_rank if rank is not None]
    ends = [
        (finding.statement.when or datetime.max, rank)
        for rank in named
        for finding in by_rank[rank]
        if finding.statement.kind is Kind.RANK_END and finding.cause.weight != PEER
    ]
    kinds: tuple[Kind, ...] = ()
    if ends:
        _, rank = min(ends)
        kinds = (Kind.EXCEPTION, Kind.DEATH)
        if all(finding.statement.kind is Kind.RANK_END for finding in by_rank[rank]):
            # Nothing else in the log has its rank.
            kinds += (Kind.TOOL, Kind.RECORD)
    elif len(named) == 1:
        # torchrun's message has a local rank only: there is just one that it can mean.
        (rank,), kinds = named, (Kind.RANK_END,)
    for finding in loose:
        its = finding.statement.kind in kinds and not finding.is_launcher
        by_rank.setdefault(rank if its else None, []).append(finding)


def _failure(log: Log, rank: int | None, group: list[_Finding]) -> Failure:
    # A rank's end explains least, but only torchrun's report of it has a time.
    informative = [
        one
        for one in group
        if (one.statement.kind is not Kind.RANK_END or one.cause.order < UNKNOWN) and not one.is_launcher
    ]
    statement, cause = min(informative or group, key=lambda one: (one.cause.weight, one.cause.order))
    times = [finding.statement.when for finding in group if finding.statement.when]
    when = statement.when or min(times, default=None)
    place = f"node {log.node}" if log.node else ""
    where = f"rank {rank} on {log.node}" if rank is not None and log.node else place
    return Failure(where, log.node, rank, cause.sentence, cause.weight, when, statement.lines[-LAST_LINES:])
