"""``chakra-et measure-threads`` on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from chakra_et.__main__ import main
from chakra_et.errors import TraceError
from chakra_et.predict.measure_threads import read_fractions

pytest.importorskip("torch")


def test_fractions_are_measured_and_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "threads.json"
    assert main(["measure-threads", "--repeats", "3", "--output", str(path)]) == 0
    assert "mm 1024" in capsys.readouterr().out
    found = read_fractions(path)
    assert found.source == "measured"
    assert all(0 <= fraction <= 1 and spread >= 0 for fraction, spread in (found.product, found.other))
    path.write_text('{"format": "another"}')
    with pytest.raises(TraceError, match="isn't a file of chakra-et measure-threads"):
        read_fractions(path)
