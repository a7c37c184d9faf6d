"""Prints a run's log of one kind, or writes its summary as one HTML page with charts.

megatron_lm/_04_report.sh JOBID [JOBID2 …] out|err|gpu|summary
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chakra_et import cli, files
from chakra_et.report.page import figures_page
from megatron_lm.logs import runs
from megatron_lm.results import view
from megatron_lm.results.view import View
from megatron_lm.settings import conf

KINDS = ("out", "err", "gpu", "summary")


@dataclass(frozen=True)
class ReportConfig:
    words: tuple[str, ...] = cli.option("job ids, then out, err, gpu or summary", positional=True)

    def __post_init__(self) -> None:
        if len(self.words) < 2 or self.words[-1] not in KINDS:
            kinds = ", ".join(KINDS)
            raise ValueError(f"give JOBID [JOBID2 …] and one of {kinds}, not '{' '.join(self.words)}'")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(ReportConfig, argv, prog="_04_report.sh", description=__doc__)
    *ids, kind = config.words
    # Both ids of a heterogeneous run are of one run.
    found = {run.jobs: run for run in (runs.find((job,), conf.log_dir()) for job in ids)}.values()
    if kind == "summary":
        print(write_summary([View(run) for run in found]))
        return 0
    for node in (node for run in found for node in run.nodes):
        print(f"==> {node.job}/{node.name}.{kind} <==", flush=True)
        sys.stdout.buffer.write(node.read(kind))
        sys.stdout.buffer.flush()
    return 0


def write_summary(views: Sequence[View]) -> Path:
    """Write summary.html, of several runs comparison.html, in the folder of the first job."""
    run = views[0].run
    path = run.log_dir / run.jobs[0] / ("comparison.html" if views[1:] else "summary.html")
    states = (f"{each.name}: {', '.join(map(str, each.states.values()))}" for each in views)
    heading = ("Runs " if views[1:] else "Run ") + "; ".join(states)
    wrong = [f"{each.name}: {text}" if views[1:] else text for each in views for text in each.found]
    if not any(samples for each in views for samples in each.use.values()):
        wrong.append("no GPU was recorded on any node")
    files.write_text(path, figures_page(heading, wrong, view.charts(views), view.tables(views)))
    return path
