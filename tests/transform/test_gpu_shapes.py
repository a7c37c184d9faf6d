"""What operators work on: from recorded shapes, strides and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chakra_et.convert.pair import convert_pair
from chakra_et.cost.operator_times import OperatorCall
from chakra_et.et import file as et_file
from chakra_et.simulate.run import make_run
from chakra_et.traces.fields import STRIDES
from chakra_et.traces.sets import Pair
from chakra_et.transform.gpu import launched_operators
from chakra_et.transform.gpu_shapes import described, memory_layout
from tests.generator.hand_made import annotation, call, kernel, op, write_kineto

torch = pytest.importorskip("torch")
BF16 = "c10::BFloat16"


def described_as(kind: str, name: str, *arguments: Any, strides: list | None = None) -> OperatorCall:
    """Of a call with tensors of these shapes, and other values as they are."""
    shapes = [list(each) if isinstance(each, tuple) else [] for each in arguments]
    types = [f"Tensor({BF16})" if isinstance(each, tuple) else "Scalar" for each in arguments]
    values = ["" if isinstance(each, tuple) else str(each) for each in arguments]
    texts = (json.dumps(each).encode() for each in (values, shapes, types))
    return described(kind, name, *texts, json.dumps(strides) if strides else "")


@pytest.mark.parametrize(
    ("dims", "strided", "apart"),
    [
        ((0, 1, 2, 3), False, 0),
        ((0, 2, 1, 3), True, 0),  # heads before tokens: rows of a head stay in one piece
        ((0, 2, 3, 1), True, 32),
        ((1, 0, 2, 3), True, 0),
        ((0, 1, 3, 2), True, 8),
    ],
)
def test_a_copy_of_a_permuted_tensor(dims: tuple[int, ...], strided: bool, apart: int) -> None:
    source = torch.empty(4, 32, 8, 64).permute(dims)
    made = source.contiguous() if strided else torch.empty_like(source)
    if dims == (0, 1, 3, 2):
        assert source.shape[-1] == 8
    found = memory_layout([made.shape, source.shape], [made.stride(), source.stride()], True)
    assert found is not None
    assert (found.elements, found.touched) == (source.numel(), (source.numel(),) * 2)
    assert (found.strided, found.apart) == (strided, apart)


def test_tensors_that_lie_alike_count_as_one_piece() -> None:
    """As images with channels last: PyTorch crosses all of them in the order of memory."""
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = memory_layout([image.shape] * 2, [image.stride()] * 2, False)
    assert found is not None and not found.strided
    mixed = memory_layout([image.shape] * 2, [image.stride(), torch.empty(image.shape).stride()], False)
    assert mixed is not None and mixed.strided


@pytest.mark.parametrize(("other", "touched"), [((768,), 768), ((4, 9, 1), 36), ((1, 1, 1), 1)])
def test_what_broadcasting_repeats_is_read_once(other: tuple[int, ...], touched: int) -> None:
    found = memory_layout([(4, 9, 768), other], [None, None], False)
    assert found is not None and found.strided
    assert found.touched == (4 * 9 * 768, touched)
    assert memory_layout([(4, 9), (5, 9)], [None, None], False) is None


def test_bytes_of_elementwise_operators() -> None:
    size = 4 * 9 * 768
    add = described_as("elementwise", "aten::add", (4, 9, 768), (768,), 1)
    assert (add.moved, add.operations, add.strided) == (2 * (2 * size + 768), size, True)
    assert described_as("elementwise", "aten::add_", (4, 9, 768), (4, 9, 768), 1).moved == 2 * 3 * size
    assert described_as("copy", "aten::copy_", (4, 9, 768), (4, 9, 768), False).moved == 2 * 2 * size
    assert described_as("elementwise", "aten::fill_", (4, 9, 768), 0).moved == 2 * size
    assert described_as("elementwise", "aten::eq", (4, 9, 768), 0).moved == 3 * size  # a byte each
    assert described_as("elementwise", "aten::gelu", (4, 9, 768)).special


def test_rows_of_products_are_aligned_as_they_lie() -> None:
    weight = described_as("matrix product", "aten::mm", (7, 100), (100, 333), strides=[[100, 1], [1, 100]])
    assert (weight.product, weight.aligned) == ((1, 7, 333, 100), (8, 8, 2))
    assert weight.along == (True, True)
    plain = described_as("matrix product", "aten::bmm", (2, 8, 64), (2, 64, 100))
    assert (plain.product, plain.aligned) == ((2, 8, 100, 64), (16, 8, 8))
    assert plain.along == (True, False)
    bias = described_as("matrix product", "aten::addmm", (64,), (7, 64), (64, 64), 1, 1)
    assert (bias.product, bias.aligned) == ((1, 7, 64, 64), (16, 16, 16))


def test_attention_sees_half_the_keys_if_it_is_causal() -> None:
    shape = (2, 8, 1024, 64)
    full, causal, decoding = (
        described_as("attention", "aten::scaled_dot_product_attention", q, shape, shape, None, 0.0, is_causal)
        for q, is_causal in ((shape, False), (shape, True), ((2, 8, 1, 64), True))
    )
    assert causal.operations == pytest.approx(full.operations / 2, rel=0.01)
    assert decoding.operations == full.operations / 1024
    assert not full.masked
    masked = described_as(
        "attention", "aten::scaled_dot_product_attention", shape, shape, shape, (2, 1, 1024, 1024)
    )
    assert masked.masked and (masked.batch, masked.queries, masked.keys) == (16, 1024, 1024)


def test_a_convolution_is_a_product_for_each_of_its_results() -> None:
    x, weight = (10, 64, 56, 56), (128, 64, 3, 3)
    forward = described_as("convolution", "aten::conv2d", x, weight, None, [1, 1], [1, 1], [1, 1], 1)
    assert forward.product == (1, 10 * 56 * 56, 128, 64 * 9)
    made = (10, 128, 56, 56)
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    both = described_as(
        "convolution", "aten::convolution_backward", made, x, weight, *rest, [True, True, False]
    )
    one = described_as(
        "convolution", "aten::convolution_backward", made, x, weight, *rest, [False, True, False]
    )
    assert both.product == (2, *forward.product[1:]) and one.product == forward.product


def step(straight: bool, recorded: bool) -> list[dict[str, Any]]:
    """A copy of a permuted tensor, and a concatenation."""
    shapes = {"Input Dims": [[4, 8, 32, 64]] * 2, "Input type": [BF16] * 2, "Concrete Inputs": ["", ""]}
    own, other = [16384, 2048, 64, 1], [16384, 64, 512, 1]
    if recorded:
        shapes["Input Strides"] = [own, own if straight else other]
    listed = {
        "Input Dims": [[[1, 4, 8], [1, 5, 8]], []],
        "Input type": ["TensorList", "Scalar"],
        "Concrete Inputs": ["", "1"],
        "Input Strides": [[[32, 8, 1], [40, 8, 1]], []],
    }
    kind = "vectorized_elementwise_kernel" if straight else "elementwise_kernel"
    return [
        annotation("ProfilerStep#0", 0, 400),
        op("aten::copy_", 20, 40, External=1, **shapes),
        call("cudaLaunchKernel", 30, 5, correlation=1),
        kernel(f"void at::native::{kind}<128, 4, direct_copy_kernel_cuda>(int)", 50, 30, correlation=1),
        op("aten::cat", 100, 40, External=2, **listed),
        call("cudaLaunchKernel", 110, 5, correlation=2),
        kernel(
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 3>(x)",
            130,
            30,
            2,
        ),
    ]


@pytest.mark.parametrize("straight", (True, False))
@pytest.mark.parametrize("recorded", (True, False))
def test_strides_are_kept_in_the_file_and_else_names_of_kernels_tell(
    straight: bool, recorded: bool, tmp_path: Path
) -> None:
    trace = convert_pair(Pair(-1, None, write_kineto(tmp_path / "t.json", step(straight, recorded)))).trace
    et_file.write(tmp_path / "t.0.et", trace)
    read = et_file.read(tmp_path / "t.0.et")
    kept = read.attributes.get(STRIDES)
    if recorded and not straight:
        assert kept is not None and len(kept.rows) == 1
        assert read.names[int(kept.rows[0])] == "aten::copy_"
        assert json.loads(kept.values[0]) == [[16384, 2048, 64, 1], [16384, 64, 512, 1]]
    else:
        assert kept is None
    work = {each.kind: each for each in launched_operators(make_run("t", [read], [0])).work if not each.joins}
    assert work["copy"].strided is not straight
    (joined,) = (each for each in launched_operators(make_run("t", [read], [0])).work if each.joins)
    assert (joined.operations, joined.moved, joined.joins) == (72, 2 * 4 * 72, 40)
