"""The contract with ASTRA-sim: in the real one, all ranks of every bundle finish when expected.json says.

The congestion-unaware binary of ``ASTRA_SIM=``, else the shared one, else all is skipped. Fast sets run in
the fast lane, each speed on one of its networks (about 15 s on two cores); `--slow` runs all sets at all
speeds on all their networks. ``ASTRA_RESULTS=FILE`` keeps what benchmarks/astra_agreement.py --results reads.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from chakra_et.files import write_json
from tests.astra.real_sets import PERCENT, SETS, measure
from tests.astra.sets import astra_sim

CASES = [
    *(
        pytest.param(name, True, id=f"{name}, one network a speed")
        for name, each in SETS.items()
        if each.fast
    ),
    *(pytest.param(name, False, id=name, marks=pytest.mark.slow) for name in SETS),
]


@pytest.mark.parametrize(("name", "quick"), CASES)
def test_every_rank_ends_when_expected(name: str, quick: bool, tmp_path: Path) -> None:
    astra_sim()
    found = measure(name, tmp_path, quick)
    if not quick and (kept := os.environ.get("ASTRA_RESULTS")):
        path = Path(kept)
        write_json(path, (json.loads(path.read_text()) if path.is_file() else {}) | {name: found})
    assert not found["unfinished"], found
    assert abs(found["worst"]) <= PERCENT, found


def test_there_are_enough_sets() -> None:
    assert len(SETS) >= 25
