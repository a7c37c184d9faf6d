"""The files of a bundle for ASTRA-sim's packet simulators, ns-3 and HTSim, where links can be congested.

Both get a tree of switches. The ranks of a node share a switch, whose uplink has the bandwidth of all of them
together. Formats: astra-sim 1fd844226d4f (examples/network/ns3, examples/htsim, and both front ends)
and ns-3's config.txt as of cb175a3dffc3. Neither simulator was run with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from chakra_et.astra.bundle_texts import Backend, write_script
from chakra_et.cost.topology import Topology, divisor
from chakra_et.errors import TraceError
from chakra_et.files import write_json, write_text

_BITS = 8
# Thresholds of ECN in kB for each Gbit/s, as far as the examples go; the lower one is a quarter.
_MARK, _MOST = 16, 3200

# The example's settings that aren't the front end's defaults (its common.h).
_NS3 = """\
TOPOLOGY_FILE ./physical.txt
FLOW_FILE ./flow.txt
TRACE_FILE ./trace.txt
TRACE_OUTPUT_FILE ./ns3_mix.tr
FCT_OUTPUT_FILE ./ns3_fct.txt
PFC_OUTPUT_FILE ./ns3_pfc.txt
QLEN_MON_FILE ./ns3_qlen.txt
QLEN_MON_START 0
QLEN_MON_END 20000
SIMULATOR_STOP_TIME 40000000000000.00
CC_MODE 12
ALPHA_RESUME_INTERVAL 1
RP_TIMER 900
EWMA_GAIN 0.00390625
FAST_RECOVERY_TIMES 1
RATE_AI 50Mb/s
RATE_HAI 100Mb/s
L2_CHUNK_SIZE 4000
L2_ACK_INTERVAL 1
GLOBAL_T 0
VAR_WIN 1
MI_THRESH 0
MULTI_RATE 0
ENABLE_TRACE 0
{marks}
BUFFER_SIZE 32
"""


def write_backend(folder: Path, name: str, backend: Backend, topology: Topology) -> list[str]:
    """Add the files of ``backend`` to a bundle's folder; returns notes. Raises ``TraceError`` for a network
    that it can't have."""
    if backend == "analytical":
        return []
    others = {d.kind for d in topology.dimensions if d.size > 1} - {"Switch"}
    if others:
        without = f"give a topology without {min(others)}"
        raise TraceError(f"--backend {backend}: packets go through switches: {without}")
    notes = [
        f"{backend} was not run: expected.json has the times of the analytical network, without congestion"
    ]
    if backend == "ns3":
        text, rates = physical(topology)
        write_text(folder / "physical.txt", text)
        write_text(folder / "ns3.txt", _NS3.format(marks="\n".join(_marks(rates))))
        write_json(folder / "logical.json", {"logical-dims": [str(d.size) for d in topology.dimensions]})
        for empty in ("flow.txt", "trace.txt"):
            write_text(folder / empty, "0\n")
        notes.append(
            "thresholds of congestion marks in ns3.txt grow with the rate of a link, as in the examples"
        )
    else:
        text, rounded = fat_tree(topology)
        write_text(folder / "fat_tree.topo", text)
        if rounded:
            notes.append(f"HTSim takes whole Gbit/s and ns: up to {rounded:.1%} was rounded off")
    write_script(folder, name, topology.ranks, backend)
    return notes


def physical(topology: Topology) -> tuple[str, set[int]]:
    """(ns-3's topology file, the rates of its links in bit/s): numbers of nodes, switches and links, then the
    switches, then each link with its rate, delay and error rate.
    """
    below, next_id = list(range(topology.ranks)), topology.ranks
    links: list[tuple[int, int, int, float]] = []
    switches: list[int] = []
    together = 1  # ranks behind each of ``below``
    for dimension in topology.dimensions:
        rate = round(dimension.bandwidth * _BITS * together)
        delay = dimension.latency_ns / 2  # of two hops
        above = []
        for first in range(0, len(below), dimension.size):
            links += [(next_id, one, rate, delay) for one in below[first : first + dimension.size]]
            above.append(next_id)
            next_id += 1
        switches += above
        below, together = above, together * dimension.size
    lines = [f"{next_id} {len(switches)} {len(links)}", " ".join(map(str, switches))]
    lines += [f"{switch} {one} {rate}bps {delay:g}ns 0" for switch, one, rate, delay in links]
    return "\n".join(lines) + "\n", {rate for _, _, rate, _ in links}


def _marks(rates: set[int]) -> Iterator[str]:
    """The thresholds from which packets are marked: ns-3 wants one for every rate that a link has."""
    for key, part in (("KMAX_MAP", 1.0), ("KMIN_MAP", 0.25), ("PMAX_MAP", 0.0)):
        pairs = []
        for rate in sorted(rates):
            mark = max(round(min(_MARK * rate / 1e9, _MOST) * part), 1)
            pairs.append(f"{rate} {mark if part else 0.2}")
        yield f"{key} {len(pairs)} {' '.join(pairs)}"


def fat_tree(topology: Topology) -> tuple[str, float]:
    """(HTSim's fat tree of two tiers, the largest part by which rounding changes a rate): each node has a
    switch with as many links upwards as ranks. Raises ``TraceError`` for three dimensions and more, or ranks
    that can't be divided among switches.
    """
    dimensions = [d for d in topology.dimensions if d.size > 1]
    if len(dimensions) > 2:
        raise TraceError("--backend htsim: a fat tree has two dimensions at most: GPUs per node, and nodes")
    inner, outer = dimensions[0], dimensions[-1]
    down, nodes = inner.size, outer.size
    if len(dimensions) == 1:
        down = divisor(inner.size)
        if not down:
            raise TraceError(f"--backend htsim: {inner.size} ranks can't be divided among equal switches")
        nodes = inner.size // down
    lines, rounded = [f"Nodes {topology.ranks}", "Tiers 2", f"Podsize {topology.ranks}"], 0.0
    for tier, (dimension, radix) in enumerate(((inner, down), (outer, nodes))):
        rate, delay = dimension.bandwidth * _BITS / 1e9, dimension.latency_ns / 2
        whole = max(round(rate), 1), max(round(delay), 1)
        rounded = max(rounded, abs(whole[0] / rate - 1))
        lines += [f"Tier {tier}", f"Downlink_speed_Gbps {whole[0]}", f"Radix_Down {radix}"]
        lines += [f"Radix_Up {down}"] * (tier == 0) + [f"Downlink_Latency_ns {whole[1]}"]
    return "\n".join(lines) + "\n", rounded
