"""Sets of other layers, batches and sequences, and replicas of one rank, against captures of the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from chakra_et.__main__ import main
from chakra_et.et import file as et_file
from chakra_et.et.columns import ExecutionTrace, NodeType
from chakra_et.job.blocks import find_blocks
from chakra_et.job.operators import operators_of
from chakra_et.transform.stages import one_f_one_b
from tests.astra.sets import write_set
from tests.simulate.replay_traces import cpu, make_trace
from tests.transform.test_same_answer import assert_same

pytest.importorskip("torch")
CASES = ("base:none:4:10:72", "deep:none:8:10:72", "wide:none:4:20:72", "long:none:4:10:144")
CASES += ("ddp:ddp:4:10:72", "frames:stack:4:10:72", "same:none:4:64:64")
REPO = Path(__file__).resolve().parents[2]
# What doesn't follow the model: the optimizer's lists hold another number of tensors.
OUTSIDE = ("_foreach", "_fused", "Optimizer", "ProfilerStep", "host-overhead")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captured")
    command = [sys.executable, "-m", "tests.transform.little_gpt", str(folder), *CASES]
    done = subprocess.run(
        command,
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert main(["convert", "--dir", str(folder)]) == 0
    return folder


def scaled(name: Path, target: Path, *flags: str) -> ExecutionTrace:
    assert main(["scale", str(name), "-o", str(target), *flags]) == 0
    assert main(["validate", str(target)]) == 0
    return et_file.read(f"{target}.0.et")


def model_operators(trace: ExecutionTrace) -> Counter[tuple[str, str]]:
    """(name, phase) of the operators of the passes, without what the optimizer does."""
    column = trace.attributes["phase"]
    phase = {int(row): str(column.values[at]) for at, row in enumerate(column.rows.tolist())}
    whole = np.flatnonzero(trace.column("segment") == 0).tolist()
    return Counter(
        (trace.names[row], phase[row])
        for row in whole
        if phase.get(row) in ("forward", "backward") and not trace.names[row].startswith(OUTSIDE)
    )


def assert_alike(ours: Counter[tuple[str, str]], real: Counter[tuple[str, str]]) -> None:
    """The residual addition before the first block looks like a block's last, and sums over the batch."""
    differ = (real - ours) + (ours - real)
    assert sum(differ.values()) <= 0.005 * sum(real.values()), differ.most_common(8)


def shapes(trace: ExecutionTrace) -> Counter[tuple[str, bytes]]:
    assert trace.inputs is not None
    pairs = zip(trace.inputs.rows.tolist(), trace.inputs.shapes, strict=True)
    return Counter((trace.names[row], text) for row, text in pairs if trace.names[row].startswith("aten::"))


@pytest.mark.parametrize("source", ["base", "frames"])
def test_twice_the_layers_run_the_operators_of_a_model_of_twice_the_layers(
    captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    trace = scaled(captured / source, tmp_path / "deep", "--layers", "2x")
    by = "modules" if source == "frames" else "repeated operators"
    assert f"4 repeated blocks were recognised by {by}; each of the 8 new ones" in capsys.readouterr().out
    assert_alike(model_operators(trace), model_operators(et_file.read(captured / "deep.0.et")))
    if source == "frames":
        column = trace.attributes["module"].values
        members = {path.split("/")[1] for path in map(bytes.decode, column.table) if "Block_" in path}
        assert members == {f"Block_{number}" for number in range(8)}


def test_half_of_the_layers_are_those_of_the_smaller_model(captured: Path, tmp_path: Path) -> None:
    trace = scaled(captured / "deep", tmp_path / "half", "--layers", "4")
    assert_alike(model_operators(trace), model_operators(et_file.read(captured / "base.0.et")))
    whole, some = (
        et_file.read(captured / "deep.0.et"),
        scaled(captured / "deep", tmp_path / "some", "--layers", "7"),
    )
    assert trace.duration_micros.sum() < some.duration_micros.sum() < whole.duration_micros.sum()


@pytest.mark.parametrize(
    ("name", "flags"), [("wide", ("--batch", "2x")), ("long", ("--seq", "144")), ("wide", ("--batch", "20"))]
)
def test_tensors_have_the_shapes_of_a_real_run(
    captured: Path, tmp_path: Path, name: str, flags: tuple[str, str]
) -> None:
    trace = scaled(captured / "base", tmp_path / name, *flags)
    real, ours = shapes(et_file.read(captured / f"{name}.0.et")), shapes(trace)
    differ = (real - ours) + (ours - real)
    # The table of places is cut to the sequence, and PyTorch may take other ways for other sizes.
    assert sum(differ.values()) <= 0.03 * sum(real.values()), differ.most_common(8)
    base = et_file.read(captured / "base.0.et").duration_micros.sum()
    assert 1.1 * base < trace.duration_micros.sum() < 4 * base


@pytest.mark.parametrize("source", ["base", "ddp"])
def test_one_rank_becomes_several_that_reduce_gradients(
    captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    network = ("--network", "10 Gbit/s, 30 us")
    trace = scaled(captured / source, tmp_path / "four", "--dp", "4", *network)
    said = capsys.readouterr().out
    assert "the time of a ring on this network: " in said and "{" not in said  # the notes have their figures
    wanted = (
        "had by itself are those"
        if source == "ddp"
        else "all-reduces were put in, assuming buckets of 25 MiB (the first of 1;"
    )
    assert wanted in said
    assert wanted in " ".join(json.loads((tmp_path / "four_conversion.json").read_text())["notes"])
    sizes = trace.column("comm_size")[trace.types == NodeType.COMM_COLL]
    gradients = 64 * (300 * 2 + 144 + 4 * (12 * 64 + 13) + 2)  # the little GPT's parameters
    assert sizes.sum() == 2 * 4 * gradients
    assert json.loads((tmp_path / "four_comm_groups.json").read_text()) == {"1": [0, 1, 2, 3]}
    assert main(["scale", str(captured / source), "--dp", "4", "-o", str(tmp_path / "no")]) == 2
    assert "give the --network" in capsys.readouterr().err


def test_layers_of_a_pipeline_go_to_their_stages(tmp_path: Path) -> None:
    assert main(["fetch-example", "megatron-pp2-dp2", "-o", str(tmp_path)]) == 0
    name = tmp_path / "megatron-pp2-dp2" / "megatron_tiny_4gpu"
    first = scaled(name, tmp_path / "eight", "--layers", "8")
    assert main(["replay", str(tmp_path / "eight"), "--semantics", "device"]) == 0
    captured, last = et_file.read(f"{name}.0.et"), et_file.read(tmp_path / "eight.3.et")
    # 3 and 1 layers become 6 and 2, of 49,984 parameters each; the last stage has the padding of its buffer.
    sizes = [trace.column("comm_size").max() for trace in (captured, first)]
    assert sizes[1] - sizes[0] == 3 * 49_984 * 4
    counts = [
        sum(trace.names[row] == "aten::gelu" for row in range(len(trace)))
        for trace in (captured, first, last)
    ]
    assert counts[1] == 2 * counts[0]
    assert counts[2] * 3 == counts[1]


@pytest.mark.slow
def test_stages_are_cut_between_blocks_and_run_one_f_one_b(tmp_path: Path) -> None:
    assert one_f_one_b(0, 2, 3) == [(False, 0), (False, 1), (True, 0), (False, 2), (True, 1), (True, 2)]
    assert one_f_one_b(1, 2, 2) == [(False, 0), (True, 0), (False, 1), (True, 1)]
    assert one_f_one_b(0, 4, 2) == [(False, 0), (False, 1), (True, 0), (True, 1)]
    assert main(["fetch-example", "megatron-pp2-dp2", "-o", str(tmp_path)]) == 0
    name = tmp_path / "megatron-pp2-dp2" / "megatron_tiny_4gpu"
    # Stages of 3 and 1 layers become ones of 6 and 2, and those become 3, 3, 1, 1.
    scaled(name, tmp_path / "four", "--layers", "8", "--pp", "4")
    assert main(["replay", str(tmp_path / "four"), "--semantics", "device"]) == 0
    ranks = [et_file.read(tmp_path / f"four.{rank}.et") for rank in range(8)]
    counts = [sum(trace.names[row] == "aten::gelu" for row in range(len(trace))) for trace in ranks]
    assert [count // counts[-1] for count in counts] == [3, 3, 3, 3, 1, 1, 1, 1]
    passes = int((et_file.read(f"{name}.0.et").types == NodeType.COMM_SEND).sum())
    sends = [int((trace.types == NodeType.COMM_SEND).sum()) for trace in ranks]
    assert sends == [passes] * 2 + [2 * passes] * 4 + [passes] * 2
    embedding = [trace.column("comm_size").tolist().count(753_664) for trace in ranks]
    assert embedding == [2, 2, 0, 0, 0, 0, 2, 2]
    gradients = [int(trace.column("comm_size").max()) for trace in ranks[2:6:2]]
    assert gradients[0] == pytest.approx(3 * gradients[1], rel=0.02)


def test_an_uneven_cut_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch-example", "megatron-pp2-dp2", "-o", str(tmp_path)]) == 0
    name = str(tmp_path / "megatron-pp2-dp2" / "megatron_tiny_4gpu")
    assert main(["scale", name, "--pp", "4", "-o", str(tmp_path / "new" / "x")]) == 2
    assert "the 3 repeated blocks of its stage can't be cut into 2 parts" in capsys.readouterr().err
    assert not list(tmp_path.glob("new/*"))


def test_what_follows_a_pass_is_no_part_of_its_last_block(tmp_path: Path) -> None:
    """The operator after the last block is a send, which has no autograd number."""
    assert main(["fetch-example", "megatron-pp2-dp2", "-o", str(tmp_path)]) == 0
    trace = et_file.read(tmp_path / "megatron-pp2-dp2" / "megatron_tiny_4gpu.0.et")
    blocks = find_blocks({0: operators_of(trace, "run")}, "run")[0]
    passes = len(blocks.is_backward)
    counts = np.zeros((passes, blocks.held), dtype=np.int64)
    np.add.at(counts, (blocks.group[blocks.block >= 0], blocks.block[blocks.block >= 0]), 1)
    assert counts.shape == (16, 3)
    for backward in (False, True):
        of_kind = counts[[flag == backward for flag in blocks.is_backward]]
        assert of_kind.max() - of_kind.min() <= 2
    outside = {trace.names[row] for row in np.flatnonzero(blocks.block < 0).tolist()}
    assert "EmbeddingBackward0" in outside


@pytest.mark.parametrize(
    ("source", "flags", "message"),
    [
        ("base", ("--layers", "0"), "give a number from 1 to"),
        ("base", ("--layers", "1.3x"), "or a factor that makes a whole one"),
        ("base", ("--batch", "half"), "--batch half: the captured one is 10"),
        ("same", ("--batch", "2x"), "batch and sequence are both 64"),
        ("base", (), "give what is to change"),
    ],
)
def test_sizes_that_can_not_be_made_are_refused(
    captured: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: str,
    flags: tuple[str, ...],
    message: str,
) -> None:
    try:
        status = main(["scale", str(captured / source), "-o", str(tmp_path / "new"), *flags])
    except SystemExit as error:
        status = int(str(error))
    assert status == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_recognised_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_trace(cpu(1, 10), rank=0, world_size=1)
    name = write_set(tmp_path / "set", {0: plain}, {})
    assert main(["scale", name, "--layers", "2x", "-o", str(tmp_path / "a")]) == 2
    assert "no attribute lane, from which operators are told" in capsys.readouterr().err
    more = {"lane": 0, "kind": "operator", "parent": -1, "phase": "forward"}
    bare = make_trace(*(cpu(at, 10, (at - 1,) if at > 1 else (), **more) for at in range(1, 4)), world_size=1)
    name = write_set(tmp_path / "other", {0: bare}, {})
    assert main(["scale", name, "--layers", "2x", "-o", str(tmp_path / "b")]) == 2
    assert "neither sibling modules of one class (attribute module) nor" in capsys.readouterr().err
    assert main(["scale", name, "--seq", "2x", "-o", str(tmp_path / "c")]) == 2
    assert "no aten::embedding looks up indices of two dimensions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("base", ["--batch", "2x"]),
        ("base", ["--seq", "144", "--layers", "2x"]),
        ("frames", ["--layers", "8"]),
    ],
)
def test_predict_says_what_the_scaled_set_takes(
    captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, flags: list[str]
) -> None:
    assert_same(capsys, captured / name, flags, tmp_path)
