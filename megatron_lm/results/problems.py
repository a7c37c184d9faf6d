"""What is wrong with a run, the worst first, one sentence each: its failure, and what ends no run, such as
numbers that are not finite, a growing loss, no progress.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_lm.diagnosis import failures
from megatron_lm.logs import records, runs
from megatron_lm.logs.records import Iteration
from megatron_lm.logs.runs import Run

if TYPE_CHECKING:
    from megatron_lm.results.view import View

TAIL_BYTES = 20_000
IDLE_MB = 1024  # a GPU in use holds more than this: a CUDA context and weights
UNCOMPARED = ("NODE_RANK", "MASTER_ADDR", "PRECISION")  # the last one is as used, not as asked for
NOT_FINITE = re.compile(rb"^ iteration +(\d+)/ +\d+ not finite: (.*)$", re.MULTILINE)
WAITING = re.compile(rb"^.* no progress for \d+ s: waiting for (.*)|^.* progress again$", re.MULTILINE)
WINDOW = 50  # losses before one that it is compared with
IN_A_ROW = 3  # losses that must be too large
SIGMAS, GROWTH = 8, 0.2  # above the lowest median: as a multiple of the scatter, and as a share
PATIENCE, LEAST_PATIENCE = 10, 30.0  # median iterations, and seconds


def found(view: View) -> Iterator[str]:
    """The problems as ``WRONG: …`` or ``WARNING: …``."""
    run = view.run
    for job, known in view.states.items():
        if known.word != runs.COMPLETED and known.word not in runs.ALIVE:
            yield f"WRONG: job {job} is not running: {known}"
    if seen := [match for data in view.outputs.values() for match in NOT_FINITE.findall(data)]:
        number, where = seen[-1]
        yield f"WRONG: {with_nodes(run, f'iteration {int(number)} is not finite: {where.decode()}')}"
    if any(known.word == runs.RUNNING for known in view.states.values()):
        interval = next((settings.get("LOG_INTERVAL", "1") for settings in view.settings.values()), "1")
        if sentence := stall(run, view.iterations, int(interval)):
            yield f"WRONG: {with_nodes(run, sentence)}"
        for node in run.nodes:
            last = last_gpus(node.read("gpu"))
            if last and not any((gpu.used or 0) > IDLE_MB for gpu in last):
                yield f"WRONG: no process uses the GPUs of {node.name}"
    if view.failure is not None:
        yield f"WRONG: {view.failure}"
    submitted = runs.submitted(run)
    for host, settings in view.settings.items():
        for name, value in settings.items():
            if name not in UNCOMPARED and value != submitted.get(name, value):
                yield f"WRONG: {name} is {value!r} on {host}, the run was submitted with {submitted[name]!r}"
    if unsure := divergence(view.iterations):
        yield f"WARNING: {unsure}"


def with_nodes(run: Run, sentence: str) -> str:
    """A sentence with the node of each rank that it names."""
    logs = map(failures.log_of, run.nodes)
    firsts = sorted((log.first_rank, log.node) for log in logs if log.first_rank is not None)

    def placed(match: re.Match[str]) -> str:
        on = [name for first, name in firsts if first <= int(match[1])]
        return f"{match[0]} on {on[-1]}" if on else match[0]

    return re.sub(r"\brank (\d+)", placed, sentence)


def last_gpus(data: bytes) -> list[records.Gpu]:
    """The last sample of a GPU log; empty if it has none."""
    samples = records.gpu_samples(data[-TAIL_BYTES:])
    return samples[max(samples)] if samples else []


def divergence(iterations: Sequence[Iteration]) -> str:
    """Where the loss leaves its lowest running median for good; empty if it does not.

    Robust, so that neither a few outliers nor a noisy loss count: it must exceed the median by 8 standard
    deviations, as estimated from the median absolute deviation, and by 20%, three times in a row.
    """
    losses = [(each.number, each.loss) for each in iterations if each.loss is not None]
    best = float("inf")
    for at in range(1, len(losses) - IN_A_ROW + 1):
        before = [loss for _, loss in losses[max(0, at - WINDOW) : at]]
        middle = statistics.median(before)
        best = min(best, middle)
        sigma = 1.4826 * statistics.median(abs(loss - middle) for loss in before)
        limit = best + max(SIGMAS * sigma, GROWTH * abs(best))
        if all(loss > limit for _, loss in losses[at : at + IN_A_ROW]):
            largest = max(loss for _, loss in losses[at:])
            return (
                f"the loss diverges from iteration {losses[at][0]} on: up to {largest:.4g}, after a median "
                f"of {best:.4g}; lower LR, or continue from an earlier checkpoint"
            )
    return ""


def stall(run: Run, iterations: Sequence[Iteration], log_interval: int) -> str:
    """That a running run makes no progress, and for whom it waits; empty if it goes on."""
    waiting, times = [], []
    for node in run.nodes:
        said = records.read(node.file("err"))
        waiting += WAITING.findall(said, max(0, said.rfind(b"\nattempt ")))
        with contextlib.suppress(OSError):
            times.append(node.file("out").stat().st_mtime)
    silent = time.time() - max(times, default=time.time())
    typical = statistics.median([each.seconds for each in iterations]) if iterations else float("inf")
    late = silent > max(LEAST_PATIENCE, PATIENCE * typical) + log_interval * typical
    who = f": waiting for {waiting[-1].decode(errors='replace')}" if waiting and waiting[-1] else ""
    if not (late or who):
        return ""
    since = f", since iteration {iterations[-1].number}" if iterations else " in set-up"
    return f"no progress for {silent:.0f} s{since}{who}"
