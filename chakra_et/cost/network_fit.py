"""The α–β–γ model of a network, fitted to measured communication or read from a file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from chakra_et.cost.collectives import collective_time
from chakra_et.cost.topology import Dimension, Topology
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType
from chakra_et.files import read_json, write_json
from chakra_et.text import duration, plural, size

MODEL_FORMAT = "chakra-et network model"


@dataclass(frozen=True)
class Sample:
    """A collective that took ``ns``: ``size`` bytes from each of ``ranks`` ranks."""

    kind: CollectiveType
    size: int
    ranks: int
    ns: float


@dataclass(frozen=True)
class NetworkModel:
    """``call_ns``: of a call; ``latency_ns``: α; ``bandwidth``: 1/β, ``reduce_bandwidth``: 1/γ, bytes per
    second, infinite where the samples show no such cost. ``error``: relative standard deviation of the
    samples from the model. ``measured``: samples of a network by which ``time`` goes where it can: what a
    library does beside sending, copies for one, differs among collectives by more than these costs tell."""

    call_ns: float
    latency_ns: float
    bandwidth: float
    reduce_bandwidth: float
    error: float
    samples: int
    source: str
    measured: tuple[Sample, ...] = ()

    def topology(self, ranks: int) -> Topology:
        """This network between ``ranks`` ranks."""
        dimension = Dimension(ranks, self.bandwidth, self.latency_ns)
        return Topology((dimension,), self.reduce_bandwidth, self.call_ns)

    def time(self, kind: CollectiveType, size: int, ranks: int) -> float:
        """ns of a collective: between the sizes that were measured of its kind among as many ranks, beyond
        the largest in proportion to the bytes; where there are none, by the fitted costs."""
        known = sorted((of.size, of.ns) for of in self.measured if (of.kind, of.ranks) == (kind, ranks))
        if not known:
            return collective_time(kind, size, range(ranks), self.topology(ranks))
        sizes, taken = np.array(known).T
        return float(np.interp(size, sizes, taken) * max(size / sizes[-1], 1.0))

    def was_measured(self, kind: CollectiveType, ranks: int) -> bool:
        """Whether ``time`` goes by measured collectives of this kind among as many ranks."""
        return any((each.kind, each.ranks) == (kind, ranks) for each in self.measured)

    def change(self, kind: CollectiveType, before: tuple[int, int], after: tuple[int, int]) -> float:
        """How much longer a collective of ``after`` = (bytes, ranks) takes than one of ``before``: both by
        what was measured, or both by the fitted costs."""
        known = self.was_measured(kind, before[1]) and self.was_measured(kind, after[1])
        model = self if known else replace(self, measured=())
        old = model.time(kind, *before)
        return model.time(kind, *after) / old if old else 1.0

    def describe(self) -> str:
        """One line."""
        parts = [f"call {duration(self.call_ns)}", f"latency {duration(self.latency_ns)}"]
        rates = {"bandwidth": self.bandwidth, "reduction": self.reduce_bandwidth}
        parts += [f"{name} {size(rate)}/s" for name, rate in rates.items() if rate < math.inf]
        return f"{', '.join(parts)} (±{self.error:.0%}, {plural(self.samples, 'sample')} of {self.source})"


def fit_model(samples: Sequence[Sample], source: str) -> NetworkModel:
    """The model with the least squared relative error, all four costs from 0 on.

    Costs that the samples can't tell apart are fitted as the first of β, call, α and γ. Raises ``TraceError``
    where no sample took time.
    """
    samples = [each for each in samples if each.ns > 0 and each.ranks > 1]
    if not samples:
        raise TraceError(
            f"{source}: no communication that took time, to fit a network to: give --network FILE of "
            "`chakra-et measure-network`"
        )
    taken = np.array([each.ns for each in samples])
    columns = np.array([_costs(each) for each in samples])  # β, call, α, γ
    best, best_error = np.zeros(4), math.inf
    for count in range(1, 5):
        for chosen in itertools.combinations(range(4), count):
            part = columns[:, chosen] / taken[:, None]
            if np.linalg.matrix_rank(part / np.maximum(np.abs(part).max(0), 1e-300)) < count:
                continue
            found = np.linalg.lstsq(part, np.ones(len(taken)), rcond=None)[0]
            error = float(np.sqrt(np.mean((part @ found - 1) ** 2)))
            if (found >= 0).all() and error < best_error * 0.999:
                best = np.zeros(4)
                best[list(chosen)] = found
                best_error = error
    beta, call, alpha, gamma = best.tolist()
    return NetworkModel(call, alpha, _rate(beta), _rate(gamma), best_error, len(samples), source)


def write_model(path: str | Path, model: NetworkModel, **more: object) -> None:
    """Write a model as JSON, with what else is known about the measurement."""
    entry = {name: None if value == math.inf else value for name, value in asdict(model).items()}
    entry["measured"] = [{**asdict(each), "kind": each.kind.name} for each in model.measured]
    write_json(Path(path), {"format": f"{MODEL_FORMAT} 1", **entry, **more})


def read_model(path: str | Path) -> NetworkModel:
    """The model that ``write_model`` wrote. Raises ``TraceError`` for any other file."""
    wrote = "`chakra-et measure-network --output FILE`"
    try:
        entry = read_json(path)
        measured = tuple(_sample(each) for each in entry.get("measured", ()))
        numbers = {name: entry[name] for name in ("call_ns", "latency_ns", "error", "samples")}
        for name in ("bandwidth", "reduce_bandwidth"):
            numbers[name] = math.inf if entry[name] is None else entry[name] or -1
        if not all(type(n) in (int, float) and n >= 0 for n in numbers.values()):
            raise ValueError("a figure is no number above 0")
        return NetworkModel(**numbers, source=str(entry["source"]), measured=measured)
    except OSError as error:
        reason = error.strerror or "can not be read"
        raise TraceError(f"{path}: {reason}: check the path, or write the file with {wrote}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        ours = f" ({error})" if type(error) is ValueError else ""  # only these sentences are for users
        raise TraceError(f"{path}: isn't a network model{ours}: write one with {wrote}") from None


def _sample(entry: dict[str, object]) -> Sample:
    size, ranks, ns = entry["size"], entry["ranks"], entry["ns"]
    if not (type(size) is type(ranks) is int and size > 0 and ranks > 1):
        raise ValueError(f"measured with {size!r} bytes and {ranks!r} ranks")
    if not (isinstance(ns, (int, float)) and 0 < ns < math.inf):
        raise ValueError(f"measured in {ns!r} ns")
    return Sample(CollectiveType[str(entry["kind"])], size, ranks, float(ns))


def _costs(sample: Sample) -> list[float]:
    """ns of a sample for β = 1 ns per byte, 1 ns per call, α = 1 ns, γ = 1 ns per byte, each alone."""
    free = NetworkModel(0.0, 0.0, math.inf, math.inf, 0.0, 0, "")
    alone = [replace(free, bandwidth=1e9), replace(free, call_ns=1.0)]
    alone += [replace(free, latency_ns=1.0), replace(free, reduce_bandwidth=1e9)]
    return [each.time(sample.kind, sample.size, sample.ranks) for each in alone]


def _rate(ns_per_byte: float) -> float:
    return 1e9 / ns_per_byte if ns_per_byte > 0 else math.inf
