"""The files of a capture: both traces of each rank, written atomically, and NAME_manifest.json about all.

Rank 0 collects the records of all ranks, writes it and reports on it.

Layout (``manifest_version`` 1; file names are relative to the manifest's folder):

    manifest_version, trace_name, created (UTC), complete (bool), reason (if incomplete, else null)
    versions       {torch, python, transformers, numpy, cuda, nccl, chakra_et}; or null
    run            model and run configuration, as given by the training script
    schedule       {wait_steps, warmup_steps, active_steps}
    world_size, backend
    process_groups [{name, description, backend, ranks}]: global ranks
    missing_ranks  [rank]: ranks that did not report
    ranks          [{rank, host, pid, device, complete, reason, files, steps, unfinished_step, structure_step,
                     step_times_us {step: µs}, untraced_step_times_us {step: µs}, check, group_threads,
                     ddp_buckets}]
      files        {host|device: {name, size (bytes), sha256}}; empty if nothing was written
      steps        numbers of the traced steps that ran to their end
      unfinished_step  number of a step that is in the traces but was cut short, or null
      structure_step   number of the step that the host trace covers; its times hold the observer's cost
      step_times_us    by the device trace's annotations; those of untraced steps by the host's clock
      check        {linkable, host_nodes, device_events, linked, unlinked, ended_early, problems}
      group_threads  {group: [id of the system]}: see ``gloo_threads``
      ddp_buckets  {group: [bytes]}: see ``ddp_buckets``; only if structure_step is 0
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import gzip
import json
import logging
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chakra_et import __version__
from chakra_et.capture import gloo
from chakra_et.files import scratch_folder, sha256, write_text
from chakra_et.names import SIDES, RunFiles, Side, gz, parse_trace
from chakra_et.redact import redacted

MANIFEST_VERSION = 1

_log = logging.getLogger("chakra_et.capture")


def notify(level: int, message: str, *values: object) -> None:
    """Log a line, or print it to stderr if the program has no log handler."""
    if _log.hasHandlers():
        _log.log(level, message, *values)
    else:
        print("chakra-et:", message % values, file=sys.stderr, flush=True)


class TraceFiles:
    """Both traces of rank ``rank`` of the run ``name`` in ``folder``; ``compress``: as .json.gz.

    They are written to a hidden folder beside their place, and moved there once all files of the rank are
    complete. A run that is killed leaves an earlier capture untouched; the next run removes what it left.
    """

    def __init__(self, folder: Path, name: str, rank: int, compress: bool):
        self.folder, self.name, self.rank, self.compress = folder, name, rank, compress
        self.run = RunFiles(folder, name)
        self._closing = contextlib.ExitStack()

    def prepare(self) -> None:
        """Create the folder, and a scratch folder in it. Raises OSError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
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
                _log.info("removing %s, left by an earlier run with more ranks", path)
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


class Mailbox:
    """Sends the ranks' records to rank 0 through the rendezvous store.

    Not with a collective: that would hang if a rank has died, which is when the manifest matters most.
    """

    def __init__(self, key: str, rank: int, world_size: int):
        self.key, self.rank, self.world_size = key, rank, world_size
        has_store = world_size > 1 and dist.is_available() and dist.is_initialized()
        self.store = dist.distributed_c10d._get_default_store() if has_store else None
        if self.store is not None:
            # torchrun's restarted workers find what those before them had sent.
            with contextlib.suppress(Exception):  # some stores can't delete
                self.store.delete_key(f"{key}/{rank}")

    def send(self, record: dict[str, Any]) -> None:
        """Send this rank's record. A lost store is only a warning, since rank 0 is lost with it."""
        if self.store is None:
            return
        try:
            self.store.set(f"{self.key}/{self.rank}", json.dumps(record, default=str))
        except Exception as error:
            lost = "rank %d is not in the manifest: the rendezvous store doesn't answer (%s)"
            notify(logging.WARNING, lost, self.rank, error)

    def collect(self, records: dict[int, dict[str, Any]], seconds: Callable[[], float]) -> None:
        """On rank 0: add to ``records`` those of the ranks that report within ``seconds()``, which is read at
        each poll."""
        began = time.monotonic()
        while self.store is not None and len(records) < self.world_size:
            try:
                for rank in set(range(self.world_size)) - records.keys():
                    # Reading an absent key would block.
                    if self.store.check([f"{self.key}/{rank}"]):
                        records[rank] = json.loads(self.store.get(f"{self.key}/{rank}"))
            except Exception as error:
                lost = "the manifest lacks ranks: the rendezvous store doesn't answer (%s)"
                notify(logging.WARNING, lost, error)
                self.store = None
            if time.monotonic() - began >= seconds():
                break
            time.sleep(0.02)


def build_manifest(records: dict[int, dict[str, Any]], world_size: int, **facts: Any) -> dict[str, Any]:
    """The manifest, from the ranks' own records; ``facts``: trace_name, run, schedule and backend."""
    missing = [rank for rank in range(world_size) if rank not in records]
    reasons = [
        f"rank {rank}: {records[rank]['reason']}" for rank in sorted(records) if records[rank]["reason"]
    ]
    if missing:
        reasons.append(f"no report from rank {', '.join(map(str, missing))}")
    listed = (group for rank in sorted(records) for group in records[rank]["process_groups"])
    groups = {(group["name"], tuple(group["ranks"])): group for group in listed}
    return {
        "manifest_version": MANIFEST_VERSION,
        **facts,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "complete": not missing and all(record["complete"] for record in records.values()),
        "reason": "; ".join(reasons) or None,
        "versions": versions(),
        "world_size": world_size,
        "process_groups": list(groups.values()),
        "missing_ranks": missing,
        "ranks": [
            {key: value for key, value in records[rank].items() if key != "process_groups"}
            for rank in sorted(records)
        ],
    }


def write_json(path: Path, content: Any) -> bool:
    """Write ``content`` atomically and without secrets; values that JSON can't represent become text. Returns
    whether there were secrets."""
    content = json.loads(json.dumps(content, default=str))
    public = redacted(content)
    write_text(path, json.dumps(public, indent=2, ensure_ascii=False) + "\n")
    return public != content


def summarise(manifest: dict[str, Any], folder: Path) -> None:
    """On rank 0: report per rank whether its pair can be linked and, if not, why; then what to do next.

    Rank 0 reports its own failure by itself.
    """
    name = manifest["trace_name"]
    for record in manifest["ranks"]:
        check, rank = record["check"], record["rank"]
        steps = " to ".join(map(str, sorted({*record["steps"][:1], *record["steps"][-1:]}))) or "none whole"
        counts = f"{check['host_nodes']} host nodes, {check['linked']} of them in the device trace"
        said = f": steps {steps}, {counts}" + (f"; {record['reason']}" if record["reason"] else "")
        if check["problems"]:
            said = f" can't be linked: {'; '.join(check['problems'])}"
        if not record["files"]:
            said = ": nothing was written"
        good = record["files"] and not check["problems"] and not record["reason"]
        if rank or record["files"]:
            notify(logging.INFO if good else logging.WARNING, "trace %s rank %d%s", name, rank, said)
    for rank in manifest["missing_ranks"]:
        notify(logging.WARNING, "trace %s rank %d: no report from it", name, rank)
    if manifest["complete"]:
        notify(logging.INFO, "traces and manifest of %d rank(s) are in %s", manifest["world_size"], folder)
    if not _log.hasHandlers() and any(record["files"] for record in manifest["ranks"]):
        command = "chakra-et" if shutil.which("chakra-et") else "python -m chakra_et"
        notify(logging.INFO, "next: %s convert %s --name %s", command, *map(shlex.quote, (str(folder), name)))


def versions() -> dict[str, str | None]:
    """Versions of everything that affects a trace; None for libraries that the run has not imported."""
    found = {m: getattr(sys.modules.get(m), "__version__", None) for m in ("torch", "transformers", "numpy")}
    found |= {"python": platform.python_version(), "cuda": torch.version.cuda, "nccl": None}
    if torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found | {"chakra_et": __version__}


def device_name() -> str:
    """Name of this process's GPU, or of the CPU."""
    if torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()} {torch.cuda.get_device_name()}"
    cores = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cores.read_text(errors="replace") if cores.is_file() else "")
    return f"cpu {found[1] if found else platform.processor() or platform.machine()}"


def backend() -> str | None:
    """The backend that the default process group uses on this process's device; None without a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    # "cpu:gloo,cuda:nccl"; dist.get_backend() is "undefined" if the program left the choice to PyTorch.
    by_device = dict(part.split(":") for part in dist.get_backend_config().split(","))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return by_device.get(device, dist.get_backend())


def process_groups() -> list[dict[str, Any]]:
    """Every process group known to this rank, with its members' global ranks.

    Gloo's traces have no memberships, so the converter takes them from here.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    every_rank = list(range(dist.get_world_size()))
    return [
        {
            "name": str(group.get("pg_name", "")),
            "description": str(group.get("pg_desc", "")),
            "backend": str(group.get("backend_config", "")),
            "ranks": [int(rank) for rank in group.get("ranks") or every_rank],
        }
        for group in dist.distributed_c10d._get_all_pg_configs()
    ]


def gloo_threads(groups: list[dict[str, Any]], rank: int) -> dict[str, list[int]]:
    """The threads (ids of the system) of each gloo group of this process, by the group's name.

    A gloo operation that DDP starts from C++ names no group, but runs on a thread of its group. Each group
    starts equally many threads when it is created (two by default). Empty where that doesn't add up.
    """
    own = [group["name"] for group in groups if rank in group["ranks"] and group["backend"] != "nccl"]
    threads = gloo.threads()
    each, rest = divmod(len(threads), max(1, len(own)))
    if rest or not each:
        return {}
    return {name: threads[at * each : (at + 1) * each] for at, name in enumerate(own)}


def ddp_buckets() -> dict[str, list[int]]:
    """Group → bytes of each all-reduce of its DDP model's backward pass, in their order; [] for a group with
    several models, or a hook that sends something else.

    Of models that have made their buckets anew, which DDP does after the first step, and tells of after the
    third.
    """
    found: dict[str, list[int]] = {}
    kind = torch.nn.parallel.DistributedDataParallel
    for model in gc.get_referrers(kind):
        known = model._get_ddp_logging_data() if type(model) is kind else {}
        if sizes := known.get("rebuilt_bucket_sizes"):
            group = model.process_group.group_name
            is_clear = group not in found and not known.get("comm_hook")
            found[group] = [int(size) for size in sizes.split(",")] if is_clear else []
    return found
