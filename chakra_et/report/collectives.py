"""Communication between ranks: bandwidth, skew, bytes from rank to rank, and how late each rank arrives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from chakra_et.cost import nccl, networks
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.et.node_attributes import splits
from chakra_et.report.run import COMM_NAMES, ReportRun

MESSAGES = "send", "receive"


def nccl_size(kind: str, size: int, ranks: int) -> tuple[int, float | None]:
    """The size in the sense of nccl-tests, from the bytes that one rank puts in (``comm_size``; of a scatter
    it is what one rank takes out, except on its root), and the bus bandwidth over the algorithm bandwidth,
    None for a type without one."""
    if kind in (*MESSAGES, "unknown"):
        return size, 1.0 if kind in MESSAGES else None
    of = CollectiveType(COMM_NAMES.index(kind))
    whole = size * ranks if kind == "scatter" else int(nccl.whole_bytes(of, size, ranks))
    return whole, None if kind == "barrier" else nccl.bus_factor(of, ranks)


def _usual_ns(gpu: str, kind: str, size: int, ranks: int) -> float | None:
    """What NCCL takes among GPUs of one node, None where that isn't known or the ranks need several nodes."""
    try:
        if not gpu or size <= 0 or kind == "unknown" or ranks > networks.gpu(gpu).domain:
            return None
        node = nccl.node(gpu, "")
    except TraceError:
        return None
    of = COMM_NAMES.index(kind)
    return node.message(size) if kind in MESSAGES else float(node.time(CollectiveType(of), size, ranks))


def collectives(run: ReportRun) -> list[dict[str, Any]]:
    """The communication of a run by type, size and group, over all ranks; most time first.

    ``bytes``: what NCCL's tests call the size: the whole buffer, also of an all-gather, of which each rank
    puts in a part. ``transfer_ns``: of the mean operation, once all ranks are there. ``algorithm`` and
    ``bus``: GB/s (10^9 bytes), None where size or time are unknown. ``skew_ns``: from the first to the last
    arrival (``run.arrivals``), mean and most; None where members lack. ``last``: rank → how often last.
    ``usual_bus``: the bus bandwidth that NCCL reaches with this size among such GPUs of one node, see
    ``cost.nccl``; None where the files don't name the GPU, or its node has fewer.
    """
    graph = run.graph
    node = np.flatnonzero(graph.types >= NodeType.COMM_SEND)
    kind, size = run.comm_types[node], graph.attribute("comm_size", 0)[node]
    keys, which = np.unique(np.stack([kind, size, graph.group[node]]), axis=1, return_inverse=True)
    order = np.argsort(which.reshape(-1), kind="stable")
    of_key = np.split(node[order], np.cumsum(np.bincount(which.reshape(-1)))[:-1])
    transfer = run.end_ns - run.start_ns - run.wait_ns
    (last_of, start), members_of = run.arrivals, group_members(run)
    first, matched = np.full(len(graph), np.iinfo(np.int64).max), last_of >= 0  # by the last member
    np.minimum.at(first, last_of[matched], start[matched])
    found = []
    for (code, each, group), own in zip(keys.T.tolist(), of_key, strict=False):  # of none, one empty part
        name = COMM_NAMES[code]
        message = name in MESSAGES
        members = 2 if message else len(members_of[group])
        last = np.unique(last_of[own])
        last = last[last >= 0]
        skew = start[last] - first[last]
        late = Counter(graph.trace_of[last].tolist())
        whole, factor = nccl_size(name, each, members)
        mean = float(transfer[own].mean())
        algorithm = whole / mean if whole > 0 and mean > 0 and name != "barrier" else None
        factor = factor if members > 1 else None
        on_gpu = (graph.attribute("stream", -1)[own] >= 0).all()  # not gloo's
        usual = _usual_ns(run.rates.gpu if on_gpu else "", name, whole, members)
        found.append(
            {
                "type": name,
                "bytes": whole,
                "group": graph.groups[group] if not message else "",
                "ranks": members,
                "count": len(last) or int(np.bincount(graph.trace_of[own]).max()),
                "transfer_ns": mean,
                "algorithm": algorithm,
                "bus": None if algorithm is None or factor is None else algorithm * factor,
                "skew_ns": (float(skew.mean()), int(skew.max())) if len(skew) else None,
                "last": {run.ranks[at]: late[at] for at in sorted(late)},
                "usual_bus": usual and factor and whole * factor / usual,
            }
        )
    by_name = sorted(found, key=lambda each: (each["type"], each["bytes"], each["group"]))
    return sorted(by_name, key=lambda each: -each["transfer_ns"] * each["count"])


def group_members(run: ReportRun) -> list[Sequence[int]]:
    """The ranks of each group: from the groups file, or else those that use it here; of group 0 all."""
    graph, found = run.graph, []
    communicates = graph.types >= NodeType.COMM_SEND
    for group, name in enumerate(graph.groups):
        users = np.unique(graph.trace_of[communicates & (graph.group == group)]).tolist()
        every = range(graph.world_size) if name == "0" else ()
        found.append(run.job.comm_groups.get(name) or sorted({*every, *(run.ranks[at] for at in users)}))
    return found


def split_imbalance(run: ReportRun) -> str:
    """Which rank gets most rows in uneven all-to-alls, as of experts that get more tokens; "" without any."""
    got: dict[int, int] = {}
    for rank, trace in zip(run.ranks, run.traces, strict=True):
        if known := splits(trace, "comm_out_split"):
            got[rank] = sum(map(sum, known.values()))
    if len(got) < 2 or not sum(got.values()):
        return ""
    most = max(got, key=lambda rank: got[rank])
    share = got[most] * len(got) / sum(got.values())
    return f"rank {most} gets most rows, {share:.2f} × the mean of {len(got)} ranks"


def traffic(run: ReportRun) -> dict[str, np.ndarray]:
    """From rank to rank, rows send: bytes of ``messages`` and ``collectives``, and the time in which these
    are on their way (``message_ns``, ``collective_ns``), int64[T, T].

    Messages are recorded. The paths of a collective are the library's choice. Here an all-to-all is spread
    evenly over the members; all others use a ring in rank order, which moves ``bus_factor`` times the size
    over each link (NCCL's ring algorithm). Ranks without a file have no row or column.
    """
    graph, count = run.graph, len(run.ranks)
    found = np.zeros((4, count, count), dtype=np.int64)
    place = {rank: at for at, rank in enumerate(run.ranks)}
    size, kind = graph.attribute("comm_size", 0), run.comm_types
    target, transfer = graph.attribute("comm_dst", -1), run.end_ns - run.start_ns - run.wait_ns
    members = group_members(run)
    for at in np.flatnonzero(np.isin(graph.types, (NodeType.COMM_SEND, NodeType.COMM_COLL))).tolist():
        own, name = run.ranks[graph.trace_of[at]], COMM_NAMES[kind[at]]
        ring = [own, int(target[at])] if name == "send" else members[int(graph.group[at])]
        whole, factor = nccl_size(name, int(size[at]), len(ring))
        if own not in ring or len(ring) < 2 or factor is None:
            continue
        to, part = [ring[(ring.index(own) + 1) % len(ring)]], whole * factor
        if name == "all-to-all":
            to, part = [other for other in ring if other != own], whole / len(ring)
        first = 0 if name == "send" else 2
        known = [place[rank] for rank in to if rank in place]
        found[first, place[own], known] += round(part)
        found[first + 1, place[own], known] += transfer[at]
    return dict(zip(("messages", "message_ns", "collectives", "collective_ns"), found, strict=True))
