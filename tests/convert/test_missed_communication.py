"""Oddities of other people's runs: no communication or device work is missed, and one verdict is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.convert.graph.communication import communication_names
from chakra_et.convert.pair import Converted, convert_pair
from chakra_et.convert.rank import truncation
from chakra_et.cost.operator_work import operator_work
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, NodeType
from chakra_et.traces.sets import Pair
from tests.generator.hand_made import (
    annotation,
    call,
    event,
    kernel,
    node,
    op,
    write_device,
    write_host,
    write_kineto,
)

KINDS = CollectiveType


def convert(folder: Path, events: list[dict[str, Any]], world: int = 8, **header: Any) -> Converted:
    return convert_pair(Pair(0, None, write_kineto(folder / "one.json", events, 0, world, **header)))


@pytest.mark.parametrize(
    ("name", "kind"),
    (
        ("void dpsk::ep::internode::dispatch<false, 8>(x)", KINDS.ALL_TO_ALL),
        ("void dpsk::ep::internode::combine<__nv_bfloat16>(x)", KINDS.ALL_TO_ALL),
        ("void dpsk::ep::internode::notify_dispatch<false, 4>(x)", KINDS.ALL_TO_ALL),
        ("void deep_ep::internode::cached_notify<true, 4>(x)", KINDS.BARRIER),
        ("void deep_ep::intranode::cached_notify_combine<8>(x)", KINDS.BARRIER),
        ("void deep_ep::internode_ll::dispatch<true, 7168>(x)", KINDS.ALL_TO_ALL),
        ("void deep_ep::internode_ll::clean_low_latency_buffer<256>(x)", KINDS.BARRIER),
        ("void deep_ep::layout::get_dispatch_layout<256, 32>(x)", None),
        ("void dpsk::ep::internode::get_dispatch_layout<256>(x)", None),
        ("void other::ep::internode::dispatch<8>(x)", None),
    ),
)
def test_deepep_in_all_its_namespaces(name: str, kind: CollectiveType | None) -> None:
    found = communication_names([name])
    assert (found[0].operation if found else None) is kind


def unknown(name: str, stream: int = 20) -> list[dict[str, Any]]:
    return [
        op("aten::mm", 0, 40, 3),
        call("cudaLaunchKernel", 5, 5, 1),
        kernel("gemm", 20, 60, 1),
        call("cudaLaunchKernel", 15, 5, 2),
        kernel(name, 30, 40, 2, stream=stream),
    ]


@pytest.mark.parametrize(
    ("name", "world", "warns"),
    (
        ("void moe::ep2::dispatch_kernel<4>(x)", 8, True),
        ("void my_all2all::run(x)", 8, True),
        ("kittens_put_signal(x)", 8, True),
        ("void moe::ep2::dispatch_kernel<4>(x)", 1, False),
        ("void compute_inputs(x)", 8, False),
        ("void at::native::barrier_free_combine(x)", 8, False),
    ),
)
def test_kernels_that_may_communicate_are_a_warning(
    name: str, world: int, warns: bool, tmp_path: Path
) -> None:
    warnings = convert(tmp_path, unknown(name), world).report.warnings
    keys = [key for key in warnings if key.startswith("unknown-communication")]
    assert bool(keys) == warns
    if warns:
        assert "(40% of the device's time)" in keys[0]


def test_the_warning_names_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_kineto(tmp_path / "one.json", unknown("void moe::ep2::dispatch_kernel<4>(x)"), 0, 8)
    assert main(["convert", str(tmp_path), "--allow-missing-ranks"]) == 0
    text = capsys.readouterr().err
    assert "moe::ep2::dispatch_kernel (40% of the device's time)" in text and "--comm-kernels" in text


def sampled(folder: Path, rank: int, streams: tuple[int, int]) -> None:
    """A rank of 128 in an old layout: NCCL's kernels name no group, and each communicator has a stream."""
    shapes = {"Input Dims": [[256]], "Input type": ["float"]}
    events = []
    for at, stream in enumerate((streams[0], streams[1], streams[0])):
        begin = 200.0 * at
        events += [
            op("nccl:all_reduce", begin, 30, **shapes) | {"cat": "user_annotation"},
            call("cudaLaunchKernel", begin + 5, 5, at + 1),
            kernel("ncclKernel_AllReduce_RING_LL_Sum_float(x)", begin + 40, 100, at + 1, stream, rank),
        ]
    events = [each | {"pid": each["pid"] + rank} if each["tid"] == 10 else each for each in events]
    write_kineto(folder / f"rank{rank}.json", events, rank, 128)


@pytest.mark.parametrize("streams", ((84, 203), (88, 90)))
def test_sampled_ranks_have_common_groups(
    streams: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found with ranks 0 and 1 of 128: groups were named by device and stream, which no other rank has."""
    sampled(tmp_path, 0, (84, 203))
    sampled(tmp_path, 1, streams)
    assert main(["convert", str(tmp_path), "--allow-missing-ranks"]) == 0, capsys.readouterr().err
    groups = [
        et_file.read(tmp_path / f"rank.{rank}.et").attributes["pg_name"].values.index.tolist()
        for rank in (0, 1)
    ]
    assert groups[0] == groups[1] and len(set(groups[0])) == 2
    assert main(["validate", str(tmp_path / "rank"), "--allow-missing-ranks"]) == 0


@pytest.mark.parametrize("known_by", ("group size", "ranks", "world"))
def test_a_group_of_one_rank_launches_no_kernel(known_by: str, tmp_path: Path) -> None:
    """Found on a V100: "truncated, record it again", where NCCL had nothing to do."""
    args: dict[str, Any] = {"Collective name": "allreduce", "Process Group Name": "7", "In msg nelems": 4}
    args |= {"group size": {"Group size": 1}, "ranks": {"Process Group Ranks": "[0]"}}.get(known_by, {})
    events = [
        op("record_param_comms", 0, 30, 3, **args),
        annotation("nccl:all_reduce", 5, 20),
        call("cudaLaunchKernel", 40, 5, 1),
        kernel("gemm", 50, 60, 1),
    ]
    converted = convert(tmp_path, events, 1 if known_by == "world" else 8)
    assert "missing-communication" not in converted.report.warnings
    assert truncation(Pair(0, None, tmp_path / "one.json"), converted.report) == []


def test_a_group_of_one_rank_by_its_host_trace_launches_no_kernel(tmp_path: Path) -> None:
    events = [op("record_param_comms", 0, 30, 3), annotation("nccl:all_reduce", 5, 20, 4)]
    events += [call("cudaLaunchKernel", 40, 5, 1), kernel("gemm", 50, 60, 1)]
    device = write_device(tmp_path, events, distributedInfo={"rank": 0, "world_size": 8})
    for size, missing in ((1, 0), (2, 1)):
        host = write_host(tmp_path, [node("record_param_comms", 3, pg_name="7", pg_size=size)])
        report = convert_pair(Pair(0, host, device)).report
        assert report.warnings.get("missing-communication", 0) == missing


def test_missing_sizes_get_one_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found on a V100: convert said ok, and validate had errors for 2,020 nodes."""
    events = [op("aten::mm", 0, 5, 3), call("cudaLaunchKernel", 1, 2, 1)]
    events.append(kernel("ncclKernel_AllReduce_RING_LL_Sum_float(x)", 10, 50, 1, 20))
    write_kineto(tmp_path / "old.json", events, 0, 2)
    missing = "--allow-missing-ranks"
    assert main(["convert", str(tmp_path), missing]) == 0
    assert "communication whose size is not recorded: 1" in capsys.readouterr().err
    assert main(["validate", str(tmp_path / "old"), missing]) == 0
    assert "comm-size-missing" in (text := capsys.readouterr().out) and "0 errors" in text
    assert main(["validate", str(tmp_path / "old"), missing, "--for", "astra-sim"]) == 1, (
        "it can't run without"
    )


def test_device_work_of_unknown_categories_is_kept(tmp_path: Path) -> None:
    """Found on MTIA: "ok, 0.5% overhead" with 25,814 device events left out."""
    events = [op("aten::mm", 0, 40, 3), call("mtiaLaunch", 5, 5, 1) | {"cat": "mtia_runtime"}]
    for at, category in enumerate(("mtia_ccp_events", "npu_core")):
        events.append(
            event(category, f"fc_{at}", 20 + 60 * at, 50, 3, device=0, stream=3, correlation=1 + at)
        )
    converted = convert(tmp_path, events)
    kept = {converted.trace.names[row] for row in np.flatnonzero(converted.trace.column("stream", -1) == 3)}
    assert {"fc_0", "fc_1"} <= kept and converted.report.losses == {}
    assert converted.report.notes["unknown-device-work:npu_core"] == 1


@pytest.mark.parametrize("name", ("aten::scaled_dot_product_attention", "aten::_flash_attention_forward"))
def test_causal_attention_is_half_the_work(name: str) -> None:
    def operations(causal: str) -> int:
        place = 5 if "scaled" in name else 8
        shape = [2, 128, 16, 64] if "flash" in name else [2, 16, 128, 64]
        values = json.dumps([""] * place + [causal]).encode()
        shapes, types = json.dumps([shape] * 3).encode(), json.dumps(["Tensor(float)"] * 3).encode()
        work = operator_work(name, values, shapes, types, b"[]", b"[]")
        assert work is not None
        return work[0]

    assert operations("False") == 4 * 2 * 16 * 128 * 128 * 64
    assert operations("True") == pytest.approx(operations("False") / 2, rel=0.01)


TRAITS = "pytorch_flash::Flash_fwd_kernel_traits<64, 128, 64, 4, false, true, Flash_kernel_traits<64> >"


@pytest.mark.parametrize(
    ("kernel_name", "is_causal"),
    [
        (f"void pytorch_flash::flash_fwd_kernel<{TRAITS}, false, true, false, false, true>(Params)", True),
        (f"void pytorch_flash::flash_fwd_kernel<{TRAITS}, true, false, true, true, true>(Params)", False),
        (f"void flash::flash_fwd_splitkv_kernel<{TRAITS}, true, false, false>(Params)", True),
        (f"void flash::flash_fwd_splitkv_kernel<{TRAITS}, false, true, true>(Params)", False),
        (f"void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<{TRAITS}, false, true>(Params)", True),
        ("fmhaSm100aKernel_QkvE4m3H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext", True),
        ("attn_fwd_non_causal", False),
    ],
)
def test_the_kernel_tells_that_attention_is_causal(kernel_name: str, is_causal: bool, tmp_path: Path) -> None:
    """flash-attn's operator, from a trace without concrete inputs: only the kernel's name tells."""
    shapes = {"Input Dims": [[2, 128, 16, 64]] * 3, "Input type": ["c10::BFloat16"] * 3}
    events = [
        op("flash_attn::_flash_attn_forward", 0, 40, 3, **shapes),
        call("cudaLaunchKernel", 5, 5, 1),
        kernel(kernel_name, 20, 50, 1),
    ]
    trace = convert(tmp_path, events).trace
    row = next(row for row in range(len(trace)) if trace.names[row] == kernel_name)
    whole = 4 * 2 * 16 * 128 * 128 * 64
    assert trace.column("num_ops")[row] == pytest.approx(whole / (2 if is_causal else 1), rel=0.01)


def test_collectives_of_deepep_are_nodes(tmp_path: Path) -> None:
    trace = convert(tmp_path, unknown("void dpsk::ep::internode::dispatch<false, 8>(x)")).trace
    assert (trace.types == NodeType.COMM_COLL).sum() == 1
