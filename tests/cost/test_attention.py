"""How attention of few queries is divided among the units of a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.cost_tables import read_own_attention
from chakra_et.cost import gpus
from chakra_et.cost.attention import BACKWARD_PASS, FORWARD, INTO_CACHE, attention_micros, start
from chakra_et.cost.kernel_times import kernel_times


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


def test_a_backward_pass_has_five_products_for_two_and_kernels_beside_it() -> None:
    gpu = gpus.gpu("H100")
    point = np.array([[2, 16, 16, 8192, 8192, 128, 1, call] for call in (FORWARD, BACKWARD_PASS)], float)
    forward, backward = attention_micros(gpu, start(gpu), point)
    beside = 14 * 2 * 16 * 8192 * 128 / (gpu.memory * start(gpu)["memory"]) * 1e6
    assert backward == pytest.approx(2.5 * forward + beside, rel=0.05)
    shared = point.copy()
    shared[:, 2] = 4  # gradients of keys and values are summed over the heads that share them
    more = attention_micros(gpu, start(gpu), shared)[1] - backward
    assert more == pytest.approx(beside * 8 / 14, rel=0.3)


def test_a_pass_without_a_cache_writes_none_and_starts_sooner() -> None:
    gpu = gpus.gpu("H100")
    point = np.array([[8, 16, 16, 512, 512, 128, 1, call] for call in (FORWARD, INTO_CACHE)], float)
    forward, cached = attention_micros(gpu, start(gpu), point)
    assert 0.5 < forward / cached < 0.9


@pytest.mark.parametrize("call", [FORWARD, BACKWARD_PASS])
def test_passes_of_pytorch_on_an_h200(call: int, repo_root: Path) -> None:
    """The constants were chosen with these in sight; without them the errors were 21%."""
    pytest.importorskip("pandas")
    table = read_own_attention(repo_root / "benchmarks/data/h200", call)["H200 torch"]
    said = kernel_times(table.gpu).micros("attention", table.points)
    assert np.abs(said / table.micros - 1).mean() < 0.08
