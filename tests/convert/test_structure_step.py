"""Operators of timing steps get the tensors of the same operators in the structure step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from chakra_et.convert.graph.linked import _matched


def device(*events: tuple[str, int, int, int]) -> Any:
    """Events (name, thread, start, record-function id) as the columns of a device trace."""
    names, thread, start, rf_id = zip(*events, strict=True)
    table = list(dict.fromkeys(names))
    return SimpleNamespace(
        names=table,
        name=np.array([table.index(name) for name in names]),
        thread=np.array(thread),
        start=np.array(start),
        rf_id=np.array(rf_id),
        threads=[(0, number) for number in range(20)],
    )


def test_operations_of_gloo_are_matched_by_calls_and_not_by_the_threads_that_took_them() -> None:
    """A bucket of 6 MB got the 32 bytes of the next all-reduce, which another gloo thread began first."""
    reduce = "gloo:all_reduce"
    trace = device(
        ("c10d::allreduce_", 1, 0, 1), (reduce, 7, 10, 2), ("c10d::allreduce_", 1, 20, 3), (reduce, 8, 30, 4),
        # In the next step the first call goes to the other thread, and begins after the second one.
        ("c10d::allreduce_", 1, 100, 11), ("c10d::allreduce_", 1, 120, 13), (reduce, 7, 125, 14),
        (reduce, 8, 130, 12),
    )  # fmt: skip
    pairs = dict(_matched(trace, np.arange(4), np.arange(4, 8), {}).tolist())
    assert pairs == {0: 4, 1: 7, 2: 5, 3: 6}


def test_operations_of_gloo_are_matched_within_their_group() -> None:
    """Two threads with a group each call in another order in each step: sizes went to the other group."""
    reduce = "gloo:all_reduce"
    trace = device((reduce, 7, 0, 2), (reduce, 8, 10, 4), (reduce, 8, 100, 0), (reduce, 7, 110, 0))
    pairs = _matched(trace, np.arange(2), np.arange(2, 4), {7: "1", 8: "2"}).tolist()
    assert dict(pairs) == {0: 3, 1: 2}
