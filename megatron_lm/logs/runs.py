"""A run in the log folder: its jobs, nodes and files.

``$LOG_DIR/<job id>/`` has ``<node>.out``, ``.err``, ``.gpu`` and ``.state`` per node and ``jobs``, the ids
of all jobs of the run; ``$LOG_DIR/<job id>.sbatch.out`` is the batch script's own output.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_lm.errors import RunError
from megatron_lm.logs import records
from megatron_lm.logs.files import BATCH_OUTPUT, JOBS, NODE_KINDS, SETTINGS
from megatron_lm.settings import environment

SUFFIXES = tuple(f".{kind}" for kind in NODE_KINDS)


@dataclass(frozen=True)
class Node:
    """One node of a job; its files are ``stem`` plus .out, .err, .gpu or .state."""

    job: str
    name: str
    stem: Path

    def file(self, kind: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{kind}")

    def read(self, kind: str) -> bytes:
        return records.read(self.file(kind))


@dataclass(frozen=True)
class Run:
    """jobs: the ids, the master job's first. nodes: in order of their node rank."""

    log_dir: Path
    jobs: tuple[str, ...]
    nodes: tuple[Node, ...]

    def batch_output(self, job: str) -> Path:
        """The batch script's own output, outside of any node."""
        return self.log_dir / BATCH_OUTPUT.format(job=job)


def find(ids: tuple[str, ...], folder: Path) -> Run:
    """The run that has these job ids, with all of its jobs. Raises ``RunError`` if nothing is known of it."""
    jobs: list[str] = []
    for job in ids:
        if not re.fullmatch(r"[\w.+-]+", job) or job.startswith("."):
            raise RunError(f"'{job}' is not a job id: give one that _03_submit.sh printed.")
        with contextlib.suppress(OSError):
            known = (folder / job / JOBS).read_text().split()
            jobs += [other for other in known if other not in jobs] if job in known else []
        if job not in jobs:
            jobs.append(job)
    nodes = []
    for job in jobs:
        files = (folder / job).iterdir() if (folder / job).is_dir() else []
        stems = {path.with_suffix("") for path in files if path.suffix in SUFFIXES}
        nodes += [Node(job, stem.name, stem) for stem in stems]
    run = Run(folder, tuple(jobs), tuple(sorted(nodes, key=_order)))
    if not any((folder / job).exists() or run.batch_output(job).exists() for job in jobs):
        names = (path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()
        there = sorted(names, key=natural)
        hint = f"the latest runs there are {', '.join(there[-5:])}" if there else "the folder has no runs"
        raise RunError(f"no logs of job {' '.join(ids)} in {folder}: {hint}.")
    return run


def find_all(ids: tuple[str, ...], folder: Path) -> list[Run]:
    """The runs that have these job ids, each once; jobs of which nobody noted a run are one together.

    Raises ``RunError``.
    """
    noted = {job: (job,) if (folder / job / JOBS).is_file() else () for job in ids}
    loose = tuple(job for job in ids if not noted[job])
    wanted = dict.fromkeys(noted[job] or loose for job in ids)
    return list({run.jobs: run for run in (find(jobs, folder) for jobs in wanted)}.values())


def settings(run: Run) -> dict[str, dict[str, str]]:
    """job/node → the settings that the node printed at its launch."""
    return {f"{node.job}/{node.name}": records.settings(node.read("out")) for node in run.nodes}


def submitted(run: Run) -> dict[str, str]:
    """The settings that the run was submitted with; empty if they were not kept. Raises ``SettingsError``."""
    path = run.log_dir / run.jobs[0] / SETTINGS
    return environment.read_file(path) if path.is_file() else {}


def _order(node: Node) -> tuple[int, list[tuple[int, str]]]:
    rank = records.settings(node.read("out")).get("NODE_RANK", "")
    return (int(rank) if rank.isdigit() else 1 << 30), natural(node.name)


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts the numbers in names by their value: 9 before 15, n2 before n10."""
    return [(int(digits or 0), word) for digits, word in re.findall(r"(\d+)|(\D+)", name)]
