"""PROFILE_CHAKRA: the traces of a pipeline with data parallelism convert, fit together and replay in time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from chakra_et.et import file as et_file
from chakra_et.et.columns import NodeType
from tests.megatron_lm.training_runs import ROOT, TINY, layout, train

pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra megatron)")


ENDS = ("src", "dst", "tag", "size")


class Traced(NamedTuple):
    """The settings of a run, and the path of its traces without rank and ending."""

    settings: dict[str, str]
    name: Path


def interleaved(tensor: int = 1, data: int = 1) -> dict[str, str]:
    ranks = str(2 * tensor * data)
    more = {"PIPELINE_MP_SIZE": "2", "VIRTUAL_STAGES": "2", "WORLD_SIZE": ranks, "NPROC_PER_NODE": ranks}
    return layout("1-1-1-1", tensor, data) | more


SETTINGS = {
    "PP2, DP2": layout("3-1", data=2),
    "llama, PP2, TP2, sequence parallel, recomputed": layout("1-3", tensor=2)
    | {"MODEL": "llama-tiny", "SEQUENCE_PARALLEL": "true", "RECOMPUTE": "full", "PRECISION": "bf16"},
    "llama, interleaved, DP2, sharded": interleaved(data=2)
    | {"MODEL": "llama-tiny", "SHARDED_OPTIMIZER": "true", "PROFILE": "true"},
    "interleaved, TP2": interleaved(tensor=2) | {"SEQUENCE_PARALLEL": "true"},
    "uneven chunks, one of them empty": interleaved() | {"PARTITION": "0-2-1-1"},
}


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS, scope="module")
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A run with traces of two iterations."""
    folder = tmp_path_factory.mktemp("traces")
    more = {"TRAIN_ITERS": "5", "PROFILE_CHAKRA": "true", "GLOBAL_BATCH_SIZE": "4"}
    settings = TINY | request.param | more
    done = train(**settings, TRACE_OUTPUT_DIR=str(folder))
    assert done.returncode == 0, done.stderr[-3_000:]
    return Traced(settings, folder / f"megatron_{settings['MODEL']}_{settings['WORLD_SIZE']}gpu")


@pytest.mark.slow
def test_every_rank_converts_and_the_set_replays(traced: Traced) -> None:
    settings, name = traced
    for command in (
        ["convert_to_et.py", "--dir", str(name.parent)],
        ["-m", "chakra_et", "validate", str(name)],
        ["-m", "chakra_et", "replay", str(name), "--semantics", "device", "--max-error", "10"],
    ):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
    groups = {tuple(ranks) for ranks in json.loads(Path(f"{name}_comm_groups.json").read_text()).values()}
    stages, tensor, data = (int(settings[f"{kind}_SIZE"]) for kind in ("PIPELINE_MP", "TENSOR_MP", "DP"))
    world = np.arange(stages * data * tensor).reshape(stages, data, tensor)
    for axis, size in enumerate((stages, data, tensor)):
        wanted = {tuple(ranks) for ranks in np.moveaxis(world, axis, -1).reshape(-1, size).tolist()}
        assert size == 1 or wanted <= groups, f"groups along axis {axis}"
    sides = []
    for rank in range(world.size):
        trace = et_file.read(f"{name}.{rank}.et")
        described = trace.attributes["pg_description"]
        text = {described.values[at] for at in range(len(described.rows))}
        assert data == 1 or any("DATA_PARALLEL" in words for words in text)
        assert tensor == 1 or any("TENSOR" in words for words in text)
        assert any("PIPELINE" in words or "EMBEDDING" in words for words in text)
        for kind in (NodeType.COMM_SEND, NodeType.COMM_RECV):
            for row in np.flatnonzero(trace.types == kind):
                ends = (int(trace.column(f"comm_{end}")[row]) for end in ENDS)
                sides.append((kind, *ends))
    sends = sorted(side[1:] for side in sides if side[0] is NodeType.COMM_SEND)
    receives = sorted(side[1:] for side in sides if side[0] is NodeType.COMM_RECV)
    # Two iterations; of each micro-batch a forward and a backward message over each boundary between chunks.
    boundaries = stages * int(settings.get("VIRTUAL_STAGES", "1")) - 1
    micro_batches = int(settings["GLOBAL_BATCH_SIZE"]) // data
    assert sends == receives and len(sends) == 2 * micro_batches * 2 * boundaries * data * tensor
