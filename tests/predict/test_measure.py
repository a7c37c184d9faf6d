"""``chakra-et measure-network`` with real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.cost.network_fit import read_model
from tests.ports import free_port

pytest.importorskip("torch")


@pytest.mark.slow
def test_two_gloo_ranks_are_measured(repo_root: Path, tmp_path: Path) -> None:
    words = ["measure-network", "--largest", "20", "--repeats", "3", "--output", str(tmp_path / "net.json")]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "chakra_et", *words],
            cwd=repo_root,
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            text=True,
        )
        for port in [str(free_port())]
        for rank in range(2)
    ]
    shown = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "all_reduce" in shown[0] and "wrote" in shown[0] and not shown[1]
    model = read_model(tmp_path / "net.json")
    assert model.samples == 12 and model.bandwidth > 1e6 and model.call_ns + model.latency_ns > 0
    entries = json.loads((tmp_path / "net.json").read_text())["measured"]
    assert {entry["kind"] for entry in entries} == {"ALL_REDUCE", "BROADCAST", "ALL_GATHER"}


def test_one_rank_is_refused(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["measure-network"]) == 2
    assert "torchrun" in capsys.readouterr().err
