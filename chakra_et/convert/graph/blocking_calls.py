"""Runtime and driver calls that return only when the device has done something, of every API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from chakra_et.traces.device import DeviceTrace
from chakra_et.traces.device_format import DRIVER, RUNTIME
from chakra_et.traces.fields import as_number


class Scope(IntEnum):
    """What a call waits for: all work of a device or of a stream, or the work before an event."""

    DEVICE = 0
    STREAM = 1
    EVENT = 2


# CUDA's runtime and driver, HIP, Level Zero, and MTIA's runtime, which names its calls after CUDA's.
_SCOPES = (
    (re.compile(r"(Device|Ctx|Context|Thread)_?Synchronize(_\w+)?$", re.IGNORECASE), Scope.DEVICE),
    # Memory may be in use, so the device has to be idle before it is freed.
    (re.compile(r"^(cuda|hip)Free$|^cuMemFree(_v2)?$"), Scope.DEVICE),
    (re.compile(r"(Stream|Queue|List)(Host)?_?Synchronize(_\w+)?$", re.IGNORECASE), Scope.STREAM),
    (re.compile(r"Synchronize(_\w+)?$", re.IGNORECASE), Scope.EVENT),
)
QUERY = re.compile(r"(cuda|hip|cu)(Event|Stream)Query(_\w+)?")
"""Asks whether work is done, and returns at once."""


@dataclass(frozen=True)
class BlockingCall:
    """``row``: of the call; ``device`` and ``stream`` that it waits for, -1 if not recorded; ``recorded``:
    the call that recorded the event, -1 if not known."""

    row: int
    scope: Scope
    device: int = -1
    stream: int = -1
    recorded: int = -1


def scope_of(name: str) -> Scope | None:
    """What a call with this name waits for, None if it doesn't wait."""
    return next((scope for pattern, scope in _SCOPES if pattern.search(name)), None)


def blocking_calls(device: DeviceTrace) -> Iterator[BlockingCall]:
    """The calls that wait for the device, with what their cuda_sync records tell; copies aside."""
    scopes = [scope_of(name) for name in device.names]
    waits = np.array([scope is not None for scope in scopes], dtype=bool)[device.name]
    rows = np.flatnonzero(waits & ((device.category == RUNTIME) | (device.category == DRIVER)))
    call_of = call_by_correlation(device) if len(rows) else {}
    known = {int(device.correlation[row]): (row, args) for row, args in device.waits.items()}
    for row in rows.tolist():
        scope = scopes[device.name[row]]
        assert scope is not None
        record, args = known.get(int(device.correlation[row]), (-1, None))
        if args is None:
            yield BlockingCall(row, scope)
        elif scope is Scope.DEVICE:
            yield BlockingCall(row, scope, int(device.device[record]))
        elif args.sync_kind == "Stream Sync":
            yield BlockingCall(row, Scope.STREAM, int(device.device[record]), int(device.stream[record]))
        else:
            recorded = call_of.get(int(as_number(args.record_correlation)), -1)
            stream = int(as_number(args.wait_on_stream))
            yield BlockingCall(row, scope, int(device.device[record]), stream, recorded)


def call_by_correlation(device: DeviceTrace) -> dict[int, int]:
    """Correlation id → row of the runtime or driver call."""
    rows = np.flatnonzero((device.category == RUNTIME) | (device.category == DRIVER))
    return dict(zip(device.correlation[rows].tolist(), rows.tolist(), strict=True))


def waits_for_copy(call: str, copy: str) -> bool:
    """Whether ``call`` returns only when the copy or memset that it starts has been made.

    CUDA returns from a copy of pageable memory to the device when the memory has been staged.
    """
    staged = call.startswith("cu") and "Pageable -> Device" in copy
    if "Async" in call:
        return not staged and copy.endswith("-> Pageable)")
    return "Memcpy" in call and not staged
