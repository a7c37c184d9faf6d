"""Two real gloo ranks, one of which waits for its input."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from chakra_et.__main__ import main
from chakra_et.stragglers.analyse import find_stragglers

DELAY_S = 0.3


@pytest.mark.slow
def test_a_rank_that_waits_for_its_input(
    torchrun: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    cases = json.dumps({"run": {"delays_ms": [0, DELAY_S * 1e3]}})
    flags = ["--cases", cases, "--steps", "6", "--width", "64", "--batch", "16"]
    done = torchrun(2, "benchmarks/straggler_worker.py", tmp_path, *flags)
    assert done.returncode == 0, done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"step_s"'))
    measured = median(json.loads(line)["step_s"]["run_r0"])
    assert measured >= DELAY_S
    assert main(["convert", str(tmp_path)]) == 0
    found = find_stragglers(str(tmp_path / "run_r0"))
    assert median(found.step_t_base.values()) == pytest.approx(measured, rel=0.05)
    assert median(found.step_t_nodelay.values()) == pytest.approx(measured, rel=0.05)
    # Spread evenly, each rank would wait for half of it.
    assert median(found.step_t_noblk.values()) == pytest.approx(measured - DELAY_S / 2, abs=0.04)
    assert found.worker_slowdown is not None and next(iter(found.worker_slowdown)) == 1
    by_type = found.blocking_decompose_by_optype
    assert by_type is not None and next(iter(by_type)) == "host-overhead"
