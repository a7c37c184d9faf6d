"""Ranks that are made from others, by --fill and by scale, vary as the captured ones do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chakra_et.__main__ import main
from chakra_et.et import file as et_file
from chakra_et.et.columns import CollectiveType, ExecutionTrace
from chakra_et.et.node_attributes import with_texts
from chakra_et.transform.rank_copies import compute_micros
from tests.astra.sets import write_set
from tests.simulate.replay_traces import collective, cpu, kernel, make_trace

STEPS = 12


def test_a_filled_rank_has_no_splits_of_another(tmp_path: Path) -> None:
    """Those of the rank that it was made from contradicted the others' in uneven all-to-alls."""
    sent = [[1, 2, 3, 4], [2, 2, 2, 2], [4, 3, 2, 1], [9, 1, 1, 1]]
    traces = {}
    for rank in range(4):
        all_to_all = {"comm_type": int(CollectiveType.ALL_TO_ALL), "comm_size": 1 << 16, "is_cpu_op": 0}
        trace = make_trace(cpu(1, 20), collective(2, 90, (1,), **all_to_all), rank=rank, world_size=4)
        trace = with_texts(trace, "comm_in_split", {1: json.dumps(sent[rank])})
        traces[rank] = with_texts(trace, "comm_out_split", {1: json.dumps([of[rank] for of in sent])})
    name = write_set(tmp_path / "set", traces, {"1": [0, 1, 2, 3]})
    assert main(["validate", name]) == 0
    Path(f"{name}.3.et").unlink()
    words = ["astra", name, "--fill", "--mesh", "dp4", "-o", str(tmp_path / "bundle")]
    assert main([*words, "--topology", "4 ranks, 10 Gbit/s, 5 us"]) == 0


def replica(rank: int, ranks: int, micros: np.ndarray) -> ExecutionTrace:
    """A step for each of ``micros``: an operator, a kernel that lasts so long, a reduction."""
    nodes: list[dict] = []
    for at, lasting in enumerate(micros.tolist()):
        first, begin = 4 * at + 1, 20_000 * at
        nodes += [
            cpu(first, 20, (first - 1,) if at else (), name=f"ProfilerStep#{at}", start=begin),
            cpu(first + 1, 100, (first,), start=begin + 20),
            kernel(first + 2, round(lasting), (first + 1,), is_cpu_op=0, start=begin + 120),
            collective(first + 3, 90, (first + 2,), start=begin + 15_000, comm_size=1 << 20, is_cpu_op=0),
        ]
    return make_trace(*nodes, rank=rank, world_size=ranks)


def spread(name: Path) -> float:
    """How much the work of a step varies between ranks."""
    files = sorted(name.parent.glob(f"{name.name}.*.et"))
    busy = np.array([compute_micros(et_file.read(path)).sum(axis=1) for path in files])
    return float((busy / busy.mean(axis=0)).std(ddof=1))


@settings(max_examples=5, deadline=None)
@given(sigma=st.floats(0.02, 0.25), seed=st.integers(0, 1 << 16), missing=st.integers(0, 4))
def test_sets_that_are_filled_and_scaled_again_keep_their_spread(
    sigma: float, seed: int, missing: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A filled set that was scaled varied several times as much as what was captured."""
    generator, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("copies")
    work = 5000 * np.exp(generator.normal(0, sigma, (8, STEPS)))
    traces = {rank: replica(rank, 8, work[rank]) for rank in range(8 - missing)}
    write_set(folder, traces, {"1": list(range(8))})
    captured = spread(folder / "run")
    made = []
    for before, after, dp in (("run", "once", 32), ("once", "twice", 64)):
        words = ["scale", str(folder / before), "--fill", "--mesh", f"dp{8 if before == 'run' else 32}"]
        assert main([*words, "--dp", str(dp), "--variants", "32", "-o", str(folder / after)]) == 0
        made.append(spread(folder / after))
        for rank in range(20, 32):
            (folder / f"once.{rank}.et").unlink(missing_ok=True)
    shutil.rmtree(folder)
    assert made == pytest.approx([captured] * 2, rel=0.3)
