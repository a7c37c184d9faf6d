"""Traces of real GPUs from public repositories: properties and predictions of their graphs."""

from __future__ import annotations

import copy
import gzip
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from chakra_et.convert.pair import Converted, convert_pair
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.simulate.time_by_kind import shares
from chakra_et.traces.sets import Pair, find
from chakra_et.validate.check import check
from tests.shared import shared_path
from tests.simulate.replay_traces import makespan_ns, replay_astra, replay_device

A100, MI300 = "a100_nccl_rank0.json.gz", "mi300_resnet_rank0.json.gz"


def path_of(name: str) -> Path:
    return shared_path("data/traces/public", name) / name


@cache
def converted(name: str) -> Converted:
    return convert_pair(Pair(-1, None, path_of(name)))


def communication_kernels(name: str) -> int:
    events = json.loads(gzip.decompress(path_of(name).read_bytes()))["traceEvents"]
    return sum(
        event.get("cat") == "kernel" and event["name"].startswith(("nccl", "ncclDevKernel"))
        for event in events
    )


def measured_micros(trace: ExecutionTrace) -> int:
    return int(trace.metadata["measured_end_micros"])


@pytest.mark.parametrize("name", [A100, MI300])
def test_astra_sim_needs_the_measured_time(name: str) -> None:
    """Polling threads used to block ASTRA-sim's CPU slot: 25% and 32% late."""
    trace = converted(name).trace
    for replay in (replay_astra, replay_device):
        assert abs(makespan_ns(replay(trace)) / 1000 / measured_micros(trace) - 1) <= 0.03


@pytest.mark.parametrize("name", [A100, MI300])
def test_every_nccl_kernel_is_communication_with_its_bytes(name: str) -> None:
    """RCCL kernels without a launch in the window used to become computation."""
    trace = converted(name).trace
    rows = np.flatnonzero(trace.types >= NodeType.COMM_SEND)
    assert len(rows) == communication_kernels(name) > 10
    assert (trace.column("comm_size")[rows] > 1).all()
    assert not [problem for problem in check(trace) if problem.severity == "error"]


def test_kernels_wait_for_the_collectives_of_other_streams() -> None:
    """Without the edges of stream waits, 40% of this step's critical path was overhead on the device."""
    trace = converted(MI300).trace
    found = shares(trace)
    assert found is not None
    path, _, _ = found
    assert path["device-overhead"] <= 0.05 * sum(path.values())
    quick = copy.copy(trace)
    is_communication = trace.types >= NodeType.COMM_SEND
    quick.duration_micros = np.where(is_communication, trace.duration_micros // 10, trace.duration_micros)
    assert makespan_ns(replay_device(quick)) / 1e6 <= 55


def test_eight_ranks_without_host_names_are_aligned_by_their_collectives() -> None:
    """DLRM on eight V100s; by their clocks alone, ranks were off by −32% to +13%."""
    folder = shared_path("data/traces/dlrm_8gpu", "dlrm_8gpu_rank0_device.json.gz")
    [run] = find(folder)
    traces = [convert_pair(Pair(pair.rank, None, pair.device)).trace for pair in run.pairs.values()]
    assert {trace.metadata.get("clock_domain") for trace in traces} <= {None, ""}
    for replay in (replay_device, replay_astra):
        result = replay(traces)
        for trace, end, release in zip(traces, result.end_ns, result.release_ns, strict=True):
            simulated = (int(end.max()) - release) / 1000
            assert abs(simulated / measured_micros(trace) - 1) <= 0.02
