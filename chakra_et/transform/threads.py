"""Another number of threads for CPU operators, by Amdahl's law."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.cost.operator_work import SELECTIONS, rule_of
from chakra_et.errors import TraceError
from chakra_et.simulate.run import Run, Setting
from chakra_et.simulate.time_by_kind import KINDS
from chakra_et.transform.operator_times import resized_times, work_ratios

FLAG = "--threads"
GRAIN = 32768
"""Elements of a tensor that ATen gives one thread at least (at::internal::GRAIN_SIZE,
ATen/TensorIterator.h)."""
_PRODUCT_GRAIN = 1 << 20
"""Operations of a matrix product that are worth another thread: an assumption."""


@dataclass(frozen=True)
class Shared:
    """The fraction of the time of one class of operators that threads share: ``fraction[k]`` for operators of
    ``operations[k]``, which ascend, and ``spread``, one standard deviation. Between them the logarithm of the
    operations decides; smaller and larger operators are like the first and the last."""

    operations: tuple[float, ...]
    fraction: tuple[float, ...]
    spread: float

    def of(self, operations: np.ndarray) -> np.ndarray:
        """The fraction for operators of so many operations."""
        known = np.log(np.maximum(self.operations, 1))
        found: np.ndarray = np.interp(np.log(np.maximum(operations, 1)), known, self.fraction)
        return found


@dataclass(frozen=True)
class Fractions:
    """What threads share, of matrix products and convolutions, of ``attention``, and of all others, most of
    which are bound by memory. ``source``: whether assumed or measured."""

    product: Shared = Shared((1.0,), (0.95,), 0.04)
    attention: Shared = Shared((1.0,), (0.9,), 0.1)
    other: Shared = Shared((1.0,), (0.6,), 0.3)
    source: str = "assumed"


@dataclass(frozen=True)
class Threads:
    """CPU operators work with ``after`` threads in place of ``before``.

    Of the time t₁ that an operator takes with one thread, beyond what one without work takes, a fraction p is
    shared by the threads: tₙ = t₁ (1 − p + p/n). No more threads share it than the tensor has grains; what
    works on less than one grain, or has no recorded shapes, stays.
    """

    before: int
    after: int
    fractions: Fractions = Fractions()

    def apply(self, run: Run, setting: Setting) -> Setting:
        graph = run.graph
        found = [work_ratios(trace, lambda shapes: shapes) for trace in graph.traces]
        operations, itself = (graph.gather([each[at] for each in found]) for at in (0, 2))
        works = graph.is_cpu & (itself > 0) & (operations > 0) & (run.kind == KINDS.index("operator"))
        works &= ~np.array([bool(_NO_WORK.match(name)) for name in run.names])[run.name_of]
        kind = np.array([_kind(name) for name in run.names])[run.name_of]
        shares = np.ceil(operations / np.where(kind == OTHER, GRAIN, _PRODUCT_GRAIN)).clip(1)
        parts: list[Shared] = [getattr(self.fractions, name) for name in CLASSES]
        fraction, spread = (
            np.choose(kind, each)
            for each in ([part.of(operations) for part in parts], [part.spread for part in parts])
        )
        ratios = []  # new time per old one, and that with one standard deviation less of it shared
        for part in (fraction.clip(0, 1), (fraction - spread).clip(0, 1)):
            after, before = (1 - part + part / np.minimum(n, shares) for n in (self.after, self.before))
            ratios.append(after / before)
        changes = works & (ratios[0] != 1)
        if not changes.any():
            raise TraceError(
                f"{FLAG} {self.before}:{self.after}: no CPU operator with recorded shapes works on more than "
                f"{GRAIN:,} elements"
            )
        taken, on_cpu = setting.own_ns, graph.is_cpu & (itself > 0)
        times = [resized_times(taken, graph.own_ns, on_cpu, operations, ratio) for ratio in ratios]
        own, doubtful = (np.where(changes, np.rint(each), taken).astype(np.int64) for each in times)
        shared = []
        for at, name in enumerate(CLASSES):
            nodes = np.flatnonzero(changes & (kind == at))
            if len(nodes):
                mean = np.average(fraction[nodes], weights=taken[nodes] + 1)
                shared.append(f"{mean:.0%} of {len(nodes):,} {name} nodes' time")
        note = (
            f"{FLAG} {self.before}:{self.after}: {int(changes.sum()):,} operator nodes, "
            f"{int(taken[changes].sum()) / 1e6:,.3f} ms, take {int(own[changes].sum()) / 1e6:,.3f} ms; "
            f"{self.fractions.source}: threads share {', '.join(shared)}"
        )
        setting = replace(setting, own_ns=own).noting(note)
        return setting.doubting("parallel fraction of CPU operators", own_ns=doubtful - own)


CLASSES = ("product", "attention", "other")
"""Fields of ``Fractions``."""
OTHER = CLASSES.index("other")


def _kind(name: str) -> int:
    """The index in ``CLASSES`` of an operator."""
    rule = rule_of(name)
    if rule is None or rule in SELECTIONS:
        return OTHER
    return CLASSES.index("attention" if "attention" in name else "product")


# Their nodes hold calls alone.
_NO_WORK = re.compile(r"autograd::|torch::|\w*Backward\d*$|ProfilerStep|Optimizer|c10d::")


def parse_threads(text: str) -> Threads:
    """``2:1``. Raises ``ValueError``."""
    found = re.fullmatch(r"(\d{1,4})\s*(?::|→|->)\s*(\d{1,4})", text.strip())
    if not found or not int(found[1]) or not int(found[2]):
        raise ValueError(f"{FLAG} {text!r}: write the threads before and after, as 2:1")
    return Threads(int(found[1]), int(found[2]))
