"""Prints a run's log of one kind, or writes its summary as Markdown and HTML.

megatron_lm/_04_report.sh JOBID [JOBID2] out|err|gpu|summary
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chakra_et import cli
from megatron_lm.diagnosis import of_run
from megatron_lm.logs import gpus, records, runs, state
from megatron_lm.logs.gpus import Gpu
from megatron_lm.logs.runs import Node, Run
from megatron_lm.results import pages, speed
from megatron_lm.results.charts import bar_chart, line_chart
from megatron_lm.results.get_result import problems, setting_lines
from megatron_lm.results.pages import Table
from megatron_lm.settings import conf

KINDS = ("out", "err", "gpu", "summary")
GPU_SAMPLES = 600  # per node, as many as a screen can show
Samples = dict[int, list[Gpu]]


@dataclass(frozen=True)
class ReportConfig:
    """Which run, and what of it."""

    words: tuple[str, ...] = field(
        metadata={"positional": True, "help": "one or two job ids, then out, err, gpu or summary"}
    )

    def __post_init__(self) -> None:
        if not 2 <= len(self.words) <= 3 or self.words[-1] not in KINDS:
            kinds = ", ".join(KINDS)
            raise ValueError(f"give JOBID [JOBID2] and one of {kinds}, not '{' '.join(self.words)}'")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(ReportConfig, argv, prog="_04_report.sh", description=(__doc__ or "").splitlines()[0])
    *ids, kind = config.words
    run = runs.find(tuple(ids), conf.log_dir())
    if kind == "summary":
        for path in write_summary(run):
            print(path)
        return 0
    for node in run.nodes:
        print(f"==> {node.job}/{node.name}.{kind} <==", flush=True)
        sys.stdout.buffer.write(node.read(kind))
        sys.stdout.buffer.flush()
    return 0


def write_summary(run: Run) -> list[Path]:
    """Write summary.md and summary.html in the folder of the run's first job. Raises ``RunError``."""
    folder = run.log_dir / run.jobs[0]
    states = {job: state.of_job(run, job) for job in run.jobs}
    heading = f"Run {' '.join(run.jobs)}: {', '.join(map(str, states.values()))}"
    wrong = list(problems(run, states, of_run.first_failure(run, states)))
    outputs = {node: node.read("out") for node in run.nodes}
    found = speed.iterations(outputs.values())
    memory = [line for data in outputs.values() for line in records.memory(data)]
    use = {node: gpu_use(node.read("gpu")) for node in run.nodes}
    settings = {node.name: records.settings(data) for node, data in outputs.items()}
    tables = [
        Table("Settings", ("setting", "value"), [_split(line) for line in setting_lines(settings)]),
        *_speed_tables(found, next((of_node for of_node in settings.values() if of_node), {})),
        memory_table(memory),
        *(gpu_table(node, samples) for node, samples in use.items() if samples),
    ]
    tables = [table for table in tables if table.rows]
    if not any(use.values()):
        wrong.append("no GPU was recorded on any node")
    charts = summary_charts(found, memory, use)
    texts = {
        "summary.md": pages.markdown(heading, wrong, tables),
        "summary.html": pages.page(heading, wrong, tables, charts),
    }
    for name, text in texts.items():
        pages.write(folder / name, text)
    return [folder / name for name in texts]


def gpu_use(data: bytes) -> Samples:
    """About ``GPU_SAMPLES`` samples of a node at most, evenly spread over its time."""
    return gpus.samples(data, GPU_SAMPLES)


def memory_table(memory: list[records.Memory]) -> Table:
    """The last memory line of each rank."""
    last = {line.rank: line for line in memory}
    rows = [
        (str(rank), str(line.after), *(f"{size:.1f}" for size in _sizes(line)))
        for rank, line in sorted(last.items())
    ]
    sizes = ("allocated, MB", "max allocated, MB", "reserved, MB", "max reserved, MB")
    return Table("Memory by rank", ("rank", "after iteration", *sizes), rows)


def gpu_table(node: Node, samples: Samples) -> Table:
    """Mean and peak use of each GPU of a node, over the samples that were read."""
    rows = []
    for index in _indices(samples):
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
    header = ("GPU", "mean use, %", "peak memory, MB", "total memory, MB", "peak temperature, °C")
    return Table(f"GPU use of {node.name}", header, rows)


def summary_charts(
    found: list[records.Iteration], memory: list[records.Memory], use: dict[Node, Samples]
) -> list[str]:
    """Time per iteration, memory by rank and GPU use over time, as SVG; what has no figures is left out."""
    last = {line.rank: _sizes(line) for line in memory}
    sizes = (("max allocated", 1), ("max reserved", 3))
    used = {
        f"{node.name} [{index}]": [
            (second, next((gpu.percent for gpu in sample if gpu.index == index), None))
            for second, sample in samples.items()
        ]
        for node, samples in use.items()
        for index in _indices(samples)
    }
    seconds = [(it.number, it.seconds) for it in found]
    drawn = [
        line_chart("Time per iteration", "iteration", "s", {"time": seconds}),
        bar_chart("Memory by rank", "rank", "MB",
                  {name: {str(rank): last[rank][at] for rank in sorted(last)} for name, at in sizes}),
        line_chart("GPU use over time", "s", "%", used),
    ]  # fmt: skip
    return [chart for chart in drawn if chart]


def _speed_tables(found: list[records.Iteration], settings: dict[str, str]) -> Iterator[Table]:
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


def _indices(samples: Samples) -> list[int]:
    return sorted({gpu.index for sample in samples.values() for gpu in sample})


def _sizes(line: records.Memory) -> tuple[float, float, float, float]:
    return line.allocated, line.max_allocated, line.reserved, line.max_reserved


def _split(line: str) -> tuple[str, str]:
    name, _, value = line.partition(": ")
    return name, value
