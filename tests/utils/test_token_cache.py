"""The cache of tokenized texts: hit, key, damage, an unwritable folder, two processes at once."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from utils.data.config import DataConfig
from utils.data.squad import Example
from utils.data.token_cache import TokenizedPairs, tokenize_pairs
from utils.data.tokenizers import load_tokenizer

EXAMPLES = [
    Example("Why?", "Because of the wind."),
    Example(" Who? ", "Because of the wind.\n"),
    Example("", "A text that no question belongs to."),
    Example("Why?", "The tide."),
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("gpt2", "gpt2", DataConfig(), 50257)[0]


@pytest.fixture
def no_tokenizing(tokenizer, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        def refuse(*_, **__):
            raise AssertionError("tokenized again")

        monkeypatch.setattr("utils.data.token_cache._tokenize", refuse)

    return forbid


def same(left: TokenizedPairs, right: TokenizedPairs) -> bool:
    arrays = all(np.array_equal(getattr(left, n), getattr(right, n)) for n in ("ids", "ends", "pairs"))
    return arrays and left.fingerprint == right.fingerprint


def cache_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_texts_come_back_each_tokenized_once(tokenizer, tmp_path: Path) -> None:
    pairs = tokenize_pairs(EXAMPLES, tokenizer, tmp_path)
    assert len(pairs) == 4 and len(pairs.ends) == 6  # "Why?" and the wind's context are shared
    for index, example in enumerate(EXAMPLES):
        texts = [tokenizer.decode(ids) for ids in pairs[index]]
        assert texts == [example.question.strip(), example.context.strip()]


def test_the_second_run_reads_the_cache(tokenizer, tmp_path: Path, no_tokenizing, caplog) -> None:
    first = tokenize_pairs(EXAMPLES, tokenizer, tmp_path / "new/folder")
    no_tokenizing()
    with caplog.at_level(logging.INFO):
        second = tokenize_pairs(EXAMPLES, tokenizer, tmp_path / "new/folder")
    assert same(first, second)
    (record,) = caplog.records
    assert record.message == f"tokenized data: read from {cache_file(tmp_path / 'new/folder')}"


def test_the_key_covers_texts_pairing_and_tokenizer(tokenizer, tmp_path: Path) -> None:
    other = load_tokenizer("bert", "bert-base-uncased", DataConfig(), 30522)[0]
    swapped = [Example("a", "b"), Example("c", "b")], [Example("a", "b"), Example("c", "a")]
    runs = [(EXAMPLES, tokenizer), (EXAMPLES, other), (EXAMPLES[:3], tokenizer)]
    runs += [(examples, tokenizer) for examples in swapped]
    prints = {tokenize_pairs(*run, tmp_path).fingerprint for run in runs}
    assert len(prints) == len(list(tmp_path.iterdir())) == len(runs)


def flip(content: bytes) -> bytes:
    """One bit of the ids, which keeps the file's shape."""
    middle = content.index(b"NUMPY") + 130
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "cut_at_the_end": lambda content: content[:-1],
    "flipped": flip,
    "text": lambda content: b"disk full\n",
    "zeros": lambda content: bytes(len(content)),
    "pickle": lambda content: b"\x80\x04N.",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_cache_is_built_again_with_one_line(name: str, tokenizer, tmp_path: Path, caplog) -> None:
    first = tokenize_pairs(EXAMPLES, tokenizer, tmp_path)
    path = cache_file(tmp_path)
    good = path.read_bytes()
    path.write_bytes(DAMAGE[name](good))
    assert path.read_bytes() != good
    assert same(tokenize_pairs(EXAMPLES, tokenizer, tmp_path), first)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(path) in record.message and "\n" not in record.message
    caplog.clear()
    assert same(tokenize_pairs(EXAMPLES, tokenizer, tmp_path), first)
    assert not caplog.records, "the cache was not mended"


def test_an_unwritable_folder_is_done_without(tokenizer, tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("not a folder")
    pairs = tokenize_pairs(EXAMPLES, tokenizer, tmp_path / "file")
    assert len(pairs) == 4
    assert "can't be cached in" in caplog.records[-1].message


def test_the_final_name_appears_only_when_the_file_is_whole(
    tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(source: Path, target: Path) -> None:
        assert source.parent == target.parent and not target.exists()
        assert len(np.load(source)["ends"]) == 6
        raise KeyboardInterrupt

    monkeypatch.setattr("utils.data.token_cache.os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenize_pairs(EXAMPLES, tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_behind(tokenizer, tmp_path: Path, caplog) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        pairs = tokenize_pairs(EXAMPLES, tokenizer, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(pairs) == 4 and not list(tmp_path.iterdir())
    assert "can't be cached in" in caplog.records[-1].message


def test_two_processes_at_once(tmp_path: Path, repo_root: Path, tokenizer) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from utils.data.config import DataConfig; from utils.data.tokenizers import load_tokenizer\n"
        "from utils.data_utils import *; from utils.data.squad import Example\n"
        "from utils.data.token_cache import tokenize_pairs\n"
        "tokenizer, _ = load_tokenizer('gpt2', 'gpt2', DataConfig(), 50257)\n"
        "examples = [Example(f'q{i}', f'context {i % 100}') for i in range(1000)]\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for i in range(10):\n"
        "    pairs = tokenize_pairs(examples[i:], tokenizer, Path(sys.argv[1]))\n"
        "    assert tokenizer.decode(pairs[0][0]) == f'q{i}'\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            cwd=repo_root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0 and "can't" not in errors, errors
    assert len(list(tmp_path.iterdir())) == 10
