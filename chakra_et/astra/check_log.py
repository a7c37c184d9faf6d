"""Compare a log of ASTRA-sim with the expected.json of its bundle."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chakra_et import text
from chakra_et.errors import TraceError
from chakra_et.files import read_bytes, read_json

_FINISHED = re.compile(rb"sys\[(\d+)\] finished, (\d+) cycles")
_THROWN = re.compile(rb"terminate called.*\n\s*what\(\): *(.*)")


@dataclass(frozen=True)
class LogCheck:
    """Times in µs by rank. ``finished``: of the log. ``unfinished``: ranks of the bundle that it lacks.
    ``thrown``: what ASTRA-sim says where it aborted (status 134)."""

    finished: dict[int, float]
    unfinished: list[int]
    expected: Mapping[str, Mapping[str, float | None]]
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
    wanted = _expected(folder / "expected.json")
    try:
        content = read_bytes(log, 1 << 32)
    except OSError as error:
        raise TraceError(f"{log}: can't be read: {error.strerror or error}") from None
    # A cycle of ASTRA-sim is 1 ns.
    finished = {int(rank): int(cycles) / 1000 for rank, cycles in _FINISHED.findall(content)}
    beyond = [rank for rank in finished if rank >= wanted["ranks"]]
    if beyond:
        raise TraceError(
            f"{log}: has rank {beyond[0]}, and the bundle {wanted['ranks']} ranks: give the log of this "
            "bundle"
        )
    unfinished = [rank for rank in range(wanted["ranks"]) if rank not in finished]
    thrown = _THROWN.search(content)
    what = thrown[1].decode("utf-8", "replace").strip() if thrown else ""
    return LogCheck(dict(sorted(finished.items())), unfinished, wanted, what)


def _expected(path: Path) -> dict[str, Any]:
    try:
        loaded = read_json(path)
        usable = isinstance(loaded, dict) and type(loaded.get("ranks")) is int and loaded["ranks"] > 0
    except OSError as error:
        raise TraceError(
            f"{path}: can't be read: {error.strerror or error}: name the bundle's folder"
        ) from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: isn't JSON ({error}): write the bundle again") from None
    if not usable or not all(
        isinstance(loaded.get(key), dict) for key in ("measured", "replayed", "simulated")
    ):
        raise TraceError(f"{path}: isn't the expectation of a bundle: write the bundle again")
    return dict(loaded)


def lines(found: LogCheck) -> list[str]:
    """A table by rank, and what is wrong."""
    rows: list[Sequence[str]] = [
        ("rank", "finished ms", "expected ms", "error %", "replayed ms", "measured ms")
    ]
    for rank, time in found.finished.items():
        wanted = found.expected["simulated"].get(str(rank))
        error = "-" if not wanted else f"{100 * (time / wanted - 1):+.2f}"
        others = [_milliseconds(found.expected[key].get(str(rank))) for key in ("replayed", "measured")]
        rows.append((str(rank), _milliseconds(time), _milliseconds(wanted), error, *others))
    answer = text.table(rows)
    if found.unfinished:
        absent = ", ".join(map(str, found.unfinished[:8])) + (", …" if len(found.unfinished) > 8 else "")
        answer.append(
            f"{len(found.unfinished)} of {found.expected['ranks']} ranks did not finish: {absent}; "
            + (
                f"ASTRA-sim aborted (status 134): {found.thrown}: write the bundle again"
                if found.thrown
                else "the simulation stopped early, or the ranks wait for each other"
            )
        )
    return answer


def _milliseconds(micros: float | None) -> str:
    return "-" if micros is None else f"{micros / 1000:,.3f}"
