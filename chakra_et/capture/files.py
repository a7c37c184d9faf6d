"""The files of one rank's capture: their names, and how they appear whole or not at all.

Each is written as NAME.partial in its own folder and renamed when all of the rank's files are complete,
so that a run that is killed leaves the earlier capture as it was, beside files that nobody takes for one.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from chakra_et.capture.manifest import file_entry
from chakra_et.names import SIDES, RunFiles, gz, parse_trace

PARTIAL = ".partial"

log = logging.getLogger(__name__)


class TraceFiles:
    """What rank ``rank`` of the trace ``name`` writes into ``folder``.

    Kinds: ``host`` and ``device`` on every rank, ``stacks`` and ``manifest`` on rank 0. ``compress``
    makes .json.gz of the first two.
    """

    def __init__(self, folder: Path, name: str, rank: int, compress: bool):
        self.folder, self.name, self.rank, self.compress = folder, name, rank, compress
        run = RunFiles(folder, name)
        self.paths = {side: run.trace_file(rank, side) for side in SIDES}
        if rank == 0:
            self.paths |= {"stacks": run.stacks_file, "manifest": run.manifest_file}

    def path(self, kind: str) -> Path:
        """Where a finished, uncompressed file of this kind is."""
        return self.paths[kind]

    def partial(self, kind: str) -> Path:
        """Where a file of this kind is written."""
        return _partial(self.path(kind))

    def prepare(self) -> None:
        """Make the folder, and remove what a killed run of this rank left there. Raises OSError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.remove_partials()
            self.partial("host").touch()
        except OSError as error:
            why = error.strerror or error
            raise OSError(f"the trace folder {self.folder} can't be written: {why}") from error

    def publish(self) -> dict[str, Any]:
        """Compress, hash and rename the partial files; return the manifest's entries by kind.

        Raises OSError with nothing renamed where one of them can't be completed.
        """
        finals = {kind: self._pack(kind) for kind in self.paths if kind != "manifest"}
        entries = {kind: file_entry(_partial(final), final.name) for kind, final in finals.items()}
        self._remove_outdated()
        for final in finals.values():
            os.replace(_partial(final), final)
        for kind in ("host", "device"):
            other = self.path(kind) if self.compress else gz(self.path(kind))
            other.unlink(missing_ok=True)
        return entries

    def remove_partials(self) -> None:
        """Remove the temporary files of this rank, of this capture or of a killed one."""
        for kind in self.paths:
            self.partial(kind).unlink(missing_ok=True)
            _partial(gz(self.path(kind))).unlink(missing_ok=True)
        # Kineto's own temporary file, left where the disk was full.
        _partial(self.path("device")).with_suffix(f"{PARTIAL}.tmp").unlink(missing_ok=True)
        # torch 2.4's observer makes this folder beside its file.
        resources = self.folder / (self.partial("host").stem + "_resources")
        shutil.rmtree(resources, ignore_errors=True)

    def remove_foreign(self, world_size: int) -> None:
        """On rank 0: remove the traces of ranks that this run does not have, left by an earlier one."""
        for path in self.folder.iterdir():
            found = parse_trace(path.name.removesuffix(PARTIAL))
            if found and found.run == self.name and found.rank >= world_size:
                log.info("removing %s, of an earlier run with more ranks", path)
                path.unlink(missing_ok=True)

    def _pack(self, kind: str) -> Path:
        final = self.path(kind)
        if not self.compress or kind == "stacks":
            return final
        with (
            self.partial(kind).open("rb") as plain,
            _partial(gz(final)).open("wb") as raw,
            # No name and no time in the header: the same trace gives the same bytes.
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
        ):
            shutil.copyfileobj(plain, packed, 1 << 20)
        return gz(final)

    def _remove_outdated(self) -> None:
        # A manifest of the files that are about to be replaced would be wrong if this process died now.
        if self.rank == 0:
            self.path("manifest").unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)
