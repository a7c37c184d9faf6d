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
        ratios = [self._ratio(kind, operations, shares, off) for off in (0, 1)]
        changes = works & (ratios[0] != 1)
        if not changes.any():
            raise TraceError(
                f"{FLAG} {self.before}:{self.after}: no CPU operator with recorded shapes works on more than "
                f"{GRAIN:,} elements"
            )
        taken = setting.own_ns
        on_cpu = graph.is_cpu & (itself > 0)
        own, doubtful = (
            np.where(
                changes, np.rint(resized_times(taken, graph.own_ns, on_cpu, operations, ratio)), taken
            ).astype(np.int64)
            for ratio in ratios
        )
        parts = ", ".join(
            f"{self._mean(at, operations[nodes], taken[nodes]):.0%} of {len(nodes):,} {name} nodes' time"
            for at, name in enumerate(CLASSES)
            if len(nodes := np.flatnonzero(changes & (kind == at)))
        )
        return (
            replace(setting, own_ns=own)
            .noting(
                f"{FLAG} {self.before}:{self.after}: {int(changes.sum()):,} operator nodes, "
                f"{int(taken[changes].sum()) / 1e6:,.3f} ms, take "
                f"{int(own[changes].sum()) / 1e6:,.3f} ms; {self.fractions.source}: threads share {parts}"
            )
            .doubting("parallel fraction of CPU operators", own_ns=doubtful - own)
        )

    def _ratio(self, kind: np.ndarray, operations: np.ndarray, shares: np.ndarray, off: int) -> np.ndarray:
        """New time per old one, with ``off`` standard deviations less of it shared."""
        parts: list[Shared] = [getattr(self.fractions, name) for name in CLASSES]
        fraction = np.choose(kind, [part.of(operations) - off * part.spread for part in parts]).clip(0, 1)
        old, new = (
            1 - fraction + fraction / np.minimum(threads, shares) for threads in (self.before, self.after)
        )
        ratio: np.ndarray = new / old
        return ratio

    def _mean(self, kind: int, operations: np.ndarray, taken: np.ndarray) -> float:
        """The shared fraction of nodes of a class, by their time."""
        part: Shared = getattr(self.fractions, CLASSES[kind])
        return float(np.average(part.of(operations), weights=taken + 1))


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
