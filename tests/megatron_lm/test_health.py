"""Runs of the real training that go wrong without an exception: what is not finite, where it can't save, data
and checkpoints that do not fit. Each failure is made by the test.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_lm.logs import records
from tests.megatron_lm.training_runs import layout, train

pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra megatron)")
FAULTY = Path(__file__).with_name("faulty_training.py")
NOT_FINITE = re.compile(r" iteration +(\d+)/ +\d+ not finite: loss (\S+), grad norm (\S+), first in (.*)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "loss"),
    [("nan outputs", 1, "nan"), ("nan outputs", 3, "nan"), ("nan gradients", 2, "8.")],
)
def test_the_rank_where_a_number_is_first_not_finite_is_named(
    monkeypatch: pytest.MonkeyPatch, fault: str, rank: int, loss: str
) -> None:
    """Two stages of two data-parallel ranks: the fault reaches all of them in the same iteration."""
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULT_RANK", str(rank))
    done = train(FAULTY, **layout("1-3", data=2), TRAIN_ITERS="9", STOP_ON_NAN="4", LR="1e-5")
    assert done.returncode != 0
    (found,) = NOT_FINITE.findall(done.stdout)
    where = f"the {fault.removeprefix('nan ')} of rank {rank}"
    assert found[0] == "2" and found[1].startswith(loss) and found[2:] == ("nan", where)
    why = f"not finite since iteration 2, first in {where}, 4 times in a row (STOP_ON_NAN)"
    assert f"ERROR rank {rank}: loss or gradients are {why}" in done.stderr
    assert [line.number for line in records.iterations(done.stdout.encode())] == [1, 2, 3, 4]


def test_a_step_that_fp16_skips_is_told_from_a_loss_that_is_not_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its gradients overflowed, and the loss scale is lowered: nothing is wrong with the weights."""
    from megatron_lm.engine import training
    from megatron_lm.engine.optimizer import Stepped
    from megatron_lm.errors import RunError
    from megatron_lm.settings import Settings

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(training.Health, "_origin", lambda self: (0, "the outputs of rank 0"))
    monkeypatch.setattr(training.dist, "get_rank", lambda: 0)
    chunk = SimpleNamespace(config=SimpleNamespace(finalize_model_grads_func=None))
    watched = training.Health(Settings(stop_on_nan=3), [chunk])
    assert [watched.after(n, 8.0, Stepped(False, None)) for n in range(1, 6)] == [""] * 5
    assert watched.in_a_row == 0
    assert watched.after(6, math.nan, Stepped(False, None)).startswith("not finite: loss nan")
    assert watched.after(7, 8.0, Stepped(True, 1.5)) == "" and watched.in_a_row == 0
    said = [watched.after(n, 8.0, Stepped(True, math.inf)) for n in (8, 9)]
    assert said == ["not finite: loss 8, grad norm inf, first in the outputs of rank 0", ""]
    with pytest.raises(RunError, match="since iteration 8, first in the outputs of rank 0, 3 times in a row"):
        watched.after(10, math.nan, Stepped(True, math.nan))


@pytest.mark.slow
def test_no_checkpoint_is_written_while_weights_are_not_finite(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAULT", "nan outputs")
    settings = layout() | {
        "SAVE": str(tmp_path),
        "SAVE_INTERVAL": "1",
        "TRAIN_ITERS": "4",
        "STOP_ON_NAN": "0",
    }
    done = train(FAULTY, **settings)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"]


@pytest.mark.slow
def test_a_folder_that_can_not_be_written_to_is_refused_before_training() -> None:
    done = train(**layout(), SAVE="/proc/nope")
    assert done.returncode != 0 and records.iterations(done.stdout.encode()) == []
    why = "SAVE=/proc/nope: can't be written to (No such file or directory): set SAVE to a folder that all"
    assert f"ERROR rank 0: {why}" in done.stderr


@pytest.mark.slow
def test_a_vocabulary_that_is_too_small_for_the_data_is_refused_before_training(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=np.uint16)
    tokens = np.arange(3_000) % 300
    tokens[1_234] = 2_950  # the padded embedding has a row for it
    builder.add_document(tokens, [len(tokens)])
    builder.finalize(str(tmp_path / "d.idx"))
    done = train(**layout(), DATA_PATH=str(tmp_path / "d"))
    assert done.returncode != 0 and records.iterations(done.stdout.encode()) == []
    why = "has token 2950, and VOCAB_SIZE is 2920: set VOCAB_SIZE to at least 2951"
    assert f"DATA_PATH={tmp_path / 'd'}: {why}" in done.stderr
