"""The whole log of a run by kind, or a summary of it as Markdown and HTML.

megatron_lm/_04_report.sh JOBID [JOBID2] out|err|gpu|summary
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from chakra_et import files
from chakra_et.cli import parse
from megatron_lm import logs, runs, speed
from megatron_lm.get_result import problems, setting_lines
from megatron_lm.runs import Run, RunError

KINDS = ("out", "err", "gpu", "summary")
GPU_SAMPLES = 600  # of a node: what a screen can show
ROWS = 40  # of a table in the Markdown; the HTML has all


class Table(NamedTuple):
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class ReportConfig:
    words: tuple[str, ...] = field(
        metadata={"positional": True, "help": "one or two job ids, then out, err, gpu or summary"}
    )

    def __post_init__(self) -> None:
        if not 2 <= len(self.words) <= 3 or self.words[-1] not in KINDS:
            raise ValueError(
                f"say JOBID [JOBID2] and one of {', '.join(KINDS)}, not '{' '.join(self.words)}'"
            )


def main(argv: list[str] | None = None) -> int:
    config = parse(ReportConfig, argv, prog="_04_report.sh", description=(__doc__ or "").splitlines()[0])
    *ids, kind = config.words
    try:
        run = runs.find(tuple(ids), runs.log_dir())
        if kind == "summary":
            for path in write_summary(run):
                print(path)
            return 0
    except RunError as error:
        print(f"_04_report.sh: {error}", file=sys.stderr)
        return 1
    for node in run.nodes:
        print(f"==> {node.job}/{node.name}.{kind} <==", flush=True)
        sys.stdout.buffer.write(node.read(kind))
        sys.stdout.buffer.flush()
    return 0


def write_summary(run: Run) -> list[Path]:
    """summary.md and summary.html in the folder of the run's first job. Raises ``RunError``."""
    folder = run.log_dir / run.jobs[0]
    states = {job: runs.state(run, job) for job in run.jobs}
    heading = f"Run {' '.join(run.jobs)}: {', '.join(map(str, states.values()))}"
    wrong = list(problems(run, states))
    outputs = {node: node.read("out") for node in run.nodes}
    found = speed.iterations(outputs.values())
    memory = [line for data in outputs.values() for line in logs.memory(data)]
    use = {node: gpu_use(node.read("gpu")) for node in run.nodes}
    settings = {node.name: logs.settings(data) for node, data in outputs.items()}
    tables = [
        Table("Settings", ("setting", "value"), [_split(line) for line in setting_lines(settings)]),
        *_speed_tables(found, next((of_node for of_node in settings.values() if of_node), {})),
        memory_table(memory),
        *(gpu_table(node, samples) for node, samples in use.items() if samples),
    ]
    tables = [table for table in tables if table.rows]
    if not any(use.values()):
        wrong.append("no GPU was logged on any node")
    charts = summary_charts(found, memory, use)
    paths = [folder / "summary.md", folder / "summary.html"]
    for path, text in zip(
        paths, (markdown(heading, wrong, tables), page(heading, wrong, tables, charts)), strict=True
    ):
        write_text(path, text)
    return paths


def gpu_use(data: bytes) -> dict[int, list[logs.Gpu]]:
    """At most about ``GPU_SAMPLES`` samples of a node, evenly spread over its time."""
    return logs.gpus(data, GPU_SAMPLES)


def memory_table(memory: list[logs.Memory]) -> Table:
    """The last line of each rank."""
    last = {line.rank: line for line in memory}
    rows = [
        (str(rank), str(line.after), *(f"{size:.1f}" for size in _sizes(line)))
        for rank, line in sorted(last.items())
    ]
    header = (
        "rank",
        "after iteration",
        "allocated, MB",
        "max allocated, MB",
        "reserved, MB",
        "max reserved, MB",
    )
    return Table("Memory by rank", header, rows)


def gpu_table(node: runs.Node, samples: dict[int, list[logs.Gpu]]) -> Table:
    """Mean and highest use of each GPU of a node, over the samples that were read."""
    rows = []
    for index in sorted({gpu.index for sample in samples.values() for gpu in sample}):
        of_gpu = [gpu for sample in samples.values() for gpu in sample if gpu.index == index]
        percents = [gpu.percent for gpu in of_gpu if gpu.percent is not None]
        used = [gpu.used for gpu in of_gpu if gpu.used is not None]
        heat = [gpu.celsius for gpu in of_gpu if gpu.celsius is not None]
        rows.append(
            (
                f"{index} {of_gpu[0].name}",
                f"{sum(percents) / len(percents):.0f}" if percents else "?",
                str(max(used)) if used else "?",
                str(of_gpu[0].total or "?"),
                str(max(heat)) if heat else "?",
            )
        )
    header = ("GPU", "mean use, %", "most memory, MB", "of MB", "highest °C")
    return Table(f"GPU use of {node.name}", header, rows)


def summary_charts(
    found: list[logs.Iteration], memory: list[logs.Memory], use: dict[runs.Node, dict[int, list[logs.Gpu]]]
) -> list[str]:
    """HTML of the charts; the first one that there is carries plotly itself."""
    import plotly.graph_objects as go

    figures = []
    if found:
        x = [iteration.number for iteration in found]
        figure = go.Figure(
            go.Scatter(x=x, y=[iteration.seconds for iteration in found], mode="lines+markers")
        )
        figures.append(
            figure.update_layout(title="Time of an iteration", xaxis_title="iteration", yaxis_title="s")
        )
    if memory:
        last = {line.rank: line for line in memory}
        ranks = sorted(last)
        figure = go.Figure()
        for name, at in (("max allocated", 1), ("max reserved", 3)):
            figure.add_bar(x=ranks, y=[_sizes(last[rank])[at] for rank in ranks], name=name)
        figures.append(figure.update_layout(title="Memory by rank", xaxis_title="rank", yaxis_title="MB"))
    if any(use.values()):
        figure = go.Figure()
        for node, samples in use.items():
            for index in sorted({gpu.index for sample in samples.values() for gpu in sample}):
                y = [
                    next((gpu.percent for gpu in sample if gpu.index == index), None)
                    for sample in samples.values()
                ]
                figure.add_scatter(x=list(samples), y=y, name=f"{node.name} [{index}]", mode="lines")
        figures.append(figure.update_layout(title="GPU use over time", xaxis_title="s", yaxis_title="%"))
    return [
        figure.to_html(full_html=False, include_plotlyjs=number == 0) for number, figure in enumerate(figures)
    ]


def markdown(heading: str, wrong: list[str], tables: list[Table]) -> str:
    lines = [f"# {heading}", ""]
    lines += [*(f"- **{_cell(text)}**" for text in wrong), ""] if wrong else []
    for table in tables:
        lines += [f"## {table.title}", "", _row(table.header), _row("---" for _ in table.header)]
        lines += [_row(row) for row in _shortened(table.rows)]
        lines.append("")
    return "\n".join(lines)


def page(heading: str, wrong: list[str], tables: list[Table], charts: list[str]) -> str:
    """One self-contained HTML page."""
    parts = [
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{html.escape(heading)}</title><style>body{{font:15px sans-serif;margin:1em 2em}}",
        "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:2px 8px;text-align:left}",
        f".wrong{{color:#b00020}}</style></head><body><h1>{html.escape(heading)}</h1>",
        *(f"<p class='wrong'>{html.escape(text)}</p>" for text in wrong),
        *charts,
    ]
    for table in tables:
        parts.append(f"<h2>{html.escape(table.title)}</h2><table><tr>")
        parts += [f"<th>{html.escape(cell)}</th>" for cell in table.header]
        parts += ["</tr>" + "".join(f"<tr>{_cells(row)}</tr>" for row in table.rows) + "</table>"]
    return "".join([*parts, "</body></html>\n"])


def write_text(path: Path, text: str) -> None:
    """The whole file or none of it. Raises ``RunError``."""
    try:
        files.write_text(path, text)
    except OSError as error:
        raise RunError(f"{path} can't be written: {error.strerror or error}.") from None


def _speed_tables(found: list[logs.Iteration], settings: dict[str, str]) -> Iterator[Table]:
    if not found:
        return
    yield Table("Speed", ("figure", "value"), speed.figures(found, settings))
    rows = [
        (
            str(it.number),
            f"{it.seconds:.4f}",
            "-" if it.loss is None else f"{it.loss:.6g}",
            f"{it.learning_rate:.4g}",
        )
        for it in found
    ]
    yield Table("Iterations", ("iteration", "time, s", "loss", "learning rate"), rows)


def _shortened(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    if len(rows) <= ROWS:
        return rows
    gap = ("…", *("" for _ in rows[0][1:]))
    return [*rows[: ROWS // 2], gap, *rows[-ROWS // 2 :]]


def _sizes(line: logs.Memory) -> tuple[float, float, float, float]:
    return line.allocated, line.max_allocated, line.reserved, line.max_reserved


def _split(line: str) -> tuple[str, str]:
    name, _, value = line.partition(": ")
    return name, value


def _row(cells: Iterator[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _cells(row: tuple[str, ...]) -> str:
    return "".join(f"<td>{html.escape(cell)}</td>" for cell in row)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        sys.exit(0)
