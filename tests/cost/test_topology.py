"""Topologies from text, and what is refused."""

from __future__ import annotations

import json

import pytest

from chakra_et.cost import networks
from chakra_et.cost.topology import Dimension
from chakra_et.cost.topology_text import read_topology
from chakra_et.cost.units import parse_bandwidth, parse_latency, parse_rate
from chakra_et.errors import TraceError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("400 Gbit/s", 50e9),
        ("400Gbps", 50e9),
        ("400 Gb/s", 50e9),
        ("50 GB/s", 50e9),
        ("50GBps", 50e9),
        ("1 KiB/s", 1024.0),
        ("1 MiB/s", 2.0**20),
        ("1 GiB/s", 2.0**30),
        ("1 TiB/s", 2.0**40),
        ("2.5e3 Mbit/s", 312.5e6),
        ("1.8 TB/s", 1.8e12),
    ],
)
def test_bandwidths_keep_bits_and_bytes_apart(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(expected)


@pytest.mark.parametrize(("text", "expected"), [("5 us", 5000), ("5µs", 5000), ("900 ns", 900), ("1ms", 1e6)])
def test_latencies(text: str, expected: float) -> None:
    assert parse_latency(text) == pytest.approx(expected)


def test_arithmetic_rates() -> None:
    assert parse_rate("989 TFLOP/s") == parse_rate("989 TFLOPS") == pytest.approx(989e12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("400", "bandwidth '400' has no unit: write it as in 400 Gbit/s or 50 GB/s"),
        ("0 GB/s", "bandwidth '0 GB/s' must be above 0"),
        ("-1 GB/s", "bandwidth '-1 GB/s' must be above 0"),
        ("1e400 GB/s", "bandwidth '1e400 GB/s' must be above 0"),
        ("5 us", "bandwidth '5 us' is not valid"),
        ("fast", "bandwidth 'fast' is not valid"),
        ("5 kiB/s", "bandwidth '5 kiB/s' is not valid"),
    ],
)
def test_a_bandwidth_without_a_unit_or_of_zero_is_refused(text: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse_bandwidth(text)
    assert str(caught.value).startswith(message)


def test_gpus_and_nodes() -> None:
    topology = read_topology("8xH100 NVLink, 4 nodes, 400 Gbit/s", 32)
    inner, outer = topology.dimensions
    assert (inner.size, inner.bandwidth, inner.kind) == (8, 450e9, "Switch")
    assert (outer.size, outer.bandwidth) == (4, 50e9)
    assert topology.ranks == 32
    assert topology.peak == 989e12
    assert topology.reduce_bandwidth == pytest.approx(3350e9 / 3)
    assert any("no latency between nodes" in note for note in topology.notes)
    assert any("per node" in note for note in topology.notes)


def test_a_node_may_share_its_bandwidth() -> None:
    shared = read_topology("8xA100 NVLink, 4 nodes, 400 Gbit/s per node, 3 us").dimensions[1]
    assert shared == Dimension(4, 50e9 / 8, 3000.0)
    assert read_topology("8xA100, 4 nodes, 400 Gbit/s per GPU").dimensions[1].bandwidth == 50e9


def test_a_measured_figure_replaces_the_specification() -> None:
    topology = read_topology("8xH100 NVLink 370 GB/s, 4 nodes, 400 Gbit/s, 8 us, ring")
    assert topology.dimensions[0].bandwidth == 370e9
    assert topology.dimensions[1] == Dimension(4, 50e9, 8000.0, "Ring")


def test_the_number_of_nodes_follows_from_the_ranks() -> None:
    assert [each.size for each in read_topology("8xH100, 400 Gbit/s", 32).dimensions] == [8, 4]
    assert [each.size for each in read_topology("8xH100", 8).dimensions] == [8]
    assert [each.size for each in read_topology("1xT4, 100 Gbit/s", 4).dimensions] == [4]
    assert read_topology("10 Gbit/s, 30 us", 4).dimensions == (Dimension(4, 1.25e9, 30000.0),)


@pytest.mark.parametrize("name", networks.table()["nodes"])
def test_every_node_preset_can_be_used(name: str) -> None:
    topology = read_topology(f"{name}, 4 nodes")
    assert topology.ranks == 32
    assert topology.dimensions[0].bandwidth > topology.dimensions[1].bandwidth


def test_every_gpu_has_its_figures_and_a_source() -> None:
    entries = json.loads(networks.FILE.read_text())["gpus"]
    for name, entry in entries.items():
        for link in entry["links"]:
            gpu = networks.gpu(name.lower(), link.lower())
            assert (gpu.name, gpu.link) == (name, link)
            assert gpu.memory > gpu.bandwidth > 1e9
            assert len(entry["source"]) > 20


def test_any_number_of_dimensions() -> None:
    text = "4 ranks, 450 GB/s, 2 us, fully connected; 8 nodes, 50 GB/s; 2 ranks, 10 Gbit/s"
    topology = read_topology(text, 64)
    assert topology.dimensions[0] == Dimension(4, 450e9, 2000.0, "FullyConnected")
    assert topology.dimensions[1] == Dimension(8, 50e9, 5000.0)
    assert topology.ranks == 64 and len(topology.notes) == 1 and "no latency was given" in topology.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xH100 NVLink, 4 nodes", "has 4 nodes and no bandwidth between them"),
        ("8xH100 NVLink, 4 nodes, 400", "bandwidth '400' has no unit"),
        ("8xH100 NVLink, 4 nodes, 0 Gbit/s", "must be above 0"),
        (
            "8xH100 NVLink, 8 nodes, 400 Gbit/s",
            "has 64 GPUs (8 × 8), but there are 32 ranks",
        ),
        ("3xH100 NVLink, 400 Gbit/s", "has 3 GPUs per node, and 32 ranks is not a multiple"),
        ("8xH900, 4 nodes, 400 Gbit/s", "GPU 'H900' is unknown: use one of V100"),
        ("8xT4 NVLink, 4 nodes, 400 Gbit/s", "T4 has no link 'NVLink': use PCIe"),
        ("0xH100, 4 nodes, 400 Gbit/s", "must be at least 1"),
        ("8xH100, 0 nodes, 400 Gbit/s", "must be at least 1"),
        ("4 nodes", "has neither a GPU nor a bandwidth"),
        ("8xH100, 4 nodes, 400 Gbit/s, 8 us us", "latency '8 us us' is not valid"),
        ("nothing.json", "nothing.json: can't be read: no such file"),
        ("4 ranks, 1 GB/s; 10 Gbit/s", "has no number of ranks"),
        ("4 ranks, 1 GB/s; 8 ranks", "has neither a GPU nor a bandwidth"),
    ],
)
def test_a_topology_that_cannot_be_used_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_topology(text, 32)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
