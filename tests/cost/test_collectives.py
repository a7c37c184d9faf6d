"""Times of collectives against a network that is simulated message by message."""

from __future__ import annotations

import pytest

from chakra_et.cost.collectives import collective_time, message_time
from chakra_et.cost.topology import Dimension, Topology
from chakra_et.et.columns import CollectiveType as Collective

ALPHA, BETA, GAMMA, CALL = 700.0, 0.25, 0.125, 40.0
NODE = Dimension(4, 1e9 / BETA, ALPHA)
FLAT = Topology((Dimension(16, 1e9 / BETA, ALPHA),), reduce_bandwidth=1e9 / GAMMA, call_ns=CALL)
TWO = Topology((NODE, Dimension(4, 1e9 / (8 * BETA), 10 * ALPHA)), reduce_bandwidth=1e9 / GAMMA, call_ns=CALL)


def ring_run(members: int, chunks: list[list[tuple[float, bool]]]) -> float:
    """Pass chunks around a ring: ``chunks[step]`` has (bytes, reduced) of the messages sent in that step by
    each member; a step starts when the message of the previous step has arrived and is reduced."""
    ready = [0.0] * members
    for step in chunks:
        arrived = [ready[rank] + ALPHA + step[rank][0] * BETA for rank in range(members)]
        ready = [arrived[rank - 1] + step[rank - 1][0] * GAMMA * step[rank - 1][1] for rank in range(members)]
    return max(ready)


def whole(members: int, steps: int, size: float, reduced: bool) -> list[list[tuple[float, bool]]]:
    return [[(size, reduced)] * members for _ in range(steps)]


@pytest.mark.parametrize("members", [2, 3, 8, 16])
def test_a_ring_takes_what_its_messages_take(members: int) -> None:
    size, ranks = 1 << 20, range(members)
    scatter = whole(members, members - 1, size / members, True)
    gather = whole(members, members - 1, size / members, False)
    shards = whole(members, members - 1, size, False)
    for kind, steps in [
        (Collective.ALL_REDUCE, scatter + gather),
        (Collective.REDUCE_SCATTER, scatter),
        (Collective.ALL_GATHER, shards),
        (Collective.ALL_TO_ALL, gather),
    ]:
        expected = CALL + ring_run(members, steps)
        assert collective_time(kind, size, ranks, FLAT) == pytest.approx(expected), kind


def test_members_use_the_links_between_their_places() -> None:
    within = collective_time(Collective.ALL_REDUCE, 1 << 20, (4, 5, 6, 7), TWO)
    across = collective_time(Collective.ALL_REDUCE, 1 << 20, (1, 5, 9, 13), TWO)
    assert within == pytest.approx(collective_time(Collective.ALL_REDUCE, 1 << 20, range(4), FLAT))
    assert across > 5 * within
    # Three of one node and one of another: a ring over the slower links, too.
    uneven = collective_time(Collective.ALL_REDUCE, 1 << 20, (0, 1, 2, 4), TWO)
    assert uneven == pytest.approx(across)


def test_rooted_collectives_and_a_barrier() -> None:
    n, p = 1 << 16, 8
    for kind, expected in [
        (Collective.BROADCAST, (p - 1) * ALPHA + n * BETA),
        (Collective.REDUCE, (p - 1) * ALPHA + n * (BETA + GAMMA)),
        (Collective.GATHER, (p - 1) * (ALPHA + n * BETA)),
        (Collective.SCATTER, (p - 1) * ALPHA + (p - 1) / p * n * BETA),
        (Collective.BARRIER, 3 * ALPHA),
    ]:
        assert collective_time(kind, n, range(p), FLAT) == pytest.approx(CALL + expected), kind


def test_messages_use_the_outermost_link_that_they_cross() -> None:
    assert message_time(1000, 0, 3, TWO) == pytest.approx(CALL + ALPHA + 1000 * BETA)
    assert message_time(1000, 3, 4, TWO) == pytest.approx(CALL + 10 * ALPHA + 8000 * BETA)


def test_one_member_waits_for_nobody() -> None:
    assert collective_time(Collective.ALL_REDUCE, 1 << 30, (3,), FLAT) == CALL


def test_a_rank_outside_the_topology_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks 0 to 16 are not all in a topology of 16"):
        collective_time(Collective.ALL_REDUCE, 8, range(17), FLAT)
