"""Files for ns-3 and HTSim, read back by parsers of their formats (examples of astra-sim 1fd844226d4f)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.astra.bundle_texts import Backend
from chakra_et.astra.packet_backends import fat_tree, physical, write_backend
from chakra_et.cost.topology_text import read_topology
from chakra_et.errors import TraceError
from tests.astra.sets import MESH, step, write_set

# examples/network/ns3/topology/8_nodes_1_switch_topology.txt, with its units written out.
EXAMPLE = "9 1 8\n8\n" + "".join(f"8 {rank} 400000000000bps 500ns 0\n" for rank in range(8))


def parse_physical(text: str) -> tuple[list[int], dict[tuple[int, int], tuple[int, float]]]:
    """(switches, links with bit/s and ns), as ns-3's SetupNetwork reads the file."""
    nodes, switches, links = (int(word) for word in text.split()[:3])
    words = text.split()[3:]
    ids = [int(word) for word in words[:switches]]
    rows = [words[at : at + 5] for at in range(switches, len(words), 5)]
    assert len(rows) == links and all(len(row) == 5 and row[4] == "0" for row in rows)
    found = {
        (int(a), int(b)): (int(rate.removesuffix("bps")), float(delay.removesuffix("ns")))
        for a, b, rate, delay, _ in rows
    }
    assert {end for pair in found for end in pair} == set(range(nodes))
    return ids, found


def test_one_switch_is_written_as_in_the_example() -> None:
    text, rates = physical(read_topology("8 ranks, 400 Gbit/s, 1 us", 8))
    assert text == EXAMPLE and rates == {400_000_000_000}


def test_nodes_are_joined_by_a_link_of_all_their_bandwidth() -> None:
    switches, links = parse_physical(physical(read_topology("dgx-h100, 4 nodes", 32))[0])
    assert switches == [32, 33, 34, 35, 36]
    assert {links[33, rank][0] for rank in range(8, 16)} == {3_600_000_000_000}
    assert {links[36, switch][0] for switch in switches[:4]} == {8 * 400_000_000_000}


def parse_fat_tree(text: str) -> list[dict[str, int]]:
    """The head and each tier, as HTSim's FatTreeTopology::load reads lines of a word and a number."""
    found: list[dict[str, int]] = [{}]
    for line in text.splitlines():
        word, number = line.split()
        if word == "Tier":
            found.append({})
        else:
            found[-1][word] = int(number)
    return found


def test_a_fat_tree_has_the_nodes_as_its_lower_tier() -> None:
    text, rounded = fat_tree(read_topology("dgx-h100, 4 nodes", 32))
    head, lower, upper = parse_fat_tree(text)
    assert head == {"Nodes": 32, "Tiers": 2, "Podsize": 32} and rounded == 0
    assert (lower["Radix_Down"], lower["Radix_Up"], lower["Downlink_speed_Gbps"]) == (8, 8, 3600)
    assert (upper["Radix_Down"], upper["Downlink_speed_Gbps"]) == (4, 400) and "Radix_Up" not in upper
    assert lower["Radix_Down"] * upper["Radix_Down"] == head["Nodes"]


@pytest.mark.parametrize("backend", ["ns3", "htsim"])
def test_a_bundle_has_the_files_of_its_backend(tmp_path: Path, backend: str, capsys) -> None:
    name = write_set(tmp_path / "set", {rank: step(rank) for rank in range(8)}, MESH)
    folder = tmp_path / "bundle"
    words = ["--topology", "4xA100 NVLink, 2 nodes, 200 Gbit/s, 5 us", "--backend", backend]
    assert main(["astra", name, "-o", str(folder), *words]) == 0
    assert f"{backend} was not run" in capsys.readouterr().out
    script = folder / f"run_{backend}.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    named = [word.split("=./")[-1] for word in script.read_text().split() if "=./" in word]
    assert {"system.json", "memory.json"} < set(named)
    assert all((folder / file).exists() for file in named if file != "run")
    if backend == "ns3":
        config = dict(line.split(" ", 1) for line in (folder / "ns3.txt").read_text().splitlines())
        _, links = parse_physical((folder / "physical.txt").read_text())
        rates = {str(rate) for rate, _ in links.values()}
        for key in ("KMAX_MAP", "KMIN_MAP", "PMAX_MAP"):
            assert rates == set(config[key].split()[1::2]) and int(config[key].split()[0]) == len(rates)
        assert json.loads((folder / "logical.json").read_text()) == {"logical-dims": ["4", "2"]}
    else:
        assert parse_fat_tree((folder / "fat_tree.topo").read_text())[0]["Nodes"] == 8


@pytest.mark.parametrize(
    ("topology", "backend", "sentence"),
    [
        (
            "8 ranks, 10 Gbit/s, 30 us, ring",
            "ns3",
            "packets go through switches: give a topology without Ring",
        ),
        ("7 ranks, 10 Gbit/s, 30 us", "htsim", "7 ranks can't be divided among equal switches"),
    ],
)
def test_a_network_that_a_backend_cannot_have_is_refused(
    tmp_path: Path, topology: str, backend: Backend, sentence: str
) -> None:
    network = read_topology(topology, int(topology.split()[0]))
    with pytest.raises(TraceError) as error:
        write_backend(tmp_path, "run", backend, network)
    assert sentence in str(error.value) and not list(tmp_path.iterdir())
