"""Shows how a run is doing: problems first, then the latest log lines, settings, iterations and speed.

    megatron_lm/get_result.sh JOBID [JOBID2] [--watch]

Either of a heterogeneous run's two job ids shows the whole run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from chakra_et import cli
from megatron_lm.diagnosis import of_run
from megatron_lm.diagnosis.failures import Failure
from megatron_lm.logs import gpus, records, runs, state
from megatron_lm.logs.runs import Node, Run
from megatron_lm.logs.state import State
from megatron_lm.results import speed
from megatron_lm.settings import conf

LAST_LINES = 3
WATCH_SECONDS = 2.0
TAIL_BYTES = 20_000
IDLE_MB = 1024  # a GPU in use holds more than this: a CUDA context and weights
UNCOMPARED = ("NODE_RANK", "MASTER_ADDR", "PRECISION")  # the last one is as used, not as asked for
RED, BOLD, PLAIN = "\033[1;31m", "\033[1m", "\033[0m"


@dataclass(frozen=True)
class ResultConfig:
    """Which run to show, and whether to keep showing it."""

    job_ids: tuple[str, ...] = field(
        metadata={"positional": True, "help": "job id, or both ids of a heterogeneous run"}
    )
    watch: bool = field(default=False, metadata={"help": "refresh every 2 s until the run has ended"})

    def __post_init__(self) -> None:
        if not 1 <= len(self.job_ids) <= 2:
            raise ValueError(f"give one or two job ids, not {len(self.job_ids)}")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(ResultConfig, argv, prog="get_result.sh", description=(__doc__ or "").splitlines()[0])
    terminal = sys.stdout.isatty()
    while True:
        run = runs.find(config.job_ids, conf.log_dir())
        if config.watch and terminal:
            print("\033[2J\033[H", end="")
        states = {job: state.of_job(run, job) for job in run.jobs}
        for style, text in lines(run, states):
            print(f"{style}{text}{PLAIN}" if terminal and style else text)
        sys.stdout.flush()
        if not config.watch or all(known.word in state.ENDED for known in states.values()):
            return 0
        time.sleep(WATCH_SECONDS)


def lines(run: Run, states: dict[str, State]) -> Iterator[tuple[str, str]]:
    """(style, text) of every line. style: RED for problems, BOLD for titles, else empty."""
    outputs = {node: node.read("out") for node in run.nodes}
    failure = of_run.first_failure(run, states)
    wrong = list(problems(run, states, failure))
    for text in wrong:
        yield RED, f"WRONG: {text}"
    if not wrong:
        yield "", "no problems found"

    yield title("last output message")
    for node, data in outputs.items():
        count = data.count(b"\n")
        yield "", f"{node.job}/{node.name}: {count} lines"
        yield from (("", f"  {line}") for line in _tail(data))

    yield title("last error message")
    if failure is not None:
        yield RED, f"first failure: {failure}"
        yield from (("", f"  {line}") for line in failure.lines)
    for job in run.jobs:
        data = records.read(run.batch_output(job))
        if data.strip():
            yield "", f"{job}, batch script"
            yield from (("", f"  {line}") for line in _tail(data))
    for node in run.nodes:
        data = node.read("err")
        count = data.count(b"\n")
        yield "", f"{node.job}/{node.name}: {count} lines"
        yield from (("", f"  {line}") for line in _tail(data))

    yield title("last gpu message")
    for node in run.nodes:
        data = node.read("gpu")
        last = [gpus.format_line(gpu) for gpu in last_gpus(data)] or _tail(data, 1)
        yield "", f"{node.job}/{node.name}"
        yield from (("", f"  {line}") for line in last or ["no sample yet"])

    yield title(f"job info {' '.join(run.jobs)}")
    for job, known in states.items():
        yield "", f"{job}: {known}"
    for node in run.nodes:
        kinds = " ".join(kind for kind in ("out", "err", "gpu") if node.file(kind).exists())
        yield "", f"{node.stem}: {kinds}"
    yield from (
        ("", line)
        for line in setting_lines({node.name: records.settings(outputs[node]) for node in run.nodes})
    )

    yield title("iteration time")
    yield from (("", line) for line in speed_lines(run, outputs, states))


def problems(run: Run, states: dict[str, State], failure: Failure | None) -> Iterator[str]:
    """The problems of a run, the worst first, one sentence each."""
    for job, known in states.items():
        if known.word not in (state.COMPLETED, state.RUNNING):
            yield f"job {job} is not running: {known}"
    running = any(known.word == state.RUNNING for known in states.values())
    for node in run.nodes:
        found = last_gpus(node.read("gpu"))
        if running and found and not any(gpu.processes or (gpu.used or 0) > IDLE_MB for gpu in found):
            yield f"no process uses the GPUs of {node.name}"
    if failure is not None:
        yield str(failure)
    lost = of_run.lost_nodes(run, states)
    if lost:
        names = ",".join(lost)
        yield (
            f"lost: {names}; continue on the other nodes with megatron_lm/_03_submit.sh --resume "
            f"{run.jobs[0]} --without {names}"
        )
    yield from _differences(run)


def setting_lines(settings: dict[str, dict[str, str]]) -> Iterator[str]:
    """``NAME: value``; if nodes differ, each value with the nodes that have it."""
    names = list(dict.fromkeys(name for of_node in settings.values() for name in of_node))
    for name in names:
        by_value: dict[str, list[str]] = {}
        for node, of_node in settings.items():
            if name in of_node:
                by_value.setdefault(of_node[name], []).append(node)
        if len(by_value) == 1:
            yield f"{name}: {next(iter(by_value))}"
        else:
            yield f"{name}: " + ", ".join(f"{value} ({' '.join(nodes)})" for value, nodes in by_value.items())


def speed_lines(run: Run, outputs: dict[Node, bytes], states: dict[str, State]) -> Iterator[str]:
    """All iterations, then throughput and remaining time."""
    found = speed.iterations(outputs.values())
    for iteration in found:
        yield f"iteration {iteration.number} : {iteration.seconds:.4f} s"
    if not found:
        yield "no iteration logged yet"
        return
    settings = next((of_node for data in outputs.values() if (of_node := records.settings(data))), {})
    yield from (f"{name}: {value}" for name, value in speed.figures(found, settings))
    if any(known.word == state.RUNNING for known in states.values()):
        left = found[-1].total - found[-1].number
        yield f"time left: {_duration(left * speed.typical(found))} for {left} iterations"


def _differences(run: Run) -> Iterator[str]:
    """Settings of a node that are not those that the run was submitted with."""
    submitted = runs.submitted(run)
    for node in run.nodes:
        for name, value in records.settings(node.read("out")).items():
            if name not in UNCOMPARED and value != submitted.get(name, value):
                yield f"{name} is {value!r} on {node.name}, the run was submitted with {submitted[name]!r}"


def last_gpus(data: bytes) -> list[gpus.Gpu]:
    """The last sample of a GPU log; empty if it has none."""
    found = gpus.samples(data[-TAIL_BYTES:])
    return found[max(found)] if found else []


def title(text: str) -> tuple[str, str]:
    return BOLD, f"******************* {text} *******************"


def _tail(data: bytes, count: int = LAST_LINES) -> list[str]:
    return [line.decode(errors="replace") for line in data[-TAIL_BYTES:].splitlines()[-count:]]


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
