"""$ per step: the nodes that a plan uses, and the traffic that is charged."""

from __future__ import annotations

from collections.abc import Sequence

from fasop.exact.links import Links
from fasop.plans.shapes import Seats


def price_per_step(
    links: Links,
    placement: Sequence[str],
    seconds: float,
    stages: Sequence[Seats],
    message_bytes: float,
    reduced_bytes: Sequence[float],
) -> float:
    """placement: nodes in use; seconds: of a step; message_bytes: that pass each boundary per step, in both
    directions; reduced_bytes: that each stage's replicas send to each neighbour in their ring per step.
    """
    price = links.cluster.price_of(placement) / 3600 * seconds
    for left, right in zip(stages, stages[1:], strict=False):
        price += _charge(links, left[-1][0], right[0][0]) * message_bytes
    for seats, sent in zip(stages, reduced_bytes, strict=True):
        names = [name for name, _ in seats]
        if len(names) > 1:
            ring = zip(names, [*names[1:], names[0]], strict=True)
            price += sum(_charge(links, one, two) * sent for one, two in ring)
    return price


def _charge(links: Links, one: str, two: str) -> float:
    """$ per byte between nodes of two types."""
    link = links.link(one, two)
    return link.price_per_gb / 1e9 if link else 0.0
