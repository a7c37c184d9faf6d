"""Prints a run's log of one kind, or writes its summary as one HTML page with charts.

megatron_lm/_04_report.sh JOBID [JOBID2 …] out|err|gpu|summary
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chakra_et import cli, files
from chakra_et.report.page import TextTable
from megatron_lm.errors import RunError
from megatron_lm.logs import runs
from megatron_lm.results import view
from megatron_lm.results.view import View
from megatron_lm.settings import conf

KINDS = ("out", "err", "gpu", "summary")
STYLE = (
    "body{font:15px sans-serif;margin:1em 2em}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:2px 8px;text-align:left}.wrong{color:#b00020}"
)


@dataclass(frozen=True)
class ReportConfig:
    """Which run, and what of it."""

    words: tuple[str, ...] = field(
        metadata={"positional": True, "help": "job ids, then out, err, gpu or summary"}
    )

    def __post_init__(self) -> None:
        if len(self.words) < 2 or self.words[-1] not in KINDS:
            kinds = ", ".join(KINDS)
            raise ValueError(f"give JOBID [JOBID2 …] and one of {kinds}, not '{' '.join(self.words)}'")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(ReportConfig, argv, prog="_04_report.sh", description=(__doc__ or "").splitlines()[0])
    *ids, kind = config.words
    found = runs.find_all(tuple(ids), conf.log_dir())
    if kind == "summary":
        print(write_summary([View(run) for run in found]))
        return 0
    for node in (node for run in found for node in run.nodes):
        print(f"==> {node.job}/{node.name}.{kind} <==", flush=True)
        sys.stdout.buffer.write(node.read(kind))
        sys.stdout.buffer.flush()
    return 0


def write_summary(views: Sequence[View]) -> Path:
    """Write summary.html, of several runs comparison.html, in the folder of the first job. Raises
    ``RunError``.
    """
    run = views[0].run
    path = run.log_dir / run.jobs[0] / ("comparison.html" if views[1:] else "summary.html")
    states = (f"{each.name}: {', '.join(map(str, each.states.values()))}" for each in views)
    heading = ("Runs " if views[1:] else "Run ") + "; ".join(states)
    wrong = [f"{each.name}: {text}" if views[1:] else text for each in views for text in each.found]
    if not any(samples for each in views for samples in each.use.values()):
        wrong.append("no GPU was recorded on any node")
    write(path, _page(heading, view.tables(views), wrong, view.charts(views)))
    return path


def write(path: Path, text: str) -> None:
    """Write the whole file or nothing. Raises ``RunError``."""
    try:
        files.write_text(path, text)
    except OSError as error:
        raise RunError(f"{path} can't be written: {error.strerror or error}.") from None


def _page(heading: str, tables: Sequence[TextTable], wrong: Sequence[str], charts: Sequence[str]) -> str:
    """One self-contained HTML page; ``charts`` are SVG."""

    def row(kind: str, cells: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    parts = [
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{html.escape(heading)}</title><style>{STYLE}</style></head>",
        f"<body><h1>{html.escape(heading)}</h1>",
        *(f"<p class='wrong'>{html.escape(text)}</p>" for text in wrong),
        *charts,
    ]
    for table in tables:
        parts += [f"<h2>{html.escape(table.title)}</h2><table>", row("th", table.header)]
        parts += [*(row("td", cells) for cells in table.rows), "</table>"]
    return "".join([*parts, "</body></html>\n"])
