"""Planned sets: bundles with the network that the plan assumes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from chakra_et.__main__ import main
from chakra_et.cost.network_fit import NetworkModel, write_model
from chakra_et.cost.topology_text import read_topology
from chakra_et.errors import TraceError
from fasop.__main__ import main as fasop

A10 = {"nodes": 2, "memory_gib": 80, "price_per_hour": 8, "inter_bandwidth": 40e9, "intra_bandwidth": 128e9}


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    cluster = {"clusters": {"a10": {"gpus_per_node": 4, "gpus": {"A10": A10}}}}
    (tmp_path / "cluster.yaml").write_text(json.dumps(cluster))
    flags = ["--tp", "2", "--pp", "2", "--mbs", "1", "--global-batch", "8", "--oom", "--json"]
    assert fasop(["plan", "--model", "gpt2-xl", "--cluster", f"{tmp_path / 'cluster.yaml'}:a10", *flags]) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    return path


def test_a_planned_set_gets_a_bundle_with_the_planned_network(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fasop(["simulate", str(plan), "--et", "--output", str(tmp_path), "--name", "xl"]) == 0
    capsys.readouterr()
    folder = tmp_path / "bundle"
    assert main(["astra", str(tmp_path / "xl"), "-o", str(folder), "--topology", str(plan)]) == 0
    said = capsys.readouterr().out
    for text in (said, (folder / "README.md").read_text()):
        assert "the bytes of each message and collective are those with which it lasts as long as" in text
    outer = 40e9 / 8 / 1.05 / 4 / 2**30  # what four GPUs share of 40 Gbit/s, less 5%
    assert f"{outer:.6f}" in (folder / "network.yml").read_text()
    content = json.loads((folder / "expected.json").read_text())
    assert max(content["simulated"].values()) == pytest.approx(max(content["measured"].values()), rel=0.03)


def test_the_planned_network_is_the_planner_s(plan: Path) -> None:
    inner, outer = read_topology(str(plan), 8).dimensions
    assert (inner.size, outer.size) == (4, 2)
    assert inner.bandwidth == 16e9
    assert outer.bandwidth == pytest.approx(5e9 / 1.05 / 4)


def test_a_measured_network_can_be_named(tmp_path: Path) -> None:
    model = NetworkModel(4000.0, 900.0, 2e9, math.inf, 0.1, 12, "a run")
    write_model(tmp_path / "network.json", model)
    topology = read_topology(str(tmp_path / "network.json"), 4)
    assert topology.ranks == 4
    assert (topology.dimensions[0].bandwidth, topology.dimensions[0].latency_ns) == (2e9, 900.0)


def test_a_plan_of_other_ranks_or_a_damaged_one_is_refused(plan: Path) -> None:
    with pytest.raises(TraceError, match="is for 8 GPUs, and the set has 4 ranks"):
        read_topology(str(plan), 4)
    loaded: dict[str, Any] = json.loads(plan.read_text())
    del loaded["plans"][0]["placement"]
    plan.write_text(json.dumps(loaded))
    with pytest.raises(TraceError, match="isn't a plan that can be read"):
        read_topology(str(plan), 8)
    plan.write_text("{")
    with pytest.raises(TraceError, match="isn't readable"):
        read_topology(str(plan), 8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gpus_per_node", "1e999"),
        ("intra_bandwidth", "1e999"),
        ("inter_bandwidth", "-1"),
        ("intra_latency", "NaN"),
    ],
)
def test_a_plan_with_a_number_that_no_network_has_is_refused(plan: Path, key: str, value: str) -> None:
    damaged, found = re.subn(rf'"{key}": [-.0-9e+]+', f'"{key}": {value}', plan.read_text())
    assert found
    plan.write_text(damaged)
    with pytest.raises(TraceError, match="isn't a plan that can be read|isn't readable"):
        read_topology(str(plan), 8)
