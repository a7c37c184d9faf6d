"""``chakra-et measure-threads`` on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.errors import TraceError
from chakra_et.predict.measure_threads import read_fractions
from chakra_et.transform.threads import Shared

pytest.importorskip("torch")


def test_fractions_are_measured_and_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "threads.json"
    assert main(["measure-threads", "--repeats", "3", "--output", str(path)]) == 0
    assert "mm 1024" in capsys.readouterr().out
    found = read_fractions(path)
    assert found.source == "measured"
    for part in (found.product, found.attention, found.other):
        assert len(part.operations) == 4 and part.spread >= 0
        assert all(0 <= fraction <= 1 for fraction in part.fraction)
    written = json.loads(path.read_text())
    written["other"]["fraction"].pop()
    path.write_text(json.dumps(written))
    with pytest.raises(TraceError, match="its sizes don't match its fractions"):
        read_fractions(path)
    path.write_text('{"format": "another"}')
    with pytest.raises(TraceError, match="isn't a file of chakra-et measure-threads"):
        read_fractions(path)


def test_fractions_lie_between_the_measured_sizes() -> None:
    shared = Shared((100.0, 10_000.0), (0.2, 0.8), 0.1)
    assert shared.of(np.array([1, 100, 1000, 10_000, 1e9])) == pytest.approx([0.2, 0.2, 0.5, 0.8, 0.8])
