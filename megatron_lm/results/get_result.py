"""Shows how a run is doing: problems first, then the latest log lines, settings, iterations and speed.

    megatron_lm/get_result.sh JOBID [JOBID2] [--watch]

Either of a heterogeneous run's two job ids shows the whole run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chakra_et import cli
from chakra_et.text import table
from megatron_lm.logs import records, runs
from megatron_lm.results import view
from megatron_lm.results.problems import TAIL_BYTES, last_gpus
from megatron_lm.results.report import write_summary
from megatron_lm.results.view import View
from megatron_lm.settings import conf

LAST_LINES, LINE = 3, b"\n"
WATCH_SECONDS = 2.0
# Of a run that is watched: the last rows of each table, and the tables that are left out.
SCREEN_ROWS, HIDDEN = 8, ("Settings", "Memory by rank")
CLEARED = "\033[H\033[J"  # to the first line, with everything below removed
RED, BOLD, PLAIN = "\033[1;31m", "\033[1m", "\033[0m"
STYLES = {"WRONG": RED, "WARNING": RED, "first failure": RED, "job ": BOLD, "***": BOLD}  # by a line's start


@dataclass(frozen=True)
class ResultConfig:
    job_ids: tuple[str, ...] = cli.option("job id, or both ids of a heterogeneous run", positional=True)
    watch: bool = cli.option("refresh every 2 s until the run has ended, then write its page", False)


def main(argv: Sequence[str] | None = None) -> int:
    config = cli.parse(ResultConfig, argv, prog="get_result.sh", description=__doc__)
    if config.watch:
        return watch(config.job_ids)
    for text in lines(View(runs.find(config.job_ids, conf.log_dir()))):
        style = next((style for start, style in STYLES.items() if text.startswith(start)), "")
        print(f"{style}{text}{PLAIN}" if style and sys.stdout.isatty() else text)
    return 0


def watch(ids: tuple[str, ...]) -> int:
    """Show tables in place of those before, without a terminal lines, until the run has ended; then write its
    page.
    """
    on_terminal = sys.stdout.isatty()
    while True:
        seen = View(runs.find(ids, conf.log_dir()))
        print(CLEARED + screen(seen) if on_terminal else "\n".join(lines(seen)), flush=True)
        if all(known.word not in runs.ALIVE for known in seen.states.values()):
            break
        time.sleep(WATCH_SECONDS)
    print(write_summary([seen]))
    return 0


def screen(seen: View) -> str:
    """The states of a run's jobs, its problems, and the tables that change."""
    shown = [BOLD + ", ".join(f"{job} {known}" for job, known in seen.states.items()) + PLAIN]
    shown += [f"{RED}{each}{PLAIN}" for each in seen.found]
    for found in view.tables([seen]):
        if found.title not in HIDDEN:
            shown += ["", found.title, *table([found.header, *found.rows[-SCREEN_ROWS:]])]
    return "\n".join(shown)


def lines(view: View) -> Iterator[str]:
    """What is shown of a run, line by line."""
    run, failure = view.run, view.failure
    waiting = [(job, known) for job, known in view.states.items() if known.word in runs.WAITING]
    yield from view.found
    yield from (f"job {job} waits: {known}" for job, known in waiting)
    if not view.found and not waiting:
        yield "no problems found"

    yield _title("last output message")
    for node, data in view.outputs.items():
        yield from _end(f"{node.job}/{node.name}: {data.count(LINE)} lines", data)

    yield _title("last error message")
    if failure is not None:
        yield f"first failure: {failure}"
        yield from (f"  {line}" for line in failure.lines)
    for job in run.jobs:
        if (data := records.read(run.batch_output(job))).strip():
            yield from _end(f"{job}, batch script", data)
    for node in run.nodes:
        data = node.read("err")
        yield from _end(f"{node.job}/{node.name}: {data.count(LINE)} lines", data)

    yield _title("last gpu message")
    for node in run.nodes:
        data = node.read("gpu") or b"no sample yet"
        # One line per GPU of the last sample.
        yield from _end(f"{node.job}/{node.name}", data, len(last_gpus(data)) or 1)

    yield _title(f"job info {' '.join(run.jobs)}")
    yield from (f"{job}: {known}" for job, known in view.states.items())
    yield from (f"logs of {job}: {run.log_dir / job}" for job in run.jobs)
    files = (node.file(kind) for node in run.nodes for kind in ("err", "gpu", "out"))
    yield f"items: {' '.join(path.name for path in files if path.exists())}"
    yield from (f"{name}: {text}" for name, text in view.setting_texts)

    yield _title("iteration time")
    yield from (f"iteration {it.number} : {it.seconds:.4f} s" for it in view.iterations)
    yield from (f"{name}: {value}" for name, value in view.figures)
    if not view.iterations:
        yield "no iteration logged yet"
    elif any(known.word == runs.RUNNING for known in view.states.values()):
        left = view.iterations[-1].total - view.iterations[-1].number
        seconds = round(left * records.typical(view.iterations))
        hours, rest = divmod(seconds, 3600)
        text = f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
        yield f"time left: {text} for {left} iterations"
    # As the original scripts end: whether a profiler slows this run down.
    profiled = any("true" in (of.get("NSYS"), of.get("NCU")) for of in view.settings.values())
    yield f"debug?  : {int(profiled)}"


def _title(text: str) -> str:
    return f"******************* {text} *******************"


def _end(heading: str, data: bytes, count: int = LAST_LINES) -> Iterator[str]:
    """A heading, and the last lines of a log below it."""
    yield heading
    yield from (f"  {line.decode(errors='replace')}" for line in data[-TAIL_BYTES:].splitlines()[-count:])
