"""Rules of ``validate --for astra-sim``: each input breaks exactly one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.validate.astra import check_file_for_astra, check_run_for_astra
from tests.chakra_et.good_traces import KERNEL, REDUCE, good, put

NETWORK = {"topology": "[Switch]", "npus_count": "[4]", "bandwidth": "[46.6]", "latency": "[500.0]"}
SYSTEM = {
    **{f"{name}-implementation": ["ring"] for name in ("all-reduce", "all-gather")},
    **{f"{name}-implementation": ["ring"] for name in ("reduce-scatter", "all-to-all")},
    "preferred-dataset-splits": 4,
}
GROUPS = {"1": [0, 1, 2, 3]}


def rules_of_run(
    folder: Path, network: dict, system: dict, groups: dict | None, name: str = "run"
) -> set[str]:
    lines = [f"{key}: {row}" for key, row in network.items()]
    (folder / "network.yml").write_text("\n".join(lines))
    (folder / "system.json").write_text(json.dumps(system))
    return {finding.rule for finding in check_run_for_astra(folder, name, groups, 4)}


def test_valid_run(tmp_path: Path) -> None:
    assert rules_of_run(tmp_path, NETWORK, SYSTEM, GROUPS) == set()


@pytest.mark.parametrize(
    ("rule", "network", "system", "groups"),
    [
        ("astra-group-file", {}, {}, None),
        ("astra-network", {"npus_count": "[8]"}, {}, GROUPS),
        ("astra-network", {"latency": "[500.0, 500.0]"}, {}, GROUPS),
        ("astra-network", {"bandwidth": "[-0.5]"}, {}, GROUPS),
        ("astra-bandwidth", {"bandwidth": "[50]"}, {}, GROUPS),
        ("astra-dimensions", {}, {}, {"1": [0, 1], "2": [2, 3]}),
        ("astra-system", {}, {"preferred-dataset-splits": 0}, GROUPS),
        ("astra-system", {}, {"all-reduce-implementation": ["ring", "ring"]}, GROUPS),
    ],
)
def test_run_breaks_one_rule(
    rule: str, network: dict, system: dict, groups: dict | None, tmp_path: Path
) -> None:
    assert rules_of_run(tmp_path, NETWORK | network, SYSTEM | system, groups) == {rule}


def test_memory_node() -> None:
    trace = good()
    trace.types[KERNEL] = NodeType.MEM_LOAD
    rules = [finding.rule for finding in check_file_for_astra(trace, roofline=False)]
    assert rules == ["astra-memory-node"]


def test_collective_that_astra_sim_does_not_simulate() -> None:
    trace = good()
    trace.types[trace.types == NodeType.MEM_LOAD] = NodeType.COMP
    put(trace, "comm_type", REDUCE, CollectiveType.GATHER)
    rules = [finding.rule for finding in check_file_for_astra(trace, roofline=False)]
    assert rules == ["astra-collective"]


def test_roofline_needs_tensor_sizes() -> None:
    trace = good()
    assert "astra-roofline" in {finding.rule for finding in check_file_for_astra(trace, roofline=True)}
    assert "astra-roofline" not in {finding.rule for finding in check_file_for_astra(trace, roofline=False)}
