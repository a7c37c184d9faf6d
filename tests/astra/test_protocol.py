"""What a send of a real backend waits for, which decides how the bundle has ASTRA-sim send."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

WORKER = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for size in (1 << 10, 1 << 16, 1 << 24):
    data = torch.zeros(size, dtype=torch.uint8)
    dist.barrier()
    if dist.get_rank():
        time.sleep(0.5)
        dist.recv(data, 0)
    else:
        start = time.perf_counter()
        dist.isend(data, 1).wait()
        print("sent", size, time.perf_counter() - start, flush=True)
"""


@pytest.mark.slow
def test_gloo_sends_when_the_receiver_is_ready(tmp_path: Path) -> None:
    """Messages of every size wait for a receiver that is half a second late: the rendezvous protocol."""
    script = tmp_path / "late.py"
    script.write_text(WORKER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--master-port", str(free_port()), str(script)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    took = {
        int(line.split()[1]): float(line.split()[2])
        for line in done.stdout.splitlines()
        if line[:4] == "sent"
    }
    assert sorted(took) == [1 << 10, 1 << 16, 1 << 24]
    assert all(seconds > 0.45 for seconds in took.values()), took
