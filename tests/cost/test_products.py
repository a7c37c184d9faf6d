"""What a matrix product leaves in L2, and how its tiles share the units."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from chakra_et.cost import gpus
from chakra_et.cost.products import product_micros, start


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
        assert (here > 1.2 * square) if in_lines else (here == square)


@pytest.mark.parametrize("name", ["H100", "H200", "L40S"])
def test_scaled_products_take_their_librarys_larger_tiles_from_257_rows_on(name: str) -> None:
    """Too few for all units: larger tiles take longer. A library that may choose keeps the small ones."""
    gpu = gpus.gpu(name)
    points = np.array([[1, rows, 128, 16384, 1] for rows in (256, 257)], float)
    few, more = product_micros(gpu, start(gpu, "8 bit"), points, "8 bit")
    assert more > 1.5 * few
    few, more = product_micros(gpu, start(gpu, "8 bit"), points, "8 bit", quantised=True)
    assert more == pytest.approx(few, rel=0.01)
