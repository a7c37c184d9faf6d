"""Check for missing device work: a device trace that was cut off loses its last events."""

from __future__ import annotations

import re

import numpy as np

from chakra_et.arrays import unique
from chakra_et.convert.graph.linked import LinkedRank
from chakra_et.findings import Findings
from chakra_et.traces.device_format import CPU_OP, DRIVER, KERNEL, RUNTIME, SYNC
from chakra_et.traces.fields import as_number

LAUNCH = re.compile(
    r"(cuda|hip|cu)\w*(Launch\w*Kernel\w*|LaunchKernel\w*|ModuleLaunch\w*)$|^(cuda|hip|cu)GraphLaunch$"
)
CAPTURE = re.compile(r"(cuda|hip|cu)StreamBeginCapture\w*"), re.compile(r"(cuda|hip|cu)StreamEndCapture\w*")
CUDA_TENSOR = re.compile(rb'"(cuda|hip|xpu):\d+"')
# The part of launches that may have no kernel, as launches at the end of a recording lose theirs.
TOLERATED = 0.02
# No idle device takes as long from a launch to the start of its work.
LONGEST_LAUNCH_NS = 1_000_000


def check_complete(rank: LinkedRank) -> Findings:
    """Warnings for launches, communication operators and CUDA tensors without device work."""
    device = rank.device
    findings = Findings()
    gpu = (device.category >= KERNEL) & (device.category != SYNC)
    lost = _launches_without_work(rank)
    if lost.sum() > max(TOLERATED * len(lost), 2):
        findings.add("launch-without-work", int(lost.sum()))
    if not gpu.any() and rank.host.recorded and _has_cuda_tensors(rank):
        findings.add("missing-gpu-work")
    findings.add("missing-communication", _communication_without_kernel(rank))
    findings.add("work-before-recording", _delayed(rank))
    if rank.host.recorded:
        findings.add("steps-without-host", _steps_without_host(rank))
    return findings


def _delayed(rank: LinkedRank) -> int:
    """Device work that starts long after its launch although no recorded work ran in between."""
    device = rank.device
    gpu = np.flatnonzero((device.category >= KERNEL) & (device.category != SYNC))
    gpu = gpu[np.argsort(device.start[gpu], kind="stable")]
    latest_end = np.maximum.accumulate(np.append(-1, device.end[gpu]))[:-1]
    call = rank.calls[gpu]
    launched = np.where(call >= 0, device.end[call], device.start[gpu])
    return int((device.start[gpu] - np.maximum(launched, latest_end) > LONGEST_LAUNCH_NS).sum())


def _launches_without_work(rank: LinkedRank) -> np.ndarray:
    """bool per launch call outside graph captures: whether no device work has its correlation id."""
    device = rank.device
    names = np.array([bool(LAUNCH.search(name)) for name in device.names], dtype=bool)
    calls = np.flatnonzero(
        names[device.name] & ((device.category == RUNTIME) | (device.category == DRIVER))
        & (device.correlation > 0)
    )  # fmt: skip
    if not len(calls):
        return np.zeros(0, dtype=bool)
    for thread in unique(device.thread[calls]).tolist():
        marks = []
        for pattern in CAPTURE:
            named = np.array([bool(pattern.fullmatch(name)) for name in device.names], dtype=bool)
            marks.append(device.start[named[device.name] & (device.thread == thread)])
        for begin, end in zip(*marks, strict=False):
            calls = calls[
                (device.thread[calls] != thread) | (device.start[calls] < begin) | (device.start[calls] > end)
            ]
    gpu = (device.category >= KERNEL) & (device.category != SYNC)
    # A driver call within a runtime call has the same correlation id.
    return ~np.isin(device.correlation[calls], device.correlation[gpu])


def _has_cuda_tensors(rank: LinkedRank) -> bool:
    values = rank.host.inputs[0]
    if not CUDA_TENSOR.search(values.buffer):
        return False
    rows = rank.link.host_row[rank.link.host_row >= 0].tolist()
    return any(CUDA_TENSOR.search(values[row]) for row in rows)


def _communication_without_kernel(rank: LinkedRank) -> int:
    """The number of NCCL operators without a kernel. Coalesced operators share a kernel, and those of a group
    of one rank launch none."""
    device = rank.device
    if rank.communication_rows.gpu.any() or as_number(device.distributed.get("world_size")) == 1:
        return 0
    named = np.array([name.startswith("nccl:") for name in device.names], dtype=bool)
    operators = np.flatnonzero(named[device.name] & (device.category <= CPU_OP + 1))
    return sum(not _is_alone(rank, row) for row in operators.tolist())


def _is_alone(rank: LinkedRank, row: int) -> bool:
    """Whether the operator at ``row``, or one around it, is of a group of one rank."""
    while row >= 0:
        args = rank.device.communication.get(row)
        attributes = rank.host.communication.get(int(rank.link.host_row[row]), {})
        size = as_number(attributes.get("group_size") if args is None else args.group_size)
        group = rank.communication.groups.get(str((args and args.group_name) or attributes.get("pg_name")))
        if size == 1 or (group is not None and len(group.ranks) == 1):
            return True
        row = int(rank.timeline.parent[row])
    return False


def _steps_without_host(rank: LinkedRank) -> int:
    """The number of steps in the device trace without an operator in the host trace."""
    device, missing = rank.device, 0
    operators = np.flatnonzero(device.category == CPU_OP)
    for _, row in rank.timeline.steps:
        inside = operators[
            (device.start[operators] >= device.start[row]) & (device.start[operators] < device.end[row])
        ]
        missing += bool(len(inside)) and not (rank.link.host_row[inside] >= 0).any()
    return missing
