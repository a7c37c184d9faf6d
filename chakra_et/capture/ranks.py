"""Bring the records of all ranks to rank 0, and report on them there."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from chakra_et.capture.notice import is_logging_configured, notify


class Mailbox:
    """Sends the ranks' records to rank 0 through the rendezvous store.

    Not with a collective: that would hang if a rank has died, which is when the manifest matters most.
    """

    def __init__(self, key: str, rank: int, world_size: int):
        self.key, self.rank, self.world_size = key, rank, world_size
        has_store = world_size > 1 and dist.is_available() and dist.is_initialized()
        self.store = dist.distributed_c10d._get_default_store() if has_store else None

    def send(self, record: dict[str, Any]) -> None:
        """Send this rank's record. A lost store is only a warning, since rank 0 is lost with it."""
        if self.store is None:
            return
        try:
            self.store.set(f"{self.key}/{self.rank}", json.dumps(record, default=str))
        except Exception as error:
            notify(
                logging.WARNING,
                "rank %d is not in the manifest: the rendezvous store does not answer (%s)",
                self.rank,
                error,
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
                    notify(
                        logging.WARNING,
                        "the manifest covers rank 0 only: the rendezvous store does not answer (%s)",
                        error,
                    )
                    return records
            if time.monotonic() - began > seconds():
                break
            time.sleep(0.02)
        return records


def summarise(manifest: dict[str, Any], folder: Path) -> None:
    """On rank 0: report per rank whether its pair can be linked and, if not, why; then what to do next.

    Rank 0 reports its own failure by itself.
    """
    name = manifest["trace_name"]
    for record in manifest["ranks"]:
        check, rank = record["check"], record["rank"]
        steps = " to ".join(map(str, sorted({*record["steps"][:1], *record["steps"][-1:]}))) or "none whole"
        counts = f"{check['host_nodes']} host nodes, {check['linked']} of them in the device trace"
        if not record["files"]:
            if rank:
                notify(logging.WARNING, "trace %s rank %d: nothing was written", name, rank)
        elif check["problems"]:
            problems = "; ".join(check["problems"])
            notify(logging.WARNING, "trace %s rank %d can't be linked: %s", name, rank, problems)
        elif record["reason"]:
            reason = record["reason"]
            notify(logging.WARNING, "trace %s rank %d: steps %s, %s; %s", name, rank, steps, counts, reason)
        else:
            notify(logging.INFO, "trace %s rank %d: steps %s, %s", name, rank, steps, counts)
    for rank in manifest["missing_ranks"]:
        notify(logging.WARNING, "trace %s rank %d: no report from it", name, rank)
    if manifest["complete"]:
        notify(logging.INFO, "traces and manifest of %d rank(s) are in %s", manifest["world_size"], folder)
    if not is_logging_configured():
        command = "chakra-et" if shutil.which("chakra-et") else "python -m chakra_et"
        notify(logging.INFO, "next: %s convert %s --name %s", command, *map(shlex.quote, (str(folder), name)))
