"""How attention of few queries is divided among the units of a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from chakra_et.cost import gpus
from chakra_et.cost.attention import FORWARD, attention_micros, start


def micros(blocks: int, keys: int, queries: int = 1, **given: float) -> float:
    """Of ``blocks`` heads with one query each, where all that counts is the longest part on one unit."""
    gpu = gpus.gpu("H100")
    least = {"single": 1e3, "memory": 1e9, "cache": 1e9, "launch": 0.0, "fill": 0.0}
    point = [1, blocks, blocks, queries, keys, 128, 0, FORWARD]
    return float(attention_micros(gpu, start(gpu) | least | given, np.array([point], float))[0])


def test_keys_are_divided_among_units_without_work() -> None:
    units, keys = gpus.gpu("H100").units, 1 << 16
    whole = micros(2 * units, keys)
    assert micros(units, keys) == pytest.approx(whole, rel=1e-3)
    assert micros(3 * units // 4, keys) == pytest.approx(whole, rel=1e-3), (
        "too few units are left for a second part"
    )
    assert [round(whole / micros(units // parts, keys)) for parts in (2, 4, 11)] == [2, 4, 11]


def test_a_part_has_256_keys_at_least() -> None:
    assert [round(micros(8, keys) / micros(8, 64), 2) for keys in (128, 256, 512, 1024)] == [2, 4, 4, 4]


def test_units_without_a_block_in_the_last_wave_cost_part_of_a_wave() -> None:
    units = gpus.gpu("H100").units
    one, more, two = (
        micros(blocks, 4096, 128, single=0.0, tail=0.5) for blocks in (units, units + 1, 2 * units)
    )
    assert (more / one, two / one) == (pytest.approx(1.5, rel=0.01), pytest.approx(2))
