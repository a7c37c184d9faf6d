"""The diagnosis of a whole run: its logs, its nodes' ends and Slurm's state of its jobs together."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_lm.diagnosis import failures
from megatron_lm.diagnosis.failures import Failure, Log
from megatron_lm.diagnosis.rules import OF_STATE, PEER, PRIMARY
from megatron_lm.logs import records, state
from megatron_lm.logs.runs import Node, Run
from megatron_lm.logs.state import State


def first_failure(run: Run, states: Mapping[str, State]) -> Failure | None:
    """The failure with which the run began; None if it runs, has ended well, or its logs report none."""
    words = {known.word for known in states.values()}
    if words <= {state.COMPLETED} or _is_through(run):
        return None
    has_failed = bool(words - {state.COMPLETED, state.UNKNOWN, *state.ALIVE})
    logs = [Log("", run.batch_output(job)) for job in run.jobs]
    logs += [log_of(node) for node in run.nodes]
    notes = {node.name: state.note_of(node) for node in run.nodes}
    ended = {
        name: (note.number, note.when)
        for name, note in notes.items()
        if note and note.when and note.word == "exit"
    }
    found = failures.first(logs, ended, has_failed)
    if found is not None and found.weight != PEER:
        return found
    for job, known in states.items():
        if known.word in OF_STATE:
            sentence = OF_STATE[known.word].format(job=job)
            return Failure("", "", None, sentence, PRIMARY, None, found.lines if found else ())
    return found


def log_of(node: Node) -> Log:
    """The error log of a node, with the first of its ranks if its settings are known."""
    known = records.settings(node.read("out"))
    numbers = [known.get(name, "") for name in ("NODE_RANK", "NPROC_PER_NODE")]
    first_rank = int(numbers[0]) * int(numbers[1]) if all(map(str.isdigit, numbers)) else None
    return Log(node.name, node.file("err"), first_rank)


def lost_nodes(run: Run, states: Mapping[str, State]) -> list[str]:
    """The nodes that failed: those that Slurm names, or else those that never recorded their end."""
    lost = []
    for job, known in states.items():
        text = records.read(run.batch_output(job)).decode(errors="replace")
        named = re.findall(r"error: Node failure on (\S+)", text)
        lost += [name for name in named if name not in lost]
        if known.word == "NODE_FAIL" and not named:
            notes = {node.name: state.note_of(node) for node in run.nodes if node.job == job}
            lost += [name for name, note in notes.items() if note and note.word == "running"]
    return lost


def _is_through(run: Run) -> bool:
    """Whether the last iteration has been logged, after which nothing can fail the training."""
    found = [last for node in run.nodes for last in records.iterations(node.read("out"))[-1:]]
    notes = [state.note_of(node) for node in run.nodes]
    through = bool(found) and all(last.number == last.total for last in found)
    return through and not any(note and note.word == "exit" and note.number for note in notes)
