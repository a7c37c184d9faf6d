"""Other tensor sizes: a larger batch, longer sequences, wider layers, from the shapes of the operators."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from chakra_et.cost.network_fit import NetworkModel
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType
from chakra_et.et.node_attributes import lasting, with_integers
from chakra_et.simulate.run import Run, Setting
from chakra_et.simulate.time_by_kind import KINDS
from chakra_et.text import plural
from chakra_et.transform.changes import CollectiveTimes, as_run, with_transfers
from chakra_et.transform.ddp import READY, find_backward
from chakra_et.transform.operator_times import resized_times, work_ratios

_NUMBER = re.compile(rb"\d+")
_LARGEST_DOUBT = 0.5


@dataclass(frozen=True)
class Resize:
    """Dimensions of recorded tensors change: ``sizes`` maps old sizes to new ones, ``{10: 20, 720: 1440}``
    for twice a batch of 10, where 720 is 10 sequences of 72.

    The own time of each operator that doesn't leave its work to others, and its kernels' time, changes with
    its operations (see ``operator_work``), but for what an operator without work takes. All-reduces of DDP's
    gradients change with the shapes of these; the gradients of a bucket stay together, and other collectives
    keep their sizes. So do graphs: what runs only for some sizes can't be known.
    """

    sizes: Mapping[int, int] = field(hash=False)
    model: NetworkModel | None = None

    def rebuild(self, run: Run) -> Run:
        """The run with other sizes of DDP's gradients and all-reduces."""
        if not run.is_communication.any():
            return run
        traces, changed, known = [], 0, 0
        times: CollectiveTimes | None = None
        count = len(run.graph.ranks)
        for rank, trace in zip(run.graph.ranks, with_transfers(run), strict=True):
            try:
                steps = find_backward(trace, rank, "--resize")
            except TraceError:
                note = "--resize: collectives keep their sizes, as they aren't those of DDP's gradients"
                return as_run(run, run.graph.traces, [note])
            sizes, micros = {}, {}
            for each_step, bucket in ((step, bucket) for step in steps for bucket in step.buckets):
                gradients, row = each_step.gradients[bucket.first : bucket.last], bucket.collective
                old, new = sum(each.size for each in gradients), 0.0
                for each in gradients:
                    grown = math.prod(self.sizes.get(size, size) / size for size in each.shape if size)
                    new += each.size * grown
                known += 1
                if old != round(new):
                    times = times or CollectiveTimes(run, self.model)
                    kind, sizes[row] = CollectiveType.ALL_REDUCE, round(new)
                    ratio = times.model.change(kind, (old, count), (sizes[row], count))
                    micros[row] = int(trace.duration_micros[row]) * ratio
            assert trace.inputs is not None
            shapes = [
                resized(shape, self.sizes) if trace.names[row] == READY else shape
                for row, shape in zip(trace.inputs.rows.tolist(), trace.inputs.shapes, strict=True)
            ]
            made = lasting(with_integers(trace, "comm_size", sizes), micros)
            traces.append(replace(made, inputs=replace(trace.inputs, shapes=shapes)))
            changed += len(sizes)
        kept = int(run.is_communication.sum()) - known
        notes = []
        if kept:
            notes.append(
                f"--resize: the sizes and times of {plural(kept, 'communication node')} that aren't DDP's "
                "all-reduces of gradients stay as they are"
            )
        if not changed:
            return as_run(run, run.graph.traces, notes) if notes else run
        notes.append(
            f"--resize: {plural(changed, 'all-reduce')} of gradients change with the gradients' shapes"
        )
        return as_run(run, traces, notes)

    def apply(self, run: Run, setting: Setting) -> Setting:
        graph = run.graph
        found = [work_ratios(trace, lambda text: resized(text, self.sizes)) for trace in graph.traces]
        operations, ratio, leaf = (graph.gather([each[at] for each in found]) for at in range(3))
        if not (ratio != 1).any():
            texts = [text for trace in graph.traces if trace.inputs for text in trace.inputs.shapes]
            common = Counter(int(size) for text in texts for size in _NUMBER.findall(text))
            most = ", ".join(str(size) for size, _ in common.most_common(8)) or "none recorded"
            old = ", ".join(map(str, self.sizes))
            raise TraceError(
                f"--resize: no operator's work depends on a dimension of {old}: the sizes are {most}"
            )
        on_cpu = graph.is_cpu & (leaf > 0) & (run.kind == KINDS.index("operator"))
        on_device = np.isin(run.kind, [KINDS.index("kernel"), KINDS.index("copy")]) & ~run.is_communication
        changes = (on_cpu | on_device) & (ratio != 1)
        taken = setting.own_ns.astype(float)
        times = resized_times(taken, graph.own_ns, on_cpu, operations, ratio)
        changed = np.where(changes, times, taken)
        before, after = taken[changes].sum(), changed[changes].sum()
        names = ", ".join(f"{old} → {new}" for old, new in self.sizes.items())
        return (
            replace(setting, own_ns=np.rint(changed).astype(np.int64))
            .noting(
                f"--resize {names}: {int(changes.sum()):,} nodes, {before / 1e6:,.3f} ms, take "
                f"{after / 1e6:,.3f} ms"
            )
            .doubting(
                "time per operation of an operator",
                own_ns=np.where(changes, np.abs(changed - taken) * _spread(run, operations, changes), 0),
            )
        )


def parse_resize(words: Sequence[str]) -> Resize:
    """``10=20 720=1440``. Raises ``ValueError``."""
    sizes = {}
    for word in words:
        found = re.fullmatch(r"(\d{1,12})=(\d{1,12})", word)
        if not found or not int(found[1]) or not int(found[2]):
            raise ValueError(f"--resize {word!r}: write OLD=NEW with sizes above 0, as 10=20 720=1440")
        sizes[int(found[1])] = int(found[2])
    return Resize(sizes)


def resized(shapes: bytes, sizes: Mapping[int, int]) -> bytes:
    """The JSON text of shapes with other sizes."""
    return _NUMBER.sub(lambda found: str(sizes.get(int(found[0]), int(found[0]))).encode(), shapes)


def _spread(run: Run, operations: np.ndarray, changes: np.ndarray) -> np.ndarray:
    """How much the time per operation varies among the nodes of each name, as a part of it; float64[N]."""
    nodes = np.flatnonzero(changes & (operations > 0) & (run.graph.own_ns > 0))
    rate = operations[nodes] / run.graph.own_ns[nodes]
    weight, name = run.graph.own_ns[nodes].astype(float), run.name_of[nodes]
    total = np.maximum(np.bincount(name, weight, len(run.names)), 1)
    mean = np.bincount(name, weight * rate, len(run.names)) / total
    off = np.bincount(name, weight * (rate - mean[name]) ** 2, len(run.names)) / total
    spread = np.minimum(np.sqrt(off) / np.maximum(mean, 1e-30), _LARGEST_DOUBT)
    found: np.ndarray = spread[run.name_of]
    return found
