"""The cases of ``predict_benchmark.py``: what is run, and the what-ifs and the baseline that predict it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.predict_runs import Case, Part, measured_ms
from benchmarks.predict_shard import BLOCKS
from chakra_et.cost.network_fit import read_model
from chakra_et.cost.units import parse_bandwidth
from chakra_et.et.columns import NodeType
from chakra_et.job.operators import Shape, with_shapes
from chakra_et.simulate.run import Run
from chakra_et.transform.accumulation import Accumulate
from chakra_et.transform.changes import Change, Rebuild
from chakra_et.transform.ddp import BucketSize
from chakra_et.transform.durations import RankAs, Scale
from chakra_et.transform.network import Network
from chakra_et.transform.operator_times import work_ratios
from chakra_et.transform.scale import Scaling

LATENCY_NS = 50_000.0
"""Of a message between two processes on one machine; too short to matter beside buckets of megabytes."""


def _bytes(run: Run) -> float:
    """Bytes that rank 0 sends per step: an all-reduce of two ranks sends as much as it reduces."""
    nodes = (run.graph.types == NodeType.COMM_COLL) & (run.graph.trace_of == 0)
    return float(run.graph.attribute("comm_size", 0)[nodes].sum()) / len(run.steps[0].names)


def _computing(run: Run) -> float:
    """ms per step of rank 0 without communication."""
    nodes = ~run.is_communication & (run.graph.trace_of == 0)
    return float(run.graph.own_ns[nodes].sum()) / len(run.steps[0].names) / 1e6


def _by_operations(sizes: Mapping[int, int]) -> Callable[[Run], float]:
    """Predict by scaling the compute time per step with its operations and keeping the communication time."""

    def shape(old: Shape) -> Shape:
        return tuple(sizes.get(size, size) for size in old)

    def scaled(run: Run) -> float:
        trace = run.graph.traces[0]
        operations, ratio, works_itself = work_ratios(trace, lambda text: with_shapes(text, shape))[:3]
        assert trace.inputs is not None
        counted = (operations * works_itself)[trace.inputs.rows]
        return _computing(run) * float((counted * ratio[trace.inputs.rows]).sum() / counted.sum())

    return scaled


def _by_bytes(rate: str) -> Callable[[Run], float]:
    return lambda run: _computing(run) + _bytes(run) / parse_bandwidth(rate) * 1e3


def _network(_: Path) -> list[Case]:
    shaped = (("1gbit", "1 Gbit/s"), ("500mbit", "500 Mbit/s"), ("200mbit", "200 Mbit/s"))
    return [
        Case("base", {"bucket_mb": 4}, []),
        Case("nothing", {"bucket_mb": 4}, []),
        *(
            Case(
                rate,
                {"bucket_mb": 4, "network": limit},
                [Network(parse_bandwidth(rate), LATENCY_NS)],
                _by_bytes(rate),
            )
            for limit, rate in shaped
        ),
    ]


_INSIDE = {"gelu": "gelu", "clamp": "clamp", "lerp": "_foreach_lerp_|lerp_"}
"""What the operators of predict_workload that can be slowed do."""


def _compute(_: Path) -> list[Case]:
    times = 16
    # What an operator does counts as slowed with it: all that runs within it.
    patterns = {name: f"^(slowable::{name}|aten::({inside}))$" for name, inside in _INSIDE.items()}
    cases = [Case("base", {}, []), Case("nothing", {}, [])]
    for phase, name in (("forward", "gelu"), ("backward", "clamp"), ("optimizer", "lerp")):
        change = Scale(patterns[name], times)
        cases.append(Case(f"{phase} operator × {times}", {"slow": {name: times}}, [change]))
    one = {"slow": {"gelu": times}, "slow_ranks": [1]}
    cases.append(Case("rank 1 slow", one, [_OnRank(1, patterns["gelu"], times)]))
    cases.append(Case("slow rank as the other", {}, [RankAs(1)], source="rank 1 slow"))
    return cases


@dataclass(frozen=True)
class _OnRank:
    """Scale on one rank alone."""

    rank: int
    pattern: str
    factor: float

    def apply(self, run: Run, setting: Any) -> Any:
        scaled = Scale(self.pattern, self.factor).apply(run, setting)
        here = run.graph.trace_of == run.graph.ranks.index(self.rank)
        return replace(scaled, own_ns=np.where(here, scaled.own_ns, setting.own_ns))


def _shapes(_: Path) -> list[Case]:
    """The sizes of predict_workload.MODEL: a batch of 10, sequences of 72, 256 wide, in 4 heads of 64."""
    batch, sequence = {10: 20, 720: 1440}, {72: 144, 73: 145, 720: 1440}
    wide = {256: 384, 768: 1152, 1024: 1536, 64: 96}
    return [
        Case("base", {"bucket_mb": 4}, []),
        Case("nothing", {"bucket_mb": 4}, []),
        Case(
            "batch × 2",
            {"bucket_mb": 4, "model": {"batch": 20}},
            [Scaling(resize=batch, spread=0.0)],
            _by_operations(batch),
        ),
        Case(
            "sequence × 2",
            {"bucket_mb": 4, "model": {"sequence": 144}},
            [Scaling(resize=sequence, spread=0.0)],
            _by_operations(sequence),
        ),
        Case(
            "hidden × 1.5",
            {"bucket_mb": 4, "model": {"hidden": 384}},
            [Scaling(resize=wide, spread=0.0)],
            _by_operations(wide),
        ),
    ]


def _steps(_: Path) -> list[Case]:
    """Other buckets and accumulation."""
    base = {"bucket_mb": 4}
    return [
        Case("base", base, []),
        Case("nothing", base, []),
        Case("buckets of 1 MiB", {"bucket_mb": 1}, [BucketSize(1)], _base_step),
        Case("one bucket", {"bucket_mb": 100}, [BucketSize(100)], _base_step),
        Case("2 passes", base | {"accumulation": 2}, [Accumulate(2)], _times_computing(2)),
        Case("4 passes", base | {"accumulation": 4}, [Accumulate(4)], _times_computing(4)),
    ]


def _ranks(folder: Path) -> list[Case]:
    """One rank to two, each on a core of its own. Two processes always run, so that the machine is as
    busy."""
    one, two = ({"ranks": ranks, "bucket_mb": 4} for ranks in (1, 2))
    return [
        Case("one rank", one, []),
        Case("nothing", one, [], source="one rank", source_ranks=1),
        Case("1 → 2 ranks", two, lambda _: _added(folder, 2), _alone, "one rank", 1),
    ]


def _four(folder: Path) -> list[Case]:
    """One rank and two to four. Four processes always run, as one, two or four jobs that begin each step
    together, so that a rank has the same share of a core in every case."""
    one, two, four = ({"ranks": ranks, "bucket_mb": 4} for ranks in (1, 2, 4))
    return [
        Case("one rank", one, []),
        Case("two ranks", two, []),
        Case("nothing", two, [], source="two ranks", source_ranks=2),
        Case("1 → 4 ranks", four, lambda _: _added(folder, 4), _alone, "one rank", 1),
        Case("2 → 4 ranks", four, [Scaling(dp=4, spread=0.0)], _alone, "two ranks", 2),
    ]


def _added(folder: Path, ranks: int) -> list[Change | Rebuild]:
    """DDP for a run of one rank."""
    return [Scaling(dp=ranks, spread=0.0, bucket_mb=4, network=read_model(folder / "network.json"))]


def _base_step(run: Run) -> float:
    """Operations and bytes are the same."""
    return measured_ms(run)


def _alone(run: Run) -> float:
    return _computing(run)


def _times_computing(passes: int) -> Callable[[Run], float]:
    return lambda run: passes * _computing(run)


PARTS: dict[str, Part] = {
    "network": Part(_network, shaped=True),
    "compute": Part(_compute),
    "shapes": Part(_shapes),
    "steps": Part(_steps),
    "blocks": BLOCKS,
    "ranks": Part(_ranks, 2, measured="network"),
    "four": Part(_four, 4, measured="network"),
}
