"""Another number of threads for CPU operators, by Amdahl's law."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from chakra_et.errors import TraceError
from chakra_et.graph.work import rule_of
from chakra_et.predict.resize import operator_ratios
from chakra_et.predict.run import Run, Setting
from chakra_et.replay.shares import KINDS

FLAG = "--threads"
GRAIN = 32768
"""Elements of a tensor that ATen gives one thread at least (at::internal::GRAIN_SIZE,
ATen/TensorIterator.h)."""
_PRODUCT_GRAIN = 1 << 20
"""Operations of a matrix product that are worth another thread: an assumption."""


@dataclass(frozen=True)
class Fractions:
    """The fraction of an operator's time that threads share, and its standard deviation: of operators with a
    formula in graph.work (``product``: matrix products, convolutions, attention) and of all others, which
    memory bounds (``other``). ``source``: whether assumed or measured."""

    product: tuple[float, float] = (0.95, 0.04)
    other: tuple[float, float] = (0.6, 0.3)
    source: str = "assumed"


@dataclass(frozen=True)
class Threads:
    """CPU operators work with ``after`` threads in place of ``before``.

    Of the time t₁ that an operator takes with one thread, a fraction p is shared by the threads:
    tₙ = t₁ (1 − p + p/n). No more threads share it than the tensor has grains; what works on less than one
    grain, or has no recorded shapes, stays.
    """

    before: int
    after: int
    fractions: Fractions = Fractions()

    def apply(self, run: Run, setting: Setting) -> Setting:
        graph = run.graph
        found = [operator_ratios(trace, {}) for trace in graph.traces]
        operations, itself = (graph.gather([each[at] for each in found]) for at in (0, 2))
        works = graph.is_cpu & (itself > 0) & (operations > 0) & (run.kind == KINDS.index("operator"))
        formula = np.array([rule_of(name) is not None for name in run.names])[run.name_of]
        works &= ~np.array([bool(_NO_WORK.match(name)) for name in run.names])[run.name_of]
        shares = np.ceil(operations / np.where(formula, _PRODUCT_GRAIN, GRAIN)).clip(1)
        ratios = [self._ratio(formula, shares, off) for off in (0.0, 1.0)]
        changes = works & (ratios[0] != 1)
        if not changes.any():
            raise TraceError(
                f"{FLAG} {self.before}:{self.after}: no CPU operator with recorded shapes works on more than "
                f"{GRAIN:,} elements"
            )
        taken = setting.own_ns
        own, doubtful = (
            np.where(changes, np.rint(taken * ratio), taken).astype(np.int64) for ratio in ratios
        )
        products = int((changes & formula).sum())
        return (
            replace(setting, own_ns=own)
            .noting(
                f"{FLAG} {self.before}:{self.after}: {int(changes.sum()):,} operator nodes, "
                f"{int(taken[changes].sum()) / 1e6:,.3f} ms, take "
                f"{int(own[changes].sum()) / 1e6:,.3f} ms; {self.fractions.source}: "
                f"{self.fractions.product[0]:.0%} of the time of {products:,} products and "
                f"{self.fractions.other[0]:.0%} of that of the others is shared by threads"
            )
            .doubting("parallel fraction of CPU operators", own_ns=doubtful - own)
        )

    def _ratio(self, formula: np.ndarray, shares: np.ndarray, off: float) -> np.ndarray:
        """New time per old one, with ``off`` standard deviations less of it shared."""
        (product, a), (other, b) = self.fractions.product, self.fractions.other
        fraction = np.clip(np.where(formula, product - off * a, other - off * b), 0, 1)
        old, new = (
            1 - fraction + fraction / np.minimum(threads, shares) for threads in (self.before, self.after)
        )
        ratio: np.ndarray = new / old
        return ratio


# Their nodes hold calls alone.
_NO_WORK = re.compile(r"autograd::|torch::|\w*Backward\d*$|ProfilerStep|Optimizer|c10d::")


def parse_threads(text: str) -> Threads:
    """``2:1``. Raises ``ValueError``."""
    found = re.fullmatch(r"(\d{1,4})\s*(?::|→|->)\s*(\d{1,4})", text.strip())
    if not found or not int(found[1]) or not int(found[2]):
        raise ValueError(f"{FLAG} {text!r}: write the threads before and after, as 2:1")
    return Threads(int(found[1]), int(found[2]))
