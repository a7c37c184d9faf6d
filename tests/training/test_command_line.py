"""The flags of both train.py: names and defaults are frozen, bad values are rejected."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bert.config import BertTrainConfig
from chakra_et import cli
from gpt2.config import GPT2TrainConfig
from utils.training.config import TrainConfig, parse_config

# Scripts and papers depend on these: a change here is a change for every user.
FROZEN = {
    "batch_size": 4,
    "bf16": False,
    "compile": False,
    "convert": True,
    "dataset": "squad",
    "dist_timeout": 600.0,
    "dropout": None,
    "enable_tracing": False,
    "eval_steps": 1000,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "learning_rate": 3e-4,
    "logging_steps": 10,
    "max_grad_norm": 1.0,
    "max_seq_length": None,
    "max_steps": None,
    "model_name": "gpt2",
    "num_epochs": 3,
    "num_gpus": None,
    "num_workers": 2,
    "padding": "longest",
    "report_to": "none",
    "require_dataset": False,
    "resume_from_checkpoint": None,
    "save_dir": "checkpoints/gpt2",
    "save_steps": 1000,
    "seed": 42,
    "skip_eval": False,
    "tokenizer": None,
    "trace_active_steps": 3,
    "trace_gzip": False,
    "trace_memory": False,
    "trace_name": None,
    "trace_output_dir": "outputs",
    "trace_wait_steps": 2,
    "trace_warmup_steps": 1,
    "warmup_steps": 100,
    "weight_decay": 0.01,
}
BERT_DIFFERS = {"learning_rate": 1e-4, "model_name": "bert-base-uncased", "save_dir": "checkpoints/bert"}


@pytest.mark.parametrize(
    ("config_class", "expected"), [(GPT2TrainConfig, FROZEN), (BertTrainConfig, {**FROZEN, **BERT_DIFFERS})]
)
def test_flags_and_defaults_are_frozen(config_class: type[TrainConfig], expected: dict) -> None:
    assert dataclasses.asdict(cli.parse(config_class, [])) == expected


@pytest.mark.parametrize("name", FROZEN)
def test_help_lists_every_flag_with_dashes_only(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(GPT2TrainConfig, ["--help"])
    text = capsys.readouterr().out
    assert "--" + name.replace("_", "-") in text
    assert "_" not in name or "--" + name not in text
    assert all(field.metadata["help"] for field in dataclasses.fields(GPT2TrainConfig))


def test_underscores_and_dashes_mean_the_same() -> None:
    values = ["8", "2", "7"]
    dashed = ["--batch-size", "--gradient-accumulation-steps", "--max-steps"]
    plain = [flag[:2] + flag[2:].replace("-", "_") for flag in dashed]
    first, second = (
        cli.parse(GPT2TrainConfig, [word for pair in zip(flags, values, strict=True) for word in pair])
        for flags in (dashed, plain)
    )
    assert first == second
    assert (first.batch_size, first.gradient_accumulation_steps, first.max_steps) == (8, 2, 7)


@pytest.mark.parametrize(
    "flags",
    [
        "--model-name gpt5",
        "--batch-size 0",
        "--batch-size -1",
        "--batch-size two",
        "--gradient-accumulation-steps 0",
        "--learning-rate 0",
        "--learning-rate -1",
        "--learning-rate nan",
        "--learning-rate inf",
        "--weight-decay -0.1",
        "--weight-decay nan",
        "--warmup-steps -1",
        "--max-grad-norm -1",
        "--num-epochs 0",
        "--max-steps -1",
        "--num-gpus 0",
        "--num-gpus 3",
        "--padding none",
        "--seed -1",
        "--seed 18446744073709551616",
        "--logging-steps 0",
        "--eval-steps -1",
        "--save-steps -1",
        "--report-to mail",
        "--dist-timeout 0",
        "--dropout 1",
        "--dropout -0.1",
        "--max-seq-length 1025",
        "--max-seq-length 0",
        "--num-workers -1",
        "--trace-active-steps 0",
        "--trace-wait-steps -1",
        "--trace-warmup-steps -1",
        "--max-steps 5 --enable-tracing",
        "--trace-name ../x",
    ],
)
def test_a_value_that_makes_no_sense_is_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_words(GPT2TrainConfig, flags)
    assert end.value.code == 2
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error:" in sentence
    if flags != "--trace-name ../x":
        assert flags.split()[0] in sentence


def parse_words(config_class: type[TrainConfig], flags: str) -> TrainConfig:
    return cli.parse(config_class, flags.split())


def test_bert_takes_half_of_gpt2s_context() -> None:
    assert parse_words(BertTrainConfig, "--max-seq-length 512").max_seq_length == 512
    with pytest.raises(SystemExit):
        parse_words(BertTrainConfig, "--max-seq-length 513")
    assert parse_words(GPT2TrainConfig, "--max-seq-length 1024").max_seq_length == 1024


def test_a_bad_flag_is_answered_with_one_line(repo_root: Path) -> None:
    """And before PyTorch is imported, which takes seconds."""
    command = [sys.executable, "-X", "importtime", str(repo_root / "bert" / "train.py"), "--batch-size", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert lines == ["bert/train.py: error: --batch-size is 0: give at least 1 (see bert/train.py --help)"]
    assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_an_unknown_model_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_words(BertTrainConfig, "--model-name bert")
    # Later Pythons list choices without quotes.
    assert "bert-base-uncased, bert-large-uncased, tiny" in capsys.readouterr().err.replace("'", "")


def test_num_gpus_must_agree_with_the_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_words(GPT2TrainConfig, "--num-gpus 4")
    assert "torchrun --nproc_per_node 4 gpt2/train.py" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert parse_words(GPT2TrainConfig, "--num-gpus 2").num_gpus == 2
    with pytest.raises(SystemExit):
        parse_words(GPT2TrainConfig, "--num-gpus 4")
    assert "--num-gpus 4 needs as many processes, not 2" in capsys.readouterr().err


def test_only_rank_0_tells_of_a_bad_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--batch-size", "0"])
    for rank, told in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            parse_config(GPT2TrainConfig, "Train.\n\nMore.")
        assert end.value.code == 2
        assert bool(capsys.readouterr().err) == told


def test_the_configuration_is_saved_as_json(tmp_path: Path) -> None:
    config = parse_words(GPT2TrainConfig, f"--max-steps 3 --trace-name Ä --save-dir {tmp_path}/new")
    config.save("--save-dir", Path(config.save_dir, "c.json"))
    assert json.loads((tmp_path / "new" / "c.json").read_text()) == dataclasses.asdict(config)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["c.json"]
    config.trace_output_dir = str(tmp_path / "new" / "c.json")
    with pytest.raises(
        OSError, match="--trace-output-dir .* can't be written: (Not a directory|File exists)"
    ):
        config.save("--trace-output-dir", Path(config.trace_output_dir, "c.json"))
