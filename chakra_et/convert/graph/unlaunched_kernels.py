"""Infer type and size of communication kernels that were launched before the recording began.

A device that lags behind its host starts a recording with kernels of an earlier step, whose launches and
metadata were not recorded. Training repeats the same communication in every step: if the recorded sequence on
a communicator's stream is periodic, so were the kernels before it.
"""

from __future__ import annotations

from dataclasses import replace

from chakra_et.convert.graph.communication import Communication
from chakra_et.findings import Findings
from chakra_et.traces.device import DeviceTrace


def fill_from_period(
    items: list[Communication], device: DeviceTrace, findings: Findings
) -> list[Communication]:
    """``items``, with unknown device kernels filled in from the following period; each is a warning."""
    filled = list(items)
    streams: dict[tuple[int, int], list[int]] = {}
    for index, item in enumerate(items):
        if item.on_gpu:
            key = int(device.device[item.event]), int(device.stream[item.event])
            streams.setdefault(key, []).append(index)
    for indices in streams.values():
        indices.sort(key=lambda index: (int(device.start[items[index].event]), items[index].part))
        first = next((at for at, index in enumerate(indices) if _known(items[index])), 0)
        unknown, known = indices[:first], indices[first:]
        if not unknown or not all(_known(items[index]) for index in known):
            continue
        period = _period([_kind(items[index]) for index in known])
        for back, index in enumerate(reversed(unknown), 1):
            if period:
                like = items[known[(-back) % period]]
            elif len({_kind(items[at])[:2] for at in known}) == 1:
                like = replace(items[known[0]], size=0)
            else:
                break
            if _is_named(items[index]) and _kind(items[index])[:2] != _kind(like)[:2]:
                break
            findings.add("communication-inferred")
            filled[index] = replace(
                items[index], type=like.type, collective=like.collective, size=like.size, group=like.group,
                dtype=like.dtype, peer=like.peer, tag=like.tag,
            )  # fmt: skip
    return filled


def _known(item: Communication) -> bool:
    return _is_named(item) and item.size > 0


def _is_named(item: Communication) -> bool:
    return item.is_message or item.collective is not None


def _kind(item: Communication) -> tuple[object, ...]:
    return item.type, item.collective, item.size, item.group.name, item.dtype, item.peer


def _period(kinds: list[tuple[object, ...]]) -> int:
    """The shortest period that occurs at least twice, 0 for none."""
    for period in range(1, len(kinds) // 2 + 1):
        if all(a == b for a, b in zip(kinds, kinds[period:], strict=False)):
            return period
    return 0
