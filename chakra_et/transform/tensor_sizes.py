"""Other tensor sizes, dimension by dimension: wider layers, or a batch that isn't recognised."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from chakra_et.cost.network_fit import NetworkModel
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType
from chakra_et.simulate.run import Run
from chakra_et.text import plural
from chakra_et.transform.changes import CollectiveTimes, as_run, with_sizes, with_transfers
from chakra_et.transform.ddp import bucket_bytes, find_backward
from chakra_et.transform.operator_times import resized

FLAG = "--resize"
_NUMBER = re.compile(rb"\d+")


@dataclass(frozen=True)
class Resize:
    """Dimensions of recorded tensors change: ``sizes`` maps old sizes to new ones, ``{10: 20, 720: 1440}``
    for twice a batch of 10, where 720 is 10 sequences of 72.

    Operators and their kernels change with their operations (``operator_times.resized``), all-reduces of
    DDP's gradients with the shapes of these; the gradients of a bucket stay together, and other collectives
    keep their sizes. So do graphs: what runs only for some sizes can't be known.
    """

    sizes: Mapping[int, int] = field(hash=False)
    model: NetworkModel | None = None

    def rebuild(self, run: Run) -> Run:
        made = [resized(trace, self.text) for trace in with_transfers(run)]
        reduced, ranks = self._gradients(run), len(run.graph.ranks)
        nodes, before, after = np.sum([count for _, count in made], axis=0).tolist()
        if not nodes and not any(reduced):
            raise TraceError(f"{FLAG}: {self._nothing(run)}")
        names = ", ".join(f"{old} → {new}" for old, new in self.sizes.items())
        notes = [f"{FLAG} {names}: {nodes:,} nodes, {before / 1e3:,.3f} ms, take {after / 1e3:,.3f} ms"]
        changed = sum(map(len, reduced))
        kept = int(run.is_communication.sum()) - changed
        if changed:
            notes.append(
                f"{FLAG}: {plural(changed, 'all-reduce')} of gradients change with the gradients' shapes"
            )
        if kept:
            notes.append(
                f"{FLAG}: the sizes and times of {plural(kept, 'communication node')} that aren't "
                "all-reduces of such gradients stay as they are"
            )
        if not changed:
            return as_run(run, [trace for trace, _ in made], notes)
        model = CollectiveTimes(run, self.model).model

        def retime(kind: CollectiveType, old: int, new: int, _: str, micros: float) -> float:
            return micros * model.change(kind, (old, ranks), (new, ranks))

        pairs = zip(made, reduced, strict=True)
        return as_run(run, [with_sizes(trace, sizes, retime) for (trace, _), sizes in pairs], notes)

    def text(self, shapes: bytes) -> bytes:
        """The JSON text of shapes with other sizes."""
        return _NUMBER.sub(lambda found: str(self.sizes.get(int(found[0]), int(found[0]))).encode(), shapes)

    def _gradients(self, run: Run) -> list[dict[int, int]]:
        """The new bytes of DDP's all-reduces, by row of each rank."""
        found: list[dict[int, int]] = []
        for rank, trace in zip(run.graph.ranks, run.graph.traces, strict=True):
            try:
                steps = find_backward(trace, rank, FLAG) if run.is_communication.any() else []
            except TraceError:  # collectives aren't those of DDP's gradients
                steps = []
            found.append({})
            for step in steps:
                for bucket in step.buckets:
                    new = 0.0
                    for each in step.gradients[bucket.first : bucket.last]:
                        grown = math.prod(self.sizes.get(size, size) / size for size in each.shape if size)
                        new += each.size * grown
                    if round(new) != bucket_bytes(step, list(range(bucket.first, bucket.last))):
                        found[-1][bucket.collective] = round(new)
        return found

    def _nothing(self, run: Run) -> str:
        texts = [text for trace in run.graph.traces if trace.inputs for text in trace.inputs.shapes]
        common = Counter(int(size) for text in texts for size in _NUMBER.findall(text))
        most = ", ".join(str(size) for size, _ in common.most_common(8)) or "none recorded"
        return (
            f"no operator's work depends on a dimension of {', '.join(map(str, self.sizes))}: the sizes are "
            f"{most}"
        )


def parse_resize(words: Sequence[str]) -> Resize:
    """``10=20 720=1440``. Raises ``ValueError``."""
    sizes = {}
    for word in words:
        found = re.fullmatch(r"(\d{1,12})=(\d{1,12})", word)
        if not found or not int(found[1]) or not int(found[2]):
            raise ValueError(f"{FLAG} {word!r}: write OLD=NEW with sizes above 0, as 10=20 720=1440")
        sizes[int(found[1])] = int(found[2])
    return Resize(sizes)
