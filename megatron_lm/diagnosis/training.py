"""What goes wrong in a run without ending it: numbers that are not finite, a growing loss, no progress."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Iterable, Sequence

from megatron_lm.logs import records
from megatron_lm.logs.records import Iteration
from megatron_lm.logs.runs import Node, Run

NOT_FINITE = re.compile(rb"^ iteration +(\d+)/ +\d+ not finite: (.*)$", re.MULTILINE)
WAITING = re.compile(rb"^.* no progress for \d+ s: waiting for (.*)|^.* progress again$", re.MULTILINE)
WINDOW = 50  # losses before one that it is compared with
IN_A_ROW = 3  # losses that must be too large
SIGMAS, GROWTH = 8, 0.2  # above the lowest median: as a multiple of the scatter, and as a share
PATIENCE, LEAST_PATIENCE = 10, 30.0  # median iterations, and seconds


def not_finite(outputs: Iterable[bytes]) -> str:
    """The last time that loss or gradients stopped being finite; empty if they never did."""
    found = [match for data in outputs for match in NOT_FINITE.findall(data)]
    return f"iteration {int(found[-1][0])} is not finite: {found[-1][1].decode()}" if found else ""


def divergence(found: Sequence[Iteration]) -> str:
    """Where the loss leaves its lowest running median for good; empty if it does not.

    Robust, so that neither a few outliers nor a noisy loss count: it must exceed the median by 8 standard
    deviations, as estimated from the median absolute deviation, and by 20%, three times in a row.
    """
    losses = [(each.number, each.loss) for each in found if each.loss is not None]
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


def stall(run: Run, found: Sequence[Iteration], log_interval: int) -> str:
    """That a running run makes no progress, and for whom it waits; empty if it goes on."""
    waiting = [match for node in run.nodes for match in WAITING.findall(_last_attempt(node))]
    times = []
    for node in run.nodes:
        with contextlib.suppress(OSError):
            times.append(node.file("out").stat().st_mtime)
    silent = time.time() - max(times, default=time.time())
    typical = statistics.median([each.seconds for each in found]) if found else float("inf")
    late = silent > max(LEAST_PATIENCE, PATIENCE * typical) + log_interval * typical
    who = f": waiting for {waiting[-1].decode(errors='replace')}" if waiting and waiting[-1] else ""
    if not (late or who):
        return ""
    since = f", since iteration {found[-1].number}" if found else " in set-up"
    return f"no progress for {silent:.0f} s{since}{who}"


def _last_attempt(node: Node) -> bytes:
    data = records.read(node.file("err"))
    return data[max(0, data.rfind(b"\nattempt ")) :]
