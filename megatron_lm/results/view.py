"""A run as its logs show it now, and its tables and charts; those of several runs stand beside each other.

TFLOP/s counts the model's floating-point operations as the planner does (``Model.flops_per_token``).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from chakra_et.cost import gpus as gpu_table
from chakra_et.drawing.charts import line_chart
from chakra_et.report.page import TextTable
from megatron_lm.diagnosis import failures
from megatron_lm.errors import RunError
from megatron_lm.logs import records, runs
from megatron_lm.logs.records import Gpu, Iteration
from megatron_lm.logs.runs import Node, Run
from megatron_lm.plan_settings import model_of
from megatron_lm.results import problems
from megatron_lm.settings import PREFIX
from megatron_lm.settings.conf import read_settings
from megatron_lm.settings.values import SIZE_SETTINGS

GPU_SAMPLES = 600  # per node, as many as a screen can show
# What the training logs, and where a launch begins.
RECORD = re.compile(r"^(\d\d:\d\d:\d\d) rank (\d+) (?:WARNING|ERROR) (.*)", re.MULTILINE)
ATTEMPT = re.compile(r"^attempt (\d+) on \S+ at \S+T(\d\d:\d\d:\d\d)", re.MULTILINE)
STARTED = re.compile(r"^\[before the start of training step\] datetime: \S+ (\S+)", re.MULTILINE)
NOT_FINITE = re.compile(r"^ (iteration +\d+)/ +\d+ (not finite: .*)", re.MULTILINE)
CHARTS: list[tuple[str, str, Callable[[Iteration], float | None]]] = [
    ("Loss", "", lambda it: it.loss),
    ("Gradient norm", "", lambda it: it.grad_norm),
    ("Throughput", "samples/s", lambda it: it.global_batch_size / it.seconds if it.seconds else None),
    ("Time per iteration", "s", lambda it: it.seconds),
]


class View:
    """states: by job; outputs: what each node wrote; found: its problems, as sentences."""

    def __init__(self, run: Run) -> None:
        self.run, self.name = run, " ".join(run.jobs)
        self.states = {job: runs.state_of(run, job) for job in run.jobs}
        self.outputs = {node: node.read("out") for node in run.nodes}
        self.settings = {node.name: records.settings(data) for node, data in self.outputs.items()}
        self.iterations = records.all_iterations(self.outputs.values())
        self.failure = failures.first_failure(run, self.states)
        self.found = list(problems.found(self))

    @cached_property
    def use(self) -> dict[Node, dict[int, list[Gpu]]]:
        """GPU samples of each node, evenly spread over its time."""
        return {node: records.gpu_samples(node.read("gpu"), GPU_SAMPLES) for node in self.run.nodes}

    @cached_property
    def memory(self) -> dict[int, records.Memory]:
        """The last memory line of each rank."""
        found = (line for data in self.outputs.values() for line in records.memory(data))
        return dict(sorted({line.rank: line for line in found}.items()))

    @property
    def figures(self) -> list[tuple[str, str]]:
        """(name, value) of the training and its speed."""
        settings = next((of_node for of_node in self.settings.values() if of_node), {})
        seen = (gpu.name for samples in self.use.values() for sample in samples.values() for gpu in sample)
        return figures(self.iterations, settings, next(seen, "")) if self.iterations else []

    @property
    def setting_texts(self) -> list[tuple[str, str]]:
        """(NAME, value); if nodes differ, each value with the nodes that have it."""
        found: dict[str, dict[str, list[str]]] = {}
        for node, of_node in self.settings.items():
            for name, value in of_node.items():
                found.setdefault(name, {}).setdefault(value, []).append(node)
        texts = []
        for name, by_value in found.items():
            parts = (f"{value} ({' '.join(nodes)})" for value, nodes in by_value.items())
            texts.append((name, ", ".join(parts) if len(by_value) > 1 else next(iter(by_value))))
        return texts


def figures(found: Sequence[Iteration], settings: Mapping[str, str], gpu: str = "") -> list[tuple[str, str]]:
    """(name, value) of the training and its speed, of a run that has at least one iteration line.

    gpu: as its driver has it; of a known one, MFU is the share of its peak for PRECISION.
    """
    seconds, batch = records.typical(found), found[-1].global_batch_size
    rows = [
        ("median iteration" + (" without the first" if found[1:] else ""), f"{seconds:.4f} s"),
        ("throughput", f"{batch / seconds:.2f} samples/s"),
    ]
    with contextlib.suppress(RunError, KeyError, ValueError):  # of a run of another version
        named = ("MODEL", *(settings.keys() & SIZE_SETTINGS))
        size = read_settings({PREFIX + name: settings[name] for name in named}).size
        total = model_of(size, "", batch).flops_per_token * size.sequence * batch / seconds
        each = total / int(settings["WORLD_SIZE"])
        rows.append(("operations", f"{total / 1e12:.4g} TFLOP/s, {each / 1e12:.4g} per rank"))
        if known := gpu_table.by_driver(gpu):
            peak = gpu_table.gpu(known).peak("float" if settings.get("PRECISION") == "fp32" else "half")
            rows.append(("MFU", f"{100 * each / peak:.1f}% of {known}'s {peak / 1e12:.4g} TFLOP/s"))
    if found[-1].loss is not None:
        rows.append(("last loss", f"{found[-1].loss:.6g}"))
    if skipped := sum(each.skipped for each in found):
        rows.append(("skipped steps", f"{skipped}, where fp16 gradients overflowed"))
    return rows


def tables(views: Sequence[View]) -> list[TextTable]:
    """Those with rows. Of several runs, settings and speed are columns of the same tables."""

    def beside(title: str, first: str, texts: list[list[tuple[str, str]]]) -> TextTable:
        columns = list(map(dict, texts))
        names = list(dict.fromkeys(name for column in columns for name in column))
        rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
        return TextTable(title, (first, *(view.name for view in views)), rows)

    made = [beside("Speed", "figure", [view.figures for view in views])]
    for view in views:
        of = f" of {view.name}" if views[1:] else ""
        made += [_health(view, of), _events(view, of), _iterations(view, of), _memory(view, of)]
        made += [_gpus(node, samples, of) for node, samples in view.use.items()]
    made.append(beside("Settings", "setting", [view.setting_texts for view in views]))
    return [table for table in made if table.rows]


def charts(views: Sequence[View]) -> list[str]:
    """Loss, gradient norm, speed, memory and GPU use as SVG; what has no figures is left out."""
    drawn = []
    for title, unit, value in CHARTS:
        lines = {view.name: [(it.number, value(it)) for it in view.iterations] for view in views}
        drawn.append(line_chart(title, "iteration", unit, lines))
    for view in views:
        of = f" of {view.name}" if views[1:] else ""
        sizes = {
            f"max {kind}": [(rank, getattr(line, f"max_{kind}")) for rank, line in view.memory.items()]
            for kind in ("allocated", "reserved")
        }
        drawn.append(line_chart(f"Memory by rank{of}", "rank", "MB", sizes, unjoined=tuple(sizes)))
        percents: dict[str, list[tuple[float, float | None]]] = {}
        for node, samples in view.use.items():
            for index in _by_index(samples):
                percents[f"{node.name} [{index}]"] = [
                    (second, next((gpu.percent for gpu in sample if gpu.index == index), None))
                    for second, sample in samples.items()
                ]
        drawn.append(line_chart(f"GPU use over time{of}", "s", "%", percents))
    return [chart for chart in drawn if chart]


def _by_index(samples: dict[int, list[Gpu]]) -> dict[int, list[Gpu]]:
    found: dict[int, list[Gpu]] = {}
    for gpu in (gpu for sample in samples.values() for gpu in sample):
        found.setdefault(gpu.index, []).append(gpu)
    return dict(sorted(found.items()))


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def _health(view: View, of: str) -> TextTable:
    rows = []
    for node in view.run.nodes:
        note, path = runs.note_of(node), node.file("out")
        launch = "" if note is None else "running" if note.word == "running" else f"exit {note.number}"
        ended = f" at {_clock(note.when)}" if note and note.when else ""
        last = [gpu for sample in list(view.use[node].values())[-1:] for gpu in sample]
        heat = max((gpu.celsius for gpu in last if gpu.celsius is not None), default="")
        written = _clock(path.stat().st_mtime) if path.exists() else ""
        rank = view.settings[node.name].get("NODE_RANK", "?")
        rows.append((node.name, rank, launch + ended, str(len(last)), str(heat), written))
    header = ("node", "node rank", "launch", "GPUs", "temperature, °C", "last output")
    return TextTable(f"Nodes{of}", header, rows)


def _events(view: View, of: str) -> TextTable:
    """Starts, warnings and errors of the training, and ends, in their order within each node."""
    rows: list[tuple[str, str, str]] = []
    for node, data in view.outputs.items():
        err, out = node.read("err").decode(errors="replace"), data.decode(errors="replace")
        rows += [(at, node.name, f"attempt {number} starts") for number, at in ATTEMPT.findall(err)]
        rows += [(at, node.name, "training starts") for at in STARTED.findall(out)]
        rows += [(" ".join(at.split()), node.name, what) for at, what in NOT_FINITE.findall(out)]
        rows += [(at, node.name, f"rank {rank}: {what}") for at, rank, what in RECORD.findall(err)]
    return TextTable(f"Events{of}", ("when", "node", "what"), rows)


def _iterations(view: View, of: str) -> TextTable:
    rows = []
    for it in view.iterations:
        loss = "-" if it.loss is None else f"{it.loss:.6g}"
        norm = "-" if it.grad_norm is None else f"{it.grad_norm:.4g}"
        rows.append((str(it.number), f"{it.seconds:.4f}", loss, norm, f"{it.learning_rate:.4g}"))
    return TextTable(f"Iterations{of}", ("iteration", "time, s", "loss", "grad norm", "learning rate"), rows)


def _memory(view: View, of: str) -> TextTable:
    rows = []
    for rank, line in view.memory.items():
        sizes = (line.allocated, line.max_allocated, line.reserved, line.max_reserved)
        rows.append((str(rank), str(line.after), *(f"{size:.1f}" for size in sizes)))
    names = ("allocated, MB", "max allocated, MB", "reserved, MB", "max reserved, MB")
    return TextTable(f"Memory by rank{of}", ("rank", "after iteration", *names), rows)


def _gpus(node: Node, samples: dict[int, list[Gpu]], of: str) -> TextTable:
    """Mean and peak use of each GPU of a node, over the samples that were read."""
    rows = []
    for index, of_gpu in _by_index(samples).items():
        percents = [gpu.percent for gpu in of_gpu if gpu.percent is not None]
        used = [gpu.used for gpu in of_gpu if gpu.used is not None]
        heat = [gpu.celsius for gpu in of_gpu if gpu.celsius is not None]
        mean = f"{sum(percents) / len(percents):.0f}" if percents else "?"
        peaks = (str(max(values, default="?")) for values in (used, heat))
        rows.append((f"{index} {of_gpu[0].name}", mean, *peaks, str(of_gpu[0].total or "?")))
    header = ("GPU", "mean use, %", "peak memory, MB", "peak temperature, °C", "total memory, MB")
    return TextTable(f"GPU use of {node.name}{of}", header, rows)
