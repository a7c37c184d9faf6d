"""CUDA and HIP graphs: kernels depend on their launch, and a trace of the capture identifies them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.convert.pair import Converted, PairOptions, convert_pair
from chakra_et.traces.sets import Pair
from tests.generator.hand_made import call, frame, kernel, op, write_kineto

SHAPES = {"Input type": ["float", "float"], "Concrete Inputs": ["", ""]}


def capture(rows: int = 8, prefix: str = "hip", names: bool = True) -> list[dict[str, Any]]:
    """A matrix product and an addition, captured in a graph; CUDA does not record the kernels' names."""

    def launch(kernel_name: str, ts: float, correlation: int) -> dict[str, Any]:
        return call(f"{prefix}LaunchKernel", ts, 5, correlation, **({"kernel": kernel_name} if names else {}))

    return [
        call(f"{prefix}StreamBeginCapture", 0, 2, 1),
        frame("nn.Module: Net_0", 5, 90),
        op("aten::mm", 10, 40, **{"Input Dims": [[rows, 16], [16, 4]]}, **SHAPES),
        launch("gemm", 20, 2),
        op("aten::add", 60, 30, **{"Input Dims": [[rows, 4], [rows, 4]]}, **SHAPES),
        launch("add", 70, 3),
        call(f"{prefix}StreamEndCapture", 100, 2, 4),
        call(f"{prefix}LaunchKernel", 110, 5, 5, kernel="other"),  # not captured
        kernel("other", 120, 5, 5),
    ]


def execution(prefix: str = "hip") -> list[dict[str, Any]]:
    launches = [
        kernel(name, 50 + 100 * turn + at * 20, 10, 9 + turn)
        for turn in range(2) for at, name in enumerate(("gemm", "add"))
    ]  # fmt: skip
    return [*(call(f"{prefix}GraphLaunch", 10 + 100 * turn, 20, 9 + turn) for turn in range(2)), *launches]


def convert(folder: Path, captured: list[dict[str, Any]] | None, executed: list[dict[str, Any]]) -> Converted:
    path = write_kineto(folder / "captured.json", captured) if captured else None
    pair = Pair(-1, None, write_kineto(folder / "executed.json", executed))
    return convert_pair(pair, PairOptions(graph_capture=path))


def strings(converted: Converted, name: str) -> list[str]:
    """The values of a string attribute, in order of the nodes."""
    attribute = converted.trace.attributes.get(name)
    return [] if attribute is None else [attribute.values[at] for at in range(len(attribute.rows))]


def test_kernels_of_a_graph_depend_on_their_launch(tmp_path: Path) -> None:
    converted = convert(tmp_path, None, execution())
    trace = converted.trace
    kind = np.array(strings(converted, "kind"))
    kernels = np.flatnonzero(kind == "kernel")
    launches = [row + 1 for row in range(len(trace)) if trace.names[row] == "hipGraphLaunch"]
    assert trace.column("graph_launch")[kernels].tolist() == [launches[0]] * 2 + [launches[1]] * 2
    assert trace.column("graph_id")[kernels].tolist() == [9, 9, 10, 10]
    assert converted.report.notes["graph-kernel"] == 4


@pytest.mark.parametrize("prefix, names", [("hip", True), ("cuda", False)])
def test_capture_gives_operators_modules_and_shapes(prefix: str, names: bool, tmp_path: Path) -> None:
    converted = convert(tmp_path, capture(prefix=prefix, names=names), execution(prefix))
    trace = converted.trace
    assert strings(converted, "captured_op") == ["aten::mm", "aten::add"] * 2
    assert strings(converted, "module") == ["Net_0"] * 4
    kernels = trace.attributes["captured_op"].rows
    assert trace.column("num_ops")[kernels].tolist() == [2 * 8 * 16 * 4, 8 * 4] * 2
    assert trace.inputs is not None
    shapes = dict(zip(trace.inputs.rows.tolist(), trace.inputs.shapes, strict=True))
    assert json.loads(shapes[int(kernels[0])]) == [[8, 16], [16, 4]]
    assert converted.report.notes["graph-captured"] == 4 and not converted.report.warnings


def test_shapes_that_differ_between_captures_are_left_out(tmp_path: Path) -> None:
    """Serving captures one graph per batch size, with the same kernels."""
    later = [e | {"ts": e["ts"] + 1000} for e in capture(rows=16)]
    converted = convert(tmp_path, [*capture(rows=8), *later], execution())
    assert strings(converted, "captured_op") == ["aten::mm", "aten::add"] * 2
    assert not converted.trace.column("num_ops").any()
    assert converted.report.warnings == {"graph-ambiguous": 4}


def test_a_graph_that_was_not_captured_there_is_a_warning(tmp_path: Path) -> None:
    other = [kernel("softmax", 70, 10, 9) if e["ts"] == 70 else e for e in execution()]
    converted = convert(tmp_path, capture(), other)
    assert converted.report.warnings == {"graph-not-captured": 1}
    assert strings(converted, "captured_op") == ["aten::mm", "aten::add"]


def test_streams_of_a_graph_may_run_in_another_order(tmp_path: Path) -> None:
    swapped = [
        call("hipGraphLaunch", 10, 20, 9), kernel("add", 50, 10, 9, stream=8), kernel("gemm", 55, 10, 9)
    ]  # fmt: skip
    converted = convert(tmp_path, capture(), swapped)
    assert strings(converted, "captured_op") == ["aten::add", "aten::mm"]


def test_trace_without_a_capture_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = write_kineto(tmp_path / "ran.json", execution())
    assert main(["convert", str(ran), "-o", str(tmp_path / "out"), "--graph-capture", str(ran)]) == 1
    assert "contains no graph capture" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.et"))
