"""Networks from whatever names one: a line of text, JSON, a plan of the planner, or a measured model.

8xH100 NVLink, 4 nodes, 400 Gbit/s          400 Gbit/s per GPU; `400 Gbit/s per node` is shared by 8
8xH100 NVLink 370 GB/s, 4 nodes, 400 Gbit/s, 8 us         measured figures instead of the specification
dgx-h100, 4 nodes                           a node preset
8xL40S PCIe, all-reduce 22 us 5 GB/s        time of a small, bus bandwidth of a large one in nccl-tests
4 ranks, 10 Gbit/s, 30 us                   one dimension; the number of ranks is optional
{"dimensions": [{"size": 8, "bandwidth": "450 GB/s", "latency": "2 us", "kind": "Switch"},
                {"size": 4, "bandwidth": "400 Gbit/s", "latency": "5 us"}], "memory": "3350 GB/s"}
network.json                                that, or what measure-network or `fasop plan --json` wrote
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from chakra_et.cost import nccl, networks
from chakra_et.cost.network_fit import MODEL_FORMAT, read_model
from chakra_et.cost.topology import HOP_NS, INTER_LOSS, Dimension, Kind, Topology
from chakra_et.cost.units import parse_bandwidth, parse_latency, parse_rate
from chakra_et.errors import TraceError
from chakra_et.files import read_bytes

_KINDS = {"switch": "Switch", "ring": "Ring", "fullyconnected": "FullyConnected"}
_COUNTED = re.compile(r"(\d+)\s*(nodes?|ranks?|gpus?|processes)", re.IGNORECASE)
_DEVICES = re.compile(r"(?:(\d+)\s*[x×]\s*)?([A-Za-z][\w.-]*)(?:\s+([A-Za-z]\w*))?(?:\s+(\d.*))?")
_ALL_REDUCE = re.compile(r"all-?reduce\s+(\S+\s*[a-zµμ]*s)\s+(.+)", re.IGNORECASE)
_SHARE = re.compile(r"(.+?)\s+per\s+(gpu|node)", re.IGNORECASE)
LARGEST = 1 << 20


def read_topology(text: str, ranks: int | None = None) -> Topology:
    """The topology that ``text`` describes: a line, JSON, or the path of a JSON file, of a plan, or of
    ``chakra-et measure-network``.

    ``ranks``: the required number of ranks, from which missing numbers of nodes or ranks in the text follow.
    Raises ``TraceError``.
    """
    text = text.strip()
    if text.startswith("{") or text.lower().endswith(".json"):
        topology = _from_json(text, ranks)
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
    read = _Read()
    for part in _parts(text):
        _take(read, part, text)
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


def _parts(text: str) -> list[str]:
    """The comma-separated parts, with node presets expanded."""
    parts: list[str] = []
    for part in text.split(","):
        preset = networks.node(part.strip())
        parts += [each.strip() for each in (preset or part).split(",")]
    return parts


def _take(read: _Read, part: str, text: str) -> None:
    counted = _COUNTED.fullmatch(part)
    if counted:
        count = int(counted[1])
        if count < 1:
            raise TraceError(f"topology {text!r}: {part!r} must be at least 1")
        if counted[2].lower().startswith("node"):
            read.nodes = count
        else:
            read.ranks = count
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
    if read.latency is not None:
        return bandwidth, read.latency
    latency, assumed = networks.assumed_latency("between_nodes")
    notes.append(f"no latency between nodes was given: {assumed} is assumed")
    return bandwidth, latency


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
    latency = read.latency
    if latency is None:
        latency, assumed = networks.assumed_latency("between_nodes")
        notes.append(f"no latency was given: {assumed} is assumed")
    dimension = Dimension(total, read.bandwidth, latency, read.kind)
    return Topology((dimension,), name=text, notes=tuple(notes))


def _from_json(text: str, ranks: int | None) -> Topology:
    where = "--topology" if text.startswith("{") else text
    try:
        entry = json.loads(text if text.startswith("{") else read_bytes(text))
    except OSError as error:
        raise TraceError(f"{text}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: is not JSON ({error})") from None
    if isinstance(entry, dict) and ranks is not None and isinstance(entry.get("plans"), list):
        if not entry["plans"]:
            raise TraceError(f"{where}: holds no plan: write it with fasop plan --json")
        return planned_topology(entry["plans"][0], ranks, f"{where}: its first plan")
    if isinstance(entry, dict) and ranks is not None and MODEL_FORMAT in str(entry.get("format")):
        return replace(read_model(text).topology(ranks), name=f"the network of {Path(text).name}")
    if not isinstance(entry, dict) or not isinstance(entry.get("dimensions") or None, list):
        raise TraceError(f'{where}: needs "dimensions": a list of {{"size", "bandwidth", "latency", "kind"}}')
    unknown = set(entry) - {"dimensions", "memory", "peak", "name"}
    if unknown:
        raise TraceError(
            f"{where}: has an unknown key {min(unknown)!r}: use dimensions, memory, peak and name"
        )
    try:
        dimensions = tuple(_dimension(each, number) for number, each in enumerate(entry["dimensions"]))
        memory = parse_bandwidth(str(entry["memory"])) if "memory" in entry else math.inf
        peak = parse_rate(str(entry["peak"])) if "peak" in entry else None
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from None
    name = str(entry.get("name") or " × ".join(str(dimension.size) for dimension in dimensions))
    kept = tuple(dimension for dimension in dimensions if dimension.size > 1)
    return Topology(kept, memory / networks.REDUCTION_PASSES, 0.0, name, peak)


def _dimension(entry: Any, number: int) -> Dimension:
    if not isinstance(entry, dict) or not {"size", "bandwidth"} <= set(entry):
        raise TraceError(f"dimension {number + 1} needs a size and a bandwidth")
    unknown = set(entry) - {"size", "bandwidth", "latency", "kind"}
    if unknown:
        raise TraceError(f"dimension {number + 1} has an unknown key {min(unknown)!r}")
    size, kind = entry["size"], entry.get("kind", "Switch")
    if type(size) is not int or not 1 <= size <= LARGEST:
        raise TraceError(f"dimension {number + 1} has size {size!r}: give a number of ranks from 1 on")
    if kind not in get_args(Kind):
        raise TraceError(f"dimension {number + 1} has kind {kind!r}: use {', '.join(get_args(Kind))}")
    latency = parse_latency(str(entry["latency"])) if "latency" in entry else 0.0
    return Dimension(size, parse_bandwidth(str(entry["bandwidth"])), latency, kind)


def planned_topology(plan: Any, ranks: int, where: str) -> Topology:
    """The network of one entry of a file of plans. ``where`` begins a ``TraceError``.

    The planner shares the bandwidth of a node among what leaves it at once, takes 5% of it for losses, and
    lets the slowest link of a ring decide; a dimension has one bandwidth per GPU, so that the bytes of each
    message stand for what differs.
    """
    try:
        topology = _planned(plan, plan["cluster"])
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        raise TraceError(f"{where} isn't a plan that can be read: write it with fasop plan --json") from None
    if topology.ranks != ranks:
        raise TraceError(
            f"{where} is for {topology.ranks} GPUs, and the set has {ranks} ranks: give the plan of this set"
        )
    if ranks < 2:
        raise TraceError(f"{where} is for one GPU: there is no network to simulate")
    return topology


def _planned(plan: Mapping[str, Any], cluster: Mapping[str, Any]) -> Topology:
    kinds = {gpu["name"]: gpu for gpu in cluster["gpus"]}
    used = [kinds[name] for name in dict.fromkeys(plan["placement"])]
    per_node, nodes = int(cluster["gpus_per_node"]), len(plan["placement"])
    intra = min(gpu["intra_bandwidth"] / (per_node if gpu["shared_bus"] else 1) for gpu in used) / 8
    inter = min(gpu["inter_bandwidth"] for gpu in used) / 8 / INTER_LOSS / per_node
    intra_ns = max(gpu["intra_latency"] for gpu in used) * 1e9 or HOP_NS
    inter_ns = max(gpu["inter_latency"] for gpu in used) * 1e9 or HOP_NS
    dimensions = (Dimension(per_node, intra, intra_ns), Dimension(nodes, inter, inter_ns))
    note = (
        "the planner's links are shared, lossy and unequal, and a dimension has one bandwidth: the bytes of "
        "each message and collective are those with which it lasts as long as planned"
    )
    name = f"{cluster['name']} as planned"
    kept = tuple(dimension for dimension in dimensions if dimension.size > 1)
    return Topology(kept, name=name, notes=(note,), effective=True)
