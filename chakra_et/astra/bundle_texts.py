"""The text files of a bundle: network.yml, system.json, memory.json, run.sh and README.md."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chakra_et.astra.network_dimensions import HANDSHAKE_BYTES, handshake
from chakra_et.cost.networks import REDUCTION_PASSES
from chakra_et.cost.topology import Topology
from chakra_et.cost.units import GIB
from chakra_et.files import write_text

DATASET_SPLITS = 1
"""Chunks of a collective: with one, no all-gather is too small, and the dimensions of a collective follow
each other, as in our own replay."""
FREE_REDUCTION = 1_000_000
"""GB/s of local memory where the topology has none: reducing costs nothing that could be seen."""
READ_AT = "astra-sim 0383c203930c and astra-network-analytical 047ef653f16a"


def network_yml(topology: Topology) -> str:
    """The analytical network: bandwidths in GiB/s, the latency of one hop (a Switch has two) in ns."""
    dimensions = topology.dimensions
    latencies = [d.latency_ns / (2 if d.kind == "Switch" else 1) for d in dimensions]
    rows = (
        ("topology", [d.kind for d in dimensions], "innermost first"),
        ("npus_count", [str(d.size) for d in dimensions], "ranks along each dimension"),
        ("bandwidth", [f"{d.bandwidth / GIB:.6f}" for d in dimensions], "GiB/s per rank and direction"),
        ("latency", [f"{each:.3f}" for each in latencies], "ns per hop; a Switch has two"),
    )
    return "".join(f"{key}: [ {', '.join(values)} ]  # {comment}\n" for key, values, comment in rows)


def system_json(topology: Topology, roofline: bool) -> dict[str, Any]:
    """One entry per dimension for each collective. ``roofline``: compute from num_ops and tensor_size."""
    rings = ["ring"] * len(topology.dimensions)
    # `direct1` has one message under way at a time: without congestion, more of them would cost nothing.
    exchange = ["ring" if d.kind == "Ring" else "direct1" for d in topology.dimensions]
    memory = topology.reduce_bandwidth * REDUCTION_PASSES / 1e9
    settings: dict[str, Any] = {
        "scheduling-policy": "FIFO",
        "endpoint-delay": 1,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": DATASET_SPLITS,
        "all-reduce-implementation": rings,
        "all-gather-implementation": rings,
        "reduce-scatter-implementation": rings,
        "all-to-all-implementation": exchange,
        "collective-optimization": "localBWAware",
        "local-mem-bw": round(memory) if math.isfinite(memory) else FREE_REDUCTION,
        "boost-mode": 0,
        "roofline-enabled": int(roofline),
    }
    if topology.peak is not None:
        settings["peak-perf"] = round(topology.peak / 1e12)
    return settings


MEMORY = {"memory-type": "NO_MEMORY_EXPANSION"}


def write_script(folder: Path, name: str, ranks: int) -> None:
    """Write ``run.sh``."""
    words = {"NAME": name, "RANKS": str(ranks), "BINARY": "AstraSim_Analytical_Congestion_Unaware"}
    path = folder / "run.sh"
    write_text(path, re.sub(r"@(\w+)@", lambda found: words[found[1]], _template("run.sh")))
    path.chmod(0o755)


_KEPT = {
    "all": "All nodes run: operators of the CPU, kernels and communication.",
    "gpu": "Device work and communication run (`--gpu-only`); what only the CPU did takes no time.",
    "comm": "Communication alone runs (`--comm-only`), in its order and without any computing.",
}

_ROOFLINE = "GPU compute is modelled from `num_ops` and `tensor_size` (`roofline-enabled` 1)."
_RECORDED = "Compute lasts as recorded (`roofline-enabled` 0)."


def readme(
    name: str,
    ranks: int,
    topology: Topology,
    keep: str,
    roofline: bool,
    times: Sequence[float],
    changed: Sequence[str],
    notes: Sequence[str],
) -> str:
    """What is in the folder, in which units, and what the simulation models. ``times``: µs, when the ranks
    should finish; ``roofline``: compute is modelled."""
    rows = [
        f"| {at} | {d.size} | {d.kind} | {d.bandwidth / 1e9:,.3f} GB/s = {d.bandwidth / GIB:,.3f} GiB/s "
        f"| {d.latency_ns:,.1f} ns |"
        for at, d in enumerate(topology.dimensions, 1)
    ]
    span = ""
    if times:
        span = f"The ranks should finish after {min(times) / 1000:,.3f} to {max(times) / 1000:,.3f} ms."
    handshakes = ", ".join(
        f"{handshake(d) / 1000:,.3f} us in dimension {at}" for at, d in enumerate(topology.dimensions, 1)
    )
    done = "".join(f"- {line}.\n" for line in changed) or "- Nothing was changed.\n"
    further = "".join(f"- {line}.\n" for line in notes)
    return _template("README.md").format(
        name=name,
        last=ranks - 1,
        network=topology.name or "a network",
        span=span,
        dimensions="\n".join(rows),
        kept=_KEPT[keep],
        compute=_ROOFLINE if roofline else _RECORDED,
        splits=DATASET_SPLITS,
        handshake_bytes=HANDSHAKE_BYTES,
        handshakes=handshakes,
        done=done,
        further=further,
        read_at=READ_AT,
    )


def _template(name: str) -> str:
    return (Path(__file__).with_name("templates") / name).read_text(encoding="utf-8")
