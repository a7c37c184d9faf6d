"""The losses, repairs, warnings and notes of a conversion: a stable id and a sentence for each.

Stages count them in a ``Findings``. A key is an id of ``TABLE``, or ``id:detail`` if the sentence has a
``{}`` for the detail. Ids stay the same between versions; sentences may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["loss", "repair", "warning", "note"]
KINDS: tuple[Kind, ...] = ("loss", "repair", "warning", "note")

# id → (kind, sentence). A loss is an event of the device trace without a node. A repair changed a damaged
# value. A warning is a guess or default that can make the graph differ from the actual execution.
TABLE: dict[str, tuple[Kind, str]] = {
    # losses
    "profiler-span": ("loss", "span of the profiler itself"),
    "gpu-annotation": ("loss", "annotation drawn on a device stream: no work of its own"),
    "python-frame": ("loss", "Python frame: names the module of its operators, no node of its own"),
    "event-record": ("loss", "cuda_event record: used for synchronisation, no work of its own"),
    "profiler-overhead": ("loss", "the profiler's own overhead"),
    "sync-record": ("loss", "cuda_sync record: became a dependency"),
    "polling-call": ("loss", "call of a thread that only polls the device: waiting, not work"),
    "bad-field": ("loss", "event with a field of the wrong type"),
    "bad-time": ("loss", "event with a time stamp or duration out of range"),
    "structure-step": (
        "loss",
        "event of the step in which the operators' tensors were recorded, which slowed it down: the times "
        "are those of the steps after it",
    ),
    "outside-step": ("loss", "event outside of ProfilerStep#{}"),
    "duplicate-event": ("loss", "event that is in the trace twice"),
    "unfinished-step": ("loss", "event of ProfilerStep#{}, whose recording was cut"),
    "unknown-cpu-communication": ("loss", "communication of unknown kind on a CPU thread"),
    "unknown-category": ("loss", "event of the unknown category {}"),
    # repairs
    "negative-duration": ("repair", "negative duration set to 0"),
    "bad-record": ("repair", "record with a field of the wrong type left out"),
    "bad-memory-event": (
        "repair",
        "allocations and frees without a usable time, size or device left out",
    ),
    "bad-node": ("repair", "host node with a field of the wrong type left out"),
    "unknown-attribute": ("repair", "unknown attribute {} of host nodes left out"),
    "bad-group-record": ("repair", "process-group record that can't be read"),
    "duplicate-host-id": ("repair", "host nodes with the id of another one"),
    "absent-host-parent": ("repair", "host nodes whose parent is not in the trace"),
    "cyclic-host-parent": ("repair", "host nodes that are their own ancestors, or below such"),
    "clipped-event": ("repair", "events that ended after the event around them, cut"),
    "clipped-ns": ("repair", "ns cut off events that ended after the event around them"),
    "host-repair": ("repair", "host trace, {}"),
    "device-repair": ("repair", "device trace, {}"),
    # warnings
    "name-mismatch": ("warning", "operators whose number has another name in the other trace, not linked"),
    "duplicate-events": ("warning", "events that are in the trace twice, counted once"),
    "steps-unfinished": ("warning", "steps whose recording was cut, left out: ProfilerStep#{}"),
    "clock-gap": ("warning", "seconds between the recordings of host and device trace"),
    "clock-contradicted": (
        "warning",
        "pairs of a call and device work that contradict the device's clock as estimated from all pairs",
    ),
    "steps-without-host": ("warning", "steps of the device trace that the host trace does not cover"),
    "host-only-operators": ("warning", "host operators with CUDA tensors in steps without any device work"),
    "launch-without-work": ("warning", "kernel launches whose kernel is not in the device trace"),
    "missing-communication": ("warning", "communication operators whose kernel is not in the device trace"),
    "work-before-recording": (
        "warning",
        "device work that waited long for what isn't recorded, such as work from before: that is overhead",
    ),
    "missing-gpu-work": ("warning", "the host trace has CUDA tensors and the device trace no GPU work"),
    "communication-size": ("warning", "communication whose size is not recorded"),
    "communication-kind": ("warning", "communication kernel of unknown kind {}, kept without a type"),
    "communication-inferred": (
        "warning",
        "communication launched before the recording: kind and size inferred from later steps",
    ),
    "communication-peer": ("warning", "sends and receives whose peer is not recorded"),
    "unknown-communication": (
        "warning",
        "kernels {} that may communicate by their names, kept as compute: name them with --comm-kernels",
    ),
    "group-default": ("warning", "communication without a recorded group: the default group"),
    "group-by-stream": ("warning", "communication without a recorded group: one group per stream"),
    "group-by-thread": (
        "warning",
        "gloo operators whose group was inferred from their threads and sizes",
    ),
    "structure-differs": (
        "warning",
        "operators that the step in which tensors were recorded doesn't have: kept without tensors",
    ),
    "group-local": ("note", "collectives of a group with one rank, kept as compute"),
    "graph-not-captured": ("warning", "graph launches that no capture of --graph-capture fits"),
    "graph-ambiguous": ("warning", "kernels of graphs whose shapes differ between the captures that fit"),
    "communication-unfinished": (
        "warning",
        "CPU communication whose record had not ended when the recording stopped: size taken from its call, "
        "end from the first use of its data",
    ),
    "communication-ends-late": (
        "warning",
        "CPU communication whose record ends after the thread that waited for it went on: cut to that time",
    ),
    "stream-wait-inferred": (
        "warning",
        "stream waits without cuda_sync records, inferred from the order of calls",
    ),
    "memory-total": (
        "warning",
        "allocations and frees without totals: memory counted from the start of the recording",
    ),
    "unknown-events": ("warning", "events of unknown categories left out; the losses name them"),
    "unusable-events": (
        "warning",
        "events left out for an unusable time stamp, duration or other field; the losses name them",
    ),
    # notes
    "no-host-trace": ("note", "no host trace: nodes have no tensor ids, storages and operator schemas"),
    "structure-matched": (
        "note",
        "operators matched by order and name with the step in which tensors were recorded",
    ),
    "no-host-node": ("note", "operators and annotations without a host node, kept with their times"),
    "memory-event": ("note", "allocations and frees: memory of the nodes in which they happened"),
    "graph-kernel": ("note", "kernels of CUDA or HIP graphs: --graph-capture names their operators"),
    "graph-captured": ("note", "kernels of CUDA or HIP graphs, named by the trace of the capture"),
    "blocking-copy": ("note", "copies that blocked the calling thread"),
    "early-start": ("note", "device work that starts before the call that launches it"),
    "clock-offset": ("note", "ns between the clocks of device {} and the host, corrected"),
    "unknown-device-work": ("note", "device work of the unknown category {}, kept as kernels"),
    "no-launch": ("note", "device work without a launching call, ordered by stream and time"),
    "sync-by-time": ("note", "synchronising calls whose event or stream isn't recorded, matched by time"),
    "queue-full": ("note", "launches that waited for a place in a stream's queue of {}"),
    "host-spun": ("note", "gaps in which a thread spun until the device was done"),
    "stream-wait-no-record": ("note", "stream waits whose event record is not in the trace"),
    "stream-wait-contradicted": ("note", "stream waits that contradict the times, left out"),
    "backward-waited": ("note", "backward passes that the main thread waited for"),
    "wait-blocked": ("note", "communication whose wait blocked the calling thread"),
    "wait-done": ("note", "communication that was done before its data was used"),
    "wait-not-found": ("note", "communication whose wait was not found"),
    "backward-edge": ("note", "edges left out as they would point back in time"),
    "gap-folded": ("note", "host overhead folded into the next node"),
    "gap-dropped": ("note", "host overhead dropped"),
    "gap-dropped-ns": ("note", "ns of host overhead dropped"),
}


class Findings(dict[str, int]):
    """Counts by key."""

    def add(self, key: str, count: int = 1, detail: str = "") -> None:
        """Add ``count`` to ``key``. Raises ``KeyError`` for an id that is not in ``TABLE``."""
        TABLE[key]
        if count:
            full = f"{key}:{detail}" if detail else key
            self[full] = self.get(full, 0) + int(count)

    def of(self, kind: Kind) -> dict[str, int]:
        """The findings of one kind."""
        return {key: count for key, count in self.items() if kind_of(key) == kind}


def joined(*parts: Mapping[str, int]) -> Findings:
    """The sum of all counts."""
    total = Findings()
    for part in parts:
        for key, count in part.items():
            total[key] = total.get(key, 0) + count
    return total


def kind_of(key: str) -> Kind:
    """The kind of a key."""
    return TABLE[key.partition(":")[0]][0]


def sentence(key: str) -> str:
    """The sentence for a key, with its detail filled in."""
    name, _, detail = key.partition(":")
    return TABLE[name][1].replace("{}", detail)


def listed(counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """For JSON: ``[{"id", "count", "text"}]`` sorted by key, with ``detail`` if the key has one."""
    entries = []
    for key, count in sorted(counts.items()):
        name, _, detail = key.partition(":")
        entries.append(
            {"id": name, **({"detail": detail} if detail else {}), "count": count, "text": sentence(key)}
        )
    return entries
