"""The samples that the models see: layout, labels, masks, and their reproducibility."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from chakra_et.cli import parse
from tests.shared import shared_path
from utils.data.config import DataConfig
from utils.data.squad import Example, load_squad
from utils.data.tokenizers import load_tokenizer, tokenize_pairs
from utils.data_utils import MaskedDataset, build_datasets

MODELS = {"gpt2": ("gpt2", 50257), "bert": ("bert-base-uncased", 30522)}


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer("gpt2", "gpt2", DataConfig(), 50257)[0]


@pytest.fixture(scope="module")
def bert():
    return load_tokenizer("bert", "bert-base-uncased", DataConfig(), 30522)[0]


@pytest.fixture
def config() -> DataConfig:
    return DataConfig(dataset="sample", max_seq_length=256)


def masked(tokenizer, examples: list[Example], length: int = 64, seed: int = 7) -> MaskedDataset:
    return MaskedDataset(tokenizer, tokenize_pairs(examples, tokenizer), length, "test", seed)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("length", [8, 64, 1024])
def test_samples_stack_and_have_the_full_length(
    family: str, length: int, config: DataConfig, request
) -> None:
    config.max_seq_length = length
    names = {"input_ids", "attention_mask", "labels"} | ({"token_type_ids"} if family == "bert" else set())
    tokenizer = request.getfixturevalue(family)
    for dataset in build_datasets(family, tokenizer, config, seed=1):
        batch = next(iter(DataLoader(dataset, batch_size=len(dataset))))
        assert set(batch) == names
        assert {(value.dtype, tuple(value.shape)) for value in batch.values()} == {
            (torch.int64, (len(dataset), length))
        }
        assert batch["input_ids"].min() >= 0 and batch["input_ids"].max() < len(tokenizer)
        assert (batch["labels"] != -100).any(dim=1).all()
        with pytest.raises(IndexError):
            dataset[len(dataset)]


def test_gpt2_reads_question_newline_context_and_end(gpt2, config: DataConfig) -> None:
    squad = load_squad("sample")
    train, validation = build_datasets("gpt2", gpt2, config, seed=1)
    assert (len(train), len(validation)) == (len(squad.train), len(squad.validation))
    for index in range(0, len(train), 17):
        example, sample = squad.train[index], train[index]
        ids = gpt2(f"{example.question}\n{example.context}")["input_ids"] + [gpt2.eos_token_id]
        n = len(ids)
        assert sample["input_ids"].tolist() == ids + [gpt2.pad_token_id] * (256 - n)
        assert sample["attention_mask"].tolist() == [1] * n + [0] * (256 - n)
        # The true end has a label, although padding has the same id.
        assert sample["labels"].tolist() == ids + [-100] * (256 - n)


def test_gpt2_long_texts_are_cut_without_an_end(gpt2, config: DataConfig) -> None:
    config.max_seq_length = 32
    train, _ = build_datasets("gpt2", gpt2, config, seed=1)
    sample = train[3]
    assert gpt2.eos_token_id not in sample["input_ids"] and sample["attention_mask"].all()
    assert torch.equal(sample["labels"], sample["input_ids"])


def test_gpt2_padding_counts_in_no_loss(gpt2, config: DataConfig) -> None:
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=len(gpt2), n_positions=256, n_embd=32, n_layer=2, n_head=2)
    ).eval()
    sample = build_datasets("gpt2", gpt2, config, seed=1)[0][0]
    n = int(sample["attention_mask"].sum())
    assert n < 256
    with torch.no_grad():
        padded = model(**{name: row[None] for name, row in sample.items()}).loss
        bare = model(input_ids=sample["input_ids"][None, :n], labels=sample["input_ids"][None, :n]).loss
    assert padded.item() == pytest.approx(bare.item(), rel=1e-5)


def test_bert_pairs(bert, config: DataConfig) -> None:
    squad = load_squad("sample")
    train, _ = build_datasets("bert", bert, config, seed=1)
    for index in range(0, len(train), 17):
        example, sample = squad.train[index], train[index]
        question = bert(example.question, add_special_tokens=False)["input_ids"]
        context = bert(example.context, add_special_tokens=False)["input_ids"]
        expected = [bert.cls_token_id, *question, bert.sep_token_id, *context, bert.sep_token_id]
        n, padding = len(expected), 256 - len(expected)
        original = torch.where(sample["labels"] == -100, sample["input_ids"], sample["labels"])
        assert original.tolist() == expected + [bert.pad_token_id] * padding
        assert sample["attention_mask"].tolist() == [1] * n + [0] * padding
        second = [0] * (len(question) + 2) + [1] * (len(context) + 1) + [0] * padding
        assert sample["token_type_ids"].tolist() == second


@pytest.mark.parametrize(
    ("question", "context", "length", "kept"),
    [
        (3, 100, 16, (3, 10)),  # the context is cut first
        (100, 3, 16, (10, 3)),  # the question takes what the context leaves
        (100, 100, 16, (6, 7)),  # or half
        (0, 100, 16, (0, 13)),
        (5, 8, 16, (5, 8)),  # just fits
    ],
)
def test_bert_truncation_keeps_both_parts(
    question: int, context: int, length: int, kept: tuple[int, int], bert, tmp_path: Path
) -> None:
    dataset = masked(bert, [Example("a " * question, "b " * context)], length)
    sample = dataset[0]
    original = torch.where(sample["labels"] == -100, sample["input_ids"], sample["labels"])
    a, b = kept
    words = ["[CLS]", *["a"] * a, "[SEP]", *["b"] * b, "[SEP]"]
    assert bert.convert_ids_to_tokens(original[: a + b + 3].tolist()) == words
    assert sample["attention_mask"].sum() == a + b + 3 == min(length, a + b + 3)


def test_bert_masks_15_percent_80_10_10_and_no_special(bert, config: DataConfig) -> None:
    train, _ = build_datasets("bert", bert, config, seed=1)
    ordinary = masked_tokens = became_mask = unchanged = random = 0
    specials = torch.tensor(bert.all_special_ids)
    random_ids = set()
    for epoch in range(10):
        train.set_epoch(epoch)
        batch = next(iter(DataLoader(train, batch_size=len(train))))
        ids, labels = batch["input_ids"], batch["labels"]
        chosen = labels != -100
        original = torch.where(chosen, labels, ids)
        maskable = ~torch.isin(original, specials)
        assert not (chosen & ~maskable).any(), "a special token or padding is masked"
        assert not (chosen & (batch["attention_mask"] == 0)).any()
        ordinary += int(maskable.sum())
        masked_tokens += int(chosen.sum())
        became_mask += int((chosen & (ids == bert.mask_token_id)).sum())
        unchanged += int((chosen & (ids == labels)).sum())
        other = chosen & (ids != labels) & (ids != bert.mask_token_id)
        random += int(other.sum())
        random_ids |= set(ids[other].tolist())
    assert masked_tokens / ordinary == pytest.approx(0.15, abs=0.002)

    def near(count: int, share: float) -> bool:
        """Within five standard deviations of a binomial draw."""
        return abs(count - share * masked_tokens) < 5 * math.sqrt(share * (1 - share) * masked_tokens)

    assert masked_tokens > 50_000
    # A random token is now and then the original one, once in as many draws as there are tokens.
    assert near(became_mask, 0.8) and near(unchanged, 0.1) and near(random, 0.1)
    assert not random_ids & set(bert.all_special_ids)
    assert len(random_ids) > 0.8 * (len(bert) - 5)


def test_bert_masks_depend_on_seed_epoch_and_index_alone(bert, config: DataConfig) -> None:
    first, _ = build_datasets("bert", bert, config, seed=3)
    again, _ = build_datasets("bert", bert, config, seed=3)
    backwards = {index: again[index] for index in reversed(range(len(again)))}
    assert all(same(first[index], backwards[index]) for index in range(len(first)))

    first.set_epoch(5)
    fresh = [first[index] for index in range(20)]
    assert not any(same(fresh[index], backwards[index]) for index in range(20)), "epoch 5 has epoch 0's masks"
    resumed, _ = build_datasets("bert", bert, config, seed=3)
    resumed.set_epoch(5)
    assert all(same(fresh[index], resumed[index]) for index in range(20))

    other, _ = build_datasets("bert", bert, config, seed=-4)
    assert not any(same(other[index], backwards[index]) for index in range(20))


def test_equal_texts_have_masks_of_their_own(bert, tmp_path: Path) -> None:
    dataset = masked(bert, [Example("How deep is it?", "A little less than it was. " * 5)] * 2)
    assert not same(dataset[0], dataset[1])


def test_validation_masks_never_change(bert, config: DataConfig) -> None:
    train, validation = build_datasets("bert", bert, config, seed=3)
    before = [validation[index] for index in range(len(validation))]
    train.set_epoch(9)
    _, other = build_datasets("bert", bert, config, seed=4)
    assert all(same(sample, validation[index]) for index, sample in enumerate(before))
    assert all(same(sample, other[index]) for index, sample in enumerate(before))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_set_epoch_reaches_persistent_workers(start: str, bert, config: DataConfig) -> None:
    """They keep the copy of the dataset that they were started with."""
    config.max_seq_length = 64
    dataset, _ = build_datasets("bert", bert, config, seed=3)
    loader = DataLoader(
        dataset, batch_size=60, num_workers=1, persistent_workers=True, multiprocessing_context=start
    )
    expected, _ = build_datasets("bert", bert, config, seed=3)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        expected.set_epoch(epoch)
        rows = [row for batch in loader for row in batch["input_ids"]]
        assert len(rows) == len(expected)
        assert all(torch.equal(row, expected[index]["input_ids"]) for index, row in enumerate(rows))


def test_a_text_all_unknown_still_has_labels(bert, tmp_path: Path) -> None:
    """A script that the vocabulary lacks gave no candidates, and a batch of it a loss of NaN."""
    dataset = masked(bert, [Example("Ξ Ψ", "Ω " * 10)])
    sample = dataset[0]
    chosen = sample["labels"] != -100
    assert set(sample["labels"][chosen].tolist()) == {bert.unk_token_id} and chosen.sum() == 2


def test_a_short_text_has_one_label(bert, tmp_path: Path) -> None:
    assert (masked(bert, [Example("", "tea")])[0]["labels"] != -100).sum() == 1


@pytest.mark.parametrize("family", MODELS)
def test_equal_data_has_equal_fingerprints(family: str, config: DataConfig, request) -> None:
    tokenizer = request.getfixturevalue(family)
    train, validation = build_datasets(family, tokenizer, config, seed=1)
    config.max_seq_length = 32
    train_again, _ = build_datasets(family, tokenizer, config, seed=2)
    assert train.fingerprint == train_again.fingerprint != validation.fingerprint
    assert train.source == "the sample in data/"


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse(DataConfig, ["--dataset", "sample", "--max_seq_length", "64", "--num-workers=0"])
    assert config == DataConfig(dataset="sample", max_seq_length=64, num_workers=0)
    for flags in (["--max-seq-length", "7"], ["--num-workers", "-1"]):
        with pytest.raises(SystemExit) as end:
            parse(DataConfig, flags)
        assert end.value.code == 2 and flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("family", MODELS)
def test_real_squad_with_the_real_vocabularies(family: str) -> None:
    name, vocab_size = MODELS[family]
    config = DataConfig(
        dataset=str(shared_path("data/squad/dev-v1.1-subset.json")),
        tokenizer=str(shared_path(f"data/tokenizers/{name}", "tokenizer.json", "tokenizer_config.json")),
        max_seq_length=384,
    )
    tokenizer, _ = load_tokenizer(family, name, config, vocab_size)
    train, validation = build_datasets(family, tokenizer, config, seed=1)
    assert len(train) + len(validation) == 705
    article = json.loads(Path(config.dataset).read_text(encoding="utf-8"))["data"][0]
    paragraph = article["paragraphs"][0]
    sample = train[0]
    text = tokenizer.decode(np.where(sample["labels"] == -100, sample["input_ids"], sample["labels"]))
    if family == "gpt2":
        assert text.startswith(f"{paragraph['qas'][0]['question']}\n{paragraph['context']}<|endoftext|>")
    else:
        assert text.startswith("[CLS] in what country is normandy located? [SEP] the normans")
