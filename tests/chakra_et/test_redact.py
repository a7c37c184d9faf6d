"""Tokens of a command line stood in the manifest and in the data of reports, which exports upload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chakra_et.capture import manifest
from chakra_et.cli import run
from chakra_et.errors import TraceError
from chakra_et.export import events as events_of
from chakra_et.redact import GONE, redacted, redacted_json

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
    ["train.py", "--api_key", "X1y2z3"],
    ["--wandb-key", "X1y2z3"],
    ["curl", "-H", "Authorization: Bearer X1y2z3"],
    "{'WANDB_API_KEY': 'X1y2z3', 'HOME': '/root'}",
    '{"Authorization": "Bearer X1y2z3"}',
    '{"password": "two words, X1y2z3"}',
    {"env": json.dumps({"password": 'a"X1y2z3'})},
    "HF_TOKEN=\"X1y2z3\" python train.py --password 'X1y2z3'",
    "aws_secret_access_key = X1y2z3",
    "https://host/blob?sig=X1y2z3&st=2026",
    "https://bucket.s3.amazonaws.com/a?X-Amz-Signature=X1y2z3",
    "https://me:p@X1y2z3@hub.example.org/models",
    "https://X1y2z3456@hub.example.org/models",
    "DefaultEndpointsProtocol=https;AccountKey=X1y2z3==;EndpointSuffix=core",
    {"hf_token": ["X1y2z3"]},
    {"credentials": {"user": "me", "key": "X1y2z3"}},
    {"SLURM_JWT": "X1y2z3"},
    {"env": [{"name": "HF_TOKEN", "value": "X1y2z3"}, {"name": "HOME", "value": "/root"}]},
    {"value": "X1y2z3", "name": "WANDB_API_KEY"},
    [{"key": "db.password", "type": "text", "value": 'a"X1y2z3'}],
    [{"name": "HF_TOKEN", "value": ["X1y2z3"]}],
    {"env": json.dumps([{"name": "HF_TOKEN", "value": "X1y2z3"}])},
    {"env": json.dumps([{"value": "X1y2z3", "name": "HF_TOKEN"}])},
    "env:\n  - name: HF_TOKEN\n    value: X1y2z3\n",
    "env:\n  - name: HF_TOKEN\n    value: '1 X1y2z3'\n",
    "[{'name': 'HF_TOKEN', 'value': 'X1y2z3'}]",
    [["HF_TOKEN", "X1y2z3"], ["HOME", "/root"]],
    ["HOME", "/root", "WANDB_API_KEY", "X1y2z3"],
    "[('HF_TOKEN', 'X1y2z3'), ('HOME', '/root')]",
)
HARMLESS = (
    [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"AddedToken": {"content": "<s>"}}],
    ["--max-tokens", "5", "--tokenizer", "gpt2", "--eos_token", "x"],
    {"pad_token": "<pad>", "tokens": 4096, "author": "me", "max_new_tokens": 7, "key": "value"},
    "http://hub.example.org:8080/a@b",
    "error: unexpected token in line 3",
    ["void f<SelectToken>(int)", "std::token::x", "nn.Module: embed_tokens", "tiktoken==0.9.0"],
    [{"name": "eos_token", "value": "<eos>"}, {"name": "token", "value": 4096}, {"name": "x", "value": "y"}],
    [
        {"name": "HOME", "value": "/x"},
        {"name": "use_auth", "value": True},
        {"name": "rf_id", "value": "token"},
    ],
    ["HF_TOKEN", "HOME", "WANDB_API_KEY"],
    {"names": ["token", "label", "password"], "values": ["a", "b"], "key": "token"},
    {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},
    "- name: user_token\n  enabled: true\n",
    {"PWD": "/x", "path": "ssh://git@host/x", "url": "https://me@x.org/?x=1"},
)


@pytest.mark.parametrize("value", SECRETS, ids=str)
def test_secrets_are_left_out(value: object) -> None:
    for text in (json.dumps(redacted(value)), redacted_json(json.dumps(value).encode()).decode()):
        assert "X1y2z3" not in text and GONE in text
        json.loads(text)


@pytest.mark.parametrize(
    "value", [{"HF_TOKEN": "X1Y2Z3"}, {"HF_TOKEN": ["X1Y2Z3"]}, ["--password", "X1Y2Z3"]]
)
def test_a_secret_may_look_like_a_name(value: object) -> None:
    for text in (json.dumps(redacted(value)), redacted_json(json.dumps(value).encode()).decode()):
        assert "X1Y2Z3" not in text and GONE in text


@pytest.mark.parametrize("value", HARMLESS, ids=str)
def test_what_is_none_stays(value: object) -> None:
    assert redacted(value) == value
    text = json.dumps(value).encode()
    assert redacted_json(text) is text


def test_the_manifest_has_none_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    manifest.write_json(tmp_path / "m.json", {"run": {"command": SECRETS[0]}, "reason": SECRETS[2]})
    text = (tmp_path / "m.json").read_text()
    assert "X1y2z3" not in text and json.loads(text)["run"]["command"][-2:] == ["--lr", "0.1"]


def test_a_trace_that_is_exported_has_none(tmp_path: Path) -> None:
    event = {"ph": "X", "name": "aten::add", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
    event["args"] = {"env": "HF_TOKEN=X1y2z3", "External id": 3}
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": [event]}))
    events: list[events_of.Event] = []
    events_of.recorded_events({0: tmp_path / "a.json"}, events.append)
    assert events[0]["args"] == {"env": f"HF_TOKEN={GONE}", "External id": 3}


def test_an_error_message_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise TraceError(str(SECRETS[2]))

    assert run(fail, TraceError) == 2
    assert f"https://{GONE}@hub" in capsys.readouterr().err
