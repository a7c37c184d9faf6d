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
from megatron_lm.logs import gpus, records, runs, state
from megatron_lm.results import screen, speed
from megatron_lm.results.problems import TAIL_BYTES, last_gpus
from megatron_lm.results.report import write_summary
from megatron_lm.results.view import View, setting_texts
from megatron_lm.settings import conf

LAST_LINES, LINE = 3, b"\n"
WATCH_SECONDS = 2.0
RED, BOLD, PLAIN = "\033[1;31m", "\033[1m", "\033[0m"


@dataclass(frozen=True)
class ResultConfig:
    """Which run to show, and whether to keep showing it."""

    job_ids: tuple[str, ...] = field(
        metadata={"positional": True, "help": "job id, or both ids of a heterogeneous run"}
    )
    watch: bool = field(
        default=False, metadata={"help": "refresh every 2 s until the run has ended, then write its page"}
    )

    def __post_init__(self) -> None:
        if not 1 <= len(self.job_ids) <= 2:
            raise ValueError(f"give one or two job ids, not {len(self.job_ids)}")


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(ResultConfig, argv, prog="get_result.sh", description=(__doc__ or "").splitlines()[0])
    if config.watch:
        return watch(config.job_ids)
    terminal = sys.stdout.isatty()
    for style, text in lines(View(runs.find(config.job_ids, conf.log_dir()))):
        print(f"{style}{text}{PLAIN}" if terminal and style else text)
    return 0


def watch(ids: tuple[str, ...]) -> int:
    """Show tables, or without rich or a terminal lines, until the run has ended; then write its page."""
    with screen.opened() as show:
        while True:
            view = View(runs.find(ids, conf.log_dir()))
            if show is not None:
                show(view)
            else:
                print("\n".join(text for _, text in lines(view)), flush=True)
            if all(known.word in state.ENDED for known in view.states.values()):
                break
            time.sleep(WATCH_SECONDS)
    print("\n".join(map(str, write_summary([view]))))
    return 0


def lines(view: View) -> Iterator[tuple[str, str]]:
    """(style, text) of every line. style: RED for problems, BOLD for titles, else empty."""
    run, failure = view.run, view.failure
    yield from ((RED, text) for text in view.found)
    yield from ((BOLD, text) for text in view.waiting)
    if not view.found and not view.waiting:
        yield "", "no problems found"

    yield title("last output message")
    for node, data in view.outputs.items():
        yield from block(f"{node.job}/{node.name}: {data.count(LINE)} lines", _tail(data))

    yield title("last error message")
    if failure is not None:
        yield RED, f"first failure: {failure}"
        yield from (("", f"  {line}") for line in failure.lines)
    for job in run.jobs:
        if (data := records.read(run.batch_output(job))).strip():
            yield from block(f"{job}, batch script", _tail(data))
    for node in run.nodes:
        data = node.read("err")
        yield from block(f"{node.job}/{node.name}: {data.count(LINE)} lines", _tail(data))

    yield title("last gpu message")
    for node in run.nodes:
        data = node.read("gpu")
        last = [gpus.format_line(gpu) for gpu in last_gpus(data)] or _tail(data, 1)
        yield from block(f"{node.job}/{node.name}", last or ["no sample yet"])

    yield title(f"job info {' '.join(run.jobs)}")
    for job, known in view.states.items():
        yield "", f"{job}: {known}"
    for job in run.jobs:
        yield "", f"logs of {job}: {run.log_dir / job}"
    kinds = ("out", "err", "gpu")
    files = (node.file(kind) for node in run.nodes for kind in kinds if node.file(kind).exists())
    yield "", f"items: {' '.join(f'{path.parent.name}/{path.name}' for path in files)}"
    yield from (("", f"{name}: {text}") for name, text in setting_texts(view.settings))

    yield title("iteration time")
    yield from (("", line) for line in speed_lines(view))
    # As the original scripts end: whether a profiler slows this run down.
    profiled = any("true" in (of.get("NSYS"), of.get("NCU")) for of in view.settings.values())
    yield "", f"debug?  : {int(profiled)}"


def block(heading: str, rows: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A heading, and rows below it."""
    yield from (("", text) for text in (heading, *(f"  {row}" for row in rows)))


def speed_lines(view: View) -> Iterator[str]:
    """All iterations, then throughput and remaining time."""
    found = view.iterations
    for iteration in found:
        yield f"iteration {iteration.number} : {iteration.seconds:.4f} s"
    if not found:
        yield "no iteration logged yet"
        return
    yield from (f"{name}: {value}" for name, value in view.figures)
    if any(known.word == state.RUNNING for known in view.states.values()):
        left = found[-1].total - found[-1].number
        yield f"time left: {_duration(left * speed.typical(found))} for {left} iterations"


def title(text: str) -> tuple[str, str]:
    return BOLD, f"******************* {text} *******************"


def _tail(data: bytes, count: int = LAST_LINES) -> list[str]:
    return [line.decode(errors="replace") for line in data[-TAIL_BYTES:].splitlines()[-count:]]


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
