"""The files of one rank's capture, written atomically.

They are written to a hidden folder beside their place, and moved there once all files of the rank are
complete. A run that is killed leaves an earlier capture untouched; the next run removes what it left.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from chakra_et.files import remove_abandoned, scratch_folder, sha256
from chakra_et.names import SIDES, RunFiles, Side, gz, parse_trace

log = logging.getLogger(__name__)


class TraceFiles:
    """Both traces of rank ``rank`` of the run ``name`` in ``folder``; ``compress``: as .json.gz."""

    def __init__(self, folder: Path, name: str, rank: int, compress: bool):
        self.folder, self.name, self.rank, self.compress = folder, name, rank, compress
        self.run = RunFiles(folder, name)
        self._closing = contextlib.ExitStack()

    def prepare(self) -> None:
        """Create the folder, and remove what killed runs left there. Raises OSError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.folder)
            place = self.run.trace_file(self.rank, "host")
            self.scratch = self._closing.enter_context(scratch_folder(place))
        except OSError as error:
            why = error.strerror or error
            raise OSError(f"the trace folder {self.folder} can't be written: {why}") from error

    def unfinished(self, side: Side) -> Path:
        """The path to write this side's trace to."""
        return self.scratch / self.run.trace_file(self.rank, side).name

    def publish(self) -> dict[str, Any]:
        """Compress, hash and move both traces into place; return the manifest entries by side.

        Raises OSError, with nothing moved, if one of them can't be completed.
        """
        written = {side: self._packed(self.unfinished(side)) for side in SIDES}
        entries: dict[str, Any] = {
            side: {"name": path.name, "size": path.stat().st_size, "sha256": sha256(path)}
            for side, path in written.items()
        }
        if self.rank == 0:
            # If this process died between the renames, the old manifest would describe files that are gone.
            self.run.manifest_file.unlink(missing_ok=True)
        for side, path in written.items():
            os.replace(path, self.folder / path.name)
            plain = self.run.trace_file(self.rank, side)
            (plain if self.compress else gz(plain)).unlink(missing_ok=True)
        return entries

    def discard(self) -> None:
        """Remove what is unfinished."""
        self._closing.close()

    def remove_foreign(self, world_size: int) -> None:
        """On rank 0: remove traces of an earlier, larger run, whose ranks this run does not have."""
        for path in self.folder.iterdir():
            found = parse_trace(path.name)
            if found and found.run == self.name and found.rank >= world_size:
                log.info("removing %s, left by an earlier run with more ranks", path)
                path.unlink(missing_ok=True)

    def _packed(self, path: Path) -> Path:
        if not self.compress:
            return path
        with (
            path.open("rb") as plain,
            gz(path).open("wb") as raw,
            # No name and no time in the header, so that equal traces give equal bytes.
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
        ):
            shutil.copyfileobj(plain, packed, 1 << 20)
        return gz(path)
