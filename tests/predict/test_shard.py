"""DDP as FSDP2, and more layers: what is made of a run, and what two real gloo ranks do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.convert.inputs import load_run
from chakra_et.errors import TraceError
from chakra_et.et.columns import CollectiveType, ExecutionTrace, NodeType
from chakra_et.et.node_attributes import in_phase
from chakra_et.predict.predict import predict
from chakra_et.simulate.run import Run
from chakra_et.transform.changes import Rebuild
from chakra_et.transform.ddp import ReadyGradient, find_backward
from chakra_et.transform.fsdp import Nodes, Shard, ShardedStep, Unit
from chakra_et.transform.network import find_communication
from chakra_et.transform.scale import Scaling
from tests.predict.test_ddp import ddp, on_device, sharded

WORKER = "tests/predict/shard_worker.py"


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """The converted runs of the worker."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("shard")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(repo_root / WORKER), str(folder)],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert main(["convert", str(folder)]) == 0
    return folder


def collectives(trace: ExecutionTrace) -> list[tuple[str, int]]:
    """Types and bytes in the order of the calls."""
    rows = np.flatnonzero(trace.types == NodeType.COMM_COLL)
    rows = rows[np.argsort(trace.column("comm_sequence", -1)[rows], kind="stable")]
    kinds, sizes = trace.column("comm_type")[rows].tolist(), trace.column("comm_size")[rows].tolist()
    return [(CollectiveType(kind).name, size) for kind, size in zip(kinds, sizes, strict=True)]


@pytest.mark.parametrize(
    ("source", "target", "changes"),
    [
        ("ddp", "fsdp2", [Shard()]),
        ("bare", "barefsdp2", [Shard()]),  # nothing in front of the first block needs a gradient
        ("ddp", "deep", [Scaling(layers="2x", spread=0.0)]),
        ("deep", "ddp", [Scaling(layers="4", spread=0.0)]),
        ("ddp", "deepfsdp2", [Scaling(layers="2x", spread=0.0), Shard()]),
    ],
)
def test_collectives_are_those_of_a_real_run(
    captured: Path, source: str, target: str, changes: list[Rebuild]
) -> None:
    changed = predict(load_run(str(captured / source)), changes).changed
    real = load_run(str(captured / target))
    for made, truth in zip(changed.graph.traces, real.graph.traces, strict=True):
        assert collectives(made) == collectives(truth)
        assert len(collectives(truth)) > 4
    if target in ("deep", "ddp"):
        steps = [find_backward(run.graph.traces[0], 0, "") for run in (changed, real)]
        sizes = [[gradient.size for step in each for gradient in step.gradients] for each in steps]
        assert sizes[0] == sizes[1]


def test_all_reduces_that_the_host_trace_lacks(captured: Path, tmp_path: Path) -> None:
    """Found on a busy machine: without their bytes nothing that changes DDP was predicted."""
    for path in captured.glob("ddp_*.json"):
        text = json.loads(path.read_text())
        if path.name.endswith("host.json"):
            rows = [at for at, each in enumerate(text["nodes"]) if each["name"] == "gloo:all_reduce"]
            for row in (rows[-1], rows[0]):
                del text["nodes"][row]
        (tmp_path / path.name).write_text(json.dumps(text))
    assert main(["convert", str(tmp_path)]) == 0
    lost, whole = load_run(str(tmp_path / "ddp")), load_run(str(captured / "ddp"))
    for made, truth in zip(lost.graph.traces, whole.graph.traces, strict=True):
        assert collectives(made) == collectives(truth)
        found, wanted = find_backward(made, 0, ""), find_backward(truth, 0, "")
        assert [len(step.buckets) for step in found] == [len(step.buckets) for step in wanted]
    predict(lost, [Scaling(layers="2x", spread=0.0)])


def test_the_optimizer_works_on_its_piece_and_nothing_of_ddp_is_left(captured: Path) -> None:
    run = load_run(str(captured / "ddp"))
    prediction = predict(run, [Shard()])
    assert "9 all-gathers and 5 reduce-scatters per step" in prediction.notes[-3]
    assert prediction.ranks[0].uncertainty_ns > 0
    for rank, trace in enumerate(prediction.changed.graph.traces):
        names = {trace.names[row] for row in range(len(trace))}
        assert not [name for name in names if "reducer" in name]
        assert {"fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat"} <= names
        assert trace.inputs is not None
        of_optimizer = in_phase(trace, b"optimizer")
        found = {
            shapes
            for row, shapes in zip(trace.inputs.rows.tolist(), trace.inputs.shapes, strict=True)
            if of_optimizer[row] and trace.names[row] == "aten::mul_"
        }
        # 301 rows are cut into 151 and 150.
        assert f"[[{151 - rank},255],[]]".encode() in found
    before, after = (
        float(trace.duration_micros[in_phase(trace, b"optimizer")].sum())
        for trace in (run.graph.traces[0], prediction.changed.graph.traces[0])
    )
    assert after < before


def test_a_predicted_run_is_written_and_read(captured: Path, tmp_path: Path) -> None:
    prefix = str(tmp_path / "predicted")
    words = ["--layers", "2x", "--shard", "fsdp2", "--output", prefix]
    assert main(["predict", str(captured / "ddp"), *words]) == 0
    assert main(["validate", prefix]) == 0
    assert main(["replay", prefix, "--semantics", "device", "--max-error", "0.01"]) == 0


def test_gloo_s_reduce_scatter_is_timed_as_its_all_reduce(captured: Path) -> None:
    kinds = {each.kind for each in find_communication(load_run(str(captured / "fsdp2")))}
    assert kinds == {CollectiveType.ALL_GATHER, CollectiveType.ALL_REDUCE}


def unit(block: int, rows: tuple[int, int, int], shape: tuple[int, ...]) -> Unit:
    gradient = ReadyGradient([1], 4 * int(np.prod(shape)), "float", shape, -1)
    return Unit(block, [gradient], *rows)


def nodes(measured: bool = False, call: float = 0.0) -> Nodes:
    """A byte is copied in 1 µs, and a launch takes 7; an all-gather takes 1,000 µs and an all-reduce 2,000.
    ``measured``: by collectives of measure-network. ``call``: what a call takes."""
    rate = SimpleNamespace(micros=lambda size, calls: float(size))
    taken = {CollectiveType.ALL_GATHER: 1000.0, CollectiveType.ALL_REDUCE: 2000.0}
    model = SimpleNamespace(was_measured=lambda kind, ranks: measured)
    times = SimpleNamespace(micros=lambda kind, size, ranks: taken[kind], model=model)
    return Nodes(cast(Any, rate), call, 7.0, cast(Any, times), 2, 5, 3)


def test_the_work_of_a_step() -> None:
    # Three rows of one float are two per rank: pieces of 8 bytes.
    one, two = unit(0, (10, 40, 50), (3, 1)), unit(1, (20, 30, 40), (3, 1))
    made = nodes().step(ShardedStep(None, [one, two], late=False))
    found = [(node.name, node.after, node.micros) for node in made]
    gather, out = ("fsdp::all_gather_copy_in", 16.0), ("fsdp::split_with_sizes_copy", 32.0)
    # gloo copies both pieces; it reduces a copy of the whole, divides it, and keeps a piece.
    collective, reduce = ("gloo:all_gather", 1032.0), ("gloo:all_reduce", 2032.0)
    assert [(name, micros) for name, after, micros in found if after == 9] == [
        gather, ("c10d::_allgather_base_", 7.0), collective, out,
    ]  # fmt: skip
    # The second block's backward pass: it fetches itself and the first block, then reduces.
    assert [(name, micros) for name, after, micros in found if after == 29] == [
        gather, ("c10d::_allgather_base_", 7.0), collective, out,
        gather, ("c10d::_allgather_base_", 7.0), collective, ("FSDP::backward_prefetch", 0.0),
    ]  # fmt: skip
    assert [(name, micros) for name, after, micros in found if after == 39] == [
        ("fsdp::chunk_cat", 32.0), ("c10d::_reduce_scatter_base_", 39.0), reduce,
        ("FSDP::post_backward_reduce", 16.0), out,
    ]  # fmt: skip
    assert [node.collective for node in made if node.name == "gloo:all_reduce"] == [16, 16]
    # 85 calls for a copy into a buffer, and 13 for its parameter; one for a copy out of it.
    slow = nodes(call=1000.0).step(ShardedStep(None, [one, two], late=False))
    more = {node.name: node.micros - of.micros for node, of in zip(slow, made, strict=True)}
    assert {name: micros for name, micros in more.items() if micros} == {
        "fsdp::all_gather_copy_in": 98_000, "fsdp::chunk_cat": 98_000, "fsdp::split_with_sizes_copy": 1000,
        "FSDP::post_backward_reduce": 1000, "FSDP::backward_prefetch": 1000,
    }  # fmt: skip
    # A measured all-gather has gloo's copies in it.
    again = nodes(measured=True).step(ShardedStep(None, [one, two], late=False))
    assert {node.micros for node in again if node.name == "gloo:all_gather"} == {1000}


def test_a_piece_has_the_rows_of_one_rank() -> None:
    """Of 3 rows of 5 floats, 2; of two ranks' 4 rows, 2; a vector has rows of one."""
    assert [unit(0, (1, 2, 3), shape).shard_bytes(2) for shape in ((3, 5), (4, 5), (7,))] == [40, 40, 16]


def test_the_root_is_reduced_before_a_first_block_whose_input_needs_no_gradient() -> None:
    root = unit(-1, (5, 25, 60), (8,))
    blocks = [unit(0, (10, 40, 60), (2,)), unit(1, (20, 30, 40), (4,))]
    made = nodes().step(ShardedStep(root, blocks, late=True))
    assert [node.collective for node in made if node.kind == CollectiveType.REDUCE_SCATTER] == [16, 32, 8]
    assert [node.collective for node in made if node.kind == CollectiveType.ALL_GATHER] == [16, 4, 8, 8, 4]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (ddp([1, 1], [[0, 1]]), "no repeated blocks were recognised"),
        (ddp([1, 1], []), "have no all-reduce of gradients"),
        (sharded(), "no attribute lane, from which operators are told"),
        (on_device(), "ran on a GPU"),
    ],
)
def test_what_is_not_ddp_on_cpus_is_refused(run: Run, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Shard().rebuild(run)


def test_what_fsdp2_made_is_refused(captured: Path) -> None:
    with pytest.raises(TraceError, match="aren't DDP's all-reduces of gradients, gloo:all_gather for one"):
        Shard().rebuild(load_run(str(captured / "fsdp2")))


def test_more_ranks_have_smaller_pieces(captured: Path) -> None:
    four = predict(load_run(str(captured / "ddp")), [Scaling(dp=4, spread=0.0), Shard()]).changed
    assert four.graph.ranks == [0, 1, 2, 3]
    gathered = {size for kind, size in collectives(four.graph.traces[0]) if kind == "ALL_GATHER"}
    # Of a block's 255 + 255 + 301 · 255 + 301 + 255 · 301 + 255 elements, each padded to four pieces.
    assert 4 * (64 + 64 + 76 * 255 + 76 + 64 * 301 + 64) in gathered
