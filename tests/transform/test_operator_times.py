"""How times follow sizes: the rate of elementwise operators, and kernels with their operator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from chakra_et.et.columns import ExecutionTrace, TensorInfo
from chakra_et.transform.operator_times import Elementwise, resized, work_ratios
from tests.simulate.replay_traces import cpu, kernel, make_trace


def with_inputs(trace: ExecutionTrace, shapes: dict[int, bytes]) -> ExecutionTrace:
    """``shapes``: of the two inputs of rows, which are floats."""
    kinds = [b'["Tensor(float)","Tensor(float)"]'] * len(shapes)
    info = TensorInfo(np.array(list(shapes)), [b"[]"] * len(shapes), list(shapes.values()), kinds)
    return replace(trace, inputs=info)


def test_the_rate_of_elementwise_operators_is_that_of_large_ones() -> None:
    operator = {"name": "aten::add_", "kind": "operator"}
    trace = make_trace(cpu(1, 10, **operator), cpu(2, 110, (1,), **operator), cpu(3, 10, (2,), **operator))
    shapes = {0: b"[[5000],[5000]]", 1: b"[[8000],[8000]]", 2: b"[[5],[5]]"}
    found = Elementwise(with_inputs(trace, shapes))
    # 8,000 floats of each are read, and as many written; what the call itself takes is no part of it.
    assert found.node_micros == 10
    assert found.micros_per_byte == pytest.approx(100 / (3 * 4 * 8000))
    assert found.micros(96_000, 2) == pytest.approx(120)
    small = Elementwise(with_inputs(trace, dict.fromkeys(shapes, b"[[5000],[5000]]")))
    assert small.micros_per_byte == 0


def test_kernels_change_with_the_operator_that_launched_them() -> None:
    trace = make_trace(
        cpu(1, 100, name="aten::mm", kind="operator"),
        cpu(2, 5, (1,), name="cudaLaunchKernel", kind="runtime", parent=1),
        kernel(3, 42, (2,), name="gemm", kind="kernel", parent=2),
        kernel(4, 42, (3,), name="other", kind="kernel"),
    )
    trace = with_inputs(trace, {0: b"[[64,32],[32,16]]"})
    wider = {b"[[64,32],[32,16]]": b"[[64,32],[32,48]]"}
    operations, ratio, leaf, _ = work_ratios(trace, lambda text: wider.get(text, text))
    assert operations.tolist() == [65_536, 0, 65_536, 0]
    assert ratio.tolist() == [3, 1, 3, 1] and not leaf.any()
    made, count = resized(trace, lambda text: wider.get(text, text))
    # A kernel without work takes 2 µs, which stay; what the host does for it and other kernels stay too.
    assert made.duration_micros.tolist() == [100, 5, 122, 42]
    assert count.tolist() == [1, 42, 122]
    assert made.inputs is not None and made.inputs.shapes == [b"[[64,32],[32,48]]"]


def test_what_a_device_computes_the_host_asks_for_in_as_long() -> None:
    """Also where the operator launches nothing; what it does on the CPU beside that grows."""
    operator = {"kind": "operator", "name": "aten::mul"}
    trace = make_trace(*(cpu(at, 100, (at - 1,) if at > 1 else (), **operator) for at in (1, 2, 3)))
    places = [b'[[1,2,0,65536,4,"cuda:0"],[3,4,0,1,8,"cpu"]]', b'[[1,2,0,65536,4,"cpu"],2.0]', b"[]"]
    trace = with_inputs(trace, dict.fromkeys(range(3), b"[[65536],[]]"))
    assert trace.inputs is not None
    trace = replace(trace, inputs=replace(trace.inputs, values=places))
    made, _ = resized(trace, lambda text: text.replace(b"65536", b"131072"))
    assert made.duration_micros.tolist() == [100, 200, 200]


def test_operators_on_lists_follow_the_elements_of_all_tensors() -> None:
    """Their own time, also where they call an operator for each tensor."""
    trace = make_trace(
        cpu(1, 100, name="aten::_foreach_mul_", kind="operator"),
        cpu(2, 40, (1,), name="aten::mul_", kind="operator", parent=1),
    )
    trace = with_inputs(trace, {0: b"[[[4096],[4096]],[]]", 1: b"[[4096],[]]"})
    assert trace.inputs is not None
    trace.inputs.types[0] = b'["GenericList[Tensor(float),Tensor(float)]","Tensor(float)"]'
    made, count = resized(trace, lambda text: text.replace(b"4096", b"12288"))
    assert made.duration_micros.tolist() == [300, 120] and count.tolist() == [2, 140, 420]


def test_in_one_phase_the_shapes_of_others_stay() -> None:
    trace = make_trace(
        cpu(1, 100, name="aten::mul_", kind="operator", phase="backward"),
        cpu(2, 100, (1,), name="aten::mul_", kind="operator", phase="optimizer"),
    )
    trace = with_inputs(trace, dict.fromkeys((0, 1), b"[[65536],[]]"))
    made, count = resized(trace, lambda text: text.replace(b"65536", b"32768"), b"optimizer")
    assert made.inputs is not None and made.inputs.shapes == [b"[[65536],[]]", b"[[32768],[]]"]
    assert made.duration_micros.tolist() == [100, 50] and count.tolist() == [1, 100, 50]
