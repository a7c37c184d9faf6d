"""How compute times of ranks with the same work differ from step to step, and draws of measured steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chakra_et.et.columns import ExecutionTrace, NodeType, Strings
from chakra_et.et.node_attributes import dependencies
from chakra_et.simulate.measured_steps import step_rows

KINDS = (b"operator", b"kernel", b"host-overhead", b"device-overhead")
"""Of the attribute ``kind``: what varies on its own; all other nodes together are one kind more."""


def step_of(trace: ExecutionTrace) -> np.ndarray:
    """The step of each node, int64[N] from 0; all 0 without steps, -1 for what was launched before the first.

    What the CPU does belongs to the step in which it begins (by its place in the file where there are no
    start times, as in copies); a device's work to that of the operator that launched it, which it can
    outlast.
    """
    names, rows = step_rows(trace)
    if len(names) < 2:
        return np.zeros(len(trace), dtype=np.int64)
    when = trace.start_micros if trace.start_micros.any() else np.arange(len(trace), dtype=np.uint64)
    step = np.maximum(np.searchsorted(np.sort(when[rows]), when, side="right") - 1, 0)
    on_device = trace.column("is_cpu_op") == 0
    source, target = dependencies(trace)
    # Work that was launched before the recording hangs on the gap with which the recording begins.
    launched = on_device[target] & (kind_of(trace)[source] != KINDS.index(b"host-overhead"))
    source, target = source[launched], target[launched]
    order = np.argsort(target, kind="stable")
    found, known = step.tolist(), (~on_device).tolist()
    for before, after in zip(source[order].tolist(), target[order].tolist(), strict=True):
        if known[before]:
            found[after] = max(found[after], found[before]) if known[after] else found[before]
            known[after] = True
    launched_before = on_device & ~np.array(known) & bool((on_device & known).any())
    return np.where(launched_before, -1, np.array(found, np.int64))


def kind_of(trace: ExecutionTrace) -> np.ndarray:
    """Index into ``KINDS`` of each node, int64[N], len(KINDS) for any other."""
    kinds = np.full(len(trace), len(KINDS))
    attribute = trace.attributes.get("kind")
    if attribute is not None and isinstance(attribute.values, Strings):
        place = {name: at for at, name in enumerate(KINDS)}
        code = np.array([place.get(name, len(KINDS)) for name in attribute.values.table])
        kinds[attribute.rows] = code[attribute.values.index]
    return kinds


def compute_micros(trace: ExecutionTrace) -> np.ndarray:
    """Time of all but communication by step and kind, float64[S, K]."""
    step, width = step_of(trace), len(KINDS) + 1
    computes = (trace.types < NodeType.COMM_SEND) & (step >= 0)
    cell = (step * width + kind_of(trace))[computes]
    micros = trace.duration_micros[computes].astype(np.float64)
    found: np.ndarray = np.bincount(cell, micros, (int(step.max(initial=0)) + 1) * width)
    return found.reshape(-1, width)


def deviations(busy: Sequence[np.ndarray]) -> np.ndarray:
    """How ranks with the same work differ from their mean in each step, or steps from their mean where there
    is one rank, as factors, float64[R, S, K]; ``busy``: their ``compute_micros``."""
    steps = min(len(of_rank) for of_rank in busy)
    table = np.array([of_rank[:steps] for of_rank in busy])
    mean = np.broadcast_to(table.mean(axis=0 if len(busy) > 1 else 1, keepdims=True), table.shape)
    factors: np.ndarray = np.ones_like(table)
    np.divide(table, mean, out=factors, where=(mean > 0) & (table > 0))
    return factors


def relative_spread(busy: Sequence[np.ndarray]) -> float:
    """The standard deviation of all compute time of a step from rank to rank, or with one rank from step to
    step, relative to its mean; 0 with one step too."""
    factors = deviations([of_rank.sum(axis=1, keepdims=True) for of_rank in busy])
    free = factors.size - (factors.shape[1] if len(busy) > 1 else 1)
    return float(np.sqrt(((factors - 1) ** 2).sum() / free)) if free else 0.0


def draw(
    generator: np.random.Generator, busy: Sequence[np.ndarray], own: int, spread: float | None
) -> np.ndarray:
    """Factors for the steps of a copy of rank ``own`` of ``busy``, float64[S, K].

    Each step varies as some measured step of one of the ranks did, all kinds together, so that copies of
    copies vary no more than copies; draws of few vary less than what they are drawn from, hence the power.
    With ``spread``, log-normal by so much instead.
    """
    measured = deviations(busy)
    ranks, steps, _ = measured.shape
    if spread is None:
        drawn = measured[generator.integers(ranks, size=steps), generator.integers(steps, size=steps)]
        count = ranks if ranks > 1 else steps
        drawn = drawn ** np.sqrt(count / max(count - 1, 1))
    else:
        sigma = np.sqrt(np.log1p(spread**2))
        drawn = np.exp(generator.normal(-(sigma**2) / 2, sigma, steps))[:, None]
    factors: np.ndarray = drawn / measured[own]
    return factors


def stretched(durations: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Durations (µs) times factors, rounded so that their sum stays right; uint64[N]."""
    edges = np.rint(np.concatenate(([0.0], np.cumsum(durations * factors))))
    return np.diff(edges).astype(np.uint64)
