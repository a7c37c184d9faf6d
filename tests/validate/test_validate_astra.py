"""Rules of ``validate --for astra-sim``: each input breaks exactly one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.validate.astra import check_file_for_astra, check_run_for_astra
from tests.convert.good_traces import GATHER, KERNEL, REDUCE, good, put

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
        ("astra-network", {}, {}, {"1": [0, 1], "2": [2, 3]}),
        ("astra-network", {"topology": "[Ring]", "npus_count": "[2]"}, {}, GROUPS),
        ("astra-system", {}, {"preferred-dataset-splits": 0}, GROUPS),
        ("astra-system", {}, {"all-reduce-implementation": ["ring", "ring"]}, GROUPS),
    ],
)
def test_run_breaks_one_rule(
    rule: str, network: dict, system: dict, groups: dict | None, tmp_path: Path
) -> None:
    assert rules_of_run(tmp_path, NETWORK | network, SYSTEM | system, groups) == {rule}


@pytest.mark.parametrize(
    ("field", "row", "sentence"),
    [
        ("latency", "[]", "latency is empty: write one entry per dimension, a number of ns from 0 on"),
        ("bandwidth", "[ ]", "bandwidth is empty"),
        ("npus_count", "[]", "npus_count is empty"),
        ("topology", "[]", "topology is empty"),
        ("latency", "500", "there is no list latency"),
        ("latency", "[fast]", "latency has 'fast', which isn't a number of ns from 0 on"),
        ("latency", "[-1]", "latency has '-1'"),
        ("latency", "[nan]", "latency has 'nan'"),
        ("bandwidth", "[0]", "bandwidth has '0', which isn't a number of GiB/s above 0"),
        ("bandwidth", "[inf]", "bandwidth has 'inf'"),
        ("bandwidth", "[50.5,]", "npus_count has 1 of 2 entries"),
        ("bandwidth", "\n- 46.6\n- 46.6", "latency has 1 of 2 entries"),
        ("npus_count", "[4.0]", "npus_count has '4.0', which isn't a number of ranks from 2 on"),
        ("topology", "[Torus]", "topology has 'Torus', which isn't Ring, FullyConnected or Switch"),
    ],
)
def test_every_field_of_the_network_is_checked(field: str, row: str, sentence: str, tmp_path: Path) -> None:
    lines = [f"{key}: {text}" for key, text in (NETWORK | {field: row}).items()]
    (tmp_path / "network.yml").write_text("\n".join(lines))
    found = [finding.message for finding in check_run_for_astra(tmp_path, "run", GROUPS, 4)]
    assert any(sentence in message for message in found), found


def test_several_groups_on_one_dimension_that_cannot_be_two(tmp_path: Path) -> None:
    lines = [f"{key}: {row}" for key, row in (NETWORK | {"npus_count": "[5]"}).items()]
    (tmp_path / "network.yml").write_text("\n".join(lines))
    found = check_run_for_astra(tmp_path, "run", {"1": [0, 1], "2": [2, 3]}, 5)
    assert [finding.rule for finding in found] == ["astra-dimensions"]


def test_an_unreadable_system_file_is_reported(tmp_path: Path) -> None:
    rules_of_run(tmp_path, NETWORK, SYSTEM, GROUPS)
    (tmp_path / "system.json").write_text("{")
    assert [found.rule for found in check_run_for_astra(tmp_path, "run", GROUPS, 4)] == ["astra-system"]


def test_memory_node() -> None:
    trace = good()
    trace.types[KERNEL] = NodeType.MEM_LOAD
    rules = [finding.rule for finding in check_file_for_astra(trace, None, 2, {})]
    assert rules == ["astra-memory-node"]


def test_collective_that_astra_sim_does_not_simulate() -> None:
    trace = good()
    trace.types[trace.types == NodeType.MEM_LOAD] = NodeType.COMP
    put(trace, "comm_type", REDUCE, CollectiveType.GATHER)
    rules = [finding.rule for finding in check_file_for_astra(trace, None, 2, {})]
    assert rules == ["astra-collective"]


def test_an_all_gather_of_fewer_bytes_than_chunks() -> None:
    trace = good()
    put(trace, "comm_size", GATHER, 3)
    for splits, broken in ((4, True), (3, False)):
        found = check_file_for_astra(trace, None, 2, {"preferred-dataset-splits": splits})
        assert ("astra-all-gather" in {finding.rule for finding in found}) == broken


def test_roofline_needs_tensor_sizes() -> None:
    trace = good()
    assert "astra-roofline" in {
        finding.rule for finding in check_file_for_astra(trace, None, 2, {"roofline-enabled": 1})
    }
    assert "astra-roofline" not in {finding.rule for finding in check_file_for_astra(trace, None, 2, {})}
