"""The files of one rank's capture, written atomically.

Each is written as NAME.partial and renamed once all files of the rank are complete. A run that is killed
leaves an earlier capture untouched, beside partial files that can't be mistaken for a capture.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
from pathlib import Path
from typing import Any, Literal

from chakra_et.files import sha256
from chakra_et.names import SIDES, RunFiles, gz, parse_trace

PARTIAL = ".partial"
Kind = Literal["host", "device", "stacks", "manifest"]

log = logging.getLogger(__name__)


class TraceFiles:
    """The files that rank ``rank`` of trace ``name`` writes to ``folder``.

    Kinds: ``host`` and ``device`` on every rank, ``stacks`` and ``manifest`` on rank 0. ``compress``: write
    the first two as .json.gz.
    """

    def __init__(self, folder: Path, name: str, rank: int, compress: bool):
        self.folder, self.name, self.rank, self.compress = folder, name, rank, compress
        run = RunFiles(folder, name)
        self.paths: dict[Kind, Path] = {side: run.trace_file(rank, side) for side in SIDES}
        if rank == 0:
            self.paths |= {"stacks": run.stacks_file, "manifest": run.manifest_file}

    def path(self, kind: Kind) -> Path:
        """The final path of a file of this kind, uncompressed."""
        return self.paths[kind]

    def partial(self, kind: Kind) -> Path:
        """The path that a file of this kind is written to first."""
        return _partial(self.path(kind))

    def prepare(self) -> None:
        """Create the folder, and remove what a killed run of this rank left there. Raises OSError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.remove_partials()
            self.partial("host").touch()
        except OSError as error:
            why = error.strerror or error
            raise OSError(f"the trace folder {self.folder} can't be written: {why}") from error

    def publish(self) -> dict[str, Any]:
        """Compress, hash and rename the partial files; return the manifest entries by kind.

        Raises OSError, with nothing renamed, if one of them can't be completed.
        """
        finals = {kind: self._pack(kind) for kind in self.paths if kind != "manifest"}
        entries: dict[str, Any] = {}
        for kind, final in finals.items():
            partial = _partial(final)
            entries[kind] = {
                "name": final.name,
                "size": partial.stat().st_size,
                "sha256": sha256(partial),
            }
        if self.rank == 0:
            # If this process died between the renames, the old manifest would describe files that are gone.
            self.path("manifest").unlink(missing_ok=True)
        for final in finals.values():
            os.replace(_partial(final), final)
        for side in SIDES:
            other = self.path(side) if self.compress else gz(self.path(side))
            other.unlink(missing_ok=True)
        return entries

    def remove_partials(self) -> None:
        """Remove the temporary files of this rank, whether of this capture or of a killed one."""
        for kind in self.paths:
            self.partial(kind).unlink(missing_ok=True)
            _partial(gz(self.path(kind))).unlink(missing_ok=True)
        # Kineto leaves its own temporary file behind when the disk is full.
        _partial(self.path("device")).with_suffix(f"{PARTIAL}.tmp").unlink(missing_ok=True)
        # The observer of torch 2.4 creates this folder beside its file.
        resources = self.folder / (self.partial("host").stem + "_resources")
        shutil.rmtree(resources, ignore_errors=True)

    def remove_foreign(self, world_size: int) -> None:
        """On rank 0: remove traces of an earlier, larger run, whose ranks this run does not have."""
        for path in self.folder.iterdir():
            found = parse_trace(path.name.removesuffix(PARTIAL))
            if found and found.run == self.name and found.rank >= world_size:
                log.info("removing %s, left by an earlier run with more ranks", path)
                path.unlink(missing_ok=True)

    def _pack(self, kind: Kind) -> Path:
        final = self.path(kind)
        if not self.compress or kind == "stacks":
            return final
        with (
            self.partial(kind).open("rb") as plain,
            _partial(gz(final)).open("wb") as raw,
            # No name and no time in the header, so that equal traces give equal bytes.
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
        ):
            shutil.copyfileobj(plain, packed, 1 << 20)
        return gz(final)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)
