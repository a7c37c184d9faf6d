"""Coalesced gloo collectives of a plain profiler, which names no groups."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from chakra_et.convert import command
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, NodeType

CAPTURES = Path(__file__).resolve().parents[1] / "fixtures" / "gloo_coalesced"
REDUCE, GATHER, SCATTER = (
    CollectiveType.ALL_REDUCE,
    CollectiveType.ALL_GATHER,
    CollectiveType.REDUCE_SCATTER,
)


def convert(name: str, folder: Path, ranks: range = range(4)) -> list[list[tuple[int, int, str]]]:
    """Per rank: type, bytes and group of each collective, in order."""
    for path in CAPTURES.glob(f"{name}_rank*"):
        shutil.copy(path, folder)
    assert command.main(["--dir", str(folder), "--workers", "1"]) == 0
    found = []
    for rank in ranks:
        trace = et_file.read(folder / f"{name}.{rank}.et")
        rows = np.flatnonzero(trace.types == NodeType.COMM_COLL)
        groups = trace.attributes["pg_original_name"].values
        kinds, sizes = trace.column("comm_type")[rows], trace.column("comm_size")[rows]
        names = [groups[at] for at in range(len(rows))]
        found.append(list(zip(kinds.tolist(), sizes.tolist(), names, strict=True)))
    return found


def test_types_and_sizes_of_coalesced_collectives(tmp_path: Path) -> None:
    default = [(REDUCE, 224, "0"), (GATHER, 96, "0"), (SCATTER, 128, "0"), (SCATTER, 256, "0")]
    assert convert("both", tmp_path) == [[*default, *[(REDUCE, n, "0") for n in (224, 36, 224)]]] * 4


def test_pairs_that_nothing_names_are_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = [(REDUCE, 224, "0"), (GATHER, 96, "0")], [(REDUCE, 448, "0"), (GATHER, 96, "0")]
    assert convert("pairs", tmp_path) == [first, first, second, second]
    shown = capsys.readouterr().err
    assert "the default group: 8" in shown and re.search("warning: .* do not match between ranks", shown)
