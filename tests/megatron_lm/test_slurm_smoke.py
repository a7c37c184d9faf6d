"""A run on two nodes of a real Slurm, where it is installed: submitted, launched, logged and shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_lm import virtual_cluster
from tests.megatron_lm.conftest import Script, as_environment
from tests.megatron_lm.virtual_cluster import wait_for_end


@pytest.fixture
def tiny(tiny: dict[str, str], tmp_path_factory: pytest.TempPathFactory):
    """As in conftest.py, with a Slurm of two nodes."""
    with virtual_cluster.cluster(2, tmp_path_factory.mktemp("s") / "c") as slurm:
        yield tiny | slurm | as_environment({"NNODES": "2", "NPROC_PER_NODE": "1"})


def test_a_run_on_two_virtual_nodes(script: Script, tiny: dict[str, str], tmp_path: Path) -> None:
    job = script("_03_submit.sh").stdout.strip()
    assert wait_for_end(tiny, job) == "COMPLETED"
    shown = script("get_result.sh", job).stdout
    assert shown.startswith("no problems found\n")
    assert "NODE_RANK: 0 (n1), 1 (n2)\n" in shown and "iteration 4 : " in shown
    assert sorted(path.name for path in (tmp_path / "log2" / job).glob("*.out")) == ["n1.out", "n2.out"]
