"""The skeletons of a run's ranks, beside their .et files."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

from chakra_et.convert.runs import RunOptions
from chakra_et.errors import TraceError
from chakra_et.et import file as et_file
from chakra_et.et.sets import MANY_RANKS
from chakra_et.names import SKELETON, RunFiles
from chakra_et.ranks.contract import contract
from chakra_et.ranks.skeleton_file import write_skeleton


def write_skeletons(scratch: RunFiles, place: RunFiles, run: RunOptions) -> list[str]:
    """Write the skeletons of the .et files in ``scratch`` where they are wanted, and remove those of an
    earlier conversion at ``place`` where not. Returns what to tell the user, one sentence each."""
    wanted = run.skeletons
    written = [path for _, path in scratch.et_files()]
    if wanted == "off" or wanted == "auto" and len(written) <= MANY_RANKS:
        for _, path in place.et_files(SKELETON):
            path.unlink()
        return []
    if wanted == "auto" and importlib.util.find_spec("pyarrow") is None:
        return ["joint questions will read whole ranks, as skeletons need pyarrow: pip install pyarrow"]
    with contextlib.closing(run.jobs(_write, written, run.workers)) as outcomes:
        failed = {number: str(error) for number, error in outcomes if isinstance(error, TraceError)}
    made = f"skeletons written of {len(written) - len(failed)} of {len(written)} ranks"
    return [made, *(f"{written[at].name} has no skeleton: {failed[at]}" for at in sorted(failed)[:1])]


def _write(path: Path) -> None:
    write_skeleton(path.with_suffix(SKELETON), contract(et_file.read(path)))
