"""Reading SQuAD: the sample itself, JSON files good and bad, the held-out split, and falling back."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.shared import shared_path
from utils.data import config as hub
from utils.data.squad import SAMPLE, DataError, Example, hold_out, load_squad, read_squad_json


def squad_json(**paragraph) -> dict:
    """A file of two paragraphs, the first with the given members."""
    question = {"id": "1", "question": "Why?", "answers": [{"text": "Because", "answer_start": 0}]}
    first = {"context": "Because of the wind.", "qas": [question], **paragraph}
    return {
        "version": "1.1",
        "data": [{"title": "t", "paragraphs": [first, {"context": "Other.", "qas": [question]}]}],
    }


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(hub.urllib.request, "urlopen", refuse)


def test_sample_has_enough_text_and_every_answer_is_where_it_says() -> None:
    content = json.loads(SAMPLE.read_text(encoding="utf-8"))
    paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
    questions = [(p["context"], qa) for p in paragraphs for qa in p["qas"]]
    assert content["version"] == "1.1"
    assert len(content["data"]) >= 10 and len(paragraphs) >= 60 and len(questions) >= 200
    assert all(70 <= len(paragraph["context"].split()) <= 130 for paragraph in paragraphs)
    assert all(len(paragraph["qas"]) >= 3 for paragraph in paragraphs)
    assert len({qa["id"] for _, qa in questions}) == len({qa["question"] for _, qa in questions})
    assert len({qa["id"] for _, qa in questions}) == len(questions)
    for context, qa in questions:
        (answer,) = qa["answers"]
        start = answer["answer_start"]
        end = start + len(answer["text"])
        assert context[start:end] == answer["text"] != "", qa["question"]
        around = context[max(0, start - 1) : start] + context[end : end + 1]
        assert not any(letter.isalnum() for letter in around), f"inside a word: {qa['question']}"


def test_sample_is_split_without_a_shared_context() -> None:
    squad = load_squad("sample")
    assert len(squad.train) + len(squad.validation) == 289
    assert 0.05 < len(squad.validation) / 289 < 0.15
    assert not {e.context for e in squad.train} & {e.context for e in squad.validation}
    assert load_squad("sample") == squad


@pytest.mark.parametrize(("paragraphs", "held_out"), [(2, 1), (9, 1), (10, 1), (11, 1), (20, 2), (73, 7)])
def test_hold_out_takes_whole_paragraphs(paragraphs: int, held_out: int) -> None:
    # Each context is asked about twice, far apart and once with a stray space.
    examples = [Example(f"q{i}", f"context {i}") for i in range(paragraphs)]
    examples += [Example(f"r{i}", f"context {i} ") for i in range(paragraphs)]
    train, validation = hold_out(examples)
    assert len(validation) == 2 * held_out and len(train) == 2 * (paragraphs - held_out)
    assert not {e.context.strip() for e in train} & {e.context.strip() for e in validation}


def test_v2_questions_without_an_answer_are_read(tmp_path: Path) -> None:
    path = tmp_path / "v2.json"
    impossible = {
        "id": "2",
        "question": "Who?",
        "answers": [],
        "is_impossible": True,
        "plausible_answers": [],
    }
    unanswered = {"id": "3", "question": "When?"}
    content = squad_json(qas=[impossible, unanswered]) | {"version": "v2.0"}
    # A byte-order mark, as some editors write it.
    path.write_text(json.dumps(content), encoding="utf-8-sig")
    assert [e.question for e in read_squad_json(path)] == ["Who?", "When?", "Why?"]
    squad = load_squad(str(path))
    assert [e.question for e in squad.train] == ["Who?", "When?"] and squad.source == str(path)


QUESTION = {"question": "Why?"}
BROKEN = {
    "not_json": (b'{"data": [', "is not JSON"),
    "empty": (b"", "is not JSON"),
    "not_utf8": (
        b'{"data": [{"paragraphs": [{"context": "\xff", "qas": []}]}]}',
        "is not JSON in UTF-8",
    ),
    "too_deep": (b"[" * 100_000, "is not SQuAD v1.1 or v2.0 JSON"),
    "a_list": (b"[]", "Expected `object`, got `array`"),
    "no_data": (b"{}", "Object missing required field `data`"),
    "no_paragraphs": (b'{"data": [{}]}', "missing required field `paragraphs` - at `$.data[0]`"),
    "no_article": (b'{"data": [null]}', "Expected `object`, got `null` - at `$.data[0]`"),
    "no_question_at_all": (b'{"data": []}', "has no question"),
    "context_missing": (
        squad_json(context=None),
        "Expected `str`, got `null` - at `$.data[0].paragraphs[0].context`",
    ),
    "context_blank": (squad_json(context=" \n"), "has a paragraph whose context is blank"),
    "context_half_a_surrogate": (squad_json(context="a\ud800"), "is not JSON in UTF-8"),
    "qas_missing": (
        squad_json(qas={}),
        "Expected `array`, got `object` - at `$.data[0].paragraphs[0].qas`",
    ),
    "question_a_number": (
        squad_json(qas=[QUESTION, {"question": 3}]),
        "Expected `str`, got `int` - at `$.data[0].paragraphs[0].qas[1].question`",
    ),
    "one_paragraph": (
        {"data": [{"paragraphs": [{"context": "Alone.", "qas": [QUESTION]}]}]},
        "has a single paragraph",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    content, complaint = BROKEN[name]
    path = tmp_path / f"{name}.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(DataError) as error:
        load_squad(str(path))
    message = str(error.value)
    assert message.startswith(f"--dataset {path}: ") and complaint in message and "\n" not in message


@pytest.mark.parametrize("name", ["absent.json", "squad_v9", "."])
def test_an_unknown_dataset_names_the_choices(name: str) -> None:
    with pytest.raises(DataError, match=r"--dataset .*: no such file; give squad, sample or"):
        load_squad(name)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_offline_without_cache_falls_back_with_one_line_and_asks_nobody(
    variable: str,
    tmp_path: Path,
    no_network,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in hub.OFFLINE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    assert load_squad("squad") == load_squad("sample")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "\n" not in record.message
    for word in (f"{variable} is set", str(tmp_path), "the sample in data/", "--dataset squad"):
        assert word in record.message

    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    load_squad("squad")
    assert not caplog.records
    with pytest.raises(DataError, match=f"not cached in .*{variable} is set.*--dataset sample"):
        load_squad("squad", required=True)


def test_the_real_subset() -> None:
    path = shared_path("data/squad/dev-v1.1-subset.json")
    examples = read_squad_json(path)
    assert len(examples) == 705 and len({example.context for example in examples}) == 173
    squad = load_squad(str(path))
    assert len({example.context for example in squad.validation}) == 17


def test_a_hub_that_answers_but_fails_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The tests run offline, so that the real load_dataset fails as it does on a hub without the data set.
    monkeypatch.setattr("utils.data.squad.hub_problem", lambda: None)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    assert load_squad("squad") == load_squad("sample")
    record = [record for record in caplog.records if record.name == "utils.data.config"][-1]
    assert "the hub failed: " in record.message and "\n" not in record.message


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locked.json"
    path.write_text("{}")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)  # the tests may run as root, whom no mode stops
    with pytest.raises(DataError, match=r"locked.json: can't be read \(Permission denied\)"):
        load_squad(str(path))
