"""PROFILE_CHAKRA: the traces of a pipeline with data parallelism convert, fit together and replay in time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from chakra_et.et import file as et_file
from chakra_et.et.columns import NodeType
from tests.megatron_lm.training_runs import ROOT, layout, train

pytest.importorskip("megatron.core", reason="megatron-core is not installed (requirements-megatron.txt)")


ENDS = ("src", "dst", "tag", "size")


@pytest.mark.slow
def test_every_rank_converts_and_the_set_replays(tmp_path: Path) -> None:
    settings = layout("3-1", data=2) | {"TRAIN_ITERS": "5", "PROFILE_CHAKRA": "true"}
    done = train(**settings, TRACE_OUTPUT_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3_000:]
    name = str(tmp_path / "megatron_tiny_4gpu")
    for command in (
        ["convert_to_et.py", "--dir", str(tmp_path)],
        ["-m", "chakra_et", "validate", name],
        ["-m", "chakra_et", "replay", name, "--max-error", "3"],
    ):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
    groups = {tuple(ranks) for ranks in json.loads(Path(f"{name}_comm_groups.json").read_text()).values()}
    assert {(0, 1), (2, 3), (0, 2), (1, 3)} <= groups, "data-parallel and pipeline groups"
    sides = []
    for rank in range(4):
        trace = et_file.read(f"{name}.{rank}.et")
        described = trace.attributes["pg_description"]
        text = {described.values[at] for at in range(len(described.rows))}
        assert any("DATA_PARALLEL" in words for words in text)
        assert any("PIPELINE" in words or "EMBEDDING" in words for words in text)
        for kind in (NodeType.COMM_SEND, NodeType.COMM_RECV):
            for row in np.flatnonzero(trace.types == kind):
                ends = (
                    int(trace.column(end)[row]) for end in ("comm_src", "comm_dst", "comm_tag", "comm_size")
                )
                sides.append((kind, *ends))
    sends = sorted(side[1:] for side in sides if side[0] is NodeType.COMM_SEND)
    receives = sorted(side[1:] for side in sides if side[0] is NodeType.COMM_RECV)
    # Two iterations of four micro-batches: forwards and backwards, in both pipelines.
    assert sends == receives and len(sends) == 2 * 4 * 2 * 2
