"""The notebook's cells run in order, and its stored answers are those of today."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.public_traces import TRACES
from tests.shared import shared_path

NOTEBOOK = Path(__file__).with_name("gpu_trace.ipynb")


def cells() -> list[dict[str, Any]]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in found if cell["cell_type"] == "code"]


def words(text: str) -> list[str | float]:
    """Words, and figures as numbers, which may change a little."""
    found = re.findall(r"\d[\d,]*(?:\.\d+)?|[^\d\s]+", text)
    return [float(word.replace(",", "")) if word[0].isdigit() else word for word in found]


def test_it_fetches_the_traces_that_it_reads() -> None:
    (pattern,) = re.findall(r'"--only", "([^"]+)"', cells()[0]["source"])
    fetched = {trace.name for trace in TRACES if fnmatch.fnmatchcase(trace.name, pattern)}
    read = {name for cell in cells() for name in re.findall(r'ce\.load\("traces/([^"]+)"\)', cell["source"])}
    assert len(read) == 2 and read == fetched


def test_its_cells_run_and_say_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    public = shared_path("data/traces/public", "pairs")
    (tmp_path / "traces").symlink_to(public)
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {}
    for cell in cells()[1:]:
        exec(cell["source"], values)
        stored = ["".join(each["text"]) for each in cell["outputs"] if each["output_type"] == "stream"]
        for now, then in zip(*map(words, (capsys.readouterr().out, "".join(stored))), strict=True):
            assert now == (then if isinstance(then, str) else pytest.approx(then, rel=0.05))
    times = {name: values["kernel_ms"](job) for name, job in values["times"].items()}
    assert times["MI300X, predicted"] == pytest.approx(times["MI300X, measured"], rel=0.25)
    assert (
        values["gains"]["all kernels in half the time"].after_ms
        < values["gains"]["matrix products in half the time"].after_ms
    )
