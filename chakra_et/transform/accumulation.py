"""Gradient accumulation: several forward and backward passes for one step of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.arrays import nearest
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.et.node_attributes import in_phase, lanes, parents
from chakra_et.et.rearrange import New, arrange, insert
from chakra_et.simulate.run import Run
from chakra_et.text import plural
from chakra_et.transform.changes import as_run, with_transfers
from chakra_et.transform.ddp import Backward, find_backward, reduction, refuse_others
from chakra_et.transform.operator_times import Elementwise

FLAG = "--accumulate"


@dataclass(frozen=True)
class Accumulate:
    """Each step runs its forward and backward pass ``times`` times, on batches of the same size, and the
    optimizer once. Gradients are all-reduced after the last pass alone, as with DDP's no_sync(): passes
    without reduction lack the copies to buckets and back and their all-reduces. From the second pass
    on each gradient is added to the sum of those before, at the run's rate for elementwise operators.
    """

    times: int

    def rebuild(self, run: Run) -> Run:
        traces, added, on_device = [], 0, 0
        for rank, trace in zip(run.graph.ranks, with_transfers(run), strict=True):
            steps = find_backward(trace, rank, FLAG)
            talks = (trace.types >= NodeType.COMM_SEND).sum()
            on_device += int((trace.column("is_cpu_op") == 0).sum() > talks)
            made, additions = self._repeated(trace, rank, steps)
            if not on_device:
                made = insert(made, np.zeros(len(made), bool), additions)
                added += len(additions)
            traces.append(made)
        done = plural(len(steps), "step")
        notes = [f"{FLAG} {self.times}: {done} of {self.times} passes, reduced after the last pass alone"]
        if added:
            notes.append(
                f"{FLAG}: {added:,} additions of gradients are assumed, at the rate of elementwise operators"
            )
        if on_device:
            notes.append(f"{FLAG}: kernels that add gradients of {plural(on_device, 'rank')} aren't counted")
        return as_run(run, traces, notes)

    def _repeated(
        self, trace: ExecutionTrace, rank: int, steps: list[Backward]
    ) -> tuple[ExecutionTrace, list[New]]:
        """The trace with more passes, and the additions of gradients from the second pass on."""
        lane, rate = lanes(trace), Elementwise(trace)
        # The CPU row of each node: its own, or that of the CPU node around device work or communication.
        launcher = nearest(trace.column("is_cpu_op") != 0, parents(trace))
        of_optimizer, row_of = in_phase(trace, b"optimizer"), np.arange(len(trace))
        left_out = reduction(trace, steps)
        rows: list[int] = []
        more: list[tuple[int, int]] = []
        additions: list[New] = []
        done = 0
        for step in steps:
            last = max([g.rows[-1] for g in step.gradients] + [row for b in step.buckets for row in b.launch])
            inside = (launcher > step.begin) & (launcher <= last) & (row_of < step.end) & ~of_optimizer
            part = np.flatnonzero(inside)
            # How often other communication runs is up to the program, and the trace doesn't tell.
            refuse_others(trace, rank, steps, part, FLAG)
            first = int(part[0])
            rows += range(done, first)
            done = first
            again = part[~left_out[part]].tolist()
            passes: list[dict[int, int]] = []  # row → place
            for _ in range(self.times - 1):
                passes.append(dict(zip(again, range(len(rows), len(rows) + len(again)), strict=True)))
                rows += again
            passes.append({row: len(rows) + row - first for row in part.tolist()})
            for before, after in zip(passes, passes[1:], strict=False):
                # A thread that begins a pass has waited for all threads of the pass before.
                on_cpu = [row for row in before if launcher[row] == row]
                start = min(after[row] for row in after if launcher[row] == row)
                more += [(place, start) for place in {int(lane[row]): before[row] for row in on_cpu}.values()]
                for gradient in step.gradients:
                    at = after[gradient.rows[0]]
                    # Reads both, writes one.
                    additions.append(New(at, at, rate.micros(3 * gradient.size, 1), "aten::add_"))
        rows += range(done, len(trace))
        return arrange(trace, np.array(rows), more=more), additions
