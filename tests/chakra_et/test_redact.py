"""Tokens of a command line stood in the manifest and in the data of reports, which exports upload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chakra_et.capture import manifest
from chakra_et.cli import run
from chakra_et.errors import TraceError
from chakra_et.redact import GONE, redacted

SECRETS = (
    ["train.py", "--hf-token", "X1y2z3", "--password=X1y2z3", "--lr", "0.1"],
    {
        "HF_TOKEN": "X1y2z3",
        "WANDB_API_KEY": "X1y2z3",
        "AWS_SECRET_ACCESS_KEY": "X1y2z3",
        "nested": {"secret": "X1y2z3"},
    },
    "https://me:X1y2z3@hub.example.org/models: can't be reached",
    "python train.py --hf-token X1y2z3 --steps 4",
    '{"env": {"GITHUB_TOKEN": "X1y2z3", "HOME": "/root"}}',
    "hf_X1y2z3" + "a" * 30,
    "ghp_X1y2z3" + "a" * 30,
)
HARMLESS = (
    ["--max-tokens", "5", "--tokenizer", "gpt2", "--eos_token", "x"],
    {"pad_token": "<pad>", "tokens": 4096, "author": "me", "max_new_tokens": 7, "key": "value"},
    "http://hub.example.org:8080/a@b",
    "error: unexpected token in line 3",
)


@pytest.mark.parametrize("value", SECRETS, ids=str)
def test_secrets_are_left_out(value: object) -> None:
    text = json.dumps(redacted(value))
    assert "X1y2z3" not in text and GONE in text


@pytest.mark.parametrize("value", HARMLESS, ids=str)
def test_what_is_none_stays(value: object) -> None:
    assert redacted(value) == value


def test_the_manifest_has_none_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    manifest.write_json(tmp_path / "m.json", {"run": {"command": SECRETS[0]}, "reason": SECRETS[2]})
    text = (tmp_path / "m.json").read_text()
    assert "X1y2z3" not in text and json.loads(text)["run"]["command"][-2:] == ["--lr", "0.1"]


def test_an_error_message_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise TraceError(str(SECRETS[2]))

    assert run(fail, TraceError) == 2
    assert f"https://{GONE}@hub" in capsys.readouterr().err
