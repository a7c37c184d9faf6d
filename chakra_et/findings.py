"""The losses, repairs, warnings and notes of a conversion: a stable id and a sentence for each.

    report = json.loads(run_at("outputs/gpt2_2gpu_quick_trace").report_file.read_text())
    print([rank["warnings"] for rank in report["ranks"].values()])

Stages count them in a ``Findings``. A key is an id of ``TABLE``, or ``id:detail`` if the sentence has a
``{}`` for the detail. Ids stay the same between versions; sentences may change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["loss", "repair", "warning", "note"]
KINDS: tuple[Kind, ...] = ("loss", "repair", "warning", "note")

# A loss is an event of the device trace without a node. A repair changed a damaged value. A warning is a
# guess or default that can make the graph differ from the actual execution.
_SENTENCES: dict[Kind, dict[str, str]] = {
    "loss": {
        "profiler-span": "span of the profiler itself",
        "gpu-annotation": "annotation drawn on a device stream: no work of its own",
        "python-frame": "Python frame: names the module of its operators, no node of its own",
        "event-record": "cuda_event record: used for synchronisation, no work of its own",
        "profiler-overhead": "the profiler's own overhead",
        "sync-record": "cuda_sync record: became a dependency",
        "polling-call": "call of a thread that only polls the device: waiting, not work",
        "bad-field": "event with a field of the wrong type",
        "bad-time": "event with a time stamp or duration out of range",
        "structure-step": "event of the step that recording the operators' tensors slowed down: times are "
        "those of later steps",
        "outside-step": "event outside of ProfilerStep#{}",
        "duplicate-event": "event that is in the trace twice",
        "unfinished-step": "event of ProfilerStep#{}, whose recording was cut",
        "unknown-cpu-communication": "communication of unknown kind on a CPU thread",
        "unknown-category": "event of the unknown category {}",
    },
    "repair": {
        "negative-duration": "negative duration set to 0",
        "bad-record": "record with a field of the wrong type left out",
        "bad-memory-event": "allocations and frees without a usable time, size, total or device left out",
        "bad-node": "host node with a field of the wrong type left out",
        "unknown-attribute": "unknown attribute {} of host nodes left out",
        "bad-group-record": "process-group record that can't be read",
        "clipped-event": "events that ended after the event around them, cut",
        "clipped-ns": "ns cut off events that ended after the event around them",
        "host-repair": "host trace, {}",
        "device-repair": "device trace, {}",
    },
    "warning": {
        "name-mismatch": "operators whose number has another name in the other trace, not linked",
        "duplicate-events": "events that are in the trace twice, counted once",
        "steps-unfinished": "steps whose recording was cut, left out: ProfilerStep#{}",
        "clock-contradicted": "pairs of a call and device work that contradict the device's clock as "
        "estimated from all pairs",
        "steps-without-host": "steps of the device trace that the host trace does not cover",
        "launch-without-work": "kernel launches whose kernel is not in the device trace",
        "missing-communication": "communication operators whose kernel is not in the device trace",
        "work-before-recording": "streams that were busy when the recording began; each gets one node, "
        "which ends when the first wait for that work returned",
        "work-unexplained-wait": "device work that waited long for something unrecorded: overhead",
        "missing-gpu-work": "the host trace has CUDA tensors, but the device trace has no GPU work",
        "communication-size": "communication whose size is not recorded",
        "communication-kind": "communication kernel of unknown kind {}, kept without a type",
        "communication-inferred": "communication launched before the recording: kind and size inferred from "
        "later steps",
        "communication-peer": "sends and receives whose peer is not recorded",
        "unknown-communication": "kernels {} that may communicate by their names, kept as compute: name "
        "them with --comm-kernels",
        "group-default": "communication without a recorded group: the default group",
        "group-by-stream": "communication without a recorded group: one group per stream",
        "structure-differs": "operators that aren't in the step with recorded tensors: kept without",
        "communication-ends-late": "CPU communication whose record ends after the thread that waited for it "
        "went on: cut to that time",
        "stream-wait-inferred": "stream waits without cuda_sync records, inferred from the order of calls",
        "unknown-events": "events of unknown categories left out; the losses name them",
        "unusable-events": "events left out for an unusable time stamp, duration or other field; the losses "
        "name them",
    },
    "note": {
        "group-local": "collectives of a group with one rank, kept as compute",
        "no-host-trace": "no host trace: nodes have no tensor ids, storages and operator schemas",
        "structure-matched": "operators matched by order and name with the step with recorded tensors",
        "structure-alone": "operators of the step with recorded tensors that a later step lacks",
        "no-host-node": "operators and annotations without a host node, kept with their times",
        "memory-event": "allocations and frees, counted as memory of the nodes in which they happened",
        "graph-kernel": "kernels of CUDA or HIP graphs, whose operators aren't recorded",
        "blocking-copy": "copies and memsets that blocked the calling thread",
        "early-start": "device work that starts before the call that launches it",
        "clock-offset": "ns between the clocks of device {} and the host, corrected",
        "unknown-device-work": "device work of the unknown category {}, kept as kernels",
        "no-launch": "device work without a launching call, ordered by stream and time",
        "sync-by-time": "synchronising calls whose event or stream isn't recorded, matched by time",
        "queue-full": "launches that waited for a place in a stream's queue of {}",
        "host-spun": "gaps in which a thread spun until the device was done",
        "thread-waited": "gaps in which a thread waited until another one was done",
        "stream-wait-no-record": "stream waits whose event record is not in the trace",
        "stream-wait-contradicted": "stream waits that contradict the times, left out",
        "backward-waited": "backward passes that the main thread waited for",
        "wait-blocked": "communication whose wait blocked the calling thread",
        "wait-done": "communication that was done before its data was used",
        "wait-not-found": "communication whose wait was not found",
        "backward-edge": "edges left out as they would point back in time",
    },
}
# id → (kind, sentence)
TABLE = {key: (kind, text) for kind, texts in _SENTENCES.items() for key, text in texts.items()}


class Findings(Counter[str]):
    """Counts by key."""

    def add(self, key: str, count: int = 1, detail: str = "") -> None:
        """Add ``count`` to ``key``. Raises ``KeyError`` for an id that is not in ``TABLE``."""
        TABLE[key]
        if count:
            self[f"{key}:{detail}" if detail else key] += int(count)

    def of(self, kind: Kind) -> dict[str, int]:
        """The findings of one kind."""
        return {key: count for key, count in self.items() if TABLE[key.partition(":")[0]][0] == kind}


def joined(*parts: Mapping[str, int]) -> Findings:
    """The sum of all counts."""
    total = Findings()
    for part in parts:
        total.update(part)
    return total


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
