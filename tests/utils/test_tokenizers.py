"""Finding a tokenizer: the order of search, what is refused, and the small ones in data/."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.shared import shared_path
from utils.data import tokenizers
from utils.data.config import DataConfig, DataError
from utils.data.squad import Example
from utils.data.tokenizers import load_tokenizer, tokenize_pairs

MODELS = {"gpt2": ("gpt2", 50257), "bert": ("bert-base-uncased", 30522)}
SMALL = tokenizers.SMALL_FOLDER


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No image folder, no hub, and a hub cache of our own."""
    monkeypatch.setattr(tokenizers, "IMAGE_FOLDER", tmp_path / "image")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizers, "hub_problem", lambda: "offline for this test")


def cached(cache: Path, repository: str, source: Path) -> None:
    """Put ``source``/tokenizer.json where huggingface_hub keeps a download of ``repository``."""
    folder = cache / ("models--" + repository.replace("/", "--"))
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("abc")
    (folder / "snapshots/abc").mkdir(parents=True)
    shutil.copy(source / "tokenizer.json", folder / "snapshots/abc")


def test_small_tokenizers_are_what_their_script_makes(tmp_path: Path, repo_root: Path) -> None:
    script = repo_root / "data/build_tokenizers.py"
    for run in ("first", "second"):  # twice, as hash tables order things anew in each process
        subprocess.run([sys.executable, script, "--output", tmp_path / run], check=True, capture_output=True)
        for name in ("gpt2", "bert-base-uncased"):
            for file in ("tokenizer.json", "tokenizer_config.json"):
                assert (tmp_path / run / name / file).read_bytes() == (SMALL / name / file).read_bytes()


@pytest.mark.parametrize("family", MODELS)
def test_small_tokenizers_load_and_fit(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name, vocab_size = MODELS[family]
    with caplog.at_level(logging.INFO):
        tokenizer, source = load_tokenizer(family, name, DataConfig(), vocab_size)
    assert source == f"the small one in data/tokenizers/{name} (offline for this test)"
    assert [record.message for record in caplog.records] == [f"tokenizer: {source}"]
    assert 2000 < len(tokenizer) == max(tokenizer.get_vocab().values()) + 1 < vocab_size

    automatic = AutoTokenizer.from_pretrained(SMALL / name)
    assert automatic.get_vocab() == tokenizer.get_vocab()
    # Saved beside a checkpoint it must load again, with no token added.
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.all_special_ids == tokenizer.all_special_ids


def test_small_gpt2_tokenizer_loses_no_byte(tmp_path: Path) -> None:
    tokenizer, _ = load_tokenizer("gpt2", "gpt2", DataConfig(), 50257)
    text = " Çay, 훈민정음 and\n\n\t\U0001f600 don't cost 9,192,631,770 €\x00."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (
        tokenizer.convert_tokens_to_ids("<|endoftext|>") == tokenizer.eos_token_id == tokenizer.pad_token_id
    )


def test_small_bert_tokenizer_lays_out_pairs(tmp_path: Path) -> None:
    tokenizer, _ = load_tokenizer("bert", "bert-base-uncased", DataConfig(), 30522)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2, 3, 4]
    ids = tokenizer("WHERE is the lighthouse?", "On Pharos.")["input_ids"]
    assert tokenizer.decode(ids) == "[CLS] where is the lighthouse? [SEP] on pharos. [SEP]"


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place is used once those before it are gone."""
    image, cache = tmp_path / "image", tmp_path / "cache"
    given = shutil.copytree(SMALL / "gpt2", tmp_path / "given")
    for name in ("gpt2-xl", "gpt2"):
        shutil.copytree(SMALL / "gpt2", image / name)
    cached(cache, "gpt2", SMALL / "gpt2")

    def source(**flags: str) -> str:
        return load_tokenizer("gpt2", "gpt2-xl", DataConfig(**flags), 50257)[1]

    assert source(tokenizer=str(given)) == f"--tokenizer {given}"
    assert source(tokenizer=str(given / "tokenizer.json")) == f"--tokenizer {given / 'tokenizer.json'}"
    assert source() == f"the image's {image / 'gpt2-xl'}"
    shutil.rmtree(image / "gpt2-xl")
    assert source() == f"the image's {image / 'gpt2'}"
    shutil.rmtree(image)
    assert source() == "the hub cache's gpt2"
    shutil.rmtree(cache)
    assert source() == "the small one in data/tokenizers/gpt2 (offline for this test)"


def refusals(tmp_path: Path) -> dict[str, tuple[str, int, str]]:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/tokenizer.json").write_text('{"version": ')
    return {
        "absent": ("gpt2", 50257, "no such file"),
        "empty": ("gpt2", 50257, "no such file"),
        "bad": ("gpt2", 50257, "isn't a file of the tokenizers library"),
        str(SMALL / "gpt2"): ("gpt2", 2919, "ids up to 2919, but the model's vocabulary ends at 2918"),
        str(SMALL / "gpt2") + "/": (
            "bert",
            30522,
            "has no [PAD], [UNK], [CLS], [SEP], [MASK], which bert needs",
        ),
        str(SMALL / "bert-base-uncased"): ("gpt2", 50257, "has no <|endoftext|>, which"),
    }


def test_a_bad_tokenizer_flag_is_refused_in_one_line(tmp_path: Path) -> None:
    for name, (family, vocab_size, complaint) in refusals(tmp_path).items():
        path = tmp_path / name
        with pytest.raises(DataError) as error:
            load_tokenizer(family, "tiny", DataConfig(tokenizer=str(path)), vocab_size)
        message = str(error.value)
        assert message.startswith(f"--tokenizer {path}: ") and complaint in message, (name, message)
        assert "\n" not in message


def test_a_tokenizer_that_does_not_fit_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "image/gpt2").mkdir(parents=True)
    (tmp_path / "image/gpt2/tokenizer.json").write_text("[]")
    tokenizer, source = load_tokenizer("gpt2", "gpt2", DataConfig(), 50257)
    assert source.startswith("the small one") and len(tokenizer) < 50257
    assert (
        "is skipped" in caplog.records[0].message
        and str(tmp_path / "image/gpt2") in caplog.records[0].message
    )

    with pytest.raises(DataError, match="no gpt2 tokenizer fits a vocabulary of 100"):
        load_tokenizer("gpt2", "tiny", DataConfig(), 100)


@pytest.mark.parametrize("family", MODELS)
def test_the_real_vocabularies(family: str) -> None:
    name, vocab_size = MODELS[family]
    path = shared_path(f"data/tokenizers/{name}", "tokenizer.json", "tokenizer_config.json")
    tokenizer, _ = load_tokenizer(family, name, DataConfig(tokenizer=str(path)), vocab_size)
    assert len(tokenizer) == vocab_size
    assert tokenizer.pad_token_id == (0 if family == "bert" else 50256)
    with pytest.raises(DataError, match=f"vocabulary ends at {vocab_size - 2}"):
        load_tokenizer(family, name, DataConfig(tokenizer=str(path)), vocab_size - 1)


def test_a_hub_that_answers_but_fails_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests run offline, so that the real hf_hub_download fails.
    monkeypatch.setattr(tokenizers, "hub_problem", lambda: None)
    _, source = load_tokenizer("gpt2", "gpt2", DataConfig(), 50257)
    assert source.startswith("the small one in data/tokenizers/gpt2 (the hub failed: ") and "\n" not in source


EXAMPLES = [
    Example("Why?", "Because of the wind."),
    Example(" Who? ", "Because of the wind.\n"),
    Example("", "A text that no question belongs to."),
    Example("Why?", "The tide."),
]


def test_texts_come_back_each_tokenized_once() -> None:
    tokenizer = load_tokenizer("gpt2", "gpt2", DataConfig(), 50257)[0]
    pairs = tokenize_pairs(EXAMPLES, tokenizer)
    assert len(pairs) == 4 and len(pairs.ends) == 6  # "Why?" and the wind's context are shared
    for index, example in enumerate(EXAMPLES):
        texts = [tokenizer.decode(ids) for ids in pairs[index]]
        assert texts == [example.question.strip(), example.context.strip()]


def test_the_fingerprint_covers_texts_pairing_and_tokenizer() -> None:
    tokenizer = load_tokenizer("gpt2", "gpt2", DataConfig(), 50257)[0]
    other = load_tokenizer("bert", "bert-base-uncased", DataConfig(), 30522)[0]
    swapped = [Example("a", "b"), Example("c", "b")], [Example("a", "b"), Example("c", "a")]
    runs = [(EXAMPLES, tokenizer), (EXAMPLES, other), (EXAMPLES[:3], tokenizer)]
    runs += [(examples, tokenizer) for examples in swapped]
    assert len({tokenize_pairs(*run).fingerprint for run in runs}) == len(runs)
