"""Reaching the hub or not, without long waits, and the real libraries against a hub of our own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.utils.fake_hub import FakeHub
from utils.data import config as hub


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    hub._probe.cache_clear()
    for name in (*hub.OFFLINE_VARIABLES, "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", hub.OFFLINE_VARIABLES)
@pytest.mark.parametrize(("value", "offline"), [("1", True), ("true", True), ("YES", True), ("0", False)])
def test_offline_variables_need_no_probe(
    name: str, value: str, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(hub, "_probe", lambda *_: "probed")
    assert hub.hub_problem() == (f"{name} is set" if offline else "probed")


def test_a_closed_port_is_reported_at_once(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port}")
    start = time.monotonic()
    assert "can't be reached: " in hub.hub_problem()
    assert time.monotonic() - start < 2


def test_a_silent_server_costs_the_probe_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        start = time.monotonic()
        problems = [hub.hub_problem() for _ in range(3)]
        assert 0.4 < time.monotonic() - start < 2
    assert len(set(problems)) == 1 and problems[0]


def test_a_name_lookup_that_hangs_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """urlopen's own timeout begins only after the lookup."""
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.3)

    def look_up(*_, **__) -> None:
        time.sleep(3)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    start = time.monotonic()
    assert hub.hub_problem() == "http://hub.invalid didn't answer within 0.3 s"
    assert time.monotonic() - start < 2


def test_a_server_that_speaks_no_http_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail ready\r\n")

        threading.Thread(target=greet, daemon=True).start()
        assert "can't be reached" in hub.hub_problem()


@pytest.mark.parametrize(
    ("path", "problem"), [("", None), ("/absent", None), ("/status/503", "answered 503")]
)
def test_any_answer_will_do_but_a_server_error(
    path: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeHub(tmp_path) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url + path)
        found = hub.hub_problem()
    assert found is None if problem is None else problem in found


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HF_DATASETS_CACHE": "/d", "HF_HOME": "/h"}, "/d"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/datasets"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/datasets"),
        ({"HOME": "/home/me"}, "/home/me/.cache/huggingface/datasets"),
    ],
)
def test_datasets_cache_follows_the_usual_variables(
    environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_DATASETS_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hub.datasets_cache() == Path(folder)


CARD = """---
configs:
- config_name: plain_text
  data_files:
  - split: train
    path: plain_text/train-*
  - split: validation
    path: plain_text/validation-*
---
"""
PROGRAM = """
import json, sys
from utils.data.config import DataConfig
from utils.data.tokenizers import load_tokenizer
from utils.data.squad import load_squad
squad = load_squad("squad")
tokenizer, source = load_tokenizer("gpt2", "gpt2-xl", DataConfig(), 50257)
print(json.dumps([squad.train, squad.validation, squad.source, len(tokenizer), source]))
"""


def test_hub_then_its_cache(tmp_path: Path, repo_root: Path) -> None:
    """The real `datasets` and `huggingface_hub` download; the next run reads their caches without asking."""
    repository = tmp_path / "hub/datasets/rajpurkar/squad"
    (repository / "plain_text").mkdir(parents=True)
    (repository / "README.md").write_text(CARD)
    expected = {}
    for split in ("train", "validation"):
        expected[split] = [[f"What is {split} {i}?", f"{split} is {i}."] for i in range(5)]
        answers = {"text": ["is"], "answer_start": [6]}
        rows = [
            {"id": q, "title": "t", "context": c, "question": q, "answers": answers}
            for q, c in expected[split]
        ]
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, repository / f"plain_text/{split}-00000-of-00001.parquet")
    model = tmp_path / "hub/models/openai-community/gpt2"
    model.mkdir(parents=True)
    small = (repo_root / "data/tokenizers/gpt2/tokenizer.json").read_text(encoding="utf-8")
    (model / "tokenizer.json").write_text(small, encoding="utf-8")

    with FakeHub(tmp_path / "hub") as server:
        # In processes of their own, as both libraries read their variables when they are imported.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {
            "HF_HOME": str(tmp_path / "home"),
            "HF_ENDPOINT": server.url,
            "PYTHONPATH": str(repo_root),
        }

        def load(**extra: str) -> tuple[list, str]:
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM],
                env=environment | extra,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout), done.stderr

        (*splits, source, _, tokenizer_source), log = load()
        assert splits == [expected["train"], expected["validation"]]
        assert source == "the hub's rajpurkar/squad" and tokenizer_source == "the hub's openai-community/gpt2"
        assert "examples/s" not in log, "a progress bar in a log that is not a terminal"

        asked = len(server.requests)
        (*splits, source, _, tokenizer_source), log = load()
        assert len(server.requests) == asked, f"cached, and yet asked for {server.requests[asked:]}"
        assert splits == [expected["train"], expected["validation"]] and log == ""
        assert source.startswith("the cache ") and tokenizer_source == "the hub cache's openai-community/gpt2"

        # Before 2024 the hub's name had no owner, and older caches are named after it.
        cache = tmp_path / "home" / "datasets"
        (cache / "rajpurkar___squad").rename(cache / "squad")
        (*splits, source, _, _), _ = load(HF_HUB_OFFLINE="1")
        assert splits == [expected["train"], expected["validation"]] and source.startswith("the cache ")

        (file,) = cache.glob("squad/*/*/*/squad-validation.arrow")
        file.write_bytes(file.read_bytes()[:100])
        (*splits, source, _, _), log = load(HF_HUB_OFFLINE="1")
        assert source == "the sample in data/"
        assert f"{cache}: the cached squad can't be read (" in log
        assert "using the sample in data/ instead (261 training questions, not SQuAD's 87,599)" in log


def test_the_log_has_no_password_of_the_hub(repo_root: Path) -> None:
    code = (
        "import logging; from utils.data.config import hub_problem; "
        "from utils.distributed import setup_logging; setup_logging(0)\n"
        "logging.getLogger('utils').info('no tokenizer: %s', hub_problem())\n"
        "from tqdm.contrib.logging import logging_redirect_tqdm\n"  # as beside the progress bar
        "with logging_redirect_tqdm():\n"
        "    logging.getLogger('utils').info('no tokenizer: %s', hub_problem())"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://me:X1y2z3@127.0.0.1:1", "HF_HUB_OFFLINE": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repo_root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "X1y2z3" not in done.stderr
    assert done.stderr.count("INFO no tokenizer: http://[redacted]@127.0.0.1:1") == 2
