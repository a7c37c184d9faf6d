"""``chakra-et astra outputs/NAME -o DIR --topology "dgx-h100, 4 nodes"``: a folder that ASTRA-sim runs.

``chakra-et astra DIR --check LOG`` compares a log of that run with what was expected. Exit status: 0; 1 where
ranks did not finish or are off by more than ``--max-error``; 2 for arguments or files that can't be used.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chakra_et import text
from chakra_et.astra.bundle import write_bundle
from chakra_et.astra.prepare import Keep, Ranks, ranks_of
from chakra_et.cli import allow_missing_ranks, option, parse, run_names
from chakra_et.errors import TraceError, reason
from chakra_et.et.sets import read_set
from chakra_et.files import read_bytes, read_json
from chakra_et.transform.rank_copies import filled

_FINISHED = re.compile(rb"sys\[(\d+)\] finished, (\d+) cycles")
TIMES = ("simulated", "measured")
_THROWN = re.compile(rb"terminate called.*\n\s*what\(\): *(.*)")


@dataclass
class AstraConfig:
    name: str = run_names("with --check, the folder for ASTRA-sim; else the run", "a folder", default="")
    output: str = option("the folder to write", "", short="-o")
    topology: str = option("'8xH100 NVLink, 4 nodes, 400 Gbit/s', 'dgx-h100, 4 nodes', or a .json file", "")
    gpu_only: bool = option("keep device work and communication only", False)
    comm_only: bool = option("keep communication only", False)
    trim: bool = option("leave missing ranks out: the others become ranks 0, 1, …", False)
    allow_missing_ranks: bool = allow_missing_ranks()
    fill: bool = option("make missing ranks from ranks of the same stage", False)
    mesh: str = option("with --fill: the mesh (tp2,dp4,pp2), where groups don't show it", "")
    seed: int = option("with --fill: random seed of the spread of compute times", 0)
    check: str | None = option(
        "a log of ASTRA-sim to compare with the folder's expected.json", None, metavar="LOG"
    )
    max_error: float | None = option(
        "with --check: exit with 1 if a rank's time is off by more than this",
        None,
        metavar="PERCENT",
        least=0,
    )

    def __post_init__(self) -> None:
        if self.check is not None:
            if self.output or self.topology:
                raise ValueError("--check compares a log: leave --output and --topology out")
        elif not (self.name and self.output and self.topology):
            raise ValueError("give a run, --output and --topology, or --check LOG")
        if self.gpu_only and self.comm_only:
            raise ValueError("--gpu-only and --comm-only exclude each other")
        if self.trim and self.fill:
            raise ValueError("--trim and --fill exclude each other")


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(AstraConfig, argv, description="Write a folder that ASTRA-sim runs, or check its log.")
    if config.check is not None:
        log = Path(config.check)
        checked = check_log(log, Path(config.name) if config.name else log.parent)
        print("\n".join(lines(checked)))
        worst = checked.worst_percent()
        late = config.max_error is not None and (worst is None or abs(worst) > config.max_error)
        if late:
            print(f"the worst rank is off by {'an unknown time' if worst is None else f'{worst:+.2f}%'}")
        return int(bool(checked.unfinished) or late)
    found = read_set(config.name, config.allow_missing_ranks or config.trim or config.fill)
    folder = Path(config.output)
    with tempfile.TemporaryDirectory() as scratch:
        if config.fill and found.missing:
            whole, step = filled(found, Path(scratch), config.mesh, config.seed)
            ranks = Ranks(whole, (step,))
        else:
            ranks = ranks_of(found, config.trim)
        keep: Keep = "gpu" if config.gpu_only else "comm" if config.comm_only else "all"
        for note in [*found.notes, *write_bundle(ranks, config.topology, folder, keep)]:
            print(f"note: {note}")
    print(f"{folder}: {len(ranks.set.files)} ranks; run {folder / 'run.sh'} with the path of ASTRA-sim")
    return 0


@dataclass(frozen=True)
class LogCheck:
    """Times in µs by rank. ``finished``: of the log. ``unfinished``: ranks of the bundle that it lacks.
    ``thrown``: what ASTRA-sim says where it aborted (status 134)."""

    finished: dict[int, float]
    unfinished: list[int]
    expected: dict[str, Any]
    thrown: str = ""

    def worst_percent(self) -> float | None:
        """The largest deviation from the expected simulated time, signed; None where none was expected."""
        simulated = self.expected["simulated"]
        pairs = ((time, simulated.get(str(rank))) for rank, time in self.finished.items())
        return max((100 * (time / wanted - 1) for time, wanted in pairs if wanted), key=abs, default=None)


def check_log(log: Path, folder: Path) -> LogCheck:
    """Read a log and the expected.json in ``folder``. Raises ``TraceError`` where either can't be used."""
    path = folder / "expected.json"
    try:
        wanted = read_json(path)
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: {reason(error)}: name a bundle's folder, or write it again") from None
    ranks = wanted.get("ranks") if isinstance(wanted, dict) else None
    if type(ranks) is not int or ranks < 1 or not all(isinstance(wanted.get(key), dict) for key in TIMES):
        raise TraceError(f"{path}: isn't the expectation of a bundle: write the bundle again")
    try:
        content = read_bytes(log, 1 << 32)
    except OSError as error:
        raise TraceError(f"{log}: can't be read: {error.strerror or error}") from None
    # A cycle of ASTRA-sim is 1 ns.
    finished = {int(rank): int(cycles) / 1000 for rank, cycles in _FINISHED.findall(content)}
    beyond = [rank for rank in finished if rank >= ranks]
    if beyond:
        raise TraceError(
            f"{log}: has rank {beyond[0]}, and the bundle {ranks} ranks: give the log of this bundle"
        )
    unfinished = [rank for rank in range(ranks) if rank not in finished]
    thrown = _THROWN.search(content)
    why = thrown[1].decode("utf-8", "replace").strip() if thrown else ""
    return LogCheck(dict(sorted(finished.items())), unfinished, wanted, why)


def lines(found: LogCheck) -> list[str]:
    """A table by rank, and what is wrong."""
    rows = [["rank", "finished ms", "expected ms", "error %", "measured ms"]]
    for rank, time in found.finished.items():
        simulated, measured = (found.expected[key].get(str(rank)) for key in TIMES)
        error = "-" if not simulated else f"{100 * (time / simulated - 1):+.2f}"
        cells = ["-" if each is None else f"{each / 1000:,.3f}" for each in (time, simulated, measured)]
        rows.append([str(rank), *cells[:2], error, *cells[2:]])
    answer = text.table(rows)
    if found.unfinished:
        absent = ", ".join(map(str, found.unfinished[:8])) + (", …" if len(found.unfinished) > 8 else "")
        why = "the simulation stopped early, or the ranks wait for each other"
        if found.thrown:
            why = f"ASTRA-sim aborted (status 134): {found.thrown}: write the bundle again"
        ranks = found.expected["ranks"]
        answer.append(f"{len(found.unfinished)} of {ranks} ranks did not finish: {absent}; {why}")
    return answer
