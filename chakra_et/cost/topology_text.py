"""Networks from whatever names one: a line of text, a plan of the planner, or a measured model.

8xH100 NVLink, 4 nodes, 400 Gbit/s          400 Gbit/s per GPU; `400 Gbit/s per node` is shared by 8
8xH100 NVLink 370 GB/s, 4 nodes, 400 Gbit/s, 8 us         measured figures instead of the specification
dgx-h100, 4 nodes                           a node preset
8xL40S PCIe, all-reduce 22 us 5 GB/s        time of a small, bus bandwidth of a large one in nccl-tests
4 ranks, 10 Gbit/s, 30 us                   one dimension; the number of ranks is optional
8 ranks, 450 GB/s, 2 us; 4 ranks, 400 Gbit/s, 5 us        any number of dimensions, from the inside out
network.json                                what measure-network or `fasop plan --json` wrote
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chakra_et.cost import nccl, networks
from chakra_et.cost.network_fit import MODEL_FORMAT, read_model
from chakra_et.cost.topology import HOP_NS, INTER_LOSS, Dimension, Kind, Topology
from chakra_et.cost.units import parse_bandwidth, parse_latency
from chakra_et.errors import TraceError, reason
from chakra_et.files import read_json

_KINDS = {"switch": "Switch", "ring": "Ring", "fullyconnected": "FullyConnected"}
_COUNTED = re.compile(r"(\d+)\s*(nodes?|ranks?|gpus?|processes)", re.IGNORECASE)
_DEVICES = re.compile(r"(?:(\d+)\s*[x×]\s*)?([A-Za-z][\w.-]*)(?:\s+([A-Za-z]\w*))?(?:\s+(\d.*))?")
_ALL_REDUCE = re.compile(r"all-?reduce\s+(\S+\s*[a-zµμ]*s)\s+(.+)", re.IGNORECASE)
_SHARE = re.compile(r"(.+?)\s+per\s+(gpu|node)", re.IGNORECASE)
LARGEST = 1 << 20


def read_topology(text: str, ranks: int | None = None) -> Topology:
    """The topology that ``text`` describes: a line, or the path of a JSON file, of a plan or of ``chakra-et
    measure-network``.

    ``ranks``: the required number of ranks, from which missing numbers of nodes or ranks in the text follow.
    Raises ``TraceError``.
    """
    text = text.strip()
    if text.lower().endswith(".json"):
        topology = _from_file(text, ranks)
    elif ";" in text:
        each = [_from_text(part, None) for part in text.split(";")]
        dimensions = tuple(of for part in each for of in part.dimensions if of.size > 1)
        notes = tuple(dict.fromkeys(note for part in each for note in part.notes))
        topology = Topology(dimensions, name=text, notes=notes)
    else:
        topology = _from_text(text, ranks)
    if not 2 <= topology.ranks <= LARGEST:
        raise TraceError(f"topology {text!r} has {topology.ranks} ranks: give 2 to {LARGEST}")
    if ranks is not None and topology.ranks != ranks:
        sizes = " × ".join(str(dimension.size) for dimension in topology.dimensions)
        raise TraceError(
            f"topology {text!r} has {topology.ranks} GPUs ({sizes}), but there are {ranks} ranks: "
            "they must agree"
        )
    return topology


@dataclass
class _Read:
    """The values in the parts of a line."""

    devices: networks.LinkedGpu | None = None
    all_reduce: tuple[float, float] | None = None
    per_node: int = 1
    nodes: int | None = None
    ranks: int | None = None
    bandwidth: float | None = None
    per: str = ""
    latency: float | None = None
    kind: Kind = "Switch"


def _from_text(text: str, ranks: int | None) -> Topology:
    read, presets = _Read(), networks.table()["nodes"]
    for part in text.split(","):
        for each in presets.get(part.strip().lower(), {"text": part})["text"].split(","):
            _take(read, each.strip(), text)
    if read.devices is None:
        return _flat(read, text, ranks)
    notes: list[str] = []
    nodes = read.nodes
    if nodes is None:
        total = read.ranks or ranks or read.per_node
        nodes, rest = divmod(total, read.per_node)
        if rest or not nodes:
            raise TraceError(
                f"topology {text!r} has {read.per_node} GPUs per node, and {total} ranks is not a multiple"
            )
    gpu = read.devices
    dimensions = [Dimension(read.per_node, gpu.bandwidth, gpu.latency_ns)] if read.per_node > 1 else []
    if nodes > 1:
        bandwidth, latency = _between_nodes(read, nodes, text, notes)
        dimensions.append(Dimension(nodes, bandwidth, latency, read.kind))
    node = _node(read, notes) if read.per_node > 1 else None
    reduces = gpu.memory / networks.REDUCTION_PASSES
    return Topology(tuple(dimensions), reduces, 0.0, text, gpu.peak, tuple(notes), node)


def _node(read: _Read, notes: list[str]) -> nccl.NcclNode:
    """NCCL within a node, with a note on what of it was not measured."""
    assert read.devices is not None
    gpu, count = read.devices, read.per_node
    found = nccl.node(gpu.name, gpu.link)
    if read.all_reduce:
        return found.scaled(count, *read.all_reduce)
    if gpu.bandwidth != networks.gpu(gpu.name, gpu.link).bandwidth:
        notes.append(f"{gpu.bandwidth / 1e9:g} GB/s is taken for the bus bandwidth of a large all-reduce")
        return found.scaled(count, found.latency(count), gpu.bandwidth)
    if gpu.link == "PCIe":
        bus = found.bus_of(count) / 1e9
        notes.append(
            "what GPUs reach together over PCIe depends on the box, not on the GPU: "
            f"{bus:.2g} GB/s among {count} is that of one box. Measure yours by nccl-tests and write "
            "the time of a small all-reduce and the bus bandwidth of a large one: "
            f"'{count}x{gpu.name} PCIe, all-reduce 22 us 5 GB/s'"
        )
    elif found.error is None:
        notes.append(f"NCCL on {found.name} was not measured: its times follow from other GPUs and the link")
    return found


def _take(read: _Read, part: str, text: str) -> None:
    counted = _COUNTED.fullmatch(part)
    if counted:
        count = int(counted[1])
        if count < 1:
            raise TraceError(f"topology {text!r}: {part!r} must be at least 1")
        setattr(read, "nodes" if counted[2].lower().startswith("node") else "ranks", count)
        return
    kind = _KINDS.get(part.lower().replace(" ", "").replace("-", ""))
    if kind:
        read.kind = kind  # type: ignore[assignment]
        return
    measured = _ALL_REDUCE.fullmatch(part)
    if measured:
        read.all_reduce = parse_latency(measured[1]), parse_bandwidth(measured[2])
        return
    devices = _DEVICES.fullmatch(part)
    if devices:
        gpu = networks.gpu(devices[2], devices[3] or "")
        read.devices = replace(gpu, bandwidth=parse_bandwidth(devices[4])) if devices[4] else gpu
        read.per_node = int(devices[1] or 1)
        if read.per_node < 1:
            raise TraceError(f"topology {text!r}: {part!r} must be at least 1")
        return
    share = _SHARE.fullmatch(part)
    try:
        read.bandwidth = parse_bandwidth(share[1] if share else part)
        read.per = share[2].lower() if share else ""
    except TraceError as error:
        try:
            read.latency = parse_latency(part)
        except TraceError as other:
            looks_like_time = re.search(r"[nuµμm]?s\s*$", part) and not re.search(r"/s|ps", part)
            raise TraceError(f"topology {text!r}: {other if looks_like_time else error}") from None


def _between_nodes(read: _Read, nodes: int, text: str, notes: list[str]) -> tuple[float, float]:
    if read.bandwidth is None:
        raise TraceError(
            f"topology {text!r} has {nodes} nodes and no bandwidth between them: add one, such as 400 Gbit/s"
        )
    bandwidth = read.bandwidth
    if read.per == "node":
        bandwidth /= read.per_node
    elif not read.per and read.per_node > 1:
        notes.append(
            "the bandwidth between nodes is assumed to be per GPU: "
            f"write `per node` if the {read.per_node} GPUs of a node share it"
        )
    return bandwidth, _latency(read, "latency between nodes", notes)


def _latency(read: _Read, what: str, notes: list[str]) -> float:
    if read.latency is not None:
        return read.latency
    assumed = networks.table()["assumed_latency"]["between_nodes"]
    notes.append(f"no {what} was given: {assumed} is assumed")
    return parse_latency(assumed)


def _flat(read: _Read, text: str, ranks: int | None) -> Topology:
    if read.bandwidth is None:
        raise TraceError(
            f"topology {text!r} has neither a GPU nor a bandwidth: write it as in '8xH100 NVLink, 4 nodes, "
            "400 Gbit/s' or '4 ranks, 10 Gbit/s, 30 us'"
        )
    total = read.ranks or read.nodes or ranks
    if total is None:
        raise TraceError(f"topology {text!r} has no number of ranks: add one, such as '4 ranks'")
    notes: list[str] = []
    dimension = Dimension(total, read.bandwidth, _latency(read, "latency", notes), read.kind)
    return Topology((dimension,), name=text, notes=tuple(notes))


def _from_file(path: str, ranks: int | None) -> Topology:
    try:
        entry = read_json(path)
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: {reason(error)}") from None
    plans = entry.get("plans") if isinstance(entry, dict) else None
    if ranks is not None and isinstance(plans, list):
        if not plans:
            raise TraceError(f"{path}: holds no plan: write it with fasop plan --json")
        return _planned(plans[0], ranks, f"{path}: its first plan")
    if ranks is not None and isinstance(entry, dict) and MODEL_FORMAT in str(entry.get("format")):
        return replace(read_model(path).topology(ranks), name=f"the network of {Path(path).name}")
    raise TraceError(f"{path}: holds neither plans nor a measured network: write the network as a line")


def _planned(plan: Any, ranks: int, where: str) -> Topology:
    """The network of one entry of a file of plans. ``where`` begins a ``TraceError``.

    The planner shares the bandwidth of a node among what leaves it at once, takes 5% of it for losses, and
    lets the slowest link of a ring decide; a dimension has one bandwidth per GPU, so that the bytes of each
    message stand for what differs.
    """
    try:
        cluster = plan["cluster"]
        kinds = {gpu["name"]: gpu for gpu in cluster["gpus"]}
        used = [kinds[name] for name in dict.fromkeys(plan["placement"])]
        per_node, nodes = int(cluster["gpus_per_node"]), len(plan["placement"])
        intra = min(gpu["intra_bandwidth"] / (per_node if gpu["shared_bus"] else 1) for gpu in used) / 8
        inter = min(gpu["inter_bandwidth"] for gpu in used) / 8 / INTER_LOSS / per_node
        intra_ns = max(gpu["intra_latency"] for gpu in used) * 1e9 or HOP_NS
        inter_ns = max(gpu["inter_latency"] for gpu in used) * 1e9 or HOP_NS
        name = f"{cluster['name']} as planned"
        used_links = (intra, intra_ns, *((inter, inter_ns) if nodes > 1 else ()))
        if not all(0 < value < math.inf for value in used_links):
            raise ValueError
    except (LookupError, TypeError, ValueError, ArithmeticError):
        raise TraceError(f"{where} isn't a plan that can be read: write it with fasop plan --json") from None
    if (planned := per_node * nodes) != ranks:
        raise TraceError(
            f"{where} is for {planned} GPUs, and the set has {ranks} ranks: give the plan of this set"
        )
    if ranks < 2:
        raise TraceError(f"{where} is for one GPU: there is no network to simulate")
    dimensions = (Dimension(per_node, intra, intra_ns), Dimension(nodes, inter, inter_ns))
    note = (
        "the planner's links are shared, lossy and unequal, and a dimension has one bandwidth: the bytes of "
        "each message and collective are those with which it lasts as long as planned"
    )
    kept = tuple(dimension for dimension in dimensions if dimension.size > 1)
    return Topology(kept, name=name, notes=(note,), effective=True)
