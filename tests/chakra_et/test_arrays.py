"""Codes of values against numpy's, and strings packed into one buffer."""

from __future__ import annotations

import numpy as np
import pytest

from chakra_et import arrays
from chakra_et.et import wire


@pytest.mark.parametrize("spread", [3, 1 << 40])
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_distinct_values_are_numpys(dtype: type, spread: int) -> None:
    bounds = np.iinfo(dtype)
    random = np.random.default_rng(1)
    low, high = max(bounds.min, -spread), min(bounds.max, spread)
    values = random.integers(low, high, 500, dtype=dtype)
    for part in (values, values[:1], values[:0], np.sort(values)):
        pairs, index = arrays.coded_pairs(part, part[::-1])
        table = np.stack([part, part[::-1]], axis=1)
        assert pairs == [tuple(pair) for pair in np.unique(table, axis=0).tolist()]
        assert (np.array(pairs, dtype=dtype).reshape(-1, 2)[index] == table).all()
        assert (arrays.narrowed(part) == part).all()


def test_strings_in_one_buffer() -> None:
    texts = ["", "a", "größe", "", "日本語"]
    parts = [wire.byte_strings([text.encode() for text in some]) for some in (texts[:2], [], texts[2:])]
    found = wire.joined(parts)
    assert [text.decode() for text in found] == texts and found[4].decode() == texts[4]
    assert list(found.take(np.array([4, 1]))) == [texts[4].encode(), b"a"] == [found[4], *found[1:2]]
