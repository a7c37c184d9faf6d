"""Communication kernels are identified by a table of names, which users can extend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.convert.graph import communication
from chakra_et.convert.pair import Converted, PairOptions, convert_pair
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.traces.sets import Pair
from tests.generator.hand_made import call, kernel, op, write_kineto

KINDS = CollectiveType


def events(name: str) -> list[dict[str, Any]]:
    shapes = {"Input Dims": [[32, 8]], "Input type": ["c10::BFloat16"], "Concrete Inputs": [""]}
    return [
        op("_C_custom_ar::all_reduce", 5, 30, **shapes), call("cudaLaunchKernel", 10, 5, 1),
        kernel(name, 40, 20, 1), call("cudaLaunchKernel", 50, 5, 2), kernel("gemm", 60, 10, 2),
    ]  # fmt: skip


def convert(folder: Path, name: str, table: Path | None = None) -> Converted:
    pair = Pair(-1, None, write_kineto(folder / "one.json", events(name), 0, 2))
    return convert_pair(pair, PairOptions(comm_kernels=str(table or "")))


def test_an_unknown_kernel_with_a_group_communicates_as_its_name_says(tmp_path: Path) -> None:
    """A library that isn't in the table, whose kernels have NCCL's metadata without the operation."""
    name, metadata = (
        "acme::ring_allgather(x)",
        {"Process Group Name": "0", "In msg nelems": 8, "dtype": "Float"},
    )
    made = [call("cudaLaunchKernel", 10, 5, 1), kernel(name, 40, 20, 1, stream=20, **metadata)]
    trace = convert_pair(Pair(-1, None, write_kineto(tmp_path / "one.json", made, 0, 2))).trace
    at = np.flatnonzero(trace.types == NodeType.COMM_COLL)
    assert trace.column("comm_type")[at].tolist() == [KINDS.ALL_GATHER]


@pytest.mark.parametrize(
    "name, kind",
    [
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(x)", KINDS.ALL_REDUCE),
        ("void sglang::cross_device_reduce_2stage<half, 8>(x)", KINDS.ALL_REDUCE),
        ("void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16>(x)", KINDS.ALL_REDUCE),
        ("multimem_one_shot_all_reduce_kernel<c10::BFloat16>", KINDS.ALL_REDUCE),
        ("void deep_ep::intranode::dispatch<8, 768>(x)", KINDS.ALL_TO_ALL),
        ("void deep_ep::internode_ll::combine<true, 7168>(x)", KINDS.ALL_TO_ALL),
        ("nvshmemi_barrier_all_on_stream_kernel", KINDS.BARRIER),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", KINDS.REDUCE_SCATTER),
        ("rcclDevKernel_AllGather_RING_LL(x)", KINDS.ALL_GATHER),
        ("void aiter::reduce_scatter_cross_device_store<bf16, 8>(x)", KINDS.ALL_REDUCE),
        ("void aiter::allreduce_fusion_kernel_1stage<bf16, 8>(x)", KINDS.ALL_REDUCE),
        ("void aiter::allgather_lastdim<bf16, 4>(x)", KINDS.ALL_GATHER),
        ("EpDispatchIntraNodeKernel_bf16", KINDS.ALL_TO_ALL),
        ("void mori::moe::EpCombineInterNodeV1Kernel<bf16>(x)", KINDS.ALL_TO_ALL),
        ("void hybrid_ep::dispatch_kernel<4>(x)", KINDS.ALL_TO_ALL),
        ("hybrid_ep::device_sync_kernel(x)", KINDS.BARRIER),
        ("void tensorrt_llm::kernels::moe_alltoall::moeA2ACombineKernel<bf16>(x)", KINDS.ALL_TO_ALL),
        ("allToAllV_2d(void*, void*)", KINDS.ALL_TO_ALL),
    ],
)
def test_kernels_of_many_libraries_communicate(name: str, kind: CollectiveType, tmp_path: Path) -> None:
    trace = convert(tmp_path, name).trace
    at = np.flatnonzero(trace.types == NodeType.COMM_COLL)
    assert [trace.names[row] for row in at] == [name]
    assert trace.column("comm_type")[at].tolist() == [kind]
    # The operator around the launch has the tensor; a barrier moves nothing.
    assert trace.column("comm_size")[at].tolist() == [1 if kind is KINDS.BARRIER else 512]


@pytest.mark.parametrize("name", ["mscclpp_kernel_x", "nvshmemi_put_block", "ccl_kernel_sycl", "hcom_x"])
def test_kernel_of_unknown_kind_is_a_warning(name: str, tmp_path: Path) -> None:
    converted = convert(tmp_path, name)
    at = np.flatnonzero(converted.trace.types == NodeType.COMM_COLL)
    assert [converted.trace.names[row] for row in at] == [name]


@pytest.mark.parametrize(
    "name",
    [
        "triton_poi_fused_all_gather_into_tensor_wait_tensor_0",  # computes on what was gathered
        "void at::native::reduce_kernel<512, 1>(x)",
        "void aiter::local_device_load_rmsnorm_naive<bf16, 1024>(x)",
        "moeA2APrepareDispatchKernel",
        "void at::native::_scatter_gather_elementwise_kernel<128, 8>(x)",
    ],
)
def test_kernel_with_a_word_of_communication_computes(name: str, tmp_path: Path) -> None:
    trace = convert(tmp_path, name).trace
    assert not (trace.types == NodeType.COMM_COLL).any()


def test_user_table_has_precedence(tmp_path: Path) -> None:
    table = tmp_path / "mine.json"
    table.write_text(json.dumps({"kernels": [{"pattern": "^my_ring", "operation": "all_gather"}]}))
    assert not (convert(tmp_path, "my_ring_kernel").trace.types == NodeType.COMM_COLL).any()
    trace = convert(tmp_path, "my_ring_kernel", table).trace
    assert trace.column("comm_type")[trace.types == NodeType.COMM_COLL].tolist() == [KINDS.ALL_GATHER]


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "not a table of communication kernels"),
        ("{}", "not a table of communication kernels, it has no 'kernels': give"),
        ("[]", "not a table of communication kernels, it has another layout: give"),
        ('{"kernels": [{"pattern": "("}]}', "not a table of communication kernels"),
        ('{"kernels": [{"pattern": "x", "operation": "allreduce"}]}', "is none of"),
    ],
)
def test_invalid_kernel_table_is_one_sentence(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "mine.json"
    table.write_text(text)
    path = write_kineto(tmp_path / "one.json", events("gemm2"))
    assert main(["convert", str(path), "-o", str(tmp_path / "out"), "--comm-kernels", str(table)]) == 1
    assert words in capsys.readouterr().err


def test_nccl_kernels_launched_before_the_recording_are_inferred_from_later_steps(tmp_path: Path) -> None:
    """Three steps of two collectives; those of the first step have no launch in the trace."""
    made = []
    for turn in range(3):
        begin = 1000 * turn
        for at, (name, size) in enumerate((("allreduce", 1024), ("_allgather_base", 256))):
            kernel_name = (
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
                if at == 0
                else "ncclDevKernel_AllGather_RING_LL(x)"
            )
            metadata = {"Collective name": name, "In msg nelems": size, "dtype": "Float"} if turn else {}
            correlation = 10 * turn + at + 1
            if turn:
                made.append(call("cudaLaunchKernel", begin + 10 + at, 1, correlation))
            made.append(
                kernel(kernel_name, begin + 100 + 200 * at, 150, correlation if turn else 0, 20, **metadata)
            )
    converted = convert_pair(Pair(-1, None, write_kineto(tmp_path / "one.json", made, 0, 2)))
    trace = converted.trace
    at = np.flatnonzero(trace.types == NodeType.COMM_COLL)
    assert trace.column("comm_size")[at].tolist() == [4096, 1024] * 3
    assert converted.report.warnings["communication-inferred"] == 2


def test_a_pattern_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"kernels": [{"pattern": "(a|a)*$b", "operation": "all_reduce"}]}))
    limit = communication.time_limit
    monkeypatch.setattr(communication, "time_limit", lambda seconds, error: limit(seconds / 50, error))
    with pytest.raises(TraceError, match="table.json: a pattern takes too long to match"):
        convert(tmp_path, "a" * 60, table)
