"""The breakdown of a rank's step time.

Each moment counts as the first of these that applies, so the parts of a step add up to its time:

    compute         a kernel runs; on a rank without device work, an operator runs on some thread
    memory          a copy or memset runs
    communication   data is transferred to or from another rank, and none of the above runs ("exposed")
    wait            communication waits for another rank to arrive, and none of the above runs
    host            a thread is busy while the device is idle; on a rank without device work, a thread is
                    outside operators, mostly in Python
    idle            none of these; the microsecond that rounding leaves behind work of the host is the host's

So the breakdown follows the device if a rank has one, and its threads otherwise. Communication that overlaps
with compute or memory is "hidden"; it is reported separately and is not one of the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.simulate.time_by_kind import KINDS, node_kinds

ACTIVITIES = ("compute", "memory", "communication", "wait", "host", "idle")
COMPUTE, MEMORY, COMMUNICATION, WAIT, HOST, IDLE = range(6)


@dataclass(frozen=True)
class Activity:
    """The activity of one rank over time, in K intervals from ``at_ns[i]`` to ``at_ns[i + 1]``.

    ``at_ns`` int64[K + 1]; ``state`` uint8[K]: index into ``ACTIVITIES``; ``hidden`` bool[K]: whether
    communication overlaps with compute or memory.
    """

    at_ns: np.ndarray
    state: np.ndarray
    hidden: np.ndarray

    def parts(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """int64[W, 6]: ns of each of ``ACTIVITIES`` in each window; a row adds up to end - start.

        Time before the first and after the last interval is idle.
        """
        rows = [_within(self.at_ns, self.state == state, start_ns, end_ns) for state in range(IDLE)]
        used = np.stack(rows, axis=1)
        return np.concatenate([used, (end_ns - start_ns - used.sum(axis=1))[:, None]], axis=1)

    def hidden_ns(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """int64[W]: ns of hidden communication in each window."""
        return _within(self.at_ns, self.hidden, start_ns, end_ns)


def activity(
    trace: ExecutionTrace, start_ns: np.ndarray, end_ns: np.ndarray, wait_ns: np.ndarray
) -> Activity:
    """The activity of one rank.

    ``start_ns``, ``end_ns``, ``wait_ns``: int64[rows]; ``wait_ns`` is the first part of communication.
    """
    codes = node_kinds(trace)
    kind = {name: codes == at for at, name in enumerate(KINDS)}
    on_cpu = (trace.column("is_cpu_op") != 0) & (trace.types < NodeType.COMM_SEND)
    kernels = kind["kernel"] & ~on_cpu
    copies = kind["copy"] & ~on_cpu
    transfers = kind["transfer"]
    host = kind["host-overhead"]
    if kernels.any() or copies.any():
        computes, host = kernels, host | on_cpu
    else:
        computes, host = kind["operator"] & on_cpu, host | kind["runtime"]
    arrived = np.minimum(start_ns + wait_ns, end_ns)
    spans = {
        HOST: (start_ns[host], end_ns[host]),
        WAIT: (start_ns[transfers], arrived[transfers]),
        COMMUNICATION: (arrived[transfers], end_ns[transfers]),
        MEMORY: (start_ns[copies], end_ns[copies]),
        COMPUTE: (start_ns[computes], end_ns[computes]),
    }  # the last that applies stays
    at = _boundaries([each for span in spans.values() for each in span])
    state = np.full(len(at) - 1, IDLE, dtype=np.uint8)
    hidden = np.zeros(len(at) - 1, dtype=bool)
    for number, span in spans.items():
        runs = _covered(at, *span)
        if number == COMMUNICATION:
            hidden = runs
        state[runs] = number
    hidden &= state < COMMUNICATION
    rounded = (state == IDLE) & (np.diff(at) <= 1000)  # files have whole microseconds
    state[1:][rounded[1:] & (state[:-1] == HOST)] = HOST
    # Merge neighbours with the same state.
    new = np.append(True, (state[1:] != state[:-1]) | (hidden[1:] != hidden[:-1]))[: len(state)]
    return Activity(np.append(at[:-1][new], at[-1:]), state[new], hidden[new])


def union_ns(starts: np.ndarray, ends: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """int64[W]: ns of each window from ``start_ns`` to ``end_ns`` that at least one of the intervals from
    ``starts`` to ``ends`` covers."""
    at = _boundaries([starts, ends])
    return _within(at, _covered(at, starts, ends), start_ns, end_ns)


def _boundaries(times: list[np.ndarray]) -> np.ndarray:
    """The distinct starts and ends in ascending order, at least two."""
    at = np.unique(np.concatenate(times))
    return at if len(at) > 1 else np.append(at, at if len(at) else [0, 0])


def _covered(at: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """bool[K]: whether an interval covers each one between two boundaries."""
    change = np.bincount(np.searchsorted(at, starts), minlength=len(at))
    change -= np.bincount(np.searchsorted(at, ends), minlength=len(at))
    return np.cumsum(change)[:-1] > 0


def _within(at: np.ndarray, runs: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """int64[W]: ns of each window in the intervals for which ``runs`` is true."""
    before = np.concatenate(([0], np.cumsum(np.where(runs, np.diff(at), 0))))

    def until(moment: np.ndarray) -> np.ndarray:
        interval = np.clip(np.searchsorted(at, moment, side="right") - 1, 0, len(runs) - 1)
        inside = np.clip(moment - at[interval], 0, at[interval + 1] - at[interval])
        return before[interval] + np.where(runs[interval], inside, 0)

    return until(end_ns) - until(start_ns)
