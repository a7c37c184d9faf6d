"""Strides of operators' arguments: kept where a tensor isn't contiguous."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chakra_et.traces import host
from chakra_et.traces.fields import contiguous
from tests.generator.hand_made import node, write_host

torch = pytest.importorskip("torch")
BF16 = "c10::BFloat16"


def test_strides_of_a_host_trace_are_kept(tmp_path: Path) -> None:
    """PyTorch writes them from schema 1.1.1 on."""
    mine = node("aten::mm", 1)
    mine["inputs"] = {"values": [0, 0], "shapes": [[4, 8], [8, 4]], "types": [f"Tensor({BF16})"] * 2}
    other = json.loads(json.dumps(mine))
    mine["inputs"]["strides"], other["inputs"]["strides"] = [[8, 1], [1, 8]], [[8, 1], [4, 1]]
    found = host.load(write_host(tmp_path, [mine, other])).strides
    assert [json.loads(each) for each in found.values()] == [[[8, 1], [1, 8]]]


@pytest.mark.parametrize(
    ("shapes", "strides", "expected"),
    [
        ([[4, 8]], [[8, 1]], True),
        ([[4, 8]], [[1, 4]], False),
        ([[1, 8, 1]], [[9, 1, 5]], True),  # of a single element it doesn't matter
        ([[4, 0]], [[1, 7]], True),
        ([[4, 8], []], [[8, 1], []], True),
        ([[[4, 8]], []], [[[1, 4]], []], True),  # lists of tensors aren't looked at
        ([[4, 8]], [["x", 1]], True),
    ],
)
def test_contiguous(shapes: list, strides: list, expected: bool) -> None:
    assert contiguous(json.dumps(shapes).encode(), json.dumps(strides).encode()) is expected
    assert contiguous(b"[", json.dumps(strides).encode())


def test_contiguous_agrees_with_pytorch() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        sizes = random.integers(1, 4, random.integers(1, 5)).tolist()
        tensor = torch.empty(sizes).permute(*random.permutation(len(sizes)).tolist())
        texts = (json.dumps([list(each)]).encode() for each in (tensor.shape, tensor.stride()))
        assert contiguous(*texts) is tensor.is_contiguous()
