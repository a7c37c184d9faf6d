"""The operators of a rank without a host trace, from its device trace.

Most frameworks only write Kineto's trace. Its operators have shapes, types and scalar arguments, but no
tensor ids, storages and schemas.
"""

from __future__ import annotations

import functools
import re

import numpy as np

from chakra_et.et.columns import Packer, Texts
from chakra_et.traces.device import DeviceTrace, OperatorInputs
from chakra_et.traces.device_format import ANNOTATION, CPU_OP
from chakra_et.traces.fields import STRIDES
from chakra_et.traces.host import HostTrace

_TYPE = re.compile(rb'"([^"\\]*)"')
_NOT_TENSORS = frozenset((b"", b"Scalar", b"ScalarList", b"TensorList", b"Device", b"Layout", b"Generator"))
_NOTHING = b"[]"


def operators_of(device: DeviceTrace) -> HostTrace:
    """The operators and annotations of ``device`` as host nodes, in the order of its rows.

    The record-function id of a node is its row + 1, which makes it unique. ``device`` must be loaded with
    ``operators=True``.
    """
    rows = np.flatnonzero((device.category == CPU_OP) | (device.category == ANNOTATION))
    count = len(rows)
    empty = OperatorInputs([b""] * len(device), [b""] * len(device), [b""] * len(device))
    inputs = device.inputs or empty
    taken = rows.tolist()
    nothing = Texts([_NOTHING], np.zeros(count, dtype=np.int32))
    none = np.zeros(count, dtype=np.int64)
    values, results = Packer(), Packer()
    values.add([inputs.values[row] or _NOTHING for row in taken])
    results.add([_NOTHING] * count)
    return HostTrace(
        path=device.path,
        id=rows + 2,
        parent=np.full(count, -1, dtype=np.int64),
        name=device.name[rows],
        names=device.names,
        op_schema=none,
        schemas=[""],
        rf_id=rows + 1,
        fw_parent=none,
        seq_id=device.sequence[rows],
        scope=none,
        tid=device.thread[rows].astype(np.int64) + 1,
        fw_tid=np.maximum(device.forward_thread[rows], 0),
        inputs=(
            values.packed(),
            Texts.of([inputs.shapes[row] or _NOTHING for row in taken]),
            Texts.of([_host_types(inputs.types[row]) for row in taken]),
        ),
        outputs=(results.packed(), nothing, nothing),
        communication={},
        texts={row: {STRIDES: device.strides[at]} for row, at in enumerate(taken) if at in device.strides},
        groups=[],
        header={"schema": "", "pid": _pid(device), "time": "", "start_ts": 0, "finish_ts": 0},
        recorded=False,
    )


@functools.lru_cache(maxsize=65536)
def _host_types(types: bytes) -> bytes:
    """Kineto's types in the observer's notation: ``"float"`` of a tensor becomes ``"Tensor(float)"``."""
    if not types:
        return _NOTHING

    def name(match: re.Match[bytes]) -> bytes:
        return match[0] if match[1] in _NOT_TENSORS else b'"Tensor(' + match[1] + b')"'

    return _TYPE.sub(name, types)


def _pid(device: DeviceTrace) -> int:
    """The process id of the first CPU thread with a numeric one, 0 for none."""
    return next((pid for pid, _ in device.threads if isinstance(pid, int) and pid > 0), 0)
