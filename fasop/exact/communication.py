"""Seconds of messages and collectives on the links that a group of GPUs really uses.

A ring sends 2(n−1)/n of an all-reduce's bytes, and (n−1)/n of a reduce-scatter's or all-gather's, over each
of its links (Patarasu and Yuan 2009). What a ring gets of a link is shared with the other rings of the node.
"""

from __future__ import annotations

import math

import numpy as np

from chakra_et.cost.topology import COLLECTIVE_START, HOP_NS, INTER_LOSS, INTRA_LOSS
from fasop.inputs.clusters import Cluster
from fasop.memo import memo
from fasop.plans.shapes import Group, Part, group_size

BITS = 8
HOP = HOP_NS / 1e9
# A sender is free again once the rest fits into the transport's buffer: NCCL_BUFFSIZE's default.
SEND_BUFFER = 4 * 2**20
NEAR_NODES = 4  # to which a token goes at most, where experts are chosen by groups (DeepSeek-V3, 2024)


class Communication:
    """The links of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._gpus = {gpu.name: gpu for gpu in cluster.gpus}

    def between(self, one: str, two: str, size: float) -> tuple[float, float]:
        """bit/s and seconds of latency of a message of ``size`` bytes between two nodes of these types.

        A link of its own in the cluster file is taken to give what messages reach, the types' bandwidths what
        the network is sold for.
        """
        a, b = self._gpus[one], self._gpus[two]
        link = next((link for link in self.cluster.links if set(link.between) == {one, two}), None)
        if link is None:
            sold = min(a.inter_bandwidth, b.inter_bandwidth)
            return sold / INTER_LOSS, max(a.inter_latency, b.inter_latency)
        bandwidth = link.bandwidth
        if link.points:
            # Interpolated over the logarithm of the size.
            sizes, rates = zip(*link.points, strict=True)
            bandwidth = float(np.interp(math.log(max(size, 1e-9)), np.log(sizes), rates))
        return bandwidth, max(link.latency, a.inter_latency, b.inter_latency)

    @memo
    def collective(self, group: Group, size: float, rings: int = 1, reduces: bool = True) -> float:
        """Seconds of a collective of ``size`` bytes per rank: an all-reduce, or with ``reduces`` False one
        half of it, a reduce-scatter or an all-gather.

        rings: groups like this one that are active at once, each with as many GPUs in the same nodes.
        """
        begin, per_byte = self.ring(group, size, rings, reduces)
        return begin + size * per_byte

    @memo
    def ring(self, group: Group, size: float, rings: int, reduces: bool) -> tuple[float, float]:
        """Seconds until a ring collective begins and for its hops, and seconds per byte, for sizes near
        ``size``.
        """
        n = group_size(group)
        if n < 2:
            return 0.0, 0.0
        passes = (2 if reduces else 1) * (n - 1)
        seconds_per_bit, hop = self._slowest(group, size / n, rings)
        return COLLECTIVE_START + passes * hop, passes * BITS / n * seconds_per_bit

    @memo
    def to_neighbour(self, group: Group, size: float, rings: int) -> float:
        """Seconds of a message of ``size`` bytes from each GPU of a group to the next, all at once as in a
        collective; rings: groups like this one that are active at once.
        """
        # Over each node's network one GPU of a ring sends.
        edges = group if len(group) == 1 else tuple(part._replace(gpus=1) for part in group)
        seconds_per_bit, hop = self._slowest(edges, size, rings)
        return hop + size * BITS * seconds_per_bit

    @memo
    def exchange(self, group: Group, size: float, copies: float, rings: int) -> float:
        """Seconds in which each GPU of a group sends ``copies`` of each of its tokens on average, ``size``
        bytes in all, to others, an equal share to each.

        rings: groups like this one that are active at once.
        """
        n = group_size(group)
        if n < 2:
            return 0.0
        seconds, hop = 0.0, 0.0
        for part in group:
            gpu = self._gpus[part.gpu]
            inside = size * copies * (part.gpus - 1) / n * (rings * part.gpus if gpu.shared_bus else 1)
            seconds = max(seconds, inside * BITS / gpu.intra_bandwidth)
            hop = max(hop, gpu.intra_latency or HOP)
            for other in group:
                if other.node != part.node:
                    bandwidth, latency = self.between(part.gpu, other.gpu, size / n)
                    # A node gets each token once, and sends it on.
                    sent = min(copies * (n - part.gpus) / n, len(group) - 1, NEAR_NODES)
                    outside = size * sent * rings * part.gpus
                    seconds = max(seconds, outside * BITS / bandwidth)
                    hop = max(hop, latency or HOP)
        return COLLECTIVE_START + (n - 1) * hop + seconds

    def _slowest(self, group: Group, size: float, rings: int) -> tuple[float, float]:
        """Seconds per bit over the slowest link of a ring, and the longest latency."""
        seconds, hop = 0.0, 0.0
        for part in group:
            gpu = self._gpus[part.gpu]
            if part.gpus > 1:
                # On a shared bus all groups of the node send at once, those of other stages too.
                inside = max(self.cluster.size(gpu) // part.gpus, 1)
                if len(group) > 1:
                    inside = min(inside, rings)
                seconds = max(seconds, (inside if gpu.shared_bus else 1) / gpu.intra_bandwidth)
                hop = max(hop, gpu.intra_latency or HOP)
        if len(group) > 1:
            for part, other in zip(group, (*group[1:], group[0]), strict=True):
                bandwidth, latency = self.between(part.gpu, other.gpu, size)
                for end in (part, other):
                    gpu = self._gpus[end.gpu]
                    if gpu.gpu_bandwidth:
                        bandwidth = min(bandwidth, gpu.gpu_bandwidth * end.gpus * rings)
                seconds = max(seconds, rings / bandwidth)
                hop = max(hop, latency or HOP)
        return seconds, hop

    @memo
    def message(self, source: Group, target: Group, size: float, flows: int = 1) -> float:
        """Seconds of an output of ``size`` bytes in all, which the GPUs of ``source`` send to those of the
        next stage, each an equal share to its counterpart.

        flows: groups that send from the same nodes at once.
        """
        senders = group_size(source)
        if {part.node for part in source} == {part.node for part in target} and len(source) == 1:
            gpu = self._gpus[source[0].gpu]
            share = size / senders * (senders * flows if gpu.shared_bus else 1)
            return share * BITS * INTRA_LOSS / gpu.intra_bandwidth + gpu.intra_latency
        seconds = 0.0
        for one, two in _crossings(source, target):
            bandwidth, latency = self.between(one.gpu, two.gpu, size / senders)
            load = 0.0
            for end, group in ((one, source), (two, target)):
                gpu = self._gpus[end.gpu]
                share = size * end.gpus / group_size(group)
                own = gpu.gpu_bandwidth * end.gpus if gpu.gpu_bandwidth else math.inf
                load = max(load, share / min(bandwidth / flows, own))
            seconds = max(seconds, load * BITS + latency)
        return seconds


def _crossings(source: Group, target: Group) -> list[tuple[Part, Part]]:
    """The pairs of nodes that exchange something, where each GPU sends to its counterpart."""
    total_source, total_target = (group_size(group) for group in (source, target))
    pairs, i, j, sent, received = [], 0, 0, 0.0, 0.0
    while i < len(source) and j < len(target):
        pairs.append((source[i], target[j]))
        end_source = sent + source[i].gpus / total_source
        end_target = received + target[j].gpus / total_target
        if end_source <= end_target + 1e-12:
            i, sent = i + 1, end_source
        if end_target <= end_source + 1e-12:
            j, received = j + 1, end_target
    return [(one, two) for one, two in pairs if one.node != two.node] or pairs[:1]
