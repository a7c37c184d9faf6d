"""The contract with ASTRA-sim: in the real one, all ranks of every bundle finish when expected.json says.

The congestion-unaware binary of ``ASTRA_SIM=``, else the shared one, else all is skipped. Fast sets run in
the fast lane, each speed on one of its networks (about 40 s on two cores); `--slow` runs all sets at all
speeds on all their networks (about 20 minutes).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.astra.command import check_log
from tests.astra.real_sets import SETS, networks
from tests.astra.sets import astra_sim, run_astra

SPEEDS = (0.1, 1, 10, 100, 1000)
PERCENT = 1.0
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
    about = SETS[name]
    made = about.make(tmp_path / "set")
    for at, speed in enumerate(SPEEDS):
        of_kind = networks(about.ranks, speed)
        chosen = [list(of_kind)[at % len(of_kind)]] if quick else list(of_kind)
        for kind in chosen:
            folder = tmp_path / f"{kind} {speed}"
            assert main(["astra", made, "-o", str(folder), "--topology", of_kind[kind], *about.flags]) == 0
            done = run_astra(folder)
            assert f"{about.ranks} of {about.ranks} ranks finished" in done.stdout, done.stdout
            found = check_log(folder / "astra.log", folder)
            worst = found.worst_percent()
            assert not found.unfinished
            assert worst is not None and abs(worst) <= PERCENT, f"{kind}, {speed} Gbit/s: {worst:+.2f}%"


def test_there_are_enough_sets() -> None:
    assert len(SETS) >= 25
