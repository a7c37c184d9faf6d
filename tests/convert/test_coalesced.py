"""Coalesced gloo collectives of a plain profiler, which names no groups."""

from __future__ import annotations

import gzip
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


def test_pairs_that_alone_communicate_are_found_by_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = [(REDUCE, 224, "1"), (GATHER, 96, "1")], [(REDUCE, 448, "2"), (GATHER, 96, "2")]
    assert convert("pairs", tmp_path) == [first, first, second, second]
    assert "inferred from their threads and sizes: 8" in capsys.readouterr().err


def test_default_group_and_pairs_are_told_apart(tmp_path: Path) -> None:
    default = [(REDUCE, 224, "0"), (GATHER, 96, "0"), (SCATTER, 128, "0"), (SCATTER, 256, "0")]
    after = [(REDUCE, 36, "0"), (REDUCE, 224, "0")]
    found = convert("both", tmp_path)
    assert found == [[*default, (REDUCE, 224, pair), *after] for pair in ("1", "1", "2", "2")]


def test_a_wrong_guess_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in CAPTURES.glob("pairs_rank*"):
        shutil.copy(path, tmp_path)
    for path in tmp_path.glob("pairs_rank*"):
        # Without the names of the all-gathers, nothing tells the pairs from the default group.
        text = gzip.decompress(path.read_bytes())
        path.write_bytes(gzip.compress(text.replace(b"c10d::allgather_into_tensor_coalesced_", b"c10d::x")))
    assert command.main(["--dir", str(tmp_path), "--workers", "1"]) == 0
    shown = capsys.readouterr().err
    assert "the default group: 8" in shown and re.search("warning: .* do not match between ranks", shown)
