"""What a matrix product leaves in L2, and how its tiles share the units."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from chakra_et.cost import gpus
from chakra_et.cost.products import START, _quantising, product_micros, start


def test_a_result_larger_than_l2_takes_as_long_as_memory_writes_it() -> None:
    gpu, edge = gpus.gpu("A100"), 16384.0
    parameters = start(gpu, "16 bit") | {"memory": 0.1}
    (taken,) = product_micros(gpu, parameters, np.array([[1, edge, edge, 16, 1]]), "16 bit").tolist()
    assert taken > 2 * edge**2 / (0.1 * gpu.memory / 1e6)


def test_an_undivided_l2_keeps_all_that_fits() -> None:
    """One in halves fades: each keeps copies of the other's lines."""
    one = gpus.gpu("L40S")
    halves = replace(one, cache=2 * one.cache, parts=2)
    parameters = start(one, "16 bit") | {"memory": 0.1, "cache": 1.0}
    points = np.array([[1, 1, one.cache * share / 8192, 4096, 1] for share in (0.2, 0.85, 1.15, 2.0)])
    undivided, divided = (product_micros(gpu, parameters, points, "16 bit") for gpu in (one, halves))
    assert undivided[0] == divided[0] and undivided[3] == divided[3]
    assert undivided[1] < divided[1] / 10 and undivided[2] > divided[2]


def test_small_tiles_share_a_unit() -> None:
    """Columns of 64 take tiles of half the width, and two of 256 by 64 fit in a unit as one of 256 by 128."""
    gpu = gpus.gpu("A100")
    parameters = start(gpu, "16 bit") | {"fill": 1e9, "launch": 0.0}
    points = np.array([[1, rows * 256 * gpu.units, 64, 16, 1] for rows in (1, 2, 4)], float)
    one, two, four = product_micros(gpu, parameters, points, "16 bit").tolist()
    assert one == pytest.approx(two, rel=1e-3) and four > 1.5 * two


@pytest.mark.parametrize(("name", "high", "wide"), [("L40S", 32768, 4096), ("H100", 32768, 32768)])
def test_tiles_in_lines_load_operands_again_where_8_bits_are_quantised(
    name: str, high: int, wide: int
) -> None:
    """cuBLAS's products keep their waves square, and so do those of 8 bits that were quantised before."""
    gpu = gpus.gpu(name)
    other = replace(gpu, name="other", like="")
    points = np.array([[1, high, wide, 16384, 1]], float)
    for number, quantised, in_lines in (
        ("8 bit", False, True),
        ("8 bit", True, False),
        ("16 bit", False, False),
    ):
        parameters = start(gpu, number) | {"memory": 0.02}
        (here,), (square,) = (
            product_micros(each, parameters, points, number, quantised).tolist() for each in (gpu, other)
        )
        assert (here > 1.2 * square) if in_lines else here == pytest.approx(square, rel=0.02)


@pytest.mark.parametrize("name", ["H100", "H200", "L40S"])
def test_scaled_products_take_their_librarys_larger_tiles_from_257_rows_on(name: str) -> None:
    """Too few for all units: larger tiles take longer. A library that may choose keeps the small ones."""
    gpu = gpus.gpu(name)
    points = np.array([[1, rows, 128, 16384, 1] for rows in (256, 257)], float)
    few, more = product_micros(gpu, start(gpu, "8 bit"), points, "8 bit")
    assert more > 1.5 * few
    few, more = product_micros(gpu, start(gpu, "8 bit"), points, "8 bit", quantised=True)
    assert more == pytest.approx(few, rel=0.01)


def test_many_rows_are_quantised_sooner_by_a_warp_for_each() -> None:
    """Short rows, so that bytes hardly matter: blocks of 256 threads wait for one another, warps don't."""
    gpu = gpus.gpu("L40S")
    points = np.array([[1, rows, 32, 32, 6] for rows in (64, 852, 16 * gpu.units - 1, 16 * gpu.units)], float)
    few, round_, rounds, warps = _quantising(gpu, start(gpu, "8 bit"), points)
    assert round_ == pytest.approx(few, rel=0.02)
    assert rounds > 1.4 * round_ and warps < 1.02 * round_


def test_a_lone_tile_gets_what_its_unit_can_load() -> None:
    """Idle units leave it L2: on L40S, whose tensor cores need little, more than twice its share of it."""
    gpu = gpus.gpu("L40S")
    parameters = start(gpu, "8 bit") | {"step": 1.0, "fill": 1.0, "launch": 0.01}
    depths = 32768, 65536
    points = np.array([[1, 16, 64, depth, 1] for depth in depths], float)
    taken = product_micros(gpu, parameters, points, "8 bit") - _quantising(gpu, parameters, points)
    cycles = (taken[1] - taken[0]) * gpu.clock / 1e6
    loaded = (16 + 64) * (depths[1] - depths[0])
    share = START["load"] * gpu.peak("8 bit") / gpu.units / gpu.clock * (256 + 128) / (256 * 128) / 2
    assert 2 * share < loaded / cycles < 64


def test_products_of_16_bits_on_hopper_take_cublass_tiles_of_192_rows_and_columns() -> None:
    """A training step's 6,400 × 2,048 by an H200 (``tests/fixtures/gpu``, device-bound): three waves of 192 ×
    192, where tiles of 128 × 256 need a fourth. Not on an A100, not with 8 bits, not where rows aren't
    aligned."""
    points = np.array([[1, 6400, 2048, 2048, 2]], float)
    unaligned = np.hstack([points, [[2.0, 1.0, 0.0]]])
    for name, number, at, taken in (
        ("H200", "16 bit", points, True),
        ("H100", "tf32", points, True),
        ("A100", "16 bit", points, False),
        ("H200", "8 bit", points, False),
        ("H200", "16 bit", unaligned, False),
    ):
        gpu = replace(gpus.gpu(name), units=132)
        other = replace(gpu, name="other", like="")
        here, without = (
            float(product_micros(each, start(gpu, number), at, number, True)[0]) for each in (gpu, other)
        )
        assert (here < 0.9 * without) if taken else (here == without)
