"""NAME_manifest.json: what was traced, where, with which versions, and which files came out of it.

Layout (``manifest_version`` 1; file names are relative to the manifest's folder):

    manifest_version, trace_name, created (UTC), complete (bool), reason (why not, or null)
    versions       {torch, python, transformers, numpy, cuda, nccl, project_commit}; null where absent
    run            the model and run configuration as the training script gave it
    schedule       {wait_steps, warmup_steps, active_steps}
    world_size, backend
    process_groups [{name, description, backend, ranks}]: global ranks
    step_times     {source, unit}: what the ranks' step_times_us are
    missing_ranks  [rank]: ranks that did not report
    ranks          [{rank, host, pid, device, complete, reason, files, steps, unfinished_step,
                     step_times_us {step: µs}, untraced_step_times_us {step: µs}, check}]
      files        {host|device|stacks: {name, size (bytes), sha256}}; empty where nothing was captured
      steps        the traced steps that ran to their end, by number
      unfinished_step  a step that is annotated in the traces but was cut short, or null
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
STEP_TIME_SOURCE = "ProfilerStep annotations of the device trace; untraced steps by the host's clock"


def build_manifest(records: dict[int, dict[str, Any]], world_size: int, **facts: Any) -> dict[str, Any]:
    """The manifest from the ranks' own records; ``facts`` are trace_name, run, schedule and backend."""
    missing = [rank for rank in range(world_size) if rank not in records]
    reasons = [
        f"rank {rank}: {records[rank]['reason']}" for rank in sorted(records) if records[rank]["reason"]
    ]
    if missing:
        reasons.append(f"no word from rank {', '.join(map(str, missing))}")
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
    """Write ``content`` whole or not at all; what JSON does not know is written as its text."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")


def file_entry(path: Path, name: str) -> dict[str, Any]:
    """Name, size in bytes and sha256 of a file that will be published as ``name``."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"name": name, "size": path.stat().st_size, "sha256": digest.hexdigest()}


def versions() -> dict[str, str | None]:
    """Versions of what shapes a trace. Libraries that the run has not imported are null."""
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
    # git describe --dirty would rewrite the checkout's index, and leave its lock when killed meanwhile.
    command = ["git", "--no-optional-locks", "-C", str(root), "status"]
    command += ["--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    commits = [line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")]
    changed = any(not line.startswith("#") for line in lines)
    if not commits or commits[0] == "(initial)":
        return None
    return commits[0] + ("-dirty" if changed else "")


def device_name() -> str:
    """The GPU of this process, or the machine's CPU."""
    if torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()} {torch.cuda.get_device_name()}"
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return "cpu " + line.partition(":")[2].strip()
    return f"cpu {platform.processor() or platform.machine()}"


def process_groups() -> list[dict[str, Any]]:
    """Every process group that this rank knows, with its members' global ranks.

    Gloo's traces carry no memberships, so this is where they come from.
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
    """Brings the ranks' records to rank 0 through the rendezvous store.

    No collective: one would hang where a rank is dead, which is when the manifest matters most.
    """

    def __init__(self, key: str, rank: int, world_size: int):
        self.key, self.rank, self.world_size = key, rank, world_size
        self.store = dist.distributed_c10d._get_default_store() if world_size > 1 else None

    def send(self, record: dict[str, Any]) -> None:
        """Post this rank's record. A store that is gone is no error: rank 0 is gone with it."""
        if self.store is None:
            return
        try:
            self.store.set(f"{self.key}/{self.rank}", json.dumps(record, default=str))
        except Exception as error:
            log.warning(
                "the manifest lacks rank %d: the rendezvous store does not answer (%s)", self.rank, error
            )

    def collect(self, own: dict[str, Any], seconds: Callable[[], float]) -> dict[int, dict[str, Any]]:
        """On rank 0: the records by rank, of those that answer within ``seconds()``, asked anew each time."""
        records = {self.rank: own}
        began = time.monotonic()
        while len(records) < self.world_size:
            for rank in set(range(self.world_size)) - records.keys():
                try:
                    # A read of an absent key would block.
                    if self.store.check([f"{self.key}/{rank}"]):
                        records[rank] = json.loads(self.store.get(f"{self.key}/{rank}"))
                except Exception as error:
                    log.warning(
                        "the manifest is of rank 0 only: the rendezvous store does not answer (%s)", error
                    )
                    return records
            if time.monotonic() - began > seconds():
                break
            time.sleep(0.02)
        return records


def log_summary(manifest: dict[str, Any], folder: Path) -> None:
    """One line for each rank: whether its pair can be linked, and why not."""
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
        log.warning("trace %s rank %d: no word from it", name, rank)
    if manifest["complete"]:
        log.info("traces and manifest of %d rank(s) are in %s", manifest["world_size"], folder)
