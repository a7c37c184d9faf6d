"""A job in memory: its tables, what changes it, and what that predicts. Everything here is in ``chakra_et``.

    import chakra_et as ce

    job = ce.load("outputs/gpt2_2gpu_quick_trace")
    print(job.kernels.pandas().head())
    print(ce.predict(job.scale(dp=8).with_network(bandwidth="100Gbit/s")).after_ms)

A job is changed by what-ifs and remains what it was; only ``convert`` and ``Job.save`` write files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chakra_et.cli import made
from chakra_et.convert.inputs import find_run
from chakra_et.errors import TraceError
from chakra_et.export import tables
from chakra_et.export.tables import Table
from chakra_et.predict.command import PredictConfig, changes
from chakra_et.predict.predict import Prediction, predicted_traces, write_traces
from chakra_et.predict.predict import predict as _predict
from chakra_et.report.run import ReportRun, assemble
from chakra_et.report.run import load as _load
from chakra_et.simulate.run import Run
from chakra_et.text import plural

if TYPE_CHECKING:
    from chakra_et.convert.runs import SetResult
    from chakra_et.transform.changes import Change, Rebuild


@dataclass(frozen=True, eq=False)
class Job:
    """All ranks of one training run. ``measured``: the run as recorded; ``changes``: what-ifs, in order.

    Tables show the run as recorded or, of a job with changes, as it is predicted. A job is never altered:
    ``scale`` and the like return another.
    """

    measured: ReportRun
    changes: tuple[Change | Rebuild, ...] = ()

    def __repr__(self) -> str:
        ranks, changes = plural(len(self.ranks), "rank"), plural(len(self.changes), "change")
        return f"Job({self.name}: {ranks}, {len(self.shown.graph):,} nodes, {changes})"

    @property
    def name(self) -> str:
        return self.measured.name

    @property
    def ranks(self) -> list[int]:
        """The numbers of the ranks."""
        return self.shown.ranks

    @property
    def notes(self) -> list[str]:
        """What is missing, guessed or assumed, one sentence each."""
        return self.shown.lacks

    def scale(
        self,
        *,
        dp: int | None = None,
        tp: int | None = None,
        pp: int | None = None,
        layers: int | str = "",
        batch: int | str = "",
        seq: int | str = "",
        mesh: str = "",
    ) -> Job:
        """The job with other degrees of parallelism, layers, sequences per rank (``batch``) or tokens per
        sequence (``seq``); text such as ``"2x"`` is a factor. ``mesh``: the recorded one, where the process
        groups don't show it. Raises ``TraceError`` for what the run doesn't show how to make."""
        size = {"layers": str(layers), "batch": str(batch), "seq": str(seq)}
        return self.what_if(dp=dp, tp=tp, pp=pp, mesh=mesh, **size)

    def with_network(
        self, topology: str | None = None, *, bandwidth: str | None = None, latency: str | None = None
    ) -> Job:
        """The job on another network: a topology (``"8xH100 NVLink, 4 nodes, 400 Gbit/s"``), or the bandwidth
        of each rank's link (``"100Gbit/s"``) and the latency of a message (``"5us"``)."""
        return self.what_if(topology=topology, bandwidth=bandwidth, latency=latency)

    def what_if(self, **flags: Any) -> Job:
        """The job under the changes that the flags of ``chakra-et predict`` describe:
        ``what_if(scale=("gemm=0.5",), gpu="H100:MI300X")``. Raises ``TraceError`` for unusable ones."""
        try:
            config = made(PredictConfig, {"name": self.name, **flags})
        except (TypeError, ValueError) as error:
            raise TraceError(f"{self.name}: {error}") from None
        return replace(self, changes=(*self.changes, *changes(config, self.run)))

    def save(self, prefix: str | os.PathLike[str]) -> list[Path]:
        """Write ``PREFIX.RANK.et`` and the comm-group file; raises ``TraceError`` where they are there."""
        return write_traces(self.shown.traces, self.shown.job, prefix)

    @cached_property
    def run(self) -> Run:
        """The recorded run as replays and predictions take it."""
        if self.measured.apart:
            raise TraceError(f"{self.name}: {self.measured.apart}")
        return self.measured.job

    @cached_property
    def prediction(self) -> Prediction:
        """What the changes do; ``ce.predict`` returns it."""
        return _predict(self.run, self.changes)

    @cached_property
    def shown(self) -> ReportRun:
        """What the tables show."""
        if not self.changes:
            return self.measured
        changed, notes = self.prediction.changed, self.prediction.notes
        traces, ranks = predicted_traces(self.prediction), changed.graph.ranks
        return assemble(self.name, traces, ranks, changed.comm_groups, self.measured.manifest, {}, notes)

    @cached_property
    def nodes(self) -> Table:
        """Operators, calls, kernels, copies and communication: one row each, times in ns on one clock."""
        return tables.nodes(self.shown)

    @cached_property
    def edges(self) -> Table:
        """Dependencies: the target waits for the source."""
        return tables.edges(self.shown)

    @cached_property
    def operators(self) -> Table:
        """Time by kind and name over all ranks: operators, calls, kernels, copies and communication."""
        return tables.operators(self.shown)

    @cached_property
    def kernels(self) -> Table:
        """``operators``, but kernels alone, each with its class and rates."""
        return tables.operators(self.shown, ("kernel",))

    @cached_property
    def kernel_classes(self) -> Table:
        """Device work by class: matrix products, attention, copies, …, with the part of the GPU's peak that
        each reaches, and how many times as long it takes as such work usually does there."""
        return tables.kernel_classes(self.shown)

    @cached_property
    def collectives(self) -> Table:
        """Communication by type, size and group: transfer time, GB/s (10^9 bytes), skew of arrival."""
        return tables.collectives(self.shown)

    @cached_property
    def steps(self) -> Table:
        """Each step of each rank, and where its time went."""
        return tables.steps(self.shown)

    @cached_property
    def critical_path(self) -> Table:
        """The chain of nodes that decides how long the run takes, in time order."""
        return tables.critical_path(self.shown)


def load(name: str | os.PathLike[str]) -> Job:
    """The run of which ``name`` is the NAME (of NAME.0.et, NAME.1.et, …), a file, or the folder.

    Traces of PyTorch are converted on the way, in memory. Raises ``TraceError`` for what is no run.
    """
    return Job(_load(find_run([os.fspath(name)])))


def predict(job: Job, **flags: Any) -> Prediction:
    """Step times of ``job`` under its changes, and those that ``flags`` describe (see ``Job.what_if``)."""
    return (job.what_if(**flags) if flags else job).prediction


def convert(
    traces: str | os.PathLike[str], output: str | os.PathLike[str] = "", **flags: Any
) -> list[SetResult]:
    """Convert a folder of traces, or one file, to .et files in ``output`` (default: beside the traces).

    ``flags``: those of ``chakra-et convert``. Returns one result per run, with its ranks, errors and
    warnings; ``load(result.prefix)`` reads it. Raises ``TraceError`` where there is nothing to convert.
    """
    from chakra_et.convert.command import ConvertConfig
    from chakra_et.convert.command import convert as run

    try:
        given = {"files": (os.fspath(traces),), "output": os.fspath(output)}
        config = made(ConvertConfig, {**given, **flags})
    except (TypeError, ValueError) as error:
        raise TraceError(f"{traces}: {error}") from None
    return run(config, config.sets())
