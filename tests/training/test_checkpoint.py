"""Checkpoint folders: loadable, whole or not there at all, and cleaned up after."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest
import torch
from transformers import BertForMaskedLM, GPT2LMHeadModel, PreTrainedTokenizerFast

from bert.config import PRESETS as BERT_PRESETS
from bert.model import BERT
from chakra_et.files import HOST
from gpt2.config import PRESETS as GPT2_PRESETS
from gpt2.model import GPT2
from tests.training.jobs import REPO_ROOT
from utils.training import checkpoint
from utils.training.checkpoint import (
    CheckpointError,
    atomic_folder,
    clean_up,
    find_checkpoint,
    save_checkpoint,
)
from utils.training.step import build_optimizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    file = REPO_ROOT / "data" / "tokenizers" / "gpt2" / "tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=str(file))


@pytest.mark.parametrize(
    ("family", "presets", "loader"),
    [(GPT2, GPT2_PRESETS, GPT2LMHeadModel), (BERT, BERT_PRESETS, BertForMaskedLM)],
)
def test_a_saved_model_loads_with_transformers(family, presets, loader, tokenizer, tmp_path) -> None:
    model = family.build(presets["tiny"], None, 0.3)
    save_checkpoint(tmp_path / "best_model", model, tokenizer)
    assert (tmp_path / "best_model" / "model.safetensors").is_file()
    loaded = loader.from_pretrained(tmp_path / "best_model")
    rebuilt = family.build(presets["tiny"], str(tmp_path / "best_model"), None)
    for other in (loaded, rebuilt):
        assert other.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(other.state_dict()[name], value) for name, value in model.state_dict().items())
    assert getattr(rebuilt.config, family.dropouts[0]) == 0.3
    PreTrainedTokenizerFast.from_pretrained(tmp_path / "best_model")


def test_files_are_as_readable_as_their_folder(tokenizer, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", GPT2.build(GPT2_PRESETS["tiny"], None, None), tokenizer)
    mode = (tmp_path / "c").stat().st_mode & 0o666
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "c").iterdir()} == {mode}


def test_weights_of_another_family_or_damaged_are_refused(tokenizer, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "gpt2", GPT2.build(GPT2_PRESETS["tiny"], None, None), tokenizer)
    with pytest.raises(ValueError, match="gpt2 model, not bert"):
        BERT.build(BERT_PRESETS["tiny"], str(tmp_path / "gpt2"), None)
    with pytest.raises(ValueError, match="can't be loaded"):
        GPT2.build(GPT2_PRESETS["tiny"], str(tmp_path / "nowhere"), None)
    with (tmp_path / "gpt2" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ValueError, match="can't be loaded"):
        GPT2.build(GPT2_PRESETS["tiny"], str(tmp_path / "gpt2"), None)


def write(folder: Path, text: str) -> None:
    (folder / "a").write_text(text)
    (folder / "b").write_text(text)


def content(folder: Path) -> set[str]:
    return {(folder / name).read_text() for name in ("a", "b")}


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "best_model"
    for text in ("old", "new"):
        with atomic_folder(target) as temporary:
            write(temporary, text)
            assert not target.exists() or content(target) == {"old"}
        assert content(target) == {text}
    assert [path.name for path in tmp_path.iterdir()] == ["best_model"]


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(1)])
def test_a_failed_save_leaves_the_old_folder(error: BaseException, tmp_path: Path) -> None:
    target = tmp_path / "best_model"
    with atomic_folder(target) as temporary:
        write(temporary, "old")
    expected = CheckpointError if isinstance(error, ValueError) else type(error)
    with pytest.raises(expected), atomic_folder(target) as temporary:
        write(temporary, "new")
        raise error
    assert content(target) == {"old"}
    assert [path.name for path in tmp_path.iterdir()] == ["best_model"]


def save_for_ever(target: Path) -> None:
    number = 0
    while True:
        number += 1
        with atomic_folder(target) as temporary:
            write(temporary, f"{number}\n" * 5000)


def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    target = tmp_path / "best_model"
    moments = random.Random(1)
    for _ in range(20):
        saver = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(target,))
        saver.start()
        while not target.exists():
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.1))
        saver.kill()
        saver.join()
        clean_up(tmp_path)  # of a process that died between two renames, it brings the old folder back
        texts = content(target)
        assert len(texts) == 1
        assert len(set(texts.pop().split())) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["best_model"]


def save_slowly(target: Path) -> None:
    with atomic_folder(target):
        time.sleep(60)


def test_clean_up_spares_saves_under_way(tmp_path: Path) -> None:
    other = multiprocessing.get_context("fork").Process(target=save_slowly, args=(tmp_path / "step-1",))
    other.start()
    try:
        while not (under_way := list(tmp_path.iterdir())):
            time.sleep(0.01)
        elsewhere = tmp_path / ".step-2.0123456789abcdef.tmp"
        own = tmp_path / f".step-3.{HOST}89abcdef.tmp"
        old = tmp_path / ".step-4.0123456789abcdef.tmp"
        for folder in (elsewhere, own, old):
            folder.mkdir()
        os.utime(old, (0, 0))
        assert set(clean_up(tmp_path)) == {own, old}
        other.kill()
        other.join()
        assert clean_up(tmp_path) == under_way
        assert list(tmp_path.iterdir()) == [elsewhere]
    finally:
        other.kill()
        other.join()


def test_clean_up_puts_back_a_folder_that_was_moved_aside(tmp_path: Path) -> None:
    for name in (".best_model.old", ".step-1.old", "step-1"):
        (tmp_path / name).mkdir()
    clean_up(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best_model", "step-1"]


def test_a_full_disk_is_told_in_one_sentence(small_disk, tokenizer) -> None:
    model = GPT2.build(GPT2_PRESETS["tiny"], None, None)  # 7 MB, and 13 MB of moments
    optimizer = build_optimizer(model, 1e-3, 0.0)
    model(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    disk = small_disk(16)
    target = disk / "step-1"
    save_checkpoint(target, model, tokenizer)
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(target, model, tokenizer, optimizer, {"step": 1})
    assert str(error.value).startswith(f"can't save {target}: the disk is full")
    assert "\n" not in str(error.value)
    assert (target / "model.safetensors").read_bytes() == before
    assert [path.name for path in disk.iterdir()] == ["step-1"]


def test_a_folder_that_can_not_be_written_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match="can't save .*file/step-1.*older checkpoints are untouched"),
        atomic_folder(tmp_path / "file" / "step-1"),
    ):
        pass


def state_of(step: int) -> dict[str, object]:
    return {"step": step, "best_loss": None, "model_name": "tiny", "order": {}}


def test_finding_the_checkpoint_to_resume_from(tokenizer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="latest: there is no checkpoint in"):
        find_checkpoint("latest", tmp_path)
    model = GPT2.build(GPT2_PRESETS["tiny"], None, None)
    optimizer = build_optimizer(model, 1e-3, 0.0)
    for step in (20, 3):
        folder = tmp_path / f"step-{step}"
        save_checkpoint(folder, model, tokenizer, optimizer, state_of(step))
    save_checkpoint(tmp_path / "best_model", model, tokenizer)
    # The newest, not the one with the most steps, which may be left from a longer run before.
    assert find_checkpoint("latest", tmp_path).name == "step-3"
    assert find_checkpoint(str(tmp_path / "step-20"), tmp_path).name == "step-20"
    with pytest.raises(CheckpointError, match="best_model has weights only"):
        find_checkpoint(str(tmp_path / "best_model"), tmp_path)
    with pytest.raises(CheckpointError, match="nowhere is not a checkpoint"):
        find_checkpoint(str(tmp_path / "nowhere"), tmp_path)
    (tmp_path / "step-3" / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="trainer_state.json lacks best_loss, model_name"):
        find_checkpoint("latest", tmp_path)


@pytest.mark.parametrize("damaged", ["optimizer.pt", "trainer_state.json"])
def test_a_damaged_checkpoint_is_told_in_one_sentence(damaged: str, tokenizer, tmp_path: Path) -> None:
    model = GPT2.build(GPT2_PRESETS["tiny"], None, None)
    optimizer = build_optimizer(model, 1e-3, 0.0)
    folder = tmp_path / "step-1"
    save_checkpoint(folder, model, tokenizer, optimizer, state_of(1))
    with (folder / damaged).open("r+b") as file:
        file.truncate(30)
    with pytest.raises(CheckpointError, match="step-1 can't be read .*: resume from another"):
        checkpoint.read_state(folder)
        checkpoint.load_optimizer(folder, optimizer, torch.device("cpu"))
