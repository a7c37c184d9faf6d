"""Compare a log of ASTRA-sim with the expected.json of its bundle."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chakra_et import text
from chakra_et.errors import TraceError
from chakra_et.files import read_bytes, read_json

_FINISHED = re.compile(rb"sys\[(\d+)\] finished, (\d+) cycles")
TIMES = ("simulated", "replayed", "measured")
_THROWN = re.compile(rb"terminate called.*\n\s*what\(\): *(.*)")


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
        errors = [
            100 * (time / wanted - 1)
            for rank, time in self.finished.items()
            if (wanted := simulated.get(str(rank)))
        ]
        return max(errors, key=abs, default=None)


def check_log(log: Path, folder: Path) -> LogCheck:
    """Read a log and the expected.json in ``folder``. Raises ``TraceError`` where either can't be used."""
    path = folder / "expected.json"
    try:
        wanted = read_json(path)
    except OSError as error:
        raise TraceError(
            f"{path}: can't be read: {error.strerror or error}: name the bundle's folder"
        ) from None
    except ValueError as error:
        raise TraceError(f"{path}: isn't JSON ({error}): write the bundle again") from None
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
    thrown = _THROWN.search(content)
    return LogCheck(
        dict(sorted(finished.items())),
        [rank for rank in range(ranks) if rank not in finished],
        wanted,
        thrown[1].decode("utf-8", "replace").strip() if thrown else "",
    )


def lines(found: LogCheck) -> list[str]:
    """A table by rank, and what is wrong."""
    rows = [["rank", "finished ms", "expected ms", "error %", "replayed ms", "measured ms"]]
    for rank, time in found.finished.items():
        simulated, *others = (found.expected[key].get(str(rank)) for key in TIMES)
        error = "-" if not simulated else f"{100 * (time / simulated - 1):+.2f}"
        cells = ["-" if each is None else f"{each / 1000:,.3f}" for each in (time, simulated, *others)]
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
