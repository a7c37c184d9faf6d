"""Nodes have operator, module and phase; device work has bytes, operations and shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chakra_et.convert.graph.operators import MOST_BYTES_PER_NS, MOST_OPERATIONS_PER_NS, divided
from chakra_et.convert.pair import Converted, convert_pair
from chakra_et.cost.operator_work import operator_work
from chakra_et.traces.sets import Pair
from tests.generator.hand_made import annotation, call, frame, kernel, op, write_kineto


def training_step() -> list[dict[str, Any]]:
    """Forward in two modules, backward by the engine on another thread, an optimizer step."""
    return [
        annotation("ProfilerStep#3", 0, 1000),
        frame("nn.Module: GPT_0", 5, 200),
        frame("nn.Module: Linear_0", 10, 50),
        op("aten::linear", 15, 40, **{"Sequence number": 7, "Fwd thread id": 0}),
        op("aten::addmm", 20, 30),
        call("cudaLaunchKernel", 25, 5, 1), kernel("gemm_fwd", 40, 20, 1),
        frame("nn.Module: GELU_0", 70, 50),
        op("aten::gelu", 75, 40, **{"Sequence number": 8, "Fwd thread id": 0}),
        call("cudaLaunchKernel", 80, 5, 2), kernel("gelu_fwd", 95, 20, 2),
        op("autograd::engine::evaluate_function: AddmmBackward0", 300, 60, tid=20,
           **{"Sequence number": 7, "Fwd thread id": 1}),
        op("AddmmBackward0", 305, 50, tid=20, **{"Sequence number": 7, "Fwd thread id": 1}),
        op("aten::mm", 310, 30, tid=20),
        call("cudaLaunchKernel", 315, 5, 3, tid=20), kernel("gemm_bwd", 330, 20, 3),
        annotation("Optimizer.step#AdamW.step", 600, 100),
        op("aten::_foreach_add_", 610, 50),
        call("cudaLaunchKernel", 620, 5, 4), kernel("adam", 640, 20, 4),
        call("cudaMemcpyAsync", 720, 5, 5),
        kernel("Memcpy HtoD (Pinned -> Device)", 740, 10, 5, bytes=4096),
    ]  # fmt: skip


def convert(folder: Path, events: list[dict[str, Any]]) -> Converted:
    return convert_pair(Pair(-1, None, write_kineto(folder / "one.json", events)))


def text(converted: Converted, name: str) -> dict[str, str]:
    """Node name → value of a string attribute."""
    attribute = converted.trace.attributes[name]
    rows = attribute.rows.tolist()
    return {converted.trace.names[row]: attribute.values[at] for at, row in enumerate(rows)}


def test_parent_module_and_phase(tmp_path: Path) -> None:
    converted = convert(tmp_path, training_step())
    trace = converted.trace
    parent = {
        trace.names[row]: trace.names[number - 1]
        for row, number in enumerate(trace.column("parent").tolist()) if number
    }  # fmt: skip
    assert (parent["gemm_fwd"], parent["aten::addmm"], parent["gelu_fwd"]) == (
        "aten::addmm", "aten::linear", "aten::gelu"
    )  # fmt: skip
    assert parent["gemm_bwd"] == "aten::mm" and parent["aten::linear"] == "ProfilerStep#3"
    module = text(converted, "module")
    assert module["gemm_fwd"] == module["aten::linear"] == "GPT_0/Linear_0"
    assert module["gelu_fwd"] == "GPT_0/GELU_0"
    # Backward by the sequence number of its forward.
    assert module["gemm_bwd"] == module["AddmmBackward0"] == "GPT_0/Linear_0"
    assert "adam" not in module
    phase = text(converted, "phase")
    assert {name: phase.get(name) for name in ("gemm_fwd", "gelu_fwd", "gemm_bwd", "adam")} == {
        "gemm_fwd": "forward", "gelu_fwd": "forward", "gemm_bwd": "backward", "adam": "optimizer"
    }  # fmt: skip


def test_copies_have_bytes_and_kernels_grid_and_block(tmp_path: Path) -> None:
    events = training_step()
    events[6]["args"] |= {"grid": [4, 2, 1], "block": [128, 1, 1]}
    converted = convert(tmp_path, events)
    trace = converted.trace
    copy = next(row for row in range(len(trace)) if trace.names[row].startswith("Memcpy"))
    assert trace.column("tensor_size")[copy] == 4096
    assert text(converted, "grid") == {"gemm_fwd": "4,2,1"}
    assert text(converted, "block") == {"gemm_fwd": "128,1,1"}


def test_the_kernels_of_one_operator_share_its_work_by_their_durations(tmp_path: Path) -> None:
    shapes = {
        "Input Dims": [[64, 512], [512, 256]], "Input type": ["float", "float"], "Concrete Inputs": ["", ""]
    }  # fmt: skip
    events = [
        op("aten::mm", 0, 50, **shapes),
        call("cudaLaunchKernel", 10, 5, 1), kernel("main", 20, 30, 1),
        call("cudaLaunchKernel", 30, 5, 2), kernel("reduce", 60, 10, 2),
    ]  # fmt: skip
    trace = convert(tmp_path, events).trace
    at = [row for row in range(len(trace)) if trace.names[row] in ("main", "reduce")]
    operations = 2 * 64 * 512 * 256
    assert trace.column("num_ops")[at].tolist() == [operations * 3 // 4, operations // 4]


def test_the_kernels_of_a_compiled_model_do_not_have_its_work(tmp_path: Path) -> None:
    """TorchInductor's launches have no shapes, and the model around them has those of its arguments."""
    whole = {"Input Dims": [[64, 512]], "Input type": ["float"], "Concrete Inputs": [""]}
    events = [
        op("CompiledFunction", 0, 100, **whole),
        op("triton_poi_fused_gelu_0", 10, 50),
        call("cuLaunchKernel", 20, 5, 1), kernel("triton_poi_fused_gelu_0", 30, 30, 1),
    ]  # fmt: skip
    trace = convert(tmp_path, events).trace
    assert not trace.column("num_ops").any() and not np.any(trace.column("tensor_size"))


def counted(name: str, shapes: list, values: list | None = None) -> tuple[int, int] | None:
    types = ["Tensor(float)" if shape else "Scalar" for shape in shapes]
    texts = (json.dumps(part).encode() for part in (values or [""] * len(shapes), shapes, types))
    return operator_work(name, *texts, b"[]", b"[]")


def by_torch(work: Any) -> int:
    """Operations as PyTorch's own FlopCounterMode counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def test_matrix_products_agree_with_torchs_counter() -> None:
    a, b, c = torch.empty(8, 16), torch.empty(16, 4), torch.empty(4)
    assert counted("aten::mm", [[8, 16], [16, 4]])[0] == by_torch(lambda: a @ b)
    assert counted("aten::addmm", [[4], [8, 16], [16, 4]])[0] == by_torch(lambda: torch.addmm(c, a, b))
    d, e = torch.empty(3, 8, 16), torch.empty(3, 16, 4)
    assert counted("aten::bmm", [[3, 8, 16], [3, 16, 4]])[0] == by_torch(lambda: torch.bmm(d, e))


@pytest.mark.parametrize("stride, padding, dilation, groups", [(1, 0, 1, 1), (2, 3, 1, 1), (1, 2, 2, 4)])
def test_convolutions_agree_with_torchs_counter(
    stride: int, padding: int, dilation: int, groups: int
) -> None:
    x, w = torch.empty(2, 8, 32, 32), torch.empty(16, 8 // groups, 5, 5)
    wide = [[stride] * 2, [padding] * 2, [dilation] * 2]
    values = ["", "", "", *map(str, wide), "False", "[0, 0]", str(groups)]
    shapes = [list(x.shape), list(w.shape), [], [], [], [], [], [], []]
    true = by_torch(lambda: torch.nn.functional.conv2d(x, w, None, stride, padding, dilation, groups))
    assert counted("aten::convolution", shapes, values)[0] == true


def test_the_backward_of_a_convolution_agrees_with_torchs_counter() -> None:
    x = torch.randn(2, 8, 16, 16, requires_grad=True)
    w = torch.randn(16, 8, 3, 3, requires_grad=True)
    y = torch.nn.functional.conv2d(x, w)
    true = by_torch(lambda: y.sum().backward())
    shapes = [list(y.shape), list(x.shape), list(w.shape), [], [], [], [], [], [], [], []]
    values = ["", "", "", "[0]", "[1, 1]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, False]"]
    assert counted("aten::convolution_backward", shapes, values)[0] == true


@pytest.mark.parametrize(
    "name", ["aten::_scaled_dot_product_flash_attention", "aten::_flash_attention_forward"]
)
def test_attention_agrees_with_torchs_counter(name: str) -> None:
    q = torch.empty(2, 4, 64, 32, device="meta")
    true = by_torch(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    order = [2, 4, 64, 32] if "dot_product" in name else [2, 64, 4, 32]
    assert counted(name, [order] * 3)[0] == true


def test_element_wise_work_is_one_operation_per_element_and_all_bytes() -> None:
    assert counted("aten::add", [[32, 8], [32, 8]]) == (256, 3 * 256 * 4)


def test_selections_count_what_they_take_not_the_table() -> None:
    assert counted("aten::embedding", [[50_000, 64], [10]]) == (640, 2 * 640 * 4)
    table, index = [50_000, 64], [10]
    assert counted("aten::index_select", [table, [], index], ["", "0", ""]) == (640, 2 * 640 * 4)
    assert counted("aten::index_select", [table, [], index], ["", "-1", ""]) == (500_000, 2 * 500_000 * 4)
    assert counted("aten::gather", [table, [], [10, 3], []], ["", "0", "", "False"]) == (30, 2 * 30 * 4)


def test_what_stores_into_a_table_counts_what_it_stores() -> None:
    table, rows = [50_000, 64], [10, 64]
    stored = (640, 2 * 640 * 4)
    assert counted("aten::index_copy_", [table, [], [10], rows], ["", "0", "", ""]) == stored
    assert counted("aten::index_add_", [table, [], [10], rows, []], ["", "0", "", "", "1"]) == stored
    assert counted("aten::_index_put_impl_", [table, [], rows, [], []]) == stored
    assert counted("aten::scatter_add_", [table, [], [10, 3], rows]) == (30, 2 * 30 * 4)
    assert counted("aten::index_put_", [table, [], [1], []]) is None  # one value for any number of places
    cache = [1000, 16, 8, 128]
    both = 2 * 7 * 8 * 128
    shapes = [[7, 8, 128], [7, 8, 128], cache, cache, [7]]
    assert counted("_C_cache_ops::reshape_and_cache_flash", shapes) == (both, 2 * both * 4)
    flat = [[7, 1024], [7, 1024], [16_000, 1024], [16_000, 1024], [7]]
    assert counted("sglang::store_cache", flat) == (both, 2 * both * 4)


def test_the_dimension_of_a_selection_is_in_its_values(tmp_path: Path) -> None:
    events = []
    for at, dimension in enumerate((0, 1)):
        shapes = {
            "Input Dims": [[50, 6], [], [10]], "Input type": ["float", "Scalar", "long int"],
            "Concrete Inputs": ["", str(dimension), ""],
        }  # fmt: skip
        events += [
            op("aten::index_select", 100 * at, 50, **shapes),
            call("cudaLaunchKernel", 100 * at + 10, 5, at + 1),
            kernel("select", 100 * at + 20, 10, at + 1),
        ]  # fmt: skip
    trace = convert(tmp_path, events).trace
    at = [row for row in range(len(trace)) if trace.names[row] == "select"]
    assert trace.column("num_ops")[at].tolist() == [10 * 6, 50 * 10]


def test_work_beyond_the_limits_of_any_device_is_left_out(tmp_path: Path) -> None:
    """An operator that takes a few rows of a huge table does not read all of it."""
    shapes = {
        "Input Dims": [[1_000_000, 4096], [4]], "Input type": ["float", "long int"],
        "Concrete Inputs": ["", ""],
    }  # fmt: skip
    events = [op("my::lookup", 0, 50, **shapes), call("cudaLaunchKernel", 10, 5, 1), kernel("k", 20, 3, 1)]
    trace = convert(tmp_path, events).trace
    assert not trace.column("num_ops").any() and not np.any(trace.column("tensor_size"))


def test_messages_of_a_pipeline_have_the_phase_of_what_they_carry(tmp_path: Path) -> None:
    """They ran outside of the backward engine, and counted as forward: sequence numbers are all they have."""
    forward, backward = {"Sequence number": 7, "Fwd thread id": 0}, {"Sequence number": 7, "Fwd thread id": 1}
    converted = convert(
        tmp_path,
        [
            op("c10d::recv_", 0, 5, **forward),
            op("aten::linear", 10, 10, **forward),
            op("autograd::engine::evaluate_function: AddmmBackward0", 30, 20, **backward),
            op("aten::detach", 35, 5, **forward),
            op("aten::detach_", 52, 5, **forward),
            op("c10d::send", 60, 5, **forward),
        ],
    )
    phase = text(converted, "phase")
    assert (phase["c10d::recv_"], phase["aten::detach_"], phase["c10d::send"]) == (
        "forward", "backward", "backward"
    )  # fmt: skip


def test_the_work_of_an_operator_is_divided_by_what_its_kernels_take() -> None:
    operations, moved = divided(np.array([[90, 30], [7, 5]]), np.array([0, 1, 0]), np.array([2, 1, 1]))
    assert operations.tolist() == [60, 7, 30] and moved.tolist() == [20, 5, 10]
    # No more than a GPU can do, of either.
    most = np.array([[MOST_OPERATIONS_PER_NS, MOST_BYTES_PER_NS]]) * 3
    for more, kept in (([0, 0], most[0].tolist()), ([1, 0], [0, 0]), ([0, 1], [0, 0])):
        found = divided(most + more, np.zeros(1, np.int64), np.array([3]))
        assert [int(each[0]) for each in found] == kept
