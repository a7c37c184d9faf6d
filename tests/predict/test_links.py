"""Transfers that share links."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_et.simulate.run import share


def ends(begin: list[float], wire: list[float], users: list[list[int]]) -> list[float]:
    return [round(float(end), 2) for end in share(np.array(begin), np.array(wire), users)]


def test_two_at_once_take_twice_as_long() -> None:
    assert ends([0, 0], [100, 100], [[0, 1], [0, 1]]) == [200, 200]


def test_a_later_one_takes_half_of_what_is_left() -> None:
    # 50 alone, then 50 at half the rate until 150; the other has then 50 of 100, alone until 200.
    assert ends([0, 50], [100, 100], [[0, 1], [0, 1]]) == [150, 200]


def test_other_ranks_use_other_links() -> None:
    assert ends([0, 0], [100, 100], [[0, 1], [2, 3]]) == [100, 100]


def test_the_most_crowded_link_decides() -> None:
    # Rank 1 is in both others' transfers: all three go on at half the rate at most.
    assert ends([0, 0, 0], [100, 100, 100], [[0, 1], [1, 2], [3, 4]]) == [200, 200, 100]


def test_nothing_to_send_ends_at_once() -> None:
    assert ends([5, 7], [0, 10], [[0, 1], [0, 1]]) == [5, 17]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 500)), min_size=1, max_size=12))
def test_a_shared_link_is_never_idle_while_something_waits(transfers: list[tuple[int, int]]) -> None:
    begin, wire = (np.array(column, np.float64) for column in zip(*transfers, strict=True))
    end = share(begin, wire, [[0, 1]] * len(begin))
    # One link in any order that wastes nothing: busy periods end when a first-come queue's do.
    now = 0.0
    for at, work in sorted(transfers):
        now = max(now, at) + work
    assert abs(end.max() - now) < 0.1
    assert (end - begin >= wire - 0.1).all()
