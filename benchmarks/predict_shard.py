"""The part ``blocks`` of ``predict_benchmark.py``: more layers, and FSDP2 in place of DDP; both need the
repeated blocks of the model."""

from __future__ import annotations

from pathlib import Path

from benchmarks.predict_runs import Case, Part, measured_ms
from chakra_et.simulate.run import Run
from chakra_et.transform.fsdp import Shard
from chakra_et.transform.scale import Scaling


def _blocks(_: Path) -> list[Case]:
    """predict_workload.MODEL has four layers."""
    base = {"bucket_mb": 4}
    return [
        Case("base", base, []),
        Case("nothing", base, []),
        Case(
            "layers × 2",
            {**base, "model": {"layers": 8}},
            [Scaling(layers="2x", spread=0.0)],
            _twice,
        ),
        Case("DDP → FSDP2", {"wrapper": "fsdp2"}, [Shard()], measured_ms),
    ]


def _twice(run: Run) -> float:
    return 2 * measured_ms(run)


BLOCKS = Part(_blocks)
