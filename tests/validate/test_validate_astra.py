"""Rules of ``validate --for astra-sim``: each input breaks exactly one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.names import RunFiles
from chakra_et.validate.astra import check_file_for_astra, check_run_for_astra
from tests.convert.good_traces import KERNEL, REDUCE, good, put

NETWORK = {"topology": "[Switch]", "npus_count": "[4]", "bandwidth": "[46.6]", "latency": "[500.0]"}
GROUPS = {"1": [0, 1, 2, 3]}


def messages_of_run(folder: Path, network: dict, groups: dict, name: str = "run", ranks: int = 4) -> str:
    (folder / "network.yml").write_text("\n".join(f"{key}: {row}" for key, row in network.items()))
    found = list(check_run_for_astra(RunFiles(folder, name), groups, ranks))
    return "; ".join(f"{each.rule}: {each.message}" for each in found)


def test_valid_run(tmp_path: Path) -> None:
    assert messages_of_run(tmp_path, NETWORK, GROUPS) == ""


@pytest.mark.parametrize(
    ("network", "groups", "sentence"),
    [
        ({}, {}, "astra-group-file: no comm-group file"),
        ({"npus_count": "[8]"}, GROUPS, "astra-network: network.yml: it has 8 ranks, the set 4"),
        ({"npus_count": "[4.0]"}, GROUPS, "astra-network: network.yml: topology and npus_count must be"),
        ({"topology": "[]"}, GROUPS, "topology and npus_count must be"),
        ({"topology": "Ring"}, GROUPS, "topology and npus_count must be"),
        ({"topology": "[Ring, Ring]"}, GROUPS, "topology and npus_count must be"),
        ({}, {"1": [0, 1], "2": [2, 3]}, "several groups of fewer than all ranks on one dimension"),
        ({"topology": "[Ring]", "npus_count": "[2]"}, GROUPS, "two ranks on a Ring make ASTRA-sim abort"),
    ],
)
def test_run_breaks_one_rule(network: dict, groups: dict, sentence: str, tmp_path: Path) -> None:
    ranks = 2 if network.get("npus_count") == "[2]" else 4
    found = messages_of_run(tmp_path, NETWORK | network, groups, ranks=ranks)
    assert sentence in found and ";" not in found


def test_several_groups_on_one_dimension_that_cannot_be_two(tmp_path: Path) -> None:
    groups = {"1": [0, 1], "2": [2, 3]}
    assert messages_of_run(tmp_path, NETWORK | {"npus_count": "[5]"}, groups, ranks=5) == ""


def test_memory_node() -> None:
    trace = good()
    trace.types[KERNEL] = NodeType.MEM_LOAD
    rules = [finding.rule for finding in check_file_for_astra(trace, {}, 2)]
    assert rules == ["astra-memory-node"]


def test_collective_that_astra_sim_does_not_simulate() -> None:
    trace = good()
    trace.types[trace.types == NodeType.MEM_LOAD] = NodeType.COMP
    put(trace, "comm_type", REDUCE, CollectiveType.GATHER)
    rules = [finding.rule for finding in check_file_for_astra(trace, {}, 2)]
    assert rules == ["astra-collective"]
