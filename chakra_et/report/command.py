"""``chakra-et report NAME``: one self-contained HTML page about a run.

    chakra-et report outputs/gpt2 -o gpt2.html
    chakra-et report outputs/gpt2 --json

NAME stands for NAME.0.et, NAME.1.et, … (or for traces of that name, which are converted on the way). The
run's .et files, its traces, or its folder are accepted too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chakra_et import cli, text
from chakra_et.convert.inputs import device_traces, files_of, find_run, load_run
from chakra_et.diagnose.verdict import diagnose
from chakra_et.et.sets import Skeletons
from chakra_et.files import path_of
from chakra_et.names import SKELETON, RunFiles, run_at
from chakra_et.ranks.table import step_table
from chakra_et.report.content import content, with_names
from chakra_et.report.many import MOST_NODES, many_content
from chakra_et.report.page import write_page
from chakra_et.report.run import load
from chakra_et.simulate.measured_steps import about_steps


@dataclass
class ReportConfig:
    names: tuple[str, ...] = cli.run_names()
    output: str | None = cli.option(
        "page to write (default: NAME_report.html beside the run)", None, short="-o"
    )
    allow_missing_ranks: bool = cli.allow_missing_ranks()
    skeletons: Skeletons = cli.skeletons()
    cluster: str = cli.cluster()
    xlsx: str | None = cli.option("also write the tables to this Excel workbook", None, metavar="FILE")
    json: bool = cli.option("print what the page's tables show, as JSON", False)


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(ReportConfig, argv, description="Write one HTML page about a run.")
    many = _many_ranks(config)
    if many:
        kind, files, name = "many", many, str(many.folder / many.name)
        how = config.allow_missing_ranks, config.skeletons, config.cluster
        table, job = step_table(name, *how), load_run(name, *how)
        found, columns = many_content(many, table, diagnose(job))
    else:
        chosen = find_run(config.names, config.allow_missing_ranks)
        run = load(chosen)
        kind, files, job = "report", files_of(chosen), run.job
        traces, notes = device_traces(chosen)
        run.lacks.extend(f"no call stacks: {note}" for note in notes)
        found, columns = content(run, traces)
    output = path_of(config.output) if config.output else files.page_file
    size = write_page(output, kind, f"{files.name}: report", found, columns)
    if config.xlsx and not many:
        from chakra_et.export.tables import write_workbook  # it needs openpyxl

        write_workbook(run, found["headline"], Path(config.xlsx))
    notes = [f"note: {each}" for each in about_steps(job.graph.traces, job.steps)]
    told = [*found["headline"], *notes, f"{output}: {text.size(size)}, open it in a browser"]
    print(json.dumps(with_names(found) | {"page": str(output)}) if config.json else "\n".join(told))
    return 0


def _many_ranks(config: ReportConfig) -> RunFiles | None:
    """The run, where it has too many ranks for a page with all nodes, or skeletons alone are asked for."""
    run = run_at(config.names[0])
    if len(config.names) > 1 or config.skeletons == "off" or path_of(config.names[0]).exists():
        return None
    ranks = max(len(run.et_files()), len(run.et_files(SKELETON)))
    return run if ranks > MOST_NODES or (ranks and config.skeletons == "on") else None
