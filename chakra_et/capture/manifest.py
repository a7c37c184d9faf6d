"""NAME_manifest.json: what was traced, where, with which versions, and the files written.

Layout (``manifest_version`` 1; file names are relative to the manifest's folder):

    manifest_version, trace_name, created (UTC), complete (bool), reason (if incomplete, else null)
    versions       {torch, python, transformers, numpy, cuda, nccl, project_commit}; null if absent
    run            model and run configuration, as given by the training script
    schedule       {wait_steps, warmup_steps, active_steps}
    world_size, backend
    process_groups [{name, description, backend, ranks}]: global ranks
    step_times     {source, unit} of the ranks' step_times_us
    missing_ranks  [rank]: ranks that did not report
    ranks          [{rank, host, pid, device, complete, reason, files, steps, unfinished_step,
                     step_times_us {step: µs}, untraced_step_times_us {step: µs}, check}]
      files        {host|device|stacks: {name, size (bytes), sha256}}; empty if nothing was written
      steps        numbers of the traced steps that ran to their end
      unfinished_step  number of a step that is in the traces but was cut short, or null
      check        {linkable, host_nodes, device_events, linked, unlinked, problems}
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chakra_et.files import write_text

log = logging.getLogger(__name__)

MANIFEST_VERSION = 1
STEP_TIME_SOURCE = "ProfilerStep annotations of the device trace; untraced steps: host clock"


def build_manifest(records: dict[int, dict[str, Any]], world_size: int, **facts: Any) -> dict[str, Any]:
    """The manifest, from the ranks' own records; ``facts``: trace_name, run, schedule and backend."""
    missing = [rank for rank in range(world_size) if rank not in records]
    reasons = [
        f"rank {rank}: {records[rank]['reason']}" for rank in sorted(records) if records[rank]["reason"]
    ]
    if missing:
        reasons.append(f"no report from rank {', '.join(map(str, missing))}")
    groups = {}
    for rank in sorted(records):
        for group in records[rank]["process_groups"]:
            groups[group["name"], tuple(group["ranks"])] = group
    return {
        "manifest_version": MANIFEST_VERSION,
        "trace_name": facts["trace_name"],
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "complete": not missing and all(record["complete"] for record in records.values()),
        "reason": "; ".join(reasons) or None,
        "versions": versions(),
        "run": facts["run"],
        "schedule": facts["schedule"],
        "world_size": world_size,
        "backend": facts["backend"],
        "process_groups": list(groups.values()),
        "step_times": {"source": STEP_TIME_SOURCE, "unit": "us"},
        "missing_ranks": missing,
        "ranks": [
            {key: value for key, value in records[rank].items() if key != "process_groups"}
            for rank in sorted(records)
        ],
    }


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` atomically; values that JSON can't represent are written as text."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")


def file_entry(path: Path, name: str) -> dict[str, Any]:
    """Name, size in bytes and sha256 of a file that will be renamed to ``name``."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"name": name, "size": path.stat().st_size, "sha256": digest.hexdigest()}


def versions() -> dict[str, str | None]:
    """Versions of everything that affects a trace; None for libraries that the run has not imported."""
    transformers, numpy = sys.modules.get("transformers"), sys.modules.get("numpy")
    nccl = None
    if torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "transformers": getattr(transformers, "__version__", None),
        "numpy": getattr(numpy, "__version__", None),
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "project_commit": _project_commit(),
    }


def _project_commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def device_name() -> str:
    """Name of this process's GPU, or of the CPU."""
    if torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()} {torch.cuda.get_device_name()}"
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return "cpu " + line.partition(":")[2].strip()
    return f"cpu {platform.processor() or platform.machine()}"


def process_groups() -> list[dict[str, Any]]:
    """Every process group known to this rank, with its members' global ranks.

    Gloo's traces have no memberships, so the converter takes them from here.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    every_rank = list(range(dist.get_world_size()))
    list_groups = getattr(dist.distributed_c10d, "_get_all_pg_configs", None)
    if list_groups is None:
        return [
            {"name": "0", "description": "default_pg", "backend": dist.get_backend(), "ranks": every_rank}
        ]
    return [
        {
            "name": str(group.get("pg_name", "")),
            "description": str(group.get("pg_desc", "")),
            "backend": str(group.get("backend_config", "")),
            "ranks": [int(rank) for rank in group.get("ranks") or every_rank],
        }
        for group in list_groups()
    ]


class Mailbox:
    """Sends the ranks' records to rank 0 through the rendezvous store.

    Not with a collective: that would hang if a rank has died, which is when the manifest matters most.
    """

    def __init__(self, key: str, rank: int, world_size: int):
        self.key, self.rank, self.world_size = key, rank, world_size
        self.store = dist.distributed_c10d._get_default_store() if world_size > 1 else None

    def send(self, record: dict[str, Any]) -> None:
        """Send this rank's record. A lost store is only a warning, since rank 0 is lost with it."""
        if self.store is None:
            return
        try:
            self.store.set(f"{self.key}/{self.rank}", json.dumps(record, default=str))
        except Exception as error:
            log.warning(
                "rank %d is not in the manifest: the rendezvous store does not answer (%s)", self.rank, error
            )

    def collect(self, own: dict[str, Any], seconds: Callable[[], float]) -> dict[int, dict[str, Any]]:
        """On rank 0: records of the ranks that report within ``seconds()``, which is read at each poll."""
        records = {self.rank: own}
        if self.store is None:
            return records
        began = time.monotonic()
        while len(records) < self.world_size:
            for rank in set(range(self.world_size)) - records.keys():
                try:
                    # Reading an absent key would block.
                    if self.store.check([f"{self.key}/{rank}"]):
                        records[rank] = json.loads(self.store.get(f"{self.key}/{rank}"))
                except Exception as error:
                    log.warning(
                        "the manifest covers rank 0 only: the rendezvous store does not answer (%s)", error
                    )
                    return records
            if time.monotonic() - began > seconds():
                break
            time.sleep(0.02)
        return records


def log_summary(manifest: dict[str, Any], folder: Path) -> None:
    """Log one line per rank: whether its pair can be linked and, if not, why."""
    name = manifest["trace_name"]
    for record in manifest["ranks"]:
        check, rank = record["check"], record["rank"]
        steps = " to ".join(map(str, sorted({*record["steps"][:1], *record["steps"][-1:]}))) or "none whole"
        counts = f"{check['host_nodes']} host nodes, {check['linked']} of them in the device trace"
        if not record["files"]:
            log.warning("trace %s rank %d: nothing was written", name, rank)
        elif check["problems"]:
            log.warning("trace %s rank %d can't be linked: %s", name, rank, "; ".join(check["problems"]))
        elif record["reason"]:
            log.warning("trace %s rank %d: steps %s, %s; %s", name, rank, steps, counts, record["reason"])
        else:
            log.info("trace %s rank %d: steps %s, %s", name, rank, steps, counts)
    for rank in manifest["missing_ranks"]:
        log.warning("trace %s rank %d: no report from it", name, rank)
    if manifest["complete"]:
        log.info("traces and manifest of %d rank(s) are in %s", manifest["world_size"], folder)
