"""Check .et files, each by itself and the files of a run against each other."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace
from chakra_et.et.sets import RankSet
from chakra_et.validate.ranks import check_ranks
from chakra_et.validate.rules import check_file
from chakra_et.validate.table import RULES, File, Finding

LONGEST_NAME = 80
# Rule → what the conversion found, where a file breaks it as the traces lack what ASTRA-sim needs.
NOT_RECORDED = {
    "comm-type-missing": "communication-kind",
    "comm-size-missing": "communication-size",
    "comm-peer-missing": "communication-peer",
    "p2p-rank": "communication-peer",
}


@dataclass
class Problem:
    """A rule of ``table.RULES`` that a file breaks.

    ``severity`` is "error", "warning" or "note". ``rank``, ``node`` (an id) and ``name`` (of that node) are
    None if the problem concerns no single rank or node. ``count`` is the number of nodes that break the rule;
    the message describes the first one.
    """

    severity: str
    file: str
    rank: int | None
    node: int | None
    name: str | None
    rule: str
    message: str
    count: int = 1

    def __str__(self) -> str:
        node = "" if self.node is None else f"node {self.node} {self.name!r}: "
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        return f"{self.severity}: {self.file}: {node}{self.message}{more} [{self.rule}]"


def check(
    trace: ExecutionTrace,
    comm_groups: dict[str, list[int]] | None = None,
    name: str = "trace",
    rank: int | None = None,
    more: Iterable[Finding] = (),
) -> list[Problem]:
    """Check one trace, in the file ``name``: one problem per broken rule, ``more`` with them.

    ``comm_groups`` maps group ids to ranks, as in the comm-group file (None: no such file). ``rank`` None:
    that of the metadata.
    """
    file = File(trace, trace.metadata_int("rank") if rank is None else rank, comm_groups, name)
    return [_problem(finding, name, file) for finding in (*check_file(file), *more)]


def check_together(
    traces: Mapping[int, ExecutionTrace], comm_groups: dict[str, list[int]] | None, names: Mapping[int, str]
) -> list[Problem]:
    """Check the traces of a run, in the files ``names``, against each other only. Traces of the communication
    nodes are enough."""
    files = {rank: File(trace, rank, comm_groups, name=names[rank]) for rank, trace in traces.items()}
    whole = ", ".join([*names.values()][:2]) + (", …" if len(names) > 2 else "")
    return [
        _problem(found, whole) if rank is None else _problem(found, files[rank].name, files[rank])
        for rank, found in (check_ranks(files) if files else ())
    ]


def _problem(finding: Finding, name: str, file: File | None = None) -> Problem:
    problem = Problem(RULES[finding.rule], name, None, None, None, finding.rule, finding.message)
    if file is None:
        return problem
    problem.rank = file.rank
    if len(finding.rows):
        row = int(finding.rows[0])
        problem.node, problem.name = int(file.trace.ids[row]), file.trace.names[row][:LONGEST_NAME]
        problem.count = len(finding.rows)
    if finding.rule in NOT_RECORDED:
        try:
            known = list(json.loads(file.trace.metadata_str("conversion_report"))["findings"])
        except (ValueError, KeyError, TypeError, RecursionError):
            known = []  # another converter's file
        if any(str(key).partition(":")[0] == NOT_RECORDED[finding.rule] for key in known):
            problem.severity = "warning"  # the conversion has already warned of it
    return problem


def check_set(run: RankSet, for_astra: bool = False, cluster: str = "") -> list[Problem]:
    """Read and check the files of one run. A file that can't be read breaks the rule "unreadable".

    ``for_astra``: also check the files and the bundle around them against the needs of ASTRA-sim.
    ``cluster``: where files are checked, see ``ranks.cluster``.
    """
    # A conversion checks no bundles.
    from chakra_et.ranks.cluster import each_rank
    from chakra_et.validate.astra import check_order, check_run_for_astra

    groups = run.groups if run.run.groups_file.is_file() else None
    one = functools.partial(_check_rank, run.alone, groups, len(run.files) if for_astra else 0)
    found = each_rank(one, list(run.files.items()), "checking", cluster)
    problems = [problem for own, _ in found for problem in own]
    kept = {rank: trace for rank, (_, trace) in zip(run.files, found, strict=True) if trace is not None}
    if run.is_run and len(kept) == len(run.files):
        names = {rank: str(path) for rank, path in run.files.items()}
        communication = {rank: trace.communication() for rank, trace in kept.items()}
        problems += check_together(communication, groups, names)
    if for_astra:
        about = check_run_for_astra(run.run, groups or {}, len(run.files))
        problems += [_problem(each, run.name) for each in (*about, *check_order(kept, groups or {}))]
        for problem in problems:
            # In ASTRA-sim ranks whose parts differ wait for each other for ever.
            problem.severity = "error" if problem.rule == "collective-size-uneven" else RULES[problem.rule]
    return problems


def _check_rank(
    alone: bool, groups: dict[str, list[int]] | None, ranks: int, file: tuple[int, Path]
) -> tuple[list[Problem], ExecutionTrace | None]:
    """The problems of one file, and what the check of the whole run needs, as a run can have thousands of
    ranks: its communication, or for ASTRA-sim, where ``ranks`` isn't 0, all of it."""
    from chakra_et.validate.astra import check_file_for_astra

    rank, path = file
    try:
        trace = et_file.read(path)
    except TraceError as error:
        message = str(error).removeprefix(f"{path}: ")
        return [Problem("error", str(path), rank, None, None, "unreadable", message)], None
    more = check_file_for_astra(trace, groups or {}, ranks) if ranks else ()
    problems = check(trace, groups, str(path), None if alone else rank, more)
    return problems, trace if ranks else trace.communication()
